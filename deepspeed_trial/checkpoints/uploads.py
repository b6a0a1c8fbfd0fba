"""Uploads of a run's checkpoints to ``checkpoint_storage`` during the training."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from deepspeed_trial import redaction
from deepspeed_trial.checkpoints import files
from deepspeed_trial.checkpoints.storage import SECTION
from deepspeed_trial.checkpoints.stored_run import StoredRun
from deepspeed_trial.errors import TrainingStopped, one_line

PATIENCE = 300.0  # seconds that a run waits at its end for a store that does not answer
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds between attempts
_LINKED = ".upload-"  # begins the name of a checkpoint's folder that waits for its upload
_LINKING = ".partial-upload"  # the name of such a folder before it is complete

logger = logging.getLogger("deepspeed_trial")


class Uploads:
    """Uploads new checkpoints in a thread, and removes from the store the checkpoints that the run removes.

    A waiting checkpoint is a folder of hard links, so the training may remove the original at any time. The
    training continues if the store does not answer. The end of the block waits for the last upload.

    Args:
        run: the run's folder in the store.
        output: the local folder of the run.
        also: names of files in ``output``, besides TensorBoard's, to upload with each checkpoint.

    Raises:
        TrainingStopped: at the end of the block, if the store does not answer within ``PATIENCE`` seconds.
    """

    def __init__(self, run: StoredRun, output: pathlib.Path, also: Sequence[str]) -> None:
        self._run, self._output, self._also = run, output, also
        self._folder = output / "checkpoints"
        self._stored: set[str] = set()
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of uploaded files of `also`
        self._is_ending, self._is_new = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def __enter__(self) -> Uploads:
        for left in [*self._folder.glob(f"{_LINKED}*"), self._folder / _LINKING]:  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        print(f"storage  {self._run.url}", flush=True)
        here = files.known(self._folder)
        self._stored = here.keys() & self._run.complete
        for name in reversed(here):
            if name not in self._stored:
                self.add(name)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ending.set()
        self._is_new.set()
        self._thread.join()
        self._finish(PATIENCE if kind is None else 0.0)

    def add(self, name: str) -> None:
        """Queue a complete checkpoint for upload."""
        shutil.copytree(self._folder / name, self._folder / _LINKING, copy_function=_link)
        os.rename(self._folder / _LINKING, self._folder / f"{_LINKED}{name}")
        self._is_new.set()

    def _work(self) -> None:
        wait = FIRST_WAIT
        while True:
            self._is_new.wait()
            self._is_new.clear()
            if self._is_ending.is_set():
                return
            try:
                self._upload()
            except Exception as error:  # each library raises different exceptions
                if wait == FIRST_WAIT:
                    logger.warning(f"{self._failed(error)}; the training continues, the upload follows later")
                self._is_ending.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                self._is_new.set()
            else:
                if wait > FIRST_WAIT:
                    logger.warning(f"{SECTION}: {self._run.url}: answers again")
                wait = FIRST_WAIT

    def _finish(self, patience: float) -> None:
        until, wait = time.monotonic() + patience, FIRST_WAIT
        while True:
            try:
                return self._upload()
            except Exception as error:
                failed = self._failed(error)
                if time.monotonic() + wait > until:
                    what = f"{failed}; {self._folder} has the checkpoints; --resume latest uploads them"
                    if patience:
                        raise TrainingStopped(what) from error
                    logger.warning(what)
                    return None
                if wait == FIRST_WAIT:
                    logger.warning(f"{failed}; the run retries for up to {patience:.0f} seconds")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _upload(self) -> None:
        """Upload new checkpoints, the newest first, then remove stored ones that the run no longer keeps."""
        waiting = {path.name.removeprefix(_LINKED): path for path in self._folder.glob(f"{_LINKED}*")}
        here = files.known(self._folder)
        for name in here:
            if name in waiting:
                self._upload_files()
                self._run.upload(waiting[name], name)
                self._stored.add(name)
        for name, path in waiting.items():
            if name not in self._stored:
                self._run.remove(name)  # the store may have a part of it
            shutil.rmtree(path, ignore_errors=True)
        for name in [name for name in self._stored if here and not (self._folder / name).exists()]:
            self._run.remove(name)
            self._stored.discard(name)
        if self._is_ending.is_set():
            self._upload_files()

    def _upload_files(self) -> None:
        for file in [self._output / name for name in self._also] + [*self._output.glob("*tfevents*")]:
            name = file.name
            if file.is_file():
                state = file.stat()
                version = state.st_size, state.st_mtime_ns
                if self._sent.get(name) != version:
                    self._run.put(file, name)
                    self._sent[name] = version

    def _failed(self, error: Exception) -> str:
        return f"{SECTION}: {self._run.url}: cannot be written ({redaction.text(one_line(error))})"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
