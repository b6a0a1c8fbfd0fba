"""Loads checkpoints without running code in them."""

from __future__ import annotations

import contextlib
import io
import pathlib
import pickle
import pickletools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from deepspeed_trial.errors import InvalidInput, why_unloadable
from deepspeed_trial.input_files import parsed, regular_file, small_file

MOST = 10_000  # bytes of Determined's trial_state.pkl


@dataclass
class State:
    """Progress of a trial, under the names of Determined's ``trial_state.pkl``.

    Attributes:
        trial_id: the number of the trial.
        last_ckpt: step of the last checkpoint.
        last_val: step of the last validation.
        step_id: unused; Determined's own trainer expects it.
        batches_trained: optimizer steps done.
        epochs_trained: whole epochs done.
    """

    trial_id: int = 0
    last_ckpt: int = 0
    last_val: int = 0
    step_id: int = 0
    batches_trained: int = 0
    epochs_trained: int = 0


def _member_of_zero_stage(enum: Any, name: str) -> ZeroStageEnum:
    """Return a member of DeepSpeed's enumeration of stages, pickled by Python 3.11.2 as a ``getattr``."""
    if enum is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"getattr of {enum} is not allowed in a checkpoint")
    return ZeroStageEnum[name]


_reconstruct: Any = np.zeros(0, dtype=np.uint32).__reduce__()[0]
# A checkpoint may hold these besides tensors and plain values: classes of numpy's generator and of DeepSpeed.
# A trial adds the classes of its callbacks' states with torch.serialization.add_safe_globals.
ALLOWED: list[Any] = [
    *(_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))),
    *(LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address),
    *(np.float64(1).__reduce__()[0], *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?"))),
    (_member_of_zero_stage, "builtins.getattr"),  # runs if a file names getattr
]


def allowed_globals() -> contextlib.AbstractContextManager[Any]:
    """Let ``torch.load`` construct only the classes in ``ALLOWED``."""
    if not hasattr(torch.serialization, "safe_globals"):  # before torch 2.5
        return contextlib.nullcontext()
    return torch.serialization.safe_globals(ALLOWED)


def read(file: pathlib.Path) -> Any:
    """Load a file of ``torch.save`` without running code.

    Tensors are mapped: their values are read at the first use.

    Raises:
        InvalidInput: if the file is damaged, or has an object of a class that is not allowed.
    """
    try:
        with allowed_globals():
            return torch.load(regular_file(file), map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise different exceptions
        reason = why_unloadable(error)
        remedy = "resume from another checkpoint"
        if "Unsupported global" in reason:
            remedy = f"if that class is the trial's, call torch.serialization.add_safe_globals; else {remedy}"
        raise InvalidInput(f"{file}: cannot be loaded safely ({reason}); {remedy}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values, and refuses classes and functions."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def is_count(value: Any) -> bool:
    """Return whether a value is a valid count of steps."""
    return type(value) is int and 0 <= value <= sys.maxsize


def _plain_values(content: bytes) -> Any:
    """Unpickle plain values from a small file; refuse memo indices that would allocate gigabytes."""
    for code, number, _ in pickletools.genops(content):
        # The unpickler would allocate a list of this length
        if code.name in ("PUT", "LONG_BINPUT") and (number or 0) > len(content):
            raise pickle.UnpicklingError(f"object {number:,} of {len(content):,} bytes")
    return _PlainUnpickler(io.BytesIO(content)).load()


def read_trial_state(path: pathlib.Path) -> State:
    """Read Determined's state of a trial, a pickle of whole numbers.

    Args:
        path: the checkpoint's folder.

    Raises:
        InvalidInput: if the file is missing or damaged, or has other fields than ``State``.
    """
    file = path / "trial_state.pkl"
    with parsed(f"{file}: cannot be read", "resume from another checkpoint"):
        state = dict(_plain_values(small_file(file, MOST)))
        names = vars(State()).keys()
        wrong = sorted(state.keys() ^ names) or [name for name in names if not is_count(state[name])]
        if wrong:
            raise ValueError(f"{wrong[0]}: {state.get(wrong[0], 'is missing')!r}")
        return State(**state)
