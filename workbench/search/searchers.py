"""The searchers: their fields, their brackets of trials, and the pruner that stops the worse trials.

The brackets are Determined 0.38's; Optuna's successive halving prunes within a bracket.
Source: https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/experiment-config-reference.rst#searcher
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from classify.config.experiment_fields import SEARCHERS, cluster_notes, unknown_searcher
from classify.config.sections import unknown_keys
from deepspeed_trial.experiment import Experiment

NEEDED = {
    "random": ["max_trials"],
    "tpe": ["max_trials"],
    "async_halving": ["max_trials", "num_rungs", "time_metric", "max_time"],
    "adaptive_asha": ["max_trials", "time_metric", "max_time"],
}
EXAMPLES = {
    "max_trials": "say how many trials to run, e.g. 12",
    "num_rungs": "say at how many lengths to compare trials, e.g. 3",
    "time_metric": "use the unit of hyperparameters.max_length, epochs or batches",
    "max_time": "use the length in hyperparameters.max_length",
}


def errors_of(searcher: Mapping[str, Any]) -> list[str]:
    """Return a line for each wrong field of a searcher section."""
    name = searcher.get("name")
    if name is not None and not isinstance(name, str):
        return []  # experiment_fields.py names the error
    if name not in SEARCHERS:
        return unknown_searcher(name)
    found = unknown_keys("searcher.", searcher, SEARCHERS[name], f"{name} has no such field")
    missing = [key for key in NEEDED.get(name, ()) if searcher.get(key) is None]
    return found + [f"searcher.{key}: missing: {name} needs it; {EXAMPLES[key]}" for key in missing]


def notes(experiment: Experiment, parallel: int | None) -> list[str]:
    """Return a line for each field that has no effect, or another effect, on this machine."""
    searcher = experiment.config["searcher"]
    most, divisor = searcher.get("max_concurrent_trials"), searcher.get("divisor")
    concurrent = (
        f"{parallel} at a time here; --parallel N runs more"
        if (most or 0) > (parallel or 0)
        else f"runs fewer trials at a time than --parallel {parallel}"
    )
    start = "has no effect here; set hyperparameters.weights to start from trained weights"
    means_little = {
        "max_concurrent_trials": (bool(most and parallel) and most != parallel, concurrent),
        "stop_once": (
            searcher.get("stop_once") is False,
            "a pruned trial does not resume, as in Determined 0.38",
        ),
        "divisor": (
            divisor is not None and divisor != _divisor(searcher),
            f"here one in {_divisor(searcher)} trials continues",
        ),
        "max_length": (
            searcher.get("max_length") is not None,
            "is not used; hyperparameters.max_length is the length",
        ),
        "source_trial_id": (searcher.get("source_trial_id") is not None, start),
        "source_checkpoint_uuid": (searcher.get("source_checkpoint_uuid") is not None, start),
    }
    lines = [
        f"searcher.{key}: {searcher[key]!r}: {why}" for key, (is_so, why) in means_little.items() if is_so
    ]
    return [*experiment.notes(), *cluster_notes(experiment.config), *lines]


@dataclass(frozen=True)
class Bracket:
    """A group of trials that are compared with each other.

    Attributes:
        trials: the number of trials.
        rungs: the number of lengths at which the trials are compared, the full length included; with 1 no
            trial is pruned.
        first: the shortest of these lengths.
    """

    trials: int
    rungs: int = 1
    first: int = 0


def brackets(searcher: Mapping[str, Any], grid_size: int) -> list[Bracket]:
    """Return the brackets of a checked searcher section, the bracket that prunes earliest first."""
    name = searcher["name"]
    if name in ("single", "grid"):
        return [Bracket(grid_size if name == "grid" else 1)]
    trials = searcher["max_trials"]
    if name in ("random", "tpe"):
        return [Bracket(trials)]
    longest, divisor = searcher["max_time"], _divisor(searcher)
    sizes: Sequence[int] = (
        [searcher["num_rungs"]] if name == "async_halving" else searcher.get("bracket_rungs") or ()
    )
    if not sizes:
        most = [int(math.log(n) / math.log(divisor)) + 1 for n in (longest, trials)]
        rungs = min(searcher.get("max_rungs") or 5, *most)
        least = {"aggressive": rungs, "standard": (rungs - 1) // 2 + 1, "conservative": 1}
        sizes = range(least[searcher.get("mode") or "standard"], rungs + 1)
    sizes = sorted(sizes, reverse=True)
    weights = [divisor ** (size - 1) / size for size in sizes]  # about the same work in every bracket
    shares = [max(int(weight / sum(weights) * trials), 1) for weight in weights]
    shares[0] += max(trials - sum(shares), 0)
    first = [max(longest // divisor ** (size - 1), 1) for size in sizes]
    return [Bracket(*each) for each in zip(shares, sizes, first, strict=True)]


def _divisor(searcher: Mapping[str, Any]) -> int:
    return max(2, round(searcher.get("divisor") or 4))


class BracketPruner(BasePruner):
    """Prune the worse trials of every bracket with Optuna's asynchronous successive halving.

    Args:
        searcher: the checked searcher section.
        brackets: the section's brackets; a trial's user attribute ``bracket`` is the index of its bracket.
    """

    def __init__(self, searcher: Mapping[str, Any], brackets: Sequence[Bracket]) -> None:
        self.pruners: list[BasePruner] = [
            SuccessiveHalvingPruner(each.first, _divisor(searcher)) if each.rungs > 1 else NopPruner()
            for each in brackets
        ]

    @override
    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        bracket = trial.user_attrs["bracket"]
        among: Any = _OneBracket(study, bracket)
        return self.pruners[bracket].prune(among, trial)


class _OneBracket:
    """A study that shows the trials of one bracket."""

    def __init__(self, study: optuna.Study, bracket: int) -> None:
        self._whole, self._bracket = study, bracket

    def get_trials(
        self, deepcopy: bool = True, states: tuple[TrialState, ...] | None = None
    ) -> list[FrozenTrial]:
        trials = self._whole.get_trials(deepcopy=deepcopy, states=states)
        return [trial for trial in trials if trial.user_attrs.get("bracket") == self._bracket]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
