"""What a cluster's master does for a trial, done on this machine: keeps its metrics and shows its progress."""

from __future__ import annotations

import itertools
import json
import pathlib
import signal
import sys
import time
from typing import Any, TextIO

from determined import core
from tqdm import tqdm
from typing_extensions import override

from errors import InvalidInput


def find_checkpoint(output: pathlib.Path, which: str) -> str:
    """Gives the UUID of a whole checkpoint of a run.

    Args:
        output: the run's folder.
        which: ``latest`` or a UUID.

    Raises:
        InvalidInput: if there is no such checkpoint.
    """
    # Determined writes a checkpoint's metadata after all else, so one without it is not whole.
    whole = {path.parent.name: path.stat().st_mtime_ns for path in (output / "checkpoints").glob("*/metadata.json")}
    if which == "latest" and whole:
        return max(whole, key=lambda uuid: whole[uuid])
    if which in whole:
        return which
    found = f"it holds {', '.join(sorted(whole))}" if whole else "it holds no checkpoint"
    raise InvalidInput(f"--resume: {which}: not found in {output / 'checkpoints'}; {found}")


class LocalPreempt(core.DummyPreemptContext):
    """Stops the training as a cluster would: SIGINT or SIGTERM lets it finish its steps and save a checkpoint.

    A second signal ends the process at once.
    """

    signalled = False  # this rank
    requested = False  # any rank, and known to all

    @override
    def start(self) -> LocalPreempt:
        super().start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        self.signalled = True

    @override
    def close(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    @override
    def should_preempt(self, auto_ack: bool = True) -> bool:
        self.requested = any(self._dist.allgather(self.signalled))
        return self.requested


class LocalTrain(core.DummyTrainContext):
    """Takes the metrics that a trial reports, on the chief.

    They are shown as a progress bar on a terminal and as plain lines elsewhere, and kept in ``OUTPUT/metrics.jsonl``.

    Args:
        output: the run's folder.
        metric: the validation metric by which the best checkpoint is told.
        smaller_is_better: whether smaller values of it are.
    """

    def __init__(self, output: pathlib.Path, metric: str, smaller_is_better: bool) -> None:
        super().__init__(output / "tensorboard")
        self.output = output
        self.metric = metric
        self.smaller_is_better = smaller_is_better
        self.best: float | None = None
        self.validation: dict[str, Any] = {}
        self.bar: Any = None

    def begin(self, steps: int, step_sizes: list[int], done: int) -> None:
        """Starts to show the training, whose length is known once the data is there.

        Args:
            steps: optimizer steps in all.
            step_sizes: images in each step of an epoch.
            done: steps done already, in the run that this one resumes.
        """
        self.steps, self.steps_per_epoch = steps, len(step_sizes)
        self.images_until = [0, *itertools.accumulate(step_sizes)]
        self.reported = done
        self._forget_after(done)
        self.images = 0
        self.training_seconds = 0.0
        self.since = time.perf_counter()
        self.bar = tqdm(
            total=steps, initial=done, unit=" steps", disable=not sys.stderr.isatty(), dynamic_ncols=True, smoothing=0.1
        )

    def step(self) -> None:
        """Counts one optimizer step."""
        self.bar.update()

    def restart_clock(self) -> None:
        """Leaves the time since the last report out of images/s: it went into a validation or a checkpoint."""
        self.since = time.perf_counter()

    def close(self) -> None:
        """Leaves the terminal to others."""
        if self.bar is not None:
            self.bar.close()

    @override
    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: list[dict[str, Any]] | None = None
    ) -> None:
        seconds = time.perf_counter() - self.since
        images = self._images(steps_completed) - self._images(self.reported)
        rate = images / max(seconds, 1e-9)
        self.images += images
        self.training_seconds += seconds
        self.reported = steps_completed
        self._keep("training", steps_completed, {**metrics, "images_per_second": rate})
        shown = {"loss": f"{metrics['loss']:.4f}"} if "loss" in metrics else {}
        if "accuracy" in self.validation:
            shown["accuracy"] = f"{self.validation['accuracy']:.4f}"
        shown["images/s"] = f"{rate:,.0f}"
        self.bar.set_description(self._epoch(steps_completed), refresh=False)
        self.bar.set_postfix(shown)
        self._line(steps_completed, "  ".join(f"{name} {value}" for name, value in shown.items()))
        self.restart_clock()

    @override
    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.validation = metrics
        value = metrics.get(self.metric)
        if value is not None and (self.best is None or (value < self.best) == self.smaller_is_better):
            self.best = value
        self._keep("validation", steps_completed, metrics)
        shown = "  ".join(f"{k} {metrics[k]:.4f}" for k in ("accuracy", "loss") if k in metrics)
        self._line(steps_completed, f"validation  {shown}  images {metrics.get('images', 0):,}", always=True)

    @override
    def get_experiment_best_validation(self) -> float | None:
        return self.best

    @override
    def set_status(self, status: str) -> None:
        pass

    @override
    def report_progress(self, progress: float) -> None:
        pass

    @override
    def upload_tensorboard_files(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _forget_after(self, done: int) -> None:
        """Leaves of an earlier run in the same folder only what this one goes on from."""
        (self.output / "summary.json").unlink(missing_ok=True)
        metrics = self.output / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        metrics.write_text("".join(line for line in lines if json.loads(line)["steps_completed"] <= done and done))

    def _keep(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        with open(self.output / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"group": group, "steps_completed": steps_completed, **metrics}) + "\n")

    def _images(self, steps: int) -> int:
        """The images in the first so many steps of the training."""
        epochs, in_epoch = divmod(steps, self.steps_per_epoch)
        return epochs * self.images_until[-1] + self.images_until[in_epoch]

    def _epoch(self, steps_completed: int) -> str:
        epochs = -(-self.steps // self.steps_per_epoch)
        return f"epoch {-(-steps_completed // self.steps_per_epoch)}/{epochs}"

    def _line(self, steps_completed: int, text: str, always: bool = False) -> None:
        out: TextIO = sys.stdout
        if always or self.bar.disable:
            self.bar.write(f"{self._epoch(steps_completed)}  step {steps_completed}/{self.steps}  {text}", file=out)
            out.flush()
