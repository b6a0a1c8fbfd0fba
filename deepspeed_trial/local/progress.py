"""Metrics of a run without a cluster: a file, and the progress on the terminal."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TextIO

import torch
from determined import core
from tqdm import tqdm
from typing_extensions import override

from deepspeed_trial import machine, redaction
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local import metrics_log
from deepspeed_trial.output_files import replacing
from deepspeed_trial.time_budget import (
    STEP,
    VALIDATION,
    TimeBudget,
    Work,
    about_text,
    clock_text,
    periods,
    seconds_left,
)

# Label and format of the metrics that come first
FORMS = {
    "loss": ("loss", ".4f"),
    "learning_rate": ("lr", ".2g"),
    "accuracy": ("accuracy", ".4f"),
    "images_per_second": ("images/s", ",.0f"),
}
SHOWN = 6  # most metrics of a line
NOT_SHOWN = ("batches", "epochs")  # counts in the metrics of every validation
# Least seconds between two shown steps, on a terminal (True) and elsewhere; to show metrics waits for the GPU
SHOWN_EVERY = {True: 1.0, False: 60.0}
WATCHED = 5  # least seconds of a measurement of threads or of steps
TIMED_STEPS = 3  # least steps of a measurement
LONGEST_WAIT = 0.2  # share of the time without a core; above it a note says that the host is busy
# Shows no steps per second: tqdm would count the time of validations, too
BAR = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"


class Progress:
    """Shows the progress of a training; this base class prints only changes of the number of steps.

    Attributes:
        validation: metrics of the last validation; empty on a cluster, where the master has them.
    """

    validation: Mapping[str, Any] = MappingProxyType({})

    def begin(
        self, steps: int | None, steps_per_epoch: int, done: int, work: Work, budget: TimeBudget | None = None
    ) -> None:
        """Start showing the training.

        Args:
            steps: total optimizer steps; None if not known yet.
            steps_per_epoch: optimizer steps in an epoch.
            done: steps done before this run resumed.
            work: work in addition to the steps.
            budget: the time budget, if the training's length is a time.
        """

    def plan(self, steps: int, text: str) -> None:
        """Change the total number of steps, and show a line about the change."""
        print(text, flush=True)

    def step(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Count an optimizer step; from time to time, show its metrics, which may be tensors."""

    def judge_by(self, step: int) -> None:
        """Show the validation after a step as the final result: the run ends with that step's weights."""

    def close(self) -> None:
        """End the display of the progress."""


