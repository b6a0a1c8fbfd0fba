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

from deepspeed_trial.errors import InvalidInput, one_line, why_unloadable

# The names in Determined's trial_state.pkl
TRIAL_STATE = ("trial_id", "last_ckpt", "last_val", "step_id", "batches_trained", "epochs_trained")


def _member_of_zero_stage(enum: Any, name: str) -> ZeroStageEnum:
    """Replace ``getattr``: Python 3.11.2 pickles the member of an enumeration as a call of it."""
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
    (_member_of_zero_stage, "builtins.getattr"),  # a file with the second name calls the first
]


def allowed_globals() -> contextlib.AbstractContextManager[Any]:
    """Let ``torch.load`` construct the classes of ``ALLOWED``, and no other class."""
    if not hasattr(torch.serialization, "safe_globals"):  # before torch 2.5, whose torch.load checks nothing
        return contextlib.nullcontext()
    return torch.serialization.safe_globals(ALLOWED)


def read(file: pathlib.Path) -> Any:
    """Read the structure of a file of ``torch.save`` without running code.

    Its tensors stay in the file; the values are read at their first use.

    Raises:
        InvalidInput: if it is damaged, or has an object of a class that is not allowed.
    """
    try:
        with allowed_globals():
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise each their own
        reason = why_unloadable(error)
        remedy = "resume from another checkpoint"
        if "Unsupported global" in reason:
            remedy = (
                f"if the trial keeps that, allow it with torch.serialization.add_safe_globals; else {remedy}"
            )
        raise InvalidInput(f"{file}: cannot be loaded safely ({reason}); {remedy}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values, and refuses classes and functions."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def read_trial_state(path: pathlib.Path) -> dict[str, int]:
    """Read Determined's state of a trial, a pickle of whole numbers.

    Args:
        path: the checkpoint's folder.

    Raises:
        InvalidInput: if it is missing, damaged or not such a state.
    """
    file = path / "trial_state.pkl"
    try:
        state = dict(_PlainUnpickler(io.BytesIO(file.read_bytes())).load())
        wrong = sorted(state.keys() ^ TRIAL_STATE) or [k for k in TRIAL_STATE if type(state[k]) is not int]
        if wrong:
            raise ValueError(f"{wrong[0]}: {state.get(wrong[0], 'is missing')!r}")
    except Exception as error:  # a damaged pickle raises nearly anything
        raise InvalidInput(
            f"{file}: cannot be read ({one_line(error)}); resume from another checkpoint"
        ) from error
    return state
