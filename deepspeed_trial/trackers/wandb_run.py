"""A run in Weights & Biases, sent by wandb's process, or written to a folder for ``wandb sync``.

Source: https://docs.wandb.ai/ref/python/
"""

import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

import wandb


class Record:
    """A run on the server; without a login, or with ``WANDB_MODE=offline``, in a folder."""

    def __init__(self, key: str, name: str, project: str, config: Mapping[str, Any], has_all: bool) -> None:
        is_chosen = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        settings = wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=60)
        settings.finish_timeout_raises = True
        settings.x_disable_meta = True  # the command line and the environment may hold passwords
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "_", project)[:128],
            id=key,
            name=name,
            config=dict(config),
            mode=None if is_chosen else "offline",
            resume="allow",
            allow_val_change=True,
            settings=settings,
        )
        self._first = self._run.step  # the first step that the record lacks
        if has_all and self._run.settings.mode == "offline":  # replaces the folders of before the resume
            new = pathlib.Path(self._run.settings.sync_dir)
            for folder in set(new.parent.glob(f"offline-run-*-{key}")) - {new}:
                shutil.rmtree(folder, ignore_errors=True)

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step that the record lacks."""
        if step >= self._first:
            self._run.log(dict(metrics), step=step)

    def add_file(self, path: pathlib.Path) -> None:
        """Record a file, which the library sends at the end of the run."""
        shutil.copy(path, self._run.dir)

    def finish(self, status: str) -> None:
        """Wait until the server has everything, or the folder is complete, and end the run."""
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)
