"""Trials on this machine: each is ``train.py`` in one or more processes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import filelock
import joblib
import torch

from classify.config.project import PROJECT
from classify.config.rules import is_count
from deepspeed_trial import redaction
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.local import metrics_log
from deepspeed_trial.processes import device_type
from deepspeed_trial.stops import STOP_WITH_PID
from workbench.search import node
from workbench.search.specification import Search

_ERROR = re.compile(r"^train\.py: (?!note: )(.*)", re.MULTILINE)
_RANKS_CODE = re.compile(r"exitcode\s*: (-?\d+)")  # as torchrun reports it
STDIN = pathlib.Path("/dev/stdin")
LAST_WORDS = 60  # seconds for a trial to save its checkpoint when the search ends


class TrialRun:
    """A trial's process and folder.

    Args:
        folder: the ``--output`` of ``train.py``; ``FOLDER.log`` stores its stdout and stderr.
        config: the experiment file.
        overrides: ``--set`` arguments.
        slots: the number of processes.
        whole: the experiment with its credentials, as JSON for the stdin of ``train.py``; empty if ``config``
            already has the whole experiment.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        config: pathlib.Path,
        overrides: Sequence[str],
        slots: int,
        whole: str = "",
    ) -> None:
        self.folder, self.overrides, self.slots, self.whole = folder, list(overrides), slots, whole
        self.config = STDIN if whole else config
        self.log = folder.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, environment: dict[str, str]) -> None:
        """Start the trial or resume it from its last checkpoint; do nothing if it has finished.

        Args:
            environment: additional variables for the processes.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.folder / ".lock", timeout=LAST_WORDS):
            pass
        if self.summary:
            return
        command = [sys.executable, *self.arguments()]
        if any(self.folder.glob("checkpoints/[!.]*/")):
            command += ["--resume", "latest"]
        pid = {STOP_WITH_PID: str(os.getpid())}
        self.process = node.spawn(command, self.whole, self.log, environment | pid)

    def arguments(self) -> list[str]:
        """Return the arguments of Python that train the trial."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.slots}"]
        program = [str(PROJECT / "train.py"), "--config", str(self.config), "--output", str(self.folder)]
        sets = [part for override in self.overrides for part in ("--set", override)]
        return [*(launcher if self.slots > 1 else []), *program, *sets]

    @property
    def has_ended(self) -> bool:
        """Whether the trial's processes have ended."""
        return self.process is None or self.process.poll() is not None

    def stop(self) -> None:
        """Ask the trial to save a checkpoint and end."""
        node.stop(self.process)

    def kill(self) -> None:
        """Kill all processes of the trial."""
        node.kill(self.process)

    @property
    def summary(self) -> dict[str, Any]:
        """The trial's ``summary.json``; empty if the trial has not ended or the file is damaged."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(self.read(self.folder / "summary.json"))
            if isinstance(found, dict) and is_count(found.get("steps"), 0):
                return found
        return {}

    def reports(self) -> list[dict[str, Any]]:
        """Return the trial's reports of training and validation so far, in order."""
        return metrics_log.parse(self.read(self.folder / metrics_log.FILE))

    def read(self, file: pathlib.Path) -> str:
        """Return the text of one of the trial's files; empty if the file does not exist."""
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def exit_code(self) -> int:
        """The exit code of the trial's process after its end; negative after a signal."""
        assert self.process
        return self.process.returncode

    def failure(self) -> tuple[str, str]:
        """Return the outcome of a trial without a summary: ``invalid`` or ``failed``, and the reason."""
        log, code = self.read(self.log), self.exit_code
        if self.slots > 1 and (codes := _RANKS_CODE.findall(log)):
            code = int(codes[-1])
        if errors := list(dict.fromkeys(_ERROR.findall(log))):
            return "invalid" if code == 2 else "failed", "; ".join(errors)
        if code < 0:
            return "failed", f"killed by {signal.Signals(-code).name}"
        last = (log.strip().splitlines() or ["it printed nothing"])[-1].strip()
        return "failed", f"exit code {code}: {last}; see {self.log}"


class ThisMachine:
    """The GPUs of this machine, or its cores.

    Args:
        search: the search whose trials run here.

    Attributes:
        device: ``cpu``, ``cuda`` or ``mps``, on which trials train.
        room: maximum number of trials at a time.

    Raises:
        InvalidInput: if a trial needs more GPUs than there are.
    """

    def __init__(self, search: Search) -> None:
        self.device, self.slots, self.room = device_type(), search.experiment.slots, search.concurrent
        self.gpus = torch.cuda.device_count()
        if self.gpus and self.slots > self.gpus:
            reason = f"this machine has {self.gpus} GPUs; use at most {self.gpus}"
            raise InvalidInput(f"resources.slots_per_trial: {self.slots}: {reason}")
        if self.gpus:
            self.room = min(self.room, self.gpus // self.slots)
        self.users: dict[int, TrialRun] = {}  # the last trial on each GPU

    def start(
        self, folder: pathlib.Path, config: pathlib.Path, overrides: Sequence[str], whole: str
    ) -> TrialRun:
        """Start a trial; ``TrialRun`` describes the arguments."""
        run = TrialRun(folder, config, overrides, self.slots, whole)
        environment = {}
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, joblib.cpu_count() // (self.slots * self.room)))
        if self.gpus:
            free = [each for each in range(self.gpus) if each not in self.users or self.users[each].has_ended]
            self.users |= dict.fromkeys(free[: self.slots], run)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, free[: self.slots]))
        run.start(environment)
        return run

    def close(self) -> None:
        """Do nothing; a Ray cluster needs this method."""


def as_files(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return an experiment without its credentials, as YAML, and the argument ``whole`` of ``TrialRun``."""
    shown = redaction.experiment(config)
    return json.dumps(shown, indent=2), "" if shown == config else json.dumps(config)  # JSON is YAML


@contextlib.contextmanager
def stopping(runs: Collection[TrialRun]) -> Iterator[None]:
    """Stop trials if an exception ends the block; SIGTERM interrupts the block.

    The trials save checkpoints; a trial that still runs after ``LAST_WORDS`` is killed.
    """
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except BaseException:
        for run in runs:
            run.stop()
        until = time.monotonic() + LAST_WORDS
        while time.monotonic() < until and not all(run.has_ended for run in runs):
            time.sleep(0.05)
        for run in runs:
            run.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
