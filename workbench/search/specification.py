"""A checked search file: the ranges, the brackets of trials, and the number of trials at a time.

The searchers and their brackets are Determined 0.38's; Optuna's successive halving prunes within a bracket.
Source: https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/experiment-config-reference.rst#searcher
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from classify.config import experiment_fields, experiment_file
from classify.config.command_line import called
from classify.config.experiment_fields import cluster_notes
from classify.images.settings import DataSettings
from classify.models import registry
from deepspeed_trial.errors import ErrorList, printable
from deepspeed_trial.experiment import Experiment
from workbench.search import space
from workbench.search.space import Range


@dataclass(frozen=True)
class Bracket:
    """A group of trials that are compared with each other.

    Attributes:
        trials: the number of trials.
        rungs: the number of lengths at which the trials are compared, including the full length. With one
            length no trial is pruned.
        first: the shortest of these lengths.
    """

    trials: int
    rungs: int = 1
    first: int = 0


@dataclass(frozen=True)
class Search:
    """A checked search.

    Attributes:
        file: the experiment file.
        overrides: the ``--set`` arguments.
        experiment: the file with the overrides; its hyperparameters include the ranges.
        ranges: the searched hyperparameters, in the file's order.
        data: the checked section ``data``; None in a search that ``check`` returned.
        parallel: maximum number of trials at a time; None for all that fit.
    """

    file: str
    overrides: list[str]
    experiment: Experiment
    ranges: list[Range]
    data: DataSettings | None = None
    parallel: int | None = None

    @property
    def searcher(self) -> dict[str, Any]:
        """The file's searcher section."""
        return self.experiment.config["searcher"]

    @functools.cached_property
    def brackets(self) -> list[Bracket]:
        """The groups of trials that compete."""
        size = math.prod(len(searched.grid) for searched in self.ranges) if self.is_grid else 1
        return brackets(self.searcher, size)

    @property
    def trials(self) -> int:
        """The number of trials, without the replacements of invalid ones."""
        return sum(bracket.trials for bracket in self.brackets)

    @property
    def concurrent(self) -> int:
        """Maximum number of trials at a time."""
        most = min(self.trials, self.searcher.get("max_concurrent_trials") or self.trials)
        return min(self.parallel or most, most)

    @property
    def is_grid(self) -> bool:
        """Whether the trials are the points of a grid."""
        return self.searcher["name"] == "grid"

    @property
    def is_guided(self) -> bool:
        """Whether the hyperparameters of the next trial depend on the results so far."""
        return self.searcher["name"] == "tpe"

    @property
    def best_of(self) -> Callable[..., Any]:
        """The function that returns the best of several values of the metric: ``min`` or ``max``."""
        return min if self.experiment.smaller_is_better else max

    @property
    def direction(self) -> StudyDirection:
        """The direction of better values of the metric, in Optuna's terms."""
        return StudyDirection.MINIMIZE if self.experiment.smaller_is_better else StudyDirection.MAXIMIZE

    def missing(self, known: Sequence[FrozenTrial]) -> list[int]:
        """Return the index of the bracket of each trial that is not drawn yet.

        As on a cluster, a new trial replaces each invalid trial. ``grid`` and ``single`` replace no trial.
        """
        missing, replaces = list[int](), self.searcher["name"] not in ("grid", "single")
        for index, bracket in enumerate(self.brackets):
            mine = [trial.user_attrs for trial in known if trial.user_attrs["bracket"] == index]
            invalid = sum(attributes.get("outcome") == "invalid" for attributes in mine)
            missing += [index] * (bracket.trials + replaces * min(invalid, bracket.trials) - len(mine))
        return missing

    def draws(self, known: Sequence[FrozenTrial] = ()) -> Iterator[dict[str, Any]]:
        """Draw the hyperparameters of the trials after the known ones; in a guided search, of the next trial.

        A guided search begins with random trials: a quarter of all trials, but at most ten.
        """
        finished = sum(trial.state == TrialState.COMPLETE for trial in known)
        if self.is_guided and finished >= min(10, math.ceil(self.searcher["max_trials"] / 4)):
            return iter([space.guided_draw(self.ranges, self.experiment.seed, self.direction, known)])
        drawn = space.draws(self.ranges, self.is_grid, self.experiment.seed)
        return itertools.islice(drawn, len(known), None)

    def overrides_of(self, drawn: Mapping[str, Any]) -> list[str]:
        """Return the ``--set`` arguments of a trial with these hyperparameters."""
        return [searched.override(drawn[searched.name]) for searched in self.ranges]

    def experiment_of(self, drawn: Mapping[str, Any]) -> Experiment:
        """Return the experiment of a trial with these hyperparameters.

        Raises:
            InvalidInput: with a line for each invalid field.
        """
        config = copy.deepcopy(dict(self.experiment.config))
        for searched in self.ranges:
            section, (*parents, key) = config, searched.path.split(".")
            for parent in parents:
                section = section.setdefault(parent, {})
            section[key] = searched.value(drawn[searched.name])
        return experiment_fields.check(config)


