"""A run in Weights & Biases, or in its files for ``wandb sync`` where nobody has logged in.

Source: https://docs.wandb.ai/ref/python/
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import wandb
from typing_extensions import override

from deepspeed_trial.trackers.tracked_run import FINISHED, Entry, TrackedRun, Tracker, metrics_of


class WandbRun(Tracker):
    """A run of Weights & Biases'.

    On a server the record of a resumed run goes on. Off line every process writes a folder of its own, which
    cannot be added to; so that of a resumed run has everything, and takes the place of those before it.
    """

    name = "wandb"

    def __init__(self) -> None:
        self.run: Any = None

    @override
    def start(self, run: TrackedRun, earlier: Sequence[Entry] | None) -> None:
        # Without the command line and the environment's, of which --set may hold passwords
        quiet = wandb.Settings(silent=True, console="off", x_disable_meta=True)
        mode: Any = None  # as WANDB_MODE says
        if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            print(
                "note: wandb: nobody has logged in (wandb login); off line, for wandb sync", file=sys.stderr
            )
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "_", run.project)[:128],
            id=run.key,
            name=run.name,
            config=dict(run.config),
            mode=mode,
            resume="allow",
            allow_val_change=True,
            settings=quiet,
        )
        self._first = self.run.step  # that the record does not have
        for entry in earlier or ():
            self.log(entry)
        if earlier is not None and self.run.settings.mode == "offline":
            mine = pathlib.Path(self.run.settings.sync_dir)
            for folder in mine.parent.glob(f"offline-run-*-{run.key}"):
                if folder != mine:
                    shutil.rmtree(folder, ignore_errors=True)

    @override
    def log(self, entry: Entry) -> None:
        step = entry["steps_completed"]
        if step >= self._first:
            self.run.log(metrics_of(entry), step=step)

    @override
    def add_file(self, path: pathlib.Path) -> None:
        shutil.copy(path, self.run.dir)  # all of which it takes when the run ends

    @override
    def finish(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == FINISHED else 1)