class LocalMetrics(core.DummyTrainContext, Progress):
    """Show and write the metrics that a trial reports, on the chief.

    A terminal shows a progress bar, other outputs plain lines. ``OUTPUT/metrics.jsonl`` gets all metrics.

    Args:
        output: folder of the run.
        experiment: configuration; its validation metric decides which checkpoint is best.
    """

    def __init__(self, output: pathlib.Path, experiment: Experiment) -> None:
        super().__init__(output)  # the folder names TensorBoard's files
        self.output, self.experiment = output, experiment
        self._scores: dict[int, float] = {}  # the validation metric by step
        self.steps: int | None = 0
        self.steps_per_epoch = 1
        self._budget: TimeBudget | None = None
        self._bar = tqdm(disable=True)  # until the length is known
        self._reported: dict[str, Any] = {}
        self._shown_at = 0.0  # seconds
        self._watched_since: tuple[float, float] | None = None  # time, and machine.waited_for_cores() then
        self._work: Work | None = None  # until the forecast is shown
        self._timed_since: tuple[int, float] | None = None  # step and time; only steps count
        self._costs: dict[str, float] = {}  # seconds of a validation

    @override
    def begin(
        self, steps: int | None, steps_per_epoch: int, done: int, work: Work, budget: TimeBudget | None = None
    ) -> None:
        self._budget = budget
        self.steps, self.steps_per_epoch = steps, steps_per_epoch
        self._work = None if budget else work
        self._forget_after(done)
        run = {
            "config": self.experiment.shown,
            "command": redaction.command(sys.argv),
            "machine": machine.describe(),
            "started": time.time(),
        }
        (self.output / "run.json").write_text(json.dumps(run, indent=2, default=str) + "\n")
        hidden = not sys.stderr.isatty()
        self._bar = tqdm(
            desc=self._epoch(done + 1),
            total=steps,
            initial=done,
            disable=hidden,
            dynamic_ncols=True,
            bar_format=BAR,
            smoothing=0.1,
        )
        self._shown_at = time.monotonic() if hidden else 0.0
        self._watched_since = time.monotonic(), machine.waited_for_cores()

    @override
    def plan(self, steps: int, text: str) -> None:
        self.steps = self._bar.total = steps
        self._bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    @override
    def step(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self._bar.update()
        if time.monotonic() - self._shown_at >= SHOWN_EVERY[not self._bar.disable]:
            self._show(steps_completed, metrics)

    @override
    def close(self) -> None:
        self._bar.close()

    @override
    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: list[dict[str, Any]] | None = None
    ) -> None:
        metrics = metrics_log.scalars(metrics)
        self._keep("training", steps_completed, metrics)
        self._reported = metrics
        self._show(steps_completed, metrics)

    @override
    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        if self._timed_since:
            self._costs[VALIDATION] = time.monotonic() - self._shown_at  # since the report before it
        self._remember(steps_completed, metrics_log.scalars(metrics))
        LocalMetrics.report_metrics(self, "validation", steps_completed, metrics)  # which no tracker replaces

    @override
    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        metrics = metrics_log.scalars(metrics)
        self._keep(group, steps_completed, metrics)
        shown = _in_words(metrics, self.experiment.metric)
        self._line(steps_completed, _line_of({group: "", **shown}), always=True)

    @override
    def get_experiment_best_validation(self) -> float | None:
        best = min if self.experiment.smaller_is_better else max
        return best(self._scores.values(), default=None)

    def score(self, step: int) -> float | None:
        """Return the score of the validation after a step, higher is better; None without a validation."""
        value = self._scores.get(step)
        return -value if value is not None and self.experiment.smaller_is_better else value

    @override
    def judge_by(self, step: int) -> None:
        entries = metrics_log.read(self.output)
        self.validation = next(
            entry
            for entry in reversed(entries)
            if entry["group"] == "validation" and entry["steps_completed"] == step
        )

    @override
    def set_status(self, status: str) -> None:
        if status == "training" and self._timed_since:  # after the validation and the checkpoint of a report
            took = time.monotonic() - self._shown_at
            self._timed_since = self._timed_since[0], self._timed_since[1] + took

    @override
    def report_progress(self, progress: float) -> None:
        pass

    @override
    def upload_tensorboard_files(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _forget_after(self, done: int) -> None:
        """Remove the metrics that an earlier run in the folder wrote after step ``done``."""
        (self.output / "summary.json").unlink(missing_ok=True)
        with replacing(self.output / metrics_log.FILE) as rest, open(rest, "w") as file:
            for entry in metrics_log.read(self.output) if done else ():
                is_known = entry["group"] in ("training", "validation")  # the test runs again
                if entry["steps_completed"] <= done and is_known:
                    file.write(json.dumps(entry) + "\n")
                    if entry["group"] == "validation":
                        self._remember(entry["steps_completed"], entry)

    def _remember(self, step: int, validation: dict[str, Any]) -> None:
        self.validation = validation
        if self.experiment.metric in validation:
            self._scores[step] = validation[self.experiment.metric]

    def _keep(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        entry = {"group": group, "steps_completed": steps_completed, "time": time.time(), **metrics}
        with open(self.output / metrics_log.FILE, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def _show(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        shown = _in_words({**self._reported, **metrics_log.scalars(metrics)})
        judged = {name: value for name, value in self.validation.items() if name == self.experiment.metric}
        validated = {f"validation {name}": text for name, text in _in_words(judged, *judged).items()}
        self._bar.set_description(self._epoch(steps_completed), refresh=False)
        self._bar.set_postfix({**shown, **validated})
        self._line(steps_completed, _line_of(shown))
        self._shown_at = time.monotonic()
        self._say_if_threads_wait()
        if self._work and self.steps:
            self._say_how_long(steps_completed, self.steps, self._work)

    def _say_how_long(self, done: int, total: int, work: Work) -> None:
        """Show once how long the rest of the training takes, by the speed after the slow first steps.

        A shown step has waited for the GPU, so the time between two shown steps is the time of the steps.
        """
        first, since = self._timed_since = self._timed_since or (done, self._shown_at)
        passed = self._shown_at - since
        if done - first < TIMED_STEPS or passed < WATCHED:
            return
        self._work, fraction = None, done / total
        step = passed / work.duration(done - first, first / total, fraction)
        left = seconds_left(done, total, fraction, {STEP: step, **self._costs}, work)
        if left >= WATCHED:
            number = periods(work.validation_period, done, total)
            parts = f"{total - done:,} steps, {number:,} validation{'s' * (number != 1)}"
            self._bar.write(f"time: about {about_text(left)} left: {parts}", file=sys.stdout)
            sys.stdout.flush()

    def _say_if_threads_wait(self) -> None:
        """Show once that this run's threads wait for cores that other programs use."""
        threads, now = torch.get_num_threads(), time.monotonic()
        if threads == 1 or self._watched_since is None or now - self._watched_since[0] < WATCHED:
            return
        since, waited = self._watched_since
        share = (machine.waited_for_cores() - waited) / (threads * (now - since))
        self._watched_since = now, machine.waited_for_cores()
        if share > LONGEST_WAIT:
            self._watched_since = None
            what = f"this host is busy: {threads} threads, which wait for each other, had no core for"
            remedy = "OMP_NUM_THREADS=1 may be faster"
            if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
                remedy += ", and so may OMP_WAIT_POLICY=passive"
            self._bar.write(f"note: {what} {min(share, 1):.0%} of the time; {remedy}", file=sys.stderr)

    def _epoch(self, steps_completed: int) -> str:
        epoch = -(-steps_completed // self.steps_per_epoch)
        left = f"  {clock_text(self._budget.left)} left" if self._budget else ""
        if self.steps is None:
            return f"epoch {epoch}{left}"
        epochs = -(-self.steps // self.steps_per_epoch)
        return f"epoch {min(epochs, epoch)}/{epochs}{left}"

    def _line(self, steps_completed: int, text: str, always: bool = False) -> None:
        out: TextIO = sys.stdout
        if always or self._bar.disable:
            total = "" if self.steps is None else f"/{self.steps}"
            where = f"{self._epoch(steps_completed)}  step {steps_completed}{total}"
            self._bar.write(f"{where}  {text}", file=out)
            out.flush()


def _in_words(metrics: Mapping[str, Any], chosen: str = "") -> dict[str, str]:
    """Format the metrics to show, with their labels.

    The configured metric comes first. Other metrics of single classes are left out.
    """
    first = [name for name in (chosen, *FORMS) if name in metrics]
    others = [name for name in metrics if name not in (*FORMS, *NOT_SHOWN) and "/" not in name]
    shown = {}
    for name in list(dict.fromkeys([*first, *others]))[:SHOWN]:
        label, form = FORMS.get(name, (name, "," if isinstance(metrics[name], int) else ".4g"))
        shown[label] = format(metrics[name], form)
    return shown


def _line_of(shown: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {value}".strip() for name, value in shown.items())
