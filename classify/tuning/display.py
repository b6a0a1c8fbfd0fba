"""A search's output: a table while it runs, a CSV file, and at its end the best trial."""

from __future__ import annotations

import contextlib
import csv
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator

from optuna.trial import TrialState
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from classify.tuning.results import Results
from deepspeed_trial.errors import printable
from deepspeed_trial.local.folder import shown

SHOWN = 24  # trials in the table on a terminal
STYLES = {"complete": "green", "pruned": "yellow", "failed": "bold red", "invalid": "red", "running": "cyan"}


class SearchDisplay:
    """Tells how a search goes, and how it went.

    Args:
        results: its trials.
        output: the search's folder.
        chosen_on: by which images the trials are compared, in words.
    """

    def __init__(self, results: Results, output: pathlib.Path, chosen_on: str) -> None:
        self.results, self.output, self.chosen_on = results, output, chosen_on
        self.metric, self.names = results.metric, results.names
        self.console = Console(markup=False, emoji=False)  # names are text: [b] in one is no markup
        self.live_table: Live | None = None
        self.steps: dict[int, int] = {}
        self.changed: list[str] = []  # files of code

    # ------------------------------------------------------------------------------------------ while it runs

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Shows the table on a terminal; elsewhere every event is a line."""
        if not self.console.is_terminal:
            yield
            return
        with Live(self._table(), console=self.console, refresh_per_second=2) as self.live_table:
            yield

    def update(self, steps: dict[int, int]) -> None:
        """Takes the optimizer steps of the running trials."""
        if self.live_table and steps != self.steps:
            self.steps = steps
            self.live_table.update(self._table())

    def started(self, number: int) -> None:
        """Says that a trial has started."""
        if not self.live_table:
            trial = self.results.trials[number]
            print(printable(f"trial {number}: {self.results.values(trial)}"), flush=True)

    def tell_changes(self, number: int, begun: dict[str, str], now: dict[str, str]) -> None:
        """Says, once for each set of files, that a trial starts with other code than the search did.

        Args:
            number: of the trial.
            begun: digests of the files of code when the search began, by name.
            now: those of today.
        """
        files = sorted(name for name in begun.keys() | now.keys() if begun.get(name) != now.get(name))
        if not files or files == self.changed:
            return
        self.changed = files
        mend = "compare it with the trials before as far as that does not matter, or start a new search"
        what = f"{', '.join(files)} changed since the search began"
        print(f"search.py: note: trial {number}: {what}; {mend}", file=sys.stderr)

    def ended(self, number: int) -> None:
        """Says how a trial has ended, and brings the CSV file up to date."""
        trial = self.results.trials[number]
        if not self.live_table:
            reason = trial.user_attrs.get("reason")
            outcome = [str(trial.user_attrs["outcome"]), *([reason] if reason else [])]
            score = self.results.score(trial)
            shown = [f"{self.metric} {score:.6g}"] if score is not None else []
            print(printable(f"trial {number}: {': '.join([*shown, *outcome])}"), flush=True)
        self._write_csv()

    def _table(self) -> Table:
        title = printable(self.results.search.experiment.config.get("name", "search"))
        table = Table(box=box.SIMPLE_HEAD, title=title)
        table.add_column("trial", justify="right")
        for heading in (*(self.results.short(name) for name in self.names), "step", self.metric, "images/s"):
            table.add_column(printable(heading), justify="right")
        table.add_column("")
        trials = self.results.trials
        best = self.results.best(trials)
        begun = [trial for trial in trials if trial.state != TrialState.WAITING]
        waiting = self.results.waiting(trials)
        for trial in begun[-SHOWN:]:
            outcome = trial.user_attrs.get("outcome", "running")
            reason = trial.user_attrs.get("reason")
            score, speed = self.results.score(trial), trial.user_attrs.get("images_per_second")
            params = (trial.params[name] for name in self.names if name in trial.params)
            is_best = best is not None and trial.number == best.number
            table.add_row(
                str(trial.number),
                *(f"{value:.4g}" if isinstance(value, float) else printable(value) for value in params),
                f"{trial.user_attrs.get('steps') or self.steps.get(trial.number, 0):,}",
                "" if score is None else f"{score:.4g}",
                f"{speed:,.0f}" if speed else "",
                printable(f"{outcome}: {reason}" if reason else outcome),
                style="bold green" if is_best else STYLES[outcome],
            )
        table.caption = f"{len(begun)} of {len(begun) + waiting} begun, {waiting} waiting"
        return table

    # ------------------------------------------------------------------------------------------ at its end

    def finish(self) -> int:
        """Prints the best trial and the command that trains with its hyperparameters; gives the exit code."""
        trials = self.results.trials
        self._write_csv()
        outcomes = [trial.user_attrs.get("outcome") for trial in trials]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in STYLES if name in outcomes)
        print(f"{len(trials)} trials: {counts}; {printable(shown(self.output / 'trials.csv'))}")
        best = self.results.best(trials)
        if best is None:
            print("search.py: no trial has finished; their logs are in the folder trials", file=sys.stderr)
            return 1
        score = f"{self.metric} {self.results.score(best):.6g}"
        print(printable(f"best: trial {best.number}, {score}: {self.results.values(best)}"))
        hint = "; data.validation: 0.1 holds out others" if self.chosen_on == "test images" else ""
        print(f"chosen on {self.chosen_on}{hint}")
        page = f"python3 checkpoint.py report {shlex.quote(shown(self.output))}"
        print(f"report: {printable(page)}")
        storage = f"sqlite:///{shown(self.output / 'search.db')}"
        print(f"plots:  optuna-dashboard {printable(shlex.quote(storage))}")
        print(f"train with them: {printable(self.results.command(best))}")
        return 0

    def _write_csv(self) -> None:
        file = self.output / "trials.csv"
        partial = file.with_name(".trials.csv")
        with open(partial, "w", newline="") as out:
            writer = csv.writer(out)
            speed = "images_per_second"
            measured = ["steps", speed, "seconds", "reason", "folder"]
            writer.writerow(["trial", "outcome", self.metric, *self.names, *measured])
            for trial in self.results.trials:
                attributes = trial.user_attrs
                seconds = trial.duration.total_seconds() if trial.duration else None
                outcome = attributes.get("outcome", trial.state.name.lower())
                values = [trial.params.get(name) for name in self.names]
                folder = f"trials/{trial.number:03}"
                found = [
                    attributes.get("steps"),
                    attributes.get(speed),
                    seconds,
                    attributes.get("reason"),
                    folder,
                ]
                writer.writerow([trial.number, outcome, self.results.score(trial), *values, *found])
        os.replace(partial, file)
