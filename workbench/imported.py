"""Turns a checkpoint of a Determined cluster into a run's folder, for ``train.py --resume latest``.

The checkpoint is from ``deepspeed_trial`` or from Determined's own trainer. A resume from a checkpoint of
Determined's trainer needs the same number of processes and the same ZeRO stage.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import uuid
from dataclasses import asdict
from typing import Any

from deepspeed_trial.checkpoints import files, identity, safe_load, shards
from deepspeed_trial.checkpoints.stored_run import is_uuid
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.input_files import parsed
from deepspeed_trial.local.folder import locked_folder, why_unusable

REMEDY = "give a folder that `det checkpoint download` wrote"


def import_checkpoint(source: pathlib.Path, output: pathlib.Path) -> int:
    """Create the folder of a run from a cluster's checkpoint.

    Args:
        source: a folder written by ``det checkpoint download``; it stays unchanged.
        output: the new run's folder.

    Returns:
        The number of optimizer steps before the checkpoint.

    Raises:
        InvalidInput: if the source is not such a folder, or the output already has a run.
    """
    if not (source / "trial_state.pkl").is_file():
        reason = "has no trial_state.pkl" if source.is_dir() else "no such folder"
        raise InvalidInput(f"{source}: {reason}; {REMEDY}")
    odd = next((path for path in sorted(source.rglob("*")) if not _is_plain(path)), None)
    if odd:
        raise InvalidInput(f"{odd}: is a link, a pipe or a device; {REMEDY}")
    state = safe_load.read_trial_state(source)
    with locked_folder(output, "run"):
        if unusable := why_unusable(output, resumes=False):
            raise InvalidInput(unusable)
        name = source.name if is_uuid(source.name) else str(uuid.uuid4())
        partial = output / "checkpoints" / f".partial-{name}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, ignore=lambda folder, names: {files.METADATA} & {*names})
        changes = {"trial_id": 0, "last_val": 0}  # the new run has no validation yet, so its end validates
        (partial / "trial_state.pkl").write_bytes(pickle.dumps({**asdict(state), **changes}))
        if not (partial / identity.FILE).exists():
            identity.write(partial, _identity_of(partial), {identity.IMPORTED: True})
        files.write_metadata(partial, {"steps_completed": state.batches_trained})
        os.rename(partial, output / "checkpoints" / name)
    return state.batches_trained


def _identity_of(checkpoint: pathlib.Path) -> identity.Identity:
    """Return the settings that a checkpoint of Determined's own trainer shows: processes and ZeRO stages."""
    ranks = len(list(checkpoint.glob("det_state_dict_rank*.pth")))
    mode: dict[str, Any] = {identity.PROCESSES: ranks}
    for index in range(len(list(checkpoint.glob("model*/")))):
        prefix = f"model{index}: " if index else ""
        mode[f"{prefix}{identity.STAGE}"] = _stage_of(shards.folder_of(checkpoint, index))
    return {"net": {}, "mode": mode, "position": {}, "states": {}}


def _stage_of(folder: pathlib.Path) -> int:
    """Return the ZeRO stage of an engine, which DeepSpeed writes into the files of its optimizer."""
    file = next(iter(sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"))), None)
    if file is None:
        return 0
    with parsed(f"{file}: is not an optimizer state of DeepSpeed", REMEDY):
        return int(safe_load.read(file)["optimizer_state_dict"]["zero_stage"])


def _is_plain(path: pathlib.Path) -> bool:
    return not path.is_symlink() and (path.is_file() or path.is_dir())
