"""The checkpoints of a run without a cluster: complete ones become visible, then old ones are removed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from determined import core

from deepspeed_trial.checkpoints import files
from deepspeed_trial.checkpoints.uploads import Uploads
from deepspeed_trial.errors import InvalidInput, TrainingStopped, one_line
from deepspeed_trial.local.lost_disk import how_to_go_on, is_full_disk, is_gone
from deepspeed_trial.output_files import sync

_PARTIAL = ".partial-"  # begins the name of a checkpoint's folder while it is written or removed
AUTO = "auto"  # the latest undamaged checkpoint


class LocalCheckpoints:
    """Replaces Determined's checkpoint storage without a cluster.

    All ranks write a checkpoint into a hidden folder. ``metadata.json`` lists the size and SHA-256 of every
    file. Rank 0 renames the complete folder, and then removes older checkpoints.

    Args:
        folder: has a folder for each checkpoint, named by its UUID; all ranks can read it.
        distributed: the ranks.
        keep_best: number of best checkpoints to keep (``checkpoint_storage.save_trial_best``).
        keep_latest: number of latest checkpoints to keep (``checkpoint_storage.save_trial_latest``); one is
            always kept.
        score: returns the score of the validation after a step, higher is better; None without a validation.
        uploads: uploads complete checkpoints to ``checkpoint_storage``, on rank 0; None without storage.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        distributed: core.DistributedContext,
        keep_best: int,
        keep_latest: int,
        score: Callable[[int], float | None],
        uploads: Uploads | None = None,
    ) -> None:
        self.folder, self._uploads = folder, uploads
        self.keep_best, self.keep_latest = keep_best, max(1, keep_latest)
        self._dist, self._score = distributed, score
        if self._dist.rank == 0:
            for partial in folder.glob(f"{_PARTIAL}*"):  # of a run that was killed
                shutil.rmtree(partial, ignore_errors=True)

    @contextlib.contextmanager
    def store_path(
        self, metadata: dict[str, Any], *, shard: bool = False
    ) -> Iterator[tuple[pathlib.Path, str]]:
        """Yield the folder into which all ranks write a new checkpoint, and its UUID.

        Raises:
            TrainingStopped: if the checkpoint cannot be written; earlier checkpoints stay unchanged.
        """
        name = self._dist.broadcast(str(uuid.uuid4()))
        partial = self.folder / f"{_PARTIAL}{name}"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            yield partial, name
            self._dist.allgather(None)
            if self._dist.rank == 0:
                files.write_metadata(partial, metadata)
                os.rename(partial, self.folder / name)
                sync(self.folder)  # before an older checkpoint is removed
                if self._uploads:
                    self._uploads.add(name)
                self._prune()
        except Exception as error:
            is_full = is_full_disk(error)  # torch raises RuntimeError for a full disk
            if is_gone(error, self.folder.parent) or not (isinstance(error, OSError) or is_full):
                raise
            shutil.rmtree(partial, ignore_errors=True)
            free = shutil.disk_usage(self.folder).free / 2**20
            room = f"; {free:,.0f} MiB are free there" if is_full else ""
            remedy = how_to_go_on(self.folder.parent) if is_full else "--resume latest continues from there"
            raise TrainingStopped(
                f"{self.folder}: the checkpoint of step {metadata['steps_completed']} cannot be written"
                f" ({one_line(error)}{room}); {self._last_whole()}; {remedy}"
            ) from error
        self._dist.broadcast(None)  # no rank trains before the checkpoint is complete

    @contextlib.contextmanager
    def restore_path(self, storage_id: str, *args: Any, **kwargs: Any) -> Iterator[pathlib.Path]:
        """Yield the folder of a checkpoint."""
        yield self.folder / storage_id

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the content of a checkpoint's ``metadata.json``, with ``steps_completed``."""
        return files.read_metadata(self.folder / storage_id)

    def find(self, which: str) -> str:
        """Return the UUID of a checkpoint with undamaged files.

        Args:
            which: ``latest``, a UUID, or ``auto``: the latest undamaged checkpoint. If ``auto`` skips a
                damaged checkpoint, a line on stderr names it.

        Raises:
            InvalidInput: if there is no such checkpoint, or if it is damaged. The line names the checkpoints
                to use instead.
        """
        known, unreadable = files.known(self.folder), files.unreadable(self.folder)
        candidates = [*unreadable[:1], *list(known)[:1]]
        latest = max(candidates, key=lambda each: (self.folder / each).stat().st_mtime_ns, default=None)
        name = latest if which in ("latest", AUTO) else which
        if name is None or name not in [*known, *unreadable]:
            raise InvalidInput(f"--resume: {which}: not found in {self.folder}; {files.in_words(known)}")
        damage = files.damage(self.folder / name)
        if damage is None:
            return name
        whole = next((other for other in known if files.damage(self.folder / other) is None), None)
        if which == AUTO and whole:
            what = f"{self.folder / str(name) / damage}; the run continues from {whole}"
            print(f"--resume: auto: {what}", file=sys.stderr)
            return whole
        remedy = "no undamaged checkpoint is left; start a new run with another --output"
        if whole:
            step = known[whole]["steps_completed"]
            remedy = f"the last undamaged one is of step {step}; use --resume {whole}"
        raise InvalidInput(f"--resume: {which}: {self.folder / name / damage}; {remedy}")

    def best(self) -> list[str]:
        """Return the names of the validated checkpoints, the best first; in a tie, the earliest first."""
        return files.ranked(files.known(self.folder), self._score)

    def _prune(self) -> None:
        known = files.known(self.folder)
        kept = {*list(known)[: self.keep_latest], *self.best()[: self.keep_best]}
        for name in known.keys() - kept:
            partial = self.folder / f"{_PARTIAL}{name}"
            os.rename(self.folder / name, partial)
            shutil.rmtree(partial, ignore_errors=True)

    def _last_whole(self) -> str:
        known = files.known(self.folder)
        if not known:
            return "no checkpoint was saved before"
        name, metadata = next(iter(known.items()))
        return f"the last complete one is {name} (step {metadata['steps_completed']})"
