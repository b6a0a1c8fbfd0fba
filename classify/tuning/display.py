"""What a search shows: a table while it runs, and at its end the best trial, a CSV file and plots."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator

import matplotlib
import numpy as np
import optuna
from matplotlib import pyplot, ticker
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from classify.tuning.specification import Search
from harness.errors import printable
from harness.local.folder import shown

SHOWN = 24  # trials in the table on a terminal
STYLES = {"complete": "green", "pruned": "yellow", "failed": "bold red", "invalid": "red", "running": "cyan"}


class SearchDisplay:
    """Tells how a search goes, and how it went.

    Args:
        study: Optuna's record of it.
        search: what is searched.
        output: the search's folder.
        chosen_on: by which images the trials are compared, in words.
    """

    def __init__(self, study: optuna.Study, search: Search, output: pathlib.Path, chosen_on: str) -> None:
        self.study, self.search, self.output, self.chosen_on = study, search, output, chosen_on
        self.metric = search.experiment.metric
        self.names = [each.name for each in search.ranges]
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
            trial = self._trials()[number]
            print(printable(f"trial {number}: {self._values(trial)}"), flush=True)

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
        trial = self._trials()[number]
        if not self.live_table:
            reason = trial.user_attrs.get("reason")
            outcome = [str(trial.user_attrs["outcome"]), *([reason] if reason else [])]
            score = self._score(trial)
            shown = [f"{self.metric} {score:.6g}"] if score is not None else []
            print(printable(f"trial {number}: {': '.join([*shown, *outcome])}"), flush=True)
        self._write_csv()

    def _table(self) -> Table:
        title = printable(self.search.experiment.config.get("name", "search"))
        table = Table(box=box.SIMPLE_HEAD, title=title)
        table.add_column("trial", justify="right")
        for heading in (*(self._short(name) for name in self.names), "step", self.metric, "images/s"):
            table.add_column(printable(heading), justify="right")
        table.add_column("")
        trials = self._trials()
        best = self._best(trials)
        begun = [trial for trial in trials if trial.state != TrialState.WAITING]
        waiting = len(trials) - len(begun) + len(self.search.missing(trials))
        for trial in begun[-SHOWN:]:
            outcome = trial.user_attrs.get("outcome", "running")
            reason = trial.user_attrs.get("reason")
            score, speed = self._score(trial), trial.user_attrs.get("images_per_second")
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
        trials = self._trials()
        self._write_csv()
        outcomes = [trial.user_attrs.get("outcome") for trial in trials]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in STYLES if name in outcomes)
        print(f"{len(trials)} trials: {counts}; {printable(shown(self.output / 'trials.csv'))}")
        best = self._best(trials)
        if best is None:
            print("search.py: no trial has finished; their logs are in the folder trials", file=sys.stderr)
            return 1
        for plot in self._plots(trials):
            print(f"plot: {printable(shown(self.output / plot))}")
        score = f"{self.metric} {self._score(best):.6g}"
        print(printable(f"best: trial {best.number}, {score}: {self._values(best)}"))
        hint = "; data.validation: 0.1 holds out others" if self.chosen_on == "test images" else ""
        print(f"chosen on {self.chosen_on}{hint}")
        command = ["python3", "train.py", "--config", self.search.file]
        for override in (*self.search.overrides, *self.search.overrides_of(best.params)):
            command += ["--set", override]
        print(f"train with them: {printable(shlex.join(command))}")
        return 0

    def _write_csv(self) -> None:
        file = self.output / "trials.csv"
        partial = file.with_name(".trials.csv")
        with open(partial, "w", newline="") as out:
            writer = csv.writer(out)
            speed = "images_per_second"
            measured = ["steps", speed, "seconds", "reason", "folder"]
            writer.writerow(["trial", "outcome", self.metric, *self.names, *measured])
            for trial in self._trials():
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
                writer.writerow([trial.number, outcome, self._score(trial), *values, *found])
        os.replace(partial, file)

    def _plots(self, trials: list[FrozenTrial]) -> Iterator[str]:
        """Draws the trials that have a validation, and gives the names of the files."""
        matplotlib.use("agg")
        scored = [trial for trial in trials if trial.state.is_finished() and self._score(trial) is not None]
        study = optuna.create_study(
            direction=self.study.direction
        )  # with names that fit, and pruned trials as well
        for trial in scored:
            params = {self._short(name): value for name, value in trial.params.items()}
            distributions = {self._short(name): value for name, value in trial.distributions.items()}
            value = self._score(trial)
            study.add_trial(optuna.create_trial(value=value, params=params, distributions=distributions))
        with pyplot.rc_context({"figure.figsize": (9, 5), "figure.dpi": 120}):
            history = optuna.visualization.matplotlib.plot_optimization_history(
                study, target_name=self.metric
            )
            history.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
            yield self._save("history.png")
            varied = [name for name in self.names if len({trial.params[name] for trial in scored}) > 1]
            if len(varied) > 1:
                short = [self._short(name) for name in varied]
                axes = optuna.visualization.matplotlib.plot_parallel_coordinate(
                    study, short, target_name=self.metric
                )
                for lines in axes.collections:  # Optuna's colours begin with white
                    blues = pyplot.get_cmap("Blues")(np.linspace(0.35, 1, 256))
                    is_reversed = lines.get_cmap().name.endswith("_r")
                    lines.set_cmap(ListedColormap(blues[::-1] if is_reversed else blues))
                for each in axes.figure.axes:
                    each.grid(visible=False)  # white, and across the lines
                    _spread_ticks(each.yaxis)
                yield self._save("parallel-coordinates.png")
            numbers = [
                name for name in varied if isinstance(scored[0].distributions[name], FloatDistribution)
            ]
            if numbers:
                yield self._scatter(scored, numbers[0], [name for name in varied if name not in numbers])

    def _scatter(self, scored: list[FrozenTrial], name: str, groups: list[str]) -> str:
        """The metric by one hyperparameter, coloured by each of the others; hollow: stopped early."""
        _, all_axes = pyplot.subplots(1, max(1, len(groups)), sharey=True, squeeze=False, figsize=(9, 4))
        for axes, group in itertools.zip_longest(all_axes.flat, groups):
            values = sorted({trial.params[group] for trial in scored}, key=_order) if group else [None]
            for index, value in enumerate(values):
                chosen = [trial for trial in scored if group is None or trial.params[group] == value]
                colour = f"C{index}"
                faces = [colour if trial.state == TrialState.COMPLETE else "none" for trial in chosen]
                label = None if value is None else f"{value}"
                rates, scores = (
                    [trial.params[name] for trial in chosen],
                    [self._score(trial) or 0.0 for trial in chosen],
                )
                axes.scatter(rates, scores, facecolors=faces, edgecolors=colour, linewidths=1.5)
                axes.plot([], [], "o", color=colour, label=label)
            if getattr(scored[0].distributions[name], "log", False):
                axes.set_xscale("log")
                _spread_ticks(axes.xaxis)
            axes.set_xlabel(self._short(name))
            if group:
                axes.legend(title=self._short(group), fontsize="small", title_fontsize="small")
        all_axes[0, 0].set_ylabel(f"{self.metric} (hollow: stopped early)")
        return self._save(f"{self.metric.replace('/', '-')}-by-{self._short(name)}.png")

    def _save(self, name: str) -> str:
        pyplot.savefig(self.output / name, bbox_inches="tight")
        pyplot.close("all")
        return name

    # ------------------------------------------------------------------------------------------ the trials

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _score(self, trial: FrozenTrial) -> float | None:
        """Its best validation, by which trials are compared."""
        values = trial.intermediate_values.values()
        return (min if self.search.experiment.smaller_is_better else max)(values, default=None)

    def _best(self, trials: list[FrozenTrial]) -> FrozenTrial | None:
        sign = -1 if self.search.experiment.smaller_is_better else 1
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        return max(complete, key=lambda trial: sign * (self._score(trial) or 0), default=None)

    def _values(self, trial: FrozenTrial) -> str:
        return (
            ", ".join(f"{self._short(name)} {trial.params[name]!r}" for name in self.names)
            or "as the file says"
        )

    def _short(self, name: str | None) -> str:
        """The last parts of a dotted path, as many as tell it from the others."""
        parts = str(name).split(".")
        for count in range(1, len(parts)):
            short = ".".join(parts[-count:])
            if sum(other == short or other.endswith(f".{short}") for other in self.names) == 1:
                return short
        return str(name)


def _spread_ticks(axis: Axis) -> None:
    """Labels a logarithmic axis by its decades alone, or where it has none or one, by a few round numbers."""
    if axis.get_scale() != "log":
        return
    axis.set_minor_formatter(ticker.NullFormatter())
    low, high = sorted(axis.get_view_interval())
    if high / low < 20:
        axis.set_major_locator(ticker.MaxNLocator(4))
        axis.set_major_formatter(ticker.FormatStrFormatter("%.4g"))


def _order(value: object) -> tuple[bool, object]:
    return (False, value) if isinstance(value, (int, float)) else (True, str(value))
