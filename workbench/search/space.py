"""The ranges of hyperparameters, by Determined 0.38's rules, and samples of values from them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from classify.config.experiment_fields import SAMPLED_TYPES
from classify.config.rules import is_count, is_finite
from classify.config.sections import unknown_keys
from deepspeed_trial.errors import ErrorList, nearest

# https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/experiment-config-reference.rst#hyperparameters
RANGE_KEYS = {
    "int": ("minval", "maxval", "count"),
    "double": ("minval", "maxval", "count"),
    "log": ("minval", "maxval", "base", "count"),
    "categorical": ("vals",),
    "const": ("val",),
}
# Only ranges have these keys. Without them, an unknown type is the type of a section of DeepSpeed
TELLTALES = {"minval", "maxval", "vals", "val"}


@dataclass(frozen=True)
class Range:
    """A searched hyperparameter.

    Attributes:
        path: its dotted path in the experiment file.
        spec: the mapping at that path.
    """

    path: str
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its dotted path among the hyperparameters."""
        return self.path.removeprefix("hyperparameters.")

    @property
    def distribution(self) -> BaseDistribution:
        """The range in Optuna's terms."""
        if self.spec["type"] == "categorical":
            return CategoricalDistribution([_scalar(value) for value in self.spec["vals"]])
        low, high = self.spec["minval"], self.spec["maxval"]
        if self.spec["type"] == "int":
            return IntDistribution(low, high)
        if self.spec["type"] == "double":
            return FloatDistribution(low, high)
        ends = self.spec["base"] ** float(low), self.spec["base"] ** float(high)
        return FloatDistribution(min(ends), max(ends), log=True)

    @property
    def grid(self) -> list[Any]:
        """The values for a grid: all values of a categorical range, else ``count`` evenly spaced values."""
        if self.spec["type"] == "categorical":
            return [_scalar(value) for value in self.spec["vals"]]
        low, high, count = self.spec["minval"], self.spec["maxval"], self.spec["count"]
        if self.spec["type"] == "int":
            count = min(count, high - low + 1)
        points = (
            [(low + high) / 2] if count == 1 else [low + i * (high - low) / (count - 1) for i in range(count)]
        )
        if self.spec["type"] == "int":
            return [math.floor(point + 0.5) for point in points]
        if self.spec["type"] == "double":
            return [float(point) for point in points]
        ends = self.distribution
        assert isinstance(ends, FloatDistribution)
        return [min(max(self.spec["base"] ** float(point), ends.low), ends.high) for point in points]

    def value(self, drawn: Any) -> Any:
        """Return a drawn value as the file has it: a list or a mapping instead of its JSON."""
        if self.spec["type"] == "categorical":
            return next(value for value in self.spec["vals"] if _scalar(value) == drawn)
        return drawn

    def override(self, drawn: Any) -> str:
        """Return the ``--set`` argument of a drawn value."""
        return f"{self.path}={json.dumps(self.value(drawn))}"


def _scalar(value: Any) -> Any:
    """Return a categorical value for Optuna, which accepts only scalars: lists and mappings become JSON."""
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def space(ranges: Sequence[Range]) -> dict[str, BaseDistribution]:
    """Return the search space in Optuna's terms."""
    return {each.name: each.distribution for each in ranges}


