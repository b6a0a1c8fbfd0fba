"""A checked search file: the ranges, the trials, and the number of trials at a time."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from classify.config import experiment_fields, experiment_file
from classify.config.command_line import called
from classify.images.settings import DataSettings
from deepspeed_trial.errors import ErrorList, printable
from deepspeed_trial.experiment import Experiment
from workbench.search import searchers, space
from workbench.search.space import Range


@dataclass(frozen=True)
class Search:
    """A checked search.

    Attributes:
        file: the experiment file.
        overrides: the ``--set`` arguments.
        experiment: the file with the overrides; its hyperparameters include the ranges.
        ranges: the searched hyperparameters, in the file's order.
        brackets: the groups of trials that compete.
        concurrent: maximum number of trials at a time.
    """

    file: str
    overrides: list[str]
    experiment: Experiment
    ranges: list[Range]
    brackets: list[searchers.Bracket]
    concurrent: int = 1

    @property
    def searcher(self) -> dict[str, Any]:
        """The file's searcher section."""
        return self.experiment.config["searcher"]

    @property
    def replaces_invalid(self) -> bool:
        """Whether a new trial replaces a trial with invalid hyperparameters, as on a cluster."""
        return self.searcher["name"] not in ("grid", "single")

    @property
    def is_guided(self) -> bool:
        """Whether the hyperparameters of the next trial depend on the results so far."""
        return self.searcher["name"] == "tpe"

    @property
    def direction(self) -> StudyDirection:
        """Whether larger or smaller values of the metric are better."""
        return StudyDirection.MINIMIZE if self.experiment.smaller_is_better else StudyDirection.MAXIMIZE

    def missing(self, known: Sequence[FrozenTrial]) -> list[int]:
        """Return the brackets of the trials to draw after the known ones."""
        missing: list[int] = []
        for index, bracket in enumerate(self.brackets):
            mine = [trial.user_attrs for trial in known if trial.user_attrs["bracket"] == index]
            invalid = sum(attributes.get("outcome") == "invalid" for attributes in mine)
            extra = min(invalid, bracket.trials) if self.replaces_invalid else 0
            missing += [index] * (bracket.trials + extra - len(mine))
        return missing

    def draws(self, known: Sequence[FrozenTrial] = ()) -> Iterator[dict[str, Any]]:
        """Draw the hyperparameters of the trials after the known ones; in a guided search, of the next trial.

        A guided search begins with random trials: a quarter of all trials, but at most ten.
        """
        finished = sum(trial.state == TrialState.COMPLETE for trial in known)
        if self.is_guided and finished >= min(10, math.ceil(self.searcher["max_trials"] / 4)):
            return iter([space.guided_draw(self.ranges, self.experiment.seed, self.direction, known)])
        drawn = space.draws(self.ranges, self.searcher["name"] == "grid", self.experiment.seed)
        return itertools.islice(drawn, len(known), None)

    def overrides_of(self, drawn: dict[str, Any]) -> list[str]:
        """Return the ``--set`` arguments of a trial with these hyperparameters."""
        return [searched.override(drawn[searched.name]) for searched in self.ranges]


def load(file: str, overrides: list[str], parallel: int | None) -> Search:
    """Read and check a search; print a note about each field that has no effect on this machine.

    Args:
        file: the experiment file.
        overrides: ``PATH=VALUE`` texts.
        parallel: maximum number of trials at a time; None for all that fit.

    Raises:
        InvalidInput: with a line for each wrong field.
    """
    errors = ErrorList()
    if parallel is not None and parallel < 1:
        errors.lines.append(f"--parallel: {parallel}: must be at least 1")
    config = experiment_file.read(file, overrides)
    experiment, ranges = _check(config, errors)
    with errors.collecting():
        DataSettings.parse(config.get("data"))
    errors.raise_any()
    for note in searchers.notes(experiment, parallel):
        print(f"{called('search')}: note: {printable(note)}", file=sys.stderr)
    search = _search(file, overrides, experiment, ranges)
    most = sum(bracket.trials for bracket in search.brackets)
    most = min(most, search.searcher.get("max_concurrent_trials") or most)
    return replace(search, concurrent=min(parallel or most, most))


def recorded(config: dict[str, Any], file: str, overrides: list[str]) -> Search:
    """Return a search as it began.

    Args:
        config: the experiment, with its ranges.
        file: the experiment file of the search.
        overrides: the ``--set`` arguments of the search.

    Raises:
        InvalidInput: with a line for each wrong field.
    """
    errors = ErrorList()
    experiment, ranges = _check(config, errors)
    errors.raise_any()
    return _search(file, overrides, experiment, ranges)


def _check(config: dict[str, Any], errors: ErrorList) -> tuple[Experiment, list[Range]]:
    """Check an experiment and its searcher; return the experiment and its ranges."""
    experiment = Experiment({}, {})
    with errors.collecting():
        experiment = experiment_fields.check(config, search=True)
    searcher, hyperparameters = config.get("searcher") or {}, config.get("hyperparameters") or {}
    ranges: list[Range] = []
    if isinstance(searcher, dict):
        errors.lines += searchers.errors_of(searcher)
        if isinstance(hyperparameters, dict):
            is_grid = searcher.get("name") == "grid"
            ranges, wrong = space.find_ranges("hyperparameters", hyperparameters, is_grid)
            errors.lines += wrong
    return experiment, ranges


def _search(file: str, overrides: list[str], experiment: Experiment, ranges: list[Range]) -> Search:
    searcher = experiment.config["searcher"]
    size = math.prod(len(searched.grid) for searched in ranges) if searcher["name"] == "grid" else 1
    return Search(file, overrides, experiment, ranges, searchers.brackets(searcher, size))
