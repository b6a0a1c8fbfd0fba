"""Results of a search: a row for each trial, the best trial, the command with a trial's hyperparameters."""

from __future__ import annotations

import csv
import os
import pathlib
import shlex
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from deepspeed_trial import redaction
from workbench.search.specification import Search


def quiet_optuna() -> None:
    """Hide Optuna's messages about trials and experimental features."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class Row(NamedTuple):
    """A trial as ``trials.csv``, the terminal and the page show it.

    Attributes:
        number: the trial's number, from 0.
        outcome: ``complete``, ``pruned``, ``failed``, ``invalid``, ``running`` or ``waiting``.
        score: the metric of the best validation; None before the first validation.
        values: the hyperparameters, in the order of ``Results.names``; None if not sampled yet.
        steps: optimizer steps; None before the trial's end.
        images_per_second: the speed of the training.
        seconds: the wall time; None before the trial's end.
        reason: why the trial is not complete.
        folder: the trial's folder, relative to the search's folder.
    """

    number: int
    outcome: str
    score: float | None
    values: list[Any]
    steps: int | None
    images_per_second: float | None
    seconds: float | None
    reason: str | None
    folder: str


@dataclass(frozen=True)
class Results:
    """The trials of a search and their scores.

    Attributes:
        study: Optuna's record of the trials.
        search: the search.
    """

    study: optuna.Study
    search: Search

    @property
    def metric(self) -> str:
        """The metric that compares trials."""
        return self.search.experiment.metric

    @property
    def names(self) -> list[str]:
        """The searched hyperparameters."""
        return [searched.name for searched in self.search.ranges]

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials by number."""
        return self.study.get_trials(deepcopy=False)

    def row(self, trial: FrozenTrial) -> Row:
        """Return a trial's row."""
        found = trial.user_attrs
        return Row(
            trial.number,
            found.get("outcome", trial.state.name.lower()),
            self.score(trial),
            [trial.params.get(name) for name in self.names],
            found.get("steps"),
            found.get("images_per_second"),
            trial.duration.total_seconds() if trial.duration else None,
            found.get("reason"),
            f"trials/{trial.number:03}",
        )

    def write_csv(self, file: pathlib.Path) -> None:
        """Write a row for every trial into a file, atomically."""
        partial = file.with_name(f".{file.name}")
        with open(partial, "w", newline="") as out:
            writer = csv.writer(out)
            measured = ["steps", "images_per_second", "seconds", "reason", "folder"]
            writer.writerow(["trial", "outcome", self.metric, *self.names, *measured])
            for trial in self.trials:
                number, outcome, score, values, *rest = self.row(trial)
                writer.writerow([number, outcome, score, *values, *rest])
        os.replace(partial, file)

    def score(self, trial: FrozenTrial) -> float | None:
        """Return the metric of a trial's best validation; None before the first validation."""
        values = trial.intermediate_values.values()
        return (min if self.search.experiment.smaller_is_better else max)(values, default=None)

    def best(self, trials: list[FrozenTrial]) -> FrozenTrial | None:
        """Return the best of the complete trials; None if no trial is complete."""
        sign = -1 if self.search.experiment.smaller_is_better else 1
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        return max(complete, key=lambda trial: sign * (self.score(trial) or 0), default=None)

    def values(self, trial: FrozenTrial) -> str:
        """Return a trial's hyperparameters as a line."""
        values = (f"{self.short(name)} {trial.params[name]!r}" for name in self.names)
        return ", ".join(values) or "the hyperparameters of the file"

    def short(self, name: str) -> str:
        """Return the shortest end of a dotted path that no other searched hyperparameter has."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            short = ".".join(parts[-count:])
            if sum(other == short or other.endswith(f".{short}") for other in self.names) == 1:
                return short
        return name

    def waiting(self, trials: list[FrozenTrial]) -> int:
        """Return the number of trials that have not begun."""
        drawn = sum(trial.state == TrialState.WAITING for trial in trials)
        return drawn + len(self.search.missing(trials))

    def command(self, trial: FrozenTrial) -> str:
        """Return the command that trains with a trial's hyperparameters."""
        command = ["python3", "train.py", "--config", self.search.file]
        for override in (*self.search.overrides, *self.search.overrides_of(trial.params)):
            command += ["--set", override]
        return shlex.join(redaction.command(command))


def shown(value: Any) -> str:
    """Format a value for a table; None is empty."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