def draws(ranges: Sequence[Range], grid: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the hyperparameters of trial 0, 1, ...: every point of a grid, or endless random samples.

    The samples depend only on the ranges and the seed, so a resumed search repeats them.
    """
    if grid:
        names = [each.name for each in ranges]
        for point in itertools.product(*(each.grid for each in ranges)):
            yield dict(zip(names, point, strict=True))
        return
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    while True:
        yield study.ask(space(ranges)).params


def guided_draw(
    ranges: Sequence[Range], seed: int, direction: StudyDirection, known: Sequence[FrozenTrial]
) -> dict[str, Any]:
    """Draw the hyperparameters of the next trial by Optuna's TPE, from the results so far.

    The result depends only on the arguments: every trial has a new sampler, with a seed from the search's
    seed and the trial's number. Failed and running trials count as bad results: without a result for the
    running trials, concurrent trials would be alike.

    Args:
        ranges: the search space.
        seed: the seed of the search.
        direction: the direction of better values of the metric.
        known: the trials so far, by number.
    """
    state = np.random.SeedSequence([seed, len(known)]).generate_state(1)
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=0, multivariate=True, constant_liar=True, seed=int(state[0])
    )
    study = optuna.create_study(direction=direction, sampler=sampler)
    for trial in known:
        study.add_trial(
            optuna.create_trial(
                # Optuna ignores failed trials, and takes pruned ones without a value for the worst
                state=TrialState.PRUNED if trial.state == TrialState.FAIL else trial.state,
                value=trial.value if trial.state == TrialState.COMPLETE else None,
                params=trial.params,
                distributions=trial.distributions,
            )
        )
    return study.ask(space(ranges)).params


def find_ranges(path: str, section: Mapping[str, Any], grid: bool, errors: ErrorList) -> Iterator[Range]:
    """Yield the valid ranges of a section, at any depth.

    Args:
        path: the section's dotted path.
        section: the mapping at that path.
        grid: whether the ranges need a ``count``.
        errors: the list that gets a line for each error.
    """
    for key, value in section.items():
        if not isinstance(value, dict):
            continue
        here, kind = f"{path}.{key}", value.get("type")
        if kind in SAMPLED_TYPES:
            if wrong := _range_errors(here, value, grid):
                errors.lines += wrong
            else:
                yield Range(here, value)
        elif kind == "const" and "val" in value:
            continue  # experiment_fields.py takes its value
        elif TELLTALES & value.keys():
            remedy = nearest(kind, RANGE_KEYS)
            errors.lines.append(f"{here}.type: {kind!r}: unknown hyperparameter type; {remedy}")
        else:
            yield from find_ranges(here, value, grid, errors)


def _range_errors(path: str, spec: Mapping[str, Any], grid: bool) -> list[str]:
    kind, said = spec["type"], {key: repr(value) for key, value in spec.items() if value is not None}
    errors = unknown_keys(f"{path}.", {k: v for k, v in spec.items() if k != "type"}, RANGE_KEYS[kind])
    if kind == "categorical":
        if not isinstance(spec.get("vals"), list) or not spec["vals"]:
            errors.append(f"{path}.vals: {said.get('vals', 'missing')}: must be a list of the values to try")
        return errors
    ends: dict[str, Any] = {key: spec.get(key) for key in ("minval", "maxval")}
    for key, value in ends.items():
        if kind == "int" and not (isinstance(value, int) and is_finite(value)):
            errors.append(f"{path}.{key}: {said.get(key, 'missing')}: must be a whole number")
        elif not is_finite(value):
            errors.append(f"{path}.{key}: {said.get(key, 'missing')}: must be a number below 1e300")
    low, high = ends.values()
    if is_finite(low) and is_finite(high) and low >= high:
        mend = "exchange them" if low > high else "write the value without a range"
        errors.append(f"{path}.minval: {low!r}: must be below maxval, which is {high!r}; {mend}")
    if kind == "log":
        base: Any = spec.get("base")
        if not is_finite(base) or base <= 0 or base == 1:
            rule = "must be a number above 0, except 1, e.g. 10; the range has powers of this base"
            errors.append(f"{path}.base: {said.get('base', 'missing')}: {rule}")
        elif not errors and not _finite(base, low, high):
            errors.append(f"{path}.maxval: {high!r}: too large; minval and maxval are exponents of the base")
    if spec.get("count") is None and grid:
        errors.append(f"{path}.count: missing: a grid needs it; say how many values to try, e.g. 4")
    elif spec.get("count") is not None and not is_count(spec["count"], 1):
        errors.append(f"{path}.count: {spec['count']!r}: must be a whole number of at least 1")
    return errors


def _finite(base: float, *powers: Any) -> bool:
    try:
        return all(0 < float(base) ** float(power) < math.inf for power in powers)
    except OverflowError:
        return False