def load(file: str, overrides: list[str], parallel: int | None) -> Search:
    """Read and check a search; print a note about each field that has no effect on this machine.

    Args:
        file: the experiment file.
        overrides: ``PATH=VALUE`` texts.
        parallel: maximum number of trials at a time; None for all that fit.

    Raises:
        InvalidInput: with a line for each wrong field.
    """
    errors, search, size, data = ErrorList(), None, None, None
    if parallel is not None and parallel < 1:
        errors.lines.append(f"--parallel: {parallel}: must be at least 1")
    config = experiment_file.read(file, overrides)
    with errors.collecting():
        search = check(config, file, overrides)
        chosen = search.experiment.hyperparameters
        size = registry.input_size(chosen.get("net"), chosen.get("weights"))
    with errors.collecting():
        data = DataSettings.parse(config.get("data"), size)
    errors.raise_any()
    assert search
    for note in _notes(search.experiment, parallel):
        print(f"{called('search')}: note: {printable(note)}", file=sys.stderr)
    return replace(search, data=data, parallel=parallel)


def check(config: dict[str, Any], file: str, overrides: list[str]) -> Search:
    """Check a search, except its section ``data``.

    Args:
        config: the experiment, with its ranges.
        file: the experiment file of the search.
        overrides: the ``--set`` arguments of the search.

    Raises:
        InvalidInput: with a line for each wrong field.
    """
    errors, experiment = ErrorList(), Experiment({}, {})
    with errors.collecting():
        experiment = experiment_fields.check(config, search=True)
    searcher, hyperparameters = config.get("searcher") or {}, config.get("hyperparameters") or {}
    ranges: list[Range] = []
    if isinstance(searcher, dict) and isinstance(hyperparameters, dict):
        is_grid = searcher.get("name") == "grid"
        ranges += space.find_ranges("hyperparameters", hyperparameters, is_grid, errors)
    errors.raise_any()
    return Search(file, overrides, experiment, ranges)


def _notes(experiment: Experiment, parallel: int | None) -> list[str]:
    """Return a line for each field that has no effect, or another effect, on this machine."""
    searcher = experiment.config["searcher"]
    most, divisor = searcher.get("max_concurrent_trials"), searcher.get("divisor")
    notes = dict[str, str]()
    if most and parallel and most > parallel:
        notes["max_concurrent_trials"] = f"this machine runs {parallel} at a time; --parallel N runs more"
    elif most and parallel and most < parallel:
        notes["max_concurrent_trials"] = f"runs fewer trials at a time than --parallel {parallel}"
    if searcher.get("stop_once") is False:
        notes["stop_once"] = "a pruned trial does not resume, as in Determined 0.38"
    if divisor is not None and divisor != _divisor(searcher):
        notes["divisor"] = f"here one in {_divisor(searcher)} trials continues"
    if searcher.get("max_length") is not None:
        notes["max_length"] = "is not used; hyperparameters.max_length is the length"
    for key in ("source_trial_id", "source_checkpoint_uuid"):
        if searcher.get(key) is not None:
            notes[key] = "has no effect here; set hyperparameters.weights to start from trained weights"
    lines = [f"searcher.{key}: {searcher[key]!r}: {why}" for key, why in notes.items()]
    return [*experiment.notes(), *cluster_notes(experiment.config), *lines]


def brackets(searcher: Mapping[str, Any], grid_size: int) -> list[Bracket]:
    """Return the brackets of a checked searcher section, the bracket that prunes earliest first."""
    name = searcher["name"]
    if name in ("single", "grid"):
        return [Bracket(grid_size)]
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

    A trial's user attribute ``bracket`` is the index of its bracket.

    Args:
        search: the search.
    """

    def __init__(self, search: Search) -> None:
        divisor = _divisor(search.searcher)
        self.pruners: list[BasePruner] = [
            SuccessiveHalvingPruner(each.first, divisor) if each.rungs > 1 else NopPruner()
            for each in search.brackets
        ]

    @override
    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        bracket = trial.user_attrs["bracket"]
        among: Any = copy.copy(study)
        among.get_trials = lambda **how: [
            each for each in study.get_trials(**how) if each.user_attrs.get("bracket") == bracket
        ]
        return self.pruners[bracket].prune(among, trial)
