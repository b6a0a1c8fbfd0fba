"""A checkpoint of other processes or another ZeRO stage, in a form that this run's engines can load."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from determined import core

from harness.checkpoints.identity import PROCESSES, STAGE, Identity, read
from harness.deepspeed_patches import convert_to_universal, load_as_universal
from harness.errors import InvalidInput


@contextlib.contextmanager
def as_loadable(
    path: pathlib.Path,
    name: str,
    mine: Identity,
    engines: Sequence[Any],
    distributed: core.DistributedContext,
) -> Iterator[pathlib.Path]:
    """Gives the folder to load from: the checkpoint's own, or a temporary one with what was converted.

    Args:
        path: the folder of a checkpoint that ``identity.check`` has passed.
        name: what to call it in an error line.
        mine: the identity of the trial that goes on from it.
        engines: the trial's.
        distributed: the ranks.

    Raises:
        InvalidInput: if DeepSpeed cannot convert it.
    """
    saved = read(path, name)
    if saved["mode"] == mine["mode"]:
        yield path
        return
    processes = saved["mode"][PROCESSES]
    sharded = saved["mode"][STAGE] > 0  # else every process holds all of it
    with contextlib.ExitStack() as around:
        folder, reason = None, None
        if distributed.local_rank == 0:
            temporary = tempfile.TemporaryDirectory(prefix="universal-checkpoint-")
            folder = pathlib.Path(around.enter_context(temporary))
            os.symlink(path / "trial_state.pkl", folder / "trial_state.pkl")
            for rank in range(mine["mode"][PROCESSES]):  # each new rank takes an old one's random numbers
                old = path / f"det_state_dict_rank{rank % processes}.pth"
                os.symlink(old, folder / f"det_state_dict_rank{rank}.pth")
            for source in sorted(path.glob("model*")):  # one folder an engine
                if not sharded:
                    os.symlink(source, folder / source.name)
                else:
                    reason = reason or convert_to_universal(source, folder / source.name)
        folder, reason = distributed.broadcast_local((folder, reason))
        if reason:
            mend = f"DeepSpeed cannot convert it ({reason}); use {processes} processes"
            raise InvalidInput(f"--resume: {name}: {mend}")
        if sharded:
            for engine in engines:
                around.enter_context(load_as_universal(engine))
        try:
            yield folder
        finally:
            distributed.gather_local(None)  # before the folder goes
