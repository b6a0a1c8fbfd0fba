"""A trial's process on a node of a Ray cluster.

Ray imports this module on each node. The module avoids torch, which takes seconds to import.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import filelock

LOOK = 0.5  # seconds that a look waits for the end of the process
MOST = 2**20  # bytes of the end of a log


class News(NamedTuple):
    """A look at a trial.

    Attributes:
        node: hostname.
        code: exit code of the process; None while it runs, negative after a signal.
        texts: of the files that have changed since the last look, by path.
    """

    node: str
    code: int | None
    texts: dict[str, str]


class NodeProcess:
    """A trial's process on this node.

    Args:
        home: working directory, at the same path on each node.
        folder: the trial's.
        files: the files to report.
        log: file of its stdout and stderr; reported at the end of the process.
    """

    def __init__(
        self, home: str, folder: pathlib.Path, files: Sequence[pathlib.Path], log: pathlib.Path
    ) -> None:
        self.home, self.folder, self.files, self.log = home, folder, files, log
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[pathlib.Path, tuple[int, int]] = {}

    def start(
        self,
        arguments: list[str],
        stdin: str,
        environment: dict[str, str],
        shared: pathlib.Path | None,
        pid_name: str,
    ) -> News:
        """Start the process after the end of another one in its folder, and look at it.

        Args:
            arguments: of Python.
            stdin: text for the process.
            environment: additional variables.
            shared: a file that this node must see; None if the nodes share no folder.
            pid_name: variable of this worker's process id.

        Raises:
            FileNotFoundError: if this node lacks ``home`` or ``shared``.
        """
        os.chdir(self.home)
        if shared and not shared.exists():
            raise FileNotFoundError(
                f"{shared}: not found; the nodes need a shared --output, or checkpoint_storage"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(filelock.Timeout), filelock.FileLock(self.folder / ".lock", timeout=60):
            pass
        with open(self.log, "ab") as log, tempfile.TemporaryFile() as whole:  # without a name
            whole.write(stdin.encode())
            whole.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=whole,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, pid_name: str(os.getpid())},
                start_new_session=True,
            )
        return self.look()

    def look(self) -> News:
        """Wait at most half a second for the end of the process, and report its files."""
        assert self.process
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(LOOK)
        texts = {}
        for file in self.files if code is None else [*self.files, self.log]:
            with contextlib.suppress(FileNotFoundError), open(file, "rb") as opened:
                status = os.fstat(opened.fileno())
                if (mark := (status.st_mtime_ns, status.st_size)) != self.seen.get(file):
                    self.seen[file] = mark
                    opened.seek(max(0, status.st_size - MOST) if file == self.log else 0)
                    texts[str(file)] = opened.read().decode(errors="replace")
        return News(platform.node(), code, texts)

    def stop(self) -> None:
        """Ask the process to save a checkpoint and end."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
