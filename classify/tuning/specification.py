"""What a search file asks for: the ranges, the trials, and how many at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from classify.config import experiment_fields, experiment_file
from classify.images.settings import DataSettings
from classify.tuning import searchers, space
from classify.tuning.space import Range
from harness.errors import ErrorList, printable
from harness.experiment import Experiment


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

    def draws(self) -> Iterator[dict[str, Any]]:
        """The hyperparameters of trial 0, 1, ..."""
        return space.draws(self.ranges, self.searcher["name"] == "grid", self.experiment.seed)

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
    for note in searchers.notes(experiment, parallel):
        print(f"search.py: note: {printable(note)}", file=sys.stderr)
    if gpus:
        parallel = min(parallel, gpus // slots)
    wanted = searcher.get("max_concurrent_trials") or parallel
    size = len(list(space.draws(ranges, True, 0))) if searcher["name"] == "grid" else 1
    brackets = searchers.brackets(searcher, size)
    return Search(file, overrides, experiment, ranges, brackets, min(parallel, wanted))
