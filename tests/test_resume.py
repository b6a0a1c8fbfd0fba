"""Runs that are stopped, killed, damaged or changed, and then resumed: real processes, real signals, real files."""

import json
import pathlib

from conftest import train_many
from modes import STEPS, losses, mode_rows

STOP = 17
LATEST = ["--resume", "latest"]


def checkpoints(run) -> dict[int, pathlib.Path]:
    """The folders of a run's checkpoints by their steps."""
    files = (run.output / "checkpoints").glob("*/metadata.json")
    return {json.loads(file.read_text())["steps_completed"]: file.parent for file in files}


def test_every_mode_resumes_to_the_same_bits(mode_runs, tmp_path):
    """A SIGTERM to one rank in step 17 of 40, then new processes: weights, losses and validation are as if never."""
    processes, _, straight = mode_runs
    rows = mode_rows(processes)
    for mode, run in train_many(tmp_path, rows, processes, sigterm_at=STOP).items():
        assert run.code == 130, f"{mode}: {run.stderr}"
        (step,) = checkpoints(run)
        assert step == STOP if processes == 1 else STOP <= step <= STOP + 1, mode
        assert "go on with --resume latest" in run.stderr
        assert not run.output.joinpath("summary.json").exists()
    rest = {mode: [*row, *LATEST] for mode, row in rows.items()}
    for mode, run in train_many(tmp_path, rest, processes).items():
        assert run.code == 0, f"{mode}: {run.stderr}"
        assert len(losses(run)) == STEPS
        assert losses(run) == losses(straight[mode]), mode
        assert run.summary["validation"] == straight[mode].summary["validation"], mode
        assert run.summary["weights_sha256"] == straight[mode].summary["weights_sha256"], mode
