"""Checkpoints are loaded without running anything that they hold."""

from __future__ import annotations

import contextlib
import io
import pathlib
import pickle
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from harness.errors import InvalidInput, one_line, why_unloadable


def _member_of_zero_stage(enum: Any, name: str) -> ZeroStageEnum:
    """What stands for ``getattr``, by which Python 3.11.2 pickles the member of an enumeration."""
    if enum is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"getattr of {enum} is not allowed in a checkpoint")
    return ZeroStageEnum[name]


_reconstruct: Any = np.zeros(0, dtype=np.uint32).__reduce__()[0]
# All that a checkpoint may hold beside tensors and plain values: numpy's RNG state, DeepSpeed's own.
# A trial adds what its callbacks keep with torch.serialization.add_safe_globals.
ALLOWED: list[Any] = [
    *(_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))),
    *(LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address),
    (_member_of_zero_stage, "builtins.getattr"),  # what to call where a file names this
]


def allowed_globals() -> contextlib.AbstractContextManager[Any]:
    """Lets ``torch.load`` read what a checkpoint has to hold, and nothing else that it would refuse."""
    if not hasattr(torch.serialization, "safe_globals"):  # before torch 2.5, whose torch.load checks nothing
        return contextlib.nullcontext()
    return torch.serialization.safe_globals(ALLOWED)


def check(path: pathlib.Path, identity: Any) -> None:
    """Looks into every file of a checkpoint before anything of it is loaded.

    Args:
        path: the checkpoint's folder.
        identity: what ``identity.read`` gives of it.

    Raises:
        InvalidInput: if a file is missing or damaged, or holds anything but what a checkpoint has to hold.
    """
    read_trial_state(path)
    for file in sorted([*path.glob("*.pth"), *path.glob("model*/*.pt")]):
        _check_torch_file(file)
    for rank in range(identity["mode"]["processes"]):
        file = path / f"det_state_dict_rank{rank}.pth"
        if not file.exists():
            raise InvalidInput(f"{file}: is missing; go on from another checkpoint")


def _check_torch_file(file: pathlib.Path) -> None:
    """Reads a file's structure, but not its tensors, allowing nothing that runs code."""
    try:
        with allowed_globals():
            torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise each their own
        reason = why_unloadable(error)
        raise InvalidInput(
            f"{file}: cannot be loaded safely ({reason}); go on from another checkpoint"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values and refuses everything that would have to be looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def read_trial_state(path: pathlib.Path) -> dict[str, Any]:
    """Determined's own state of a trial, a pickle of plain values."""
    file = path / "trial_state.pkl"
    try:
        return dict(_PlainUnpickler(io.BytesIO(file.read_bytes())).load())
    except Exception as error:  # a damaged pickle raises nearly anything
        raise InvalidInput(
            f"{file}: cannot be read ({one_line(error)}); go on from another checkpoint"
        ) from error
