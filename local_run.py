"""What a cluster's master does for a trial, done on this machine: keeps its metrics and shows its progress."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from determined import core
from PIL import Image
from tqdm import tqdm
from typing_extensions import override

import machine
import reports
from experiment import Experiment
from metrics import ClassificationMetrics

FILES = ("run.json", reports.FILE, "classification.json", "net.pt", "net.json", "summary.json", "profile.txt")
FOLDERS = ("checkpoints", "tensorboard")


def run_fault(output: pathlib.Path, resumes: bool) -> str | None:
    """Why a run cannot use a folder; None if it can.

    Args:
        output: the folder.
        resumes: whether the run goes on with the one that is there, which it would replace otherwise.
    """
    for name in (*FILES, *FOLDERS):
        path, file = output / name, name in FILES
        if path.exists() and path.is_dir() == file:
            return f"--output: {path}: is {'a folder' if file else 'no folder'}; move it, or give another folder"
    if not resumes and ((output / "summary.json").exists() or any(output.glob("checkpoints/[!.]*/"))):
        return f"--output: {output}: holds a run; give another folder, or go on with it: train.py --resume latest"
    return None


class LocalPreempt(core.DummyPreemptContext):
    """Stops the training as a cluster would: SIGINT or SIGTERM lets it finish a step and save a checkpoint.

    A second signal, a second or more after the first, ends the process at once; launchers pass one on several times.

    Args:
        distributed: the ranks.
        output: the run's folder, through which the ranks of a host agree on the step after which they stop.
    """

    def __init__(self, distributed: core.DistributedContext, output: pathlib.Path) -> None:
        super().__init__(distributed)
        self.requested = False  # by a signal to any rank, and known to all
        self._stop_file = output / ".stop"
        self._signalled: float | None = None  # when this rank was
        self._told = False
        self._last_step: int | None = None
        # Only where a step's collectives block the host do ranks stay within a step of one another.
        self._in_step = distributed.local_size == distributed.size and not torch.cuda.is_available()
        if distributed.rank == 0:
            self._stop_file.unlink(missing_ok=True)

    @override
    def start(self) -> LocalPreempt:
        super().start()
        self._handle(self._interrupt)
        return self

    @contextlib.contextmanager
    def gracefully(self) -> Iterator[None]:
        """Lets a signal end the training with a checkpoint; before and after, it ends the process."""
        self._handle(self._request)
        try:
            yield
        finally:
            self._handle(self._interrupt)

    @override
    def close(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._dist.rank == 0:
            self._stop_file.unlink(missing_ok=True)

    def due(self, step: int) -> bool:
        """Whether all ranks are to stop after this step."""
        if self._dist.size == 1:
            return self._signalled is not None
        if not self._in_step:
            return False  # but at the next report
        if self._signalled is not None and not self._told:
            self._tell(step + 1)  # which no other rank can have finished
        if self._last_step is None and self._stop_file.exists():
            self._last_step = int(self._stop_file.read_text())
        return self._last_step is not None and step >= self._last_step

    @override
    def should_preempt(self, auto_ack: bool = True) -> bool:
        self.requested = any(self._dist.allgather(self._signalled is not None))
        return self.requested

    def _tell(self, step: int) -> None:
        """Puts the last step where the other ranks see it; the first rank to do so decides."""
        self._told = True
        mine = self._stop_file.with_name(f".stop-{self._dist.rank}")
        mine.write_text(str(step))
        with contextlib.suppress(FileExistsError):
            os.link(mine, self._stop_file)
        mine.unlink()

    def _handle(self, handler: Callable[[int, Any], None]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def _request(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self._signalled is None:
            self._signalled = now
        elif now - self._signalled > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class LocalTrain(core.DummyTrainContext):
    """Takes the metrics that a trial reports, on the chief.

    They are shown as a progress bar on a terminal and as plain lines elsewhere, and kept in ``OUTPUT/metrics.jsonl``.

    Args:
        output: the run's folder.
        experiment: which says by which validation metric the best checkpoint is told.
    """

    def __init__(self, output: pathlib.Path, experiment: Experiment) -> None:
        super().__init__(output / "tensorboard")
        self.output, self.config = output, experiment.config
        self.metric, self.smaller_is_better = experiment.metric, experiment.smaller_is_better
        self.validation: dict[str, Any] = {}
        self.validated: dict[int, float] = {}  # the metric by step
        self.bar: Any = None

    def begin(self, steps: int, steps_per_epoch: int, done: int) -> None:
        """Starts to show the training, whose length is known once the data is there.

        Args:
            steps: optimizer steps in all.
            steps_per_epoch: optimizer steps in an epoch.
            done: steps done already, in the run that this one resumes.
        """
        self.steps, self.steps_per_epoch = steps, steps_per_epoch
        self._forget_after(done)
        described = {"config": self.config, "command": sys.argv, "machine": machine.describe(), "started": time.time()}
        (self.output / "run.json").write_text(json.dumps(described, indent=2, default=str) + "\n")
        self.bar = tqdm(
            total=steps, initial=done, unit=" steps", disable=not sys.stderr.isatty(), dynamic_ncols=True, smoothing=0.1
        )

    def step(self) -> None:
        """Counts one optimizer step."""
        self.bar.update()

    def close(self) -> None:
        """Leaves the terminal to others."""
        if self.bar is not None:
            self.bar.close()

    @override
    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: list[dict[str, Any]] | None = None
    ) -> None:
        self._keep("training", steps_completed, metrics)
        shown = {"loss": f"{metrics['loss']:.4f}"} if "loss" in metrics else {}
        if "learning_rate" in metrics:
            shown["lr"] = f"{metrics['learning_rate']:.2g}"
        if "accuracy" in self.validation:
            shown["accuracy"] = f"{self.validation['accuracy']:.4f}"
        if "images_per_second" in metrics:
            shown["images/s"] = f"{metrics['images_per_second']:,.0f}"
        self.bar.set_description(self._epoch(steps_completed), refresh=False)
        self.bar.set_postfix(shown)
        self._line(steps_completed, "  ".join(f"{name} {value}" for name, value in shown.items()))

    @override
    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self._remember(steps_completed, metrics)
        self._keep("validation", steps_completed, metrics)
        shown = "  ".join(f"{k} {metrics[k]:.4f}" for k in ("accuracy", "loss") if k in metrics)
        self._line(steps_completed, f"validation  {shown}  images {metrics.get('images', 0):,}", always=True)

    def keep_classification(self, reducer: ClassificationMetrics, images: torch.Tensor) -> None:
        """Keeps which classes were taken for which, and the hardest mistakes with their pictures, for the report.

        Args:
            reducer: of the validation.
            images: uint8 (N, 3, H, W), the validated ones.
        """
        mistakes = []
        for mistake in reducer.mistakes:
            png = io.BytesIO()
            Image.fromarray(images[mistake["image"]].permute(1, 2, 0).cpu().numpy()).save(png, "png")
            mistakes.append({**mistake, "png": base64.b64encode(png.getvalue()).decode()})
        kept = {"classes": reducer.classes, "confusion": reducer.confusion.tolist(), "mistakes": mistakes}
        (self.output / "classification.json").write_text(json.dumps(kept))

    @override
    def get_experiment_best_validation(self) -> float | None:
        return (min if self.smaller_is_better else max)(self.validated.values(), default=None)

    def score(self, step: int) -> float | None:
        """How good the validation after a step was, the higher the better; None if there was none."""
        value = self.validated.get(step)
        return -value if value is not None and self.smaller_is_better else value

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
        rest = self.output / f".{reports.FILE}"
        with open(rest, "w") as file:
            for entry in reports.read(self.output) if done else ():
                if entry["steps_completed"] <= done:
                    file.write(json.dumps(entry) + "\n")
                    if entry["group"] == "validation":
                        self._remember(entry["steps_completed"], entry)
        os.replace(rest, self.output / reports.FILE)

    def _remember(self, step: int, validation: dict[str, Any]) -> None:
        self.validation = validation
        if self.metric in validation:
            self.validated[step] = validation[self.metric]

    def _keep(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        entry = {"group": group, "steps_completed": steps_completed, "time": time.time(), **metrics}
        with open(self.output / reports.FILE, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def _epoch(self, steps_completed: int) -> str:
        epochs = -(-self.steps // self.steps_per_epoch)
        return f"epoch {-(-steps_completed // self.steps_per_epoch)}/{epochs}"

    def _line(self, steps_completed: int, text: str, always: bool = False) -> None:
        out: TextIO = sys.stdout
        if always or self.bar.disable:
            self.bar.write(f"{self._epoch(steps_completed)}  step {steps_completed}/{self.steps}  {text}", file=out)
            out.flush()
