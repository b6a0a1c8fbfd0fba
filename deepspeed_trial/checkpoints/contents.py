"""Checks of a checkpoint's files before any file is loaded."""

from __future__ import annotations

import contextlib
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from determined import core

from deepspeed_trial.checkpoints import files, safe_load
from deepspeed_trial.checkpoints.identity import PROCESSES, Identity
from deepspeed_trial.checkpoints.shards import REMEDY
from deepspeed_trial.errors import ErrorList, InvalidInput, UnusableCheckpoint, one_line
from deepspeed_trial.input_files import parsed
from deepspeed_trial.out_of_memory import is_out_of_memory


def check(path: pathlib.Path, saved: Identity, steps: int, trial_id: int) -> None:
    """Check the files of a checkpoint; ``state.check`` checks the engines' tensors.

    Args:
        path: the checkpoint's folder.
        saved: the checkpoint's identity, checked by ``identity.check``.
        steps: optimizer steps that the resumed training has done, from the metadata or the master.
        trial_id: the number of the trial that resumes.

    Raises:
        InvalidInput: with a line for each file that is damaged or from another step, and for the first
            missing file.
    """
    errors = ErrorList()
    with errors.collecting():
        _check_steps(path, steps, trial_id)
    ranks = (path / f"det_state_dict_rank{rank}.pth" for rank in range(saved["mode"][PROCESSES]))
    missing = next((file for file in ranks if not file.exists()), None)
    if missing:
        errors.lines.append(f"{missing}: is missing; {REMEDY}")
    for file in sorted(path.glob("det_state_dict_rank*.pth")):
        with errors.collecting():
            _check_rank_state(file)
    for file in sorted(path.glob("model*/*.pt")):  # DeepSpeed's loader would run code in them
        with errors.collecting():
            safe_load.read(file)
    errors.raise_any()


@contextlib.contextmanager
def loading(name: str, distributed: core.DistributedContext) -> Iterator[None]:
    """Raise the same error on every rank if the block fails on any rank.

    Args:
        name: the checkpoint's name in error lines.
        distributed: the ranks.

    Raises:
        UnusableCheckpoint: with the lines of the first failing rank. Lack of memory raises its own error.
    """
    failed: Exception | None = None
    lines: list[str] = []
    try:
        yield
    except InvalidInput as error:
        failed, lines = error, error.errors
    except Exception as error:  # DeepSpeed, torch and callbacks raise any exception
        if is_out_of_memory(error):
            raise
        failed, lines = error, [f"--resume: {name}: cannot be loaded ({one_line(error)}); {REMEDY}"]
    for each in distributed.allgather(lines):
        if each:
            raise UnusableCheckpoint(each) from failed


def _check_steps(path: pathlib.Path, steps: int, trial_id: int) -> None:
    """Compare the step counts of ``trial_state.pkl``, ``metadata.json`` and the resumed training."""
    state = safe_load.read_trial_state(path)
    file, done = path / "trial_state.pkl", state.batches_trained
    if (path / files.METADATA).exists():
        with parsed(f"{path / files.METADATA}: cannot be read", REMEDY):
            said = files.read_metadata(path)["steps_completed"]
        if said != done:
            raise InvalidInput(_differ(path / files.METADATA, "steps_completed", said, file.name, done))
    if state.trial_id == trial_id and done != steps:
        raise InvalidInput(_differ(file, "batches_trained", done, "the run", steps))
    if state.trial_id != trial_id and steps:  # a cluster counts from 0 with another trial's weights
        what = f"{file}: trial_id: {state.trial_id}: a trial of a cluster saved this checkpoint"
        raise InvalidInput(f"{what}, so this run cannot resume from it; start a new run with its weights")


def _differ(file: pathlib.Path, key: str, value: Any, other: str, there: Any) -> str:
    return f"{file}: {key}: {value!r}: differs from {there!r} in {other}; {REMEDY}"


def _check_rank_state(file: pathlib.Path) -> None:
    """Check a rank's file: the callbacks' states, and the states of the random number generators."""
    state = safe_load.read(file)
    for key in ("callbacks", "rng_state"):
        if not isinstance(state, dict) or not isinstance(state.get(key), dict):
            raise InvalidInput(f"{file}: {key} is missing; {REMEDY}")
    rng = state["rng_state"]
    with parsed(f"{file}: rng_state: is invalid", REMEDY):
        torch.Generator().set_state(rng["cpu_rng_state"])
        np.random.RandomState().set_state(rng["np_rng_state"])
        random.Random().setstate(rng["random_rng_state"])
