"""Starts, stops and kills a trial's process, on this machine or on a node of a Ray cluster.

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

LOOK = 0.5  # seconds that ``look`` waits for the end of the process
MOST = 2**20  # the maximum bytes that ``look`` reads, from the end of the log


class News(NamedTuple):
    """The state of a trial's process.

    Attributes:
        node: the hostname of the node.
        code: the exit code of the process; None while the process runs, negative after a signal.
        texts: the text of each file that has changed since the previous ``News``, by path.
    """

    node: str
    code: int | None
    texts: dict[str, str]


class NodeProcess:
    """A trial's process on this node.

    Args:
        home: the working directory, which has the same path on each node.
        folder: the trial's folder.
        files: the files whose text ``look`` reports after each change.
        log: the file for the process's stdout and stderr; ``look`` reports it after the end of the process.
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
        """Wait at most 60 s for the end of an earlier process in the folder, start the process, and ``look``.

        Args:
            arguments: the arguments of Python.
            stdin: the text that the process reads from its stdin.
            environment: environment variables, in addition to this process's own.
            shared: a file that must exist on this node; None if the nodes share no folder.
            pid_name: the name of the environment variable that gets the id of this worker process.

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
        pid = {pid_name: str(os.getpid())}
        self.process = spawn([sys.executable, *arguments], stdin, self.log, environment | pid)
        return self.look()

    def look(self) -> News:
        """Wait at most half a second for the end of the process; return its state and its changed files."""
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
        stop(self.process)

    def kill(self) -> None:
        """Kill the process and its children."""
        kill(self.process)


def spawn(
    command: Sequence[str], stdin: str, log: pathlib.Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process in a new session, so that Ctrl-C reaches only the search, which stops its trials.

    Args:
        command: the program and its arguments.
        stdin: the text that the process reads from its stdin.
        log: the file; the process appends its stdout and stderr to it.
        environment: environment variables, in addition to this process's own.
    """
    with open(log, "ab") as output, tempfile.TemporaryFile() as whole:  # no path leads to this file
        whole.write(stdin.encode())
        whole.seek(0)
        return subprocess.Popen(
            command,
            stdin=whole,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes] | None) -> None:
    """Ask a training process to save a checkpoint and end, unless it has ended."""
    if process and process.poll() is None:
        process.send_signal(signal.SIGTERM)


def kill(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a process that ``spawn`` started, with its children, and wait for its end."""
    if process and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
