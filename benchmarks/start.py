"""Run ``train.py`` to the end of its first step, and time the ends of its imports and of the step.

    python3 -m benchmarks.start REQUEST ANSWER

``REQUEST``, JSON, has ``config``, ``overrides`` and ``began``, the ``time.time()`` of the command's start.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import train
from classify.config import command_line


def main(request: dict[str, Any], answer: pathlib.Path) -> int:
    """Write wall seconds since the command and processor seconds of both ends; return the exit code."""
    ends: dict[str, tuple[float, float]] = {}
    importing = command_line.importing

    def ended(what: str) -> None:
        ends[what] = time.time() - request["began"], time.process_time()

    @contextlib.contextmanager
    def timed() -> Iterator[None]:
        with importing():
            yield
        ended("imports")
        if model_def := sys.modules.get("model_def"):
            stop_after_step(model_def.CIFARTrial)

    def stop_after_step(trial: Any) -> None:
        train_batch = trial.train_batch

        def once(*args: Any) -> None:
            train_batch(*args)
            sys.modules["deepspeed"].accelerator.get_accelerator().synchronize()
            ended("first_step")
            answer.write_text(json.dumps(ends))
            raise KeyboardInterrupt

        trial.train_batch = once

    command_line.importing = timed
    values = [part for each in request["overrides"] for part in ("--set", each)]
    with tempfile.TemporaryDirectory() as folder:
        code = train.main(["--config", request["config"], *values, "--output", folder])
    return 0 if "first_step" in ends else code or 1


if __name__ == "__main__":
    sys.exit(main(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2])))
