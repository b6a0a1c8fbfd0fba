"""The output of a search: lines, a table on a terminal, and the best trial."""

from __future__ import annotations

import contextlib
import pathlib
import shlex
import sys
from collections.abc import Iterator

from optuna.trial import TrialState
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from classify.config import command_line
from deepspeed_trial.errors import printable
from deepspeed_trial.local.folder import shown
from workbench.search import results
from workbench.search.results import Results

SHOWN = 24  # trials in the table on a terminal
STYLES = {"complete": "green", "pruned": "yellow", "failed": "bold red", "invalid": "red", "running": "cyan"}


class SearchDisplay:
    """Show a search: a live table on a terminal, else a line for every event; write ``trials.csv``.

    Args:
        results: the trials of the search.
        output: the search's folder.
        chosen_on: a description of the images on which validations compare the trials.
    """

    def __init__(self, results: Results, output: pathlib.Path, chosen_on: str) -> None:
        self.results, self.output, self.chosen_on = results, output, chosen_on
        self.metric = results.metric
        self.console = Console(markup=False, emoji=False)  # names are text: [b] in one is no markup
        self.live_table: Live | None = None
        self.steps: dict[int, int] = {}
        self.changed: list[str] = []  # files of code

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
            score = [f"{self.metric} {row.score:.6g}"] if row.score is not None else []
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
            speed = f"{row.images_per_second:,.0f}" if row.images_per_second else ""
            table.add_row(
                str(row.number),
                *(printable(results.shown(value)) for value in row.values),
                f"{row.steps or self.steps.get(row.number, 0):,}",
                results.shown(row.score),
                speed,
                printable(f"{row.outcome}: {row.reason}" if row.reason else row.outcome),
                style="bold green" if best and row.number == best.number else STYLES[row.outcome],
            )
        waiting = self.results.waiting(trials)
        table.caption = f"{len(begun)} of {len(begun) + waiting} begun, {waiting} waiting"
        return table

    def finish(self) -> int:
        """Print the best trial and the command that trains with its hyperparameters; return the exit code."""
        trials = self.results.trials
        self.results.write_csv(self.output / "trials.csv")
        outcomes = [trial.user_attrs.get("outcome") for trial in trials]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in STYLES if name in outcomes)
        print(f"{len(trials)} trials: {counts}; {printable(shown(self.output / 'trials.csv'))}")
        best = self.results.best(trials)
        if best is None:
            reason = "no trial has finished; the logs are in the folder trials"
            print(f"{command_line.called('search')}: {reason}", file=sys.stderr)
            return 1
        score = f"{self.metric} {self.results.score(best):.6g}"
        print(printable(f"best: trial {best.number}, {score}: {self.results.values(best)}"))
        hint = (
            "; data.validation: 0.1 holds out images for the choice"
            if self.chosen_on == "test images"
            else ""
        )
        print(f"chosen on {self.chosen_on}{hint}")
        page = command_line.typed("checkpoint", "report", shown(self.output))
        print(f"report: {printable(page)}")
        storage = f"sqlite:///{shown(self.output / 'search.db')}"
        print(f"plots:  optuna-dashboard {printable(shlex.quote(storage))}")
        print(f"train with them: {printable(self.results.command(best))}")
        return 0
