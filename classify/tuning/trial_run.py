"""One trial of a search on this machine: ``train.py`` in a process of its own, or in several."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import filelock

from classify.config.project import PROJECT
from classify.config.rules import is_count
from deepspeed_trial.local import metrics_log
from deepspeed_trial.stops import STOP_WITH_PID

_ERROR = re.compile(r"^train\.py: (?!note: )(.*)", re.MULTILINE)
_RANKS_CODE = re.compile(r"exitcode\s*: (-?\d+)")  # as torchrun reports it
STDIN = pathlib.Path("/dev/stdin")
LAST_WORDS = 60  # seconds that a trial has to save its checkpoint when its search ends


class TrialRun:
    """A trial's process and what it leaves in its folder.

    Args:
        folder: the trial's, which is ``--output`` to ``train.py``; what it prints goes into ``FOLDER.log``.
        config: the experiment file.
        overrides: ``--set`` arguments.
        slots: processes to train with.
        whole: the text of the experiment file, if ``config`` lacks what may not be written.
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
        """Starts the trial, or goes on with it where an interrupted search left it, unless it has finished.

        Args:
            environment: variables for its processes beside those of this one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.folder / ".lock", timeout=LAST_WORDS):
            pass
        if self.summary:
            return
        command = [sys.executable]
        if self.slots > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.slots}"]
        command += [str(PROJECT / "train.py"), "--config", str(self.config), "--output", str(self.folder)]
        command += [part for override in self.overrides for part in ("--set", override)]
        if any(self.folder.glob("checkpoints/[!.]*/")):
            command += ["--resume", "latest"]
        with open(self.log, "ab") as log, tempfile.TemporaryFile() as whole:  # which has no name
            whole.write(self.whole.encode())
            whole.seek(0)
            self.process = subprocess.Popen(
                command,
                stdin=whole,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, STOP_WITH_PID: str(os.getpid())},
                start_new_session=True,  # Ctrl-C is for the search, which asks its trials to stop
            )

    @property
    def has_ended(self) -> bool:
        """Whether no process of it runs any more."""
        return self.process is None or self.process.poll() is not None

    def stop(self) -> None:
        """Asks it to save a checkpoint and end."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends all its processes at once."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def summary(self) -> dict[str, Any]:
        """Its ``summary.json``; empty before its end, and if the file is damaged."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads((self.folder / "summary.json").read_text())
            if isinstance(found, dict) and is_count(found.get("steps"), 0):
                return found
        return {}

    def validations(self) -> list[dict[str, Any]]:
        """Its validations so far."""
        return [entry for entry in metrics_log.read(self.folder) if entry["group"] == "validation"]

    def steps(self) -> int:
        """The optimizer steps that it has reported."""
        return max((entry["steps_completed"] for entry in metrics_log.read(self.folder)), default=0)

    def failure(self) -> tuple[str, str]:
        """How a trial without a summary ended, ``invalid`` or ``failed``, and why."""
        assert self.process
        log, code = self.log.read_text(errors="replace"), self.process.returncode
        if self.slots > 1 and (codes := _RANKS_CODE.findall(log)):
            code = int(codes[-1])
        if errors := list(dict.fromkeys(_ERROR.findall(log))):
            return "invalid" if code == 2 else "failed", "; ".join(errors)
        if code < 0:
            return "failed", f"killed by {signal.Signals(-code).name}"
        last = next(
            (line.strip() for line in reversed(log.splitlines()) if line.strip()), "it printed nothing"
        )
        return "failed", f"exit code {code}: {last}; see {self.log}"


def wait_for(runs: Sequence[TrialRun], seconds: float) -> None:
    """Waits for their ends, and ends those that take longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not all(run.has_ended for run in runs):
        time.sleep(0.05)
    for run in runs:
        run.kill()
