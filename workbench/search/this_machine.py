"""This machine, which runs the trials of a search."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import joblib
import torch

from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.processes import device_type
from workbench.search.specification import Search
from workbench.search.trial_run import TrialRun


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
        gpus = torch.cuda.device_count()
        if gpus and self.slots > gpus:
            raise InvalidInput(f"resources.slots_per_trial: {self.slots}: this machine has {gpus} GPUs")
        if gpus:
            self.room = min(self.room, gpus // self.slots)
        self.free = list(range(gpus))
        self.used: dict[pathlib.Path, list[int]] = {}

    def start(
        self, folder: pathlib.Path, config: pathlib.Path, overrides: Sequence[str], whole: str
    ) -> TrialRun:
        """Start a trial; ``TrialRun`` describes the arguments."""
        run = TrialRun(folder, config, overrides, self.slots, whole)
        environment = {}
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, joblib.cpu_count() // (self.slots * self.room)))
        if self.free:
            self.used[folder], self.free = self.free[: self.slots], self.free[self.slots :]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.used[folder]))
        run.start(environment)
        return run

    def release(self, folder: pathlib.Path) -> None:
        """Free the GPUs of a trial that has ended."""
        self.free += self.used.pop(folder, [])

    def close(self) -> None:
        """Do nothing; a Ray cluster needs this method."""
