"""What a search file asks for: the ranges, the trials, and how many at a time."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import joblib
import torch
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from classify.config import experiment_fields, experiment_file
from classify.images.settings import DataSettings
from classify.tuning import searchers, space
from classify.tuning.space import Range
from deepspeed_trial.errors import ErrorList, InvalidInput, printable
from deepspeed_trial.experiment import Experiment


@dataclass(frozen=True)
class Search:
    """A checked search.

    Attributes:
        file: the experiment file.
        overrides: the ``--set`` arguments.
        experiment: both together, with the ranges still among the hyperparameters.
        ranges: the searched hyperparameters, in the file's order.
        brackets: the trials, those that are compared with one another together.
        concurrent: trials at a time.
    """

    file: str
    overrides: list[str]
    experiment: Experiment
    ranges: list[Range]
    brackets: list[searchers.Bracket]
    concurrent: int

    @property
    def searcher(self) -> dict[str, Any]:
        """The file's searcher section."""
        return self.experiment.config["searcher"]

    @property
    def replaces_invalid(self) -> bool:
        """Whether another trial takes the place of one with invalid hyperparameters, as on a cluster."""
        return self.searcher["name"] not in ("grid", "single")

    @property
    def is_guided(self) -> bool:
        """Whether the hyperparameters of a trial depend on the results of those before."""
        return self.searcher["name"] == "tpe"

    @property
    def direction(self) -> StudyDirection:
        """Whether more or less of the metric is better."""
        return StudyDirection.MINIMIZE if self.experiment.smaller_is_better else StudyDirection.MAXIMIZE

    def missing(self, known: Sequence[FrozenTrial]) -> list[int]:
        """The brackets of the trials that are still to be drawn, after these."""
        found: list[int] = []
        for index, bracket in enumerate(self.brackets):
            mine = [trial.user_attrs for trial in known if trial.user_attrs["bracket"] == index]
            invalid = sum(attributes.get("outcome") == "invalid" for attributes in mine)
            extra = min(invalid, bracket.trials) if self.replaces_invalid else 0
            found += [index] * (bracket.trials + extra - len(mine))
        return found

    def draws(self, known: Sequence[FrozenTrial] = ()) -> Iterator[dict[str, Any]]:
        """The hyperparameters of the trials after these; of a guided search the next alone counts.

        A guided search begins with random trials, a quarter of all and at most ten.
        """
        finished = sum(trial.state == TrialState.COMPLETE for trial in known)
        if self.is_guided and finished >= min(10, math.ceil(self.searcher["max_trials"] / 4)):
            return iter([space.guided_draw(self.ranges, self.experiment.seed, self.direction, known)])
        drawn = space.draws(self.ranges, self.searcher["name"] == "grid", self.experiment.seed)
        return itertools.islice(drawn, len(known), None)

    def overrides_of(self, drawn: dict[str, Any]) -> list[str]:
        """What ``--set`` has to say for a trial with these hyperparameters."""
        return [each.override(drawn[each.name]) for each in self.ranges]


def load(file: str, overrides: list[str], parallel: int) -> Search:
    """Reads and checks a search; says on stderr what it asks for and cannot have here.

    Args:
        file: the experiment file.
        overrides: ``PATH=VALUE`` each.
        parallel: trials that may run at a time.

    Raises:
        InvalidInput: with a line for each field that is wrong.
    """
    errors = ErrorList()
    if parallel < 1:
        errors.lines.append(f"--parallel: {parallel}: must be at least 1")
    config = experiment_file.read(file, overrides)
    experiment = Experiment({}, {})
    with errors.collecting():
        experiment = experiment_fields.check(config, search=True)
    with errors.collecting():
        DataSettings.parse(config.get("data"))
    searcher, hyperparameters = config.get("searcher") or {}, config.get("hyperparameters") or {}
    ranges: list[Range] = []
    if isinstance(searcher, dict):
        errors.lines += searchers.errors_of(searcher)
        if isinstance(hyperparameters, dict):
            is_grid = searcher.get("name") == "grid"
            ranges, wrong = space.find_ranges("hyperparameters", hyperparameters, is_grid)
            errors.lines += wrong
    slots, gpus = experiment.slots, torch.cuda.device_count()
    if gpus and slots > gpus:
        errors.lines.append(f"resources.slots_per_trial: {slots}: this machine has {gpus} GPUs")
    errors.raise_any()
    notes = searchers.notes(experiment, parallel)
    brackets = _brackets(searcher, ranges)
    most = sum(bracket.trials for bracket in brackets)  # that can run at a time
    if gpus:
        most = min(most, gpus // slots)
    most = min(most, searcher.get("max_concurrent_trials") or most)
    concurrent = min(parallel, most)
    if not gpus and "OMP_NUM_THREADS" not in os.environ:
        notes += idle_cores(joblib.cpu_count(), slots, concurrent, most)
    for note in notes:
        print(f"search.py: note: {printable(note)}", file=sys.stderr)
    return Search(file, overrides, experiment, ranges, brackets, concurrent)


def idle_cores(cores: int, slots: int, concurrent: int, most: int) -> list[str]:
    """A line where cores cannot be shared out evenly, with the nearest number of trials at a time that can.

    Args:
        cores: of this machine.
        slots: processes of a trial.
        concurrent: trials at a time.
        most: the most trials that can run at a time.
    """
    left = cores % (slots * concurrent)
    if not left or slots * concurrent > cores:
        return []
    even = [
        number for number in range(1, most + 1) if slots * number <= cores and not cores % (slots * number)
    ]
    nearest = min(even, key=lambda number: (abs(number - concurrent), -number), default=None)
    mend = f"; --parallel {nearest} uses all" if nearest else ""
    threads = cores // (slots * concurrent)
    said = f"{threads} thread{'s' * (threads != 1)}"
    return [f"--parallel {concurrent}: {left} of {cores} cores idle: every process has {said}{mend}"]


def _brackets(searcher: dict[str, Any], ranges: list[Range]) -> list[searchers.Bracket]:
    size = len(list(space.draws(ranges, True, 0))) if searcher["name"] == "grid" else 1
    return searchers.brackets(searcher, size)


def recorded(config: dict[str, Any], file: str, overrides: list[str]) -> Search:
    """A search as it was when it began.

    Args:
        config: the experiment, with its ranges.
        file: the experiment file it came from.
        overrides: what was put into that.

    Raises:
        InvalidInput: if it is none that a search may have.
    """
    experiment, searcher = experiment_fields.check(config, search=True), config["searcher"]
    ranges, errors = space.find_ranges(
        "hyperparameters", config["hyperparameters"], searcher["name"] == "grid"
    )
    if errors := errors + searchers.errors_of(searcher):
        raise InvalidInput(errors)
    return Search(file, overrides, experiment, ranges, _brackets(searcher, ranges), 1)
