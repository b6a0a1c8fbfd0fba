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
    *(np.float64(1).__reduce__()[0], *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?"))),
    (_member_of_zero_stage, "builtins.getattr"),  # what to call where a file names this
]


def allowed_globals() -> contextlib.AbstractContextManager[Any]:
    """Lets ``torch.load`` read what a checkpoint has to hold, and nothing else that it would refuse."""
    if not hasattr(torch.serialization, "safe_globals"):  # before torch 2.5, whose torch.load checks nothing
        return contextlib.nullcontext()
    return torch.serialization.safe_globals(ALLOWED)


def read(file: pathlib.Path) -> Any:
    """Reads the structure of a file of ``torch.save``, allowing nothing that runs code.

    Its tensors stay in the file, from where their values come when they are asked for.

    Raises:
        InvalidInput: if it is damaged, or holds anything but what a checkpoint has to hold.
    """
    try:
        with allowed_globals():
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise each their own
        reason = why_unloadable(error)
        mend = "go on from another checkpoint"
        if "Unsupported global" in reason:
            mend = f"if the trial keeps that, allow it with torch.serialization.add_safe_globals; else {mend}"
        raise InvalidInput(f"{file}: cannot be loaded safely ({reason}); {mend}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values and refuses everything that would have to be looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def read_trial_state(path: pathlib.Path) -> dict[str, int]:
    """Determined's own state of a trial, a pickle of whole numbers.

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
            f"{file}: cannot be read ({one_line(error)}); go on from another checkpoint"
        ) from error
    return state
