"""The n-th write, rename, sync or allocation of a save fails, for every n: a whole checkpoint stays, and resumes."""

import builtins
import contextlib
import errno
import io
import json
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from determined import pytorch
from line_trial import LineTrial, fit

from deepspeed_trial.checkpoints.files import damage, known
from deepspeed_trial.errors import TrainingStopped

STEPS, FIRST, FAILS = 6, 2, 4  # of the run, of the whole checkpoint, of the failed one
ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))
# Where a call comes from: the modules and their functions, and the error
CALLS: dict[str, tuple[list[tuple[Any, str]], BaseException]] = {
    "open": ([(builtins, "open"), (io, "open")], ROOM),
    "write": ([(json, "dump"), (pickle, "dump"), (torch, "save")], ROOM),
    "rename": ([(os, "rename"), (os, "replace")], BROKEN),
    "sync": ([(os, "fsync")], BROKEN),
    "remove": ([(shutil, "rmtree"), (os, "unlink")], BROKEN),
    "allocate": ([(torch.Tensor, "clone"), (torch, "zeros_like"), (torch, "empty")], MemoryError()),
}


class Faults:
    """Calls of one kind. One call fails.

    Attributes:
        calls: how many there were.
    """

    def __init__(self, kind: str, fails: int) -> None:
        self.targets, self.error = CALLS[kind]
        self.fails, self.calls, self.stack = fails, 0, contextlib.ExitStack()

    def begin(self) -> None:
        for owner, name in self.targets:
            call = getattr(owner, name)
            self.stack.enter_context(mock.patch.object(owner, name, self._failing(call)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fails:
                self.stack.close()
                raise self.error
            return call(*args, **kwargs)

        return called


def trial_with(faults: Faults) -> type[LineTrial]:
    class Faulty(LineTrial):
        def save(self, context, path):
            if context.current_train_batch() + 1 >= FAILS:
                faults.begin()
            super().save(context, path)

        def build_callbacks(self):
            class Ends(pytorch.PyTorchCallback):
                def on_checkpoint_upload_end(self, uuid):
                    faults.stack.close()

            return {**super().build_callbacks(), "ends": Ends()}

    return Faulty


def train(output: pathlib.Path, faults: Faults, resumes: bool = False) -> list[torch.Tensor]:
    folders = list(known(output / "checkpoints")) if resumes else []
    config = {"checkpoint_storage": {"save_trial_latest": 1, "save_trial_best": 0}}
    trial, _ = fit(
        output,
        trial_with(faults),
        resumes,
        {**config, "reproducibility": {"experiment_seed": 3}},
        max_length=pytorch.Batch(STEPS),
        checkpoint_period=pytorch.Batch(FIRST),
        latest_checkpoint=folders[0] if folders else None,
    )
    return trial.weights()


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> list[torch.Tensor]:
    return train(tmp_path_factory.mktemp("straight") / "run", Faults("sync", 0))


def numbers(kind: str, folder: pathlib.Path) -> Iterator[int]:
    counted = Faults(kind, 0)
    train(folder, counted)
    yield from range(1, counted.calls + 1)


@pytest.mark.soak
@pytest.mark.parametrize("kind", CALLS)
def test_a_save_that_fails_leaves_a_whole_checkpoint(straight, tmp_path, kind):
    failed = 0
    for number in numbers(kind, tmp_path / "counted"):
        output, faults = tmp_path / f"{kind}{number}", Faults(kind, number)
        try:
            train(output, faults)
        except TrainingStopped:
            failed += 1
        finally:
            faults.stack.close()
        held = [output / "checkpoints" / name for name in known(output / "checkpoints")]
        assert held and not any(map(damage, held)), number
        resumed = train(output, Faults(kind, 0), resumes=True)
        assert all(torch.equal(one, other) for one, other in zip(resumed, straight, strict=True)), number
        assert not list(output.glob("checkpoints/.partial-*")), number
    assert failed > 1
