"""Results of a search: its trials as rows, as lines and as a table on a terminal, and the best trial."""

from __future__ import annotations

import contextlib
import pathlib
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from classify.config import command_line, metric_table
from deepspeed_trial import redaction
from deepspeed_trial.errors import printable
from deepspeed_trial.local.folder import shown as shown_path
from workbench.reports import page
from workbench.search.specification import Search

SHOWN = 24  # trials in the table on a terminal
STYLES = {"complete": "green", "pruned": "yellow", "failed": "bold red", "invalid": "red", "running": "cyan"}


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

    def cells(self, metric: str, steps: int) -> dict[str, Any]:
        """Return the formatted cells of a table of trials, by the names of its columns.

        Args:
            metric: the metric of the score.
            steps: the optimizer steps so far; used if the trial has not ended.
        """
        return {
            "number": self.number,
            "values": [shown(value) for value in self.values],
            "score": "" if self.score is None else metric_table.shown(metric, self.score),
            "steps": f"{steps if self.steps is None else self.steps:,}",
            "speed": f"{self.images_per_second:,.0f}" if self.images_per_second else "",
            "seconds": f"{self.seconds:,.1f}" if self.seconds else "",
            "outcome": self.outcome,
            "reason": self.reason or "",
        }


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
    def chosen_on(self) -> str:
        """The images on which validations compare the trials, as text."""
        return self.study.user_attrs.get("chosen_on", "images")

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
        measured = ["steps", "images_per_second", "seconds", "reason", "folder"]
        rows: list[Sequence[object]] = [["trial", "outcome", self.metric, *self.names, *measured]]
        for trial in self.trials:
            number, outcome, score, values, *rest = self.row(trial)
            rows.append([number, outcome, score, *values, *rest])
        page.write(page.as_csv(rows), file)

    def score(self, trial: FrozenTrial) -> float | None:
        """Return the metric of a trial's best validation; None before the first validation."""
        return self.search.best_of(trial.intermediate_values.values(), default=None)

    def best(self, trials: list[FrozenTrial]) -> FrozenTrial | None:
        """Return the best of the complete trials; None if no trial is complete."""
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        return self.search.best_of(complete, key=lambda trial: trial.value, default=None)

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
        words = ["--config", self.search.file]
        for override in (*self.search.overrides, *self.search.overrides_of(trial.params)):
            words += ["--set", override]
        return command_line.typed("train", *redaction.command(words))


def steps_in(reports: Sequence[Mapping[str, Any]]) -> int:
    """Return the optimizer steps at the last of a trial's reports; 0 without a report."""
    return max((entry["steps_completed"] for entry in reports), default=0)


def shown(value: Any) -> str:
    """Format a value for a table; None is empty."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class SearchDisplay:
    """Shows a search: a live table on a terminal, else a line for every event; writes ``trials.csv``.

    Args:
        results: the trials of the search.
        output: the search's folder.
    """

    def __init__(self, results: Results, output: pathlib.Path) -> None:
        self.results, self.output, self.metric = results, output, results.metric
        self.console = Console(markup=False, emoji=False)  # Rich would read [b] in a name as markup
        self.live_table: Live | None = None
        self.steps: dict[int, int] = {}
        self.changed: list[str] = []  # the files of code in the last note

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Show the table while the search runs, if stdout is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Live(self._table(), console=self.console, refresh_per_second=2) as self.live_table:
            yield

    def update(self, steps: dict[int, int]) -> None:
        """Show the optimizer steps of the running trials."""
        if self.live_table and steps != self.steps:
            self.steps = steps
            self.live_table.update(self._table())

    def started(self, number: int) -> None:
        """Print a line about a trial that has started."""
        if not self.live_table:
            trial = self.results.trials[number]
            print(printable(f"trial {number}: {self.results.values(trial)}"), flush=True)

    def tell_changes(self, number: int, begun: dict[str, str], now: dict[str, str]) -> None:
        """Print a note about files of code that changed since the search began, once for each set of files.

        Args:
            number: the number of the trial that is about to start.
            begun: the digest of each file of code when the search began, by name.
            now: the digest of each file now.
        """
        files = sorted(name for name in begun.keys() | now.keys() if begun.get(name) != now.get(name))
        if not files or files == self.changed:
            return
        self.changed = files
        remedy = "if that changes the scores, start a new search"
        what = f"{', '.join(files)} changed since the search began"
        print(f"{command_line.called('search')}: note: trial {number}: {what}; {remedy}", file=sys.stderr)

    def ended(self, number: int) -> None:
        """Print a line about a trial that has ended, and write ``trials.csv``."""
        if not self.live_table:
            row = self.results.row(self.results.trials[number])
            score = (
                [] if row.score is None else [f"{self.metric} {metric_table.shown(self.metric, row.score)}"]
            )
            reason = [row.reason] if row.reason else []
            print(printable(f"trial {number}: {': '.join([*score, row.outcome, *reason])}"), flush=True)
        self.results.write_csv(self.output / "trials.csv")

    def _table(self) -> Table:
        title = printable(self.results.search.experiment.config.get("name", "search"))
        table = Table(box=box.SIMPLE_HEAD, title=title)
        short = [self.results.short(name) for name in self.results.names]
        for heading in ("trial", *short, "step", self.metric, "images/s"):
            table.add_column(printable(heading), justify="right")
        table.add_column("")
        trials = self.results.trials
        best = self.results.best(trials)
        begun = [trial for trial in trials if trial.state != TrialState.WAITING]
        for row in map(self.results.row, begun[-SHOWN:]):
            cells = row.cells(self.metric, self.steps.get(row.number, 0))
            end = f"{row.outcome}: {row.reason}" if row.reason else row.outcome
            texts = [*cells["values"], cells["steps"], cells["score"], cells["speed"], end]
            style = "bold green" if best and row.number == best.number else STYLES[row.outcome]
            table.add_row(str(row.number), *map(printable, texts), style=style)
        waiting = self.results.waiting(trials)
        table.caption = f"{len(begun)} of {len(begun) + waiting} begun, {waiting} waiting"
        return table

    def finish(self) -> int:
        """Print the best trial and the command that trains with its hyperparameters; return the exit code."""
        trials = self.results.trials
        self.results.write_csv(self.output / "trials.csv")
        outcomes = [trial.user_attrs.get("outcome") for trial in trials]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in STYLES if name in outcomes)
        print(f"{len(trials)} trials: {counts}; {printable(shown_path(self.output / 'trials.csv'))}")
        best = self.results.best(trials)
        if best is None:
            reason = "no trial has finished; the logs are in the folder trials"
            print(f"{command_line.called('search')}: {reason}", file=sys.stderr)
            return 1
        score = f"{self.metric} {metric_table.shown(self.metric, self.results.score(best) or 0.0)}"
        print(printable(f"best: trial {best.number}, {score}: {self.results.values(best)}"))
        hint = "; data.validation: 0.1 holds out images for the choice"
        print(f"chosen on {self.results.chosen_on}{hint * (self.results.chosen_on == 'test images')}")
        report = command_line.typed("checkpoint", "report", shown_path(self.output))
        print(f"report: {printable(report)}")
        storage = f"sqlite:///{shown_path(self.output / 'search.db')}"
        print(f"plots:  optuna-dashboard {printable(shlex.quote(storage))}")
        print(f"train with these values: {printable(self.results.command(best))}")
        return 0
