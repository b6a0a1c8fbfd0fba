"""What a tracker is told of a run, and what it has to be able to do."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_trial.machine import is_installed

TRACKERS = ("mlflow", "wandb")
FINISHED, KILLED, FAILED = "FINISHED", "KILLED", "FAILED"  # how a run ends, in MLflow's words

Entry = Mapping[str, Any]  # a line of metrics.jsonl: group, steps_completed, time, and the metrics
NOT_METRICS = ("group", "steps_completed", "time")


@dataclass(frozen=True)
class TrackedRun:
    """A run, by what does not change when it is resumed.

    Attributes:
        key: of this run alone, the same after a resume.
        name: what it is called.
        project: what it is one of.
        config: the experiment configuration, with the hyperparameters that the trial has.
    """

    key: str
    name: str
    project: str
    config: Mapping[str, Any]


class Tracker(abc.ABC):
    """A library's record of one run.

    Its methods are called in one thread. Each may fail, and is then called again with the same arguments.
    """

    name: str

    @abc.abstractmethod
    def start(self, run: TrackedRun, earlier: Sequence[Entry] | None) -> None:
        """Makes the record, or goes on with the one of this run.

        Args:
            run: which run.
            earlier: all that it had reported before a resume, which the record is to have as well; None
                where that is not known.
        """

    @abc.abstractmethod
    def log(self, entry: Entry) -> None:
        """Takes a report, unless the record has it."""

    @abc.abstractmethod
    def add_file(self, path: pathlib.Path) -> None:
        """Takes a copy of a file."""

    @abc.abstractmethod
    def finish(self, status: str) -> None:
        """Ends the record as ``FINISHED``, ``KILLED`` or ``FAILED``."""


def tracker_errors(value: Any) -> list[str]:
    """Checks ``hyperparameters.track``: names of trackers that are installed here."""
    field = "hyperparameters.track"
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(each in TRACKERS for each in value):
        return [f"{field}: {value!r}: must be a list of some of {', '.join(TRACKERS)}, e.g. [mlflow]"]
    missing = [name for name in dict.fromkeys(value) if not is_installed(name)]
    return [f"{field}: {name}: is not installed here; pip install {name}" for name in missing]


def metrics_of(entry: Entry) -> dict[str, float]:
    """The metrics of a report, by ``GROUP/NAME``."""
    return {f"{entry['group']}/{name}": value for name, value in entry.items() if name not in NOT_METRICS}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The values of a nested mapping by their paths, joined by dots."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
