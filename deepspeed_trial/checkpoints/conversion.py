"""A checkpoint of other processes or another mode, in a form that this run's engines can load."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from determined import core

from deepspeed_trial.checkpoints.by_name import LayerNames, folder_of, loading_by_name
from deepspeed_trial.checkpoints.identity import PROCESSES, Identity, is_same_form, read


@contextlib.contextmanager
def as_loadable(
    path: pathlib.Path,
    name: str,
    mine: Identity,
    engines: Sequence[Any],
    layers: LayerNames,
    distributed: core.DistributedContext,
) -> Iterator[pathlib.Path]:
    """Gives the folder to load from; in another mode, the engines load by the names of their weights.

    Args:
        path: the folder of a checkpoint that ``identity.check`` has passed.
        name: what to call it in an error line.
        mine: the identity of the trial that goes on from it.
        engines: the trial's.
        layers: the names of a pipeline's layers.
        distributed: the ranks.
    """
    saved = read(path, name)
    if is_same_form(saved, mine):
        yield path
        return
    processes = saved["mode"][PROCESSES]
    with contextlib.ExitStack() as around:
        folder = None
        if distributed.local_rank == 0:
            folder = pathlib.Path(around.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint-")))
            for file in path.iterdir():
                if not file.name.startswith("det_state_dict_rank"):
                    os.symlink(file.resolve(), folder / file.name)
            for rank in range(mine["mode"][PROCESSES]):  # each new rank takes an old one's random numbers
                old = path / f"det_state_dict_rank{rank % processes}.pth"
                os.symlink(old.resolve(), folder / f"det_state_dict_rank{rank}.pth")
        folder = distributed.broadcast_local(folder)
        for index, engine in enumerate(engines):
            around.enter_context(loading_by_name(engine, folder_of(path, index), layers))
        try:
            yield folder
        finally:
            distributed.gather_local(None)  # before the folder goes
