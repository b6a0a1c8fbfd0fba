"""Runs that are stopped and resumed: real processes, real signals."""

import shutil

import pytest
from modes import STEPS, losses, mode_rows
from support import (
    DIGITS,
    INSTRUCTIONS,
    LATEST,
    TWO,
    Run,
    checkpoints,
    overrides,
    train_many,
    truncate_model,
)

STOP, D = 17, "hyperparameters.overwrite_deepspeed_args"


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


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_exact_on_other_cpus(tmp_path, instructions):
    """One machine computes as others do: a resume gives the same bits, other processes the same but for rounding."""
    environment = INSTRUCTIONS[instructions]
    rows = {mode: mode_rows(1)[mode] for mode in ("digits", "accumulate", "zero3")}
    folders = {name: tmp_path / name for name in ("straight", "stopped")}
    for folder in folders.values():
        folder.mkdir()
    straight = train_many(folders["straight"], rows, environment=environment)
    stopped = train_many(folders["stopped"], rows, sigterm_at=STOP, environment=environment)
    assert {run.code for run in stopped.values()} == {130}
    shutil.copytree(folders["stopped"], tmp_path / "other")
    rest = {mode: [*row, *LATEST] for mode, row in rows.items()}
    for mode, run in train_many(folders["stopped"], rest, environment=environment).items():
        assert run.code == 0, f"{mode}: {run.stderr}"
        assert run.summary["weights_sha256"] == straight[mode].summary["weights_sha256"], mode
    for mode, run in train_many(tmp_path / "other", rest, 2, environment=environment).items():
        assert run.code == 0, f"{mode}: {run.stderr}"
        assert losses(run) == pytest.approx(losses(straight[mode]), rel=1e-5), mode


def test_new_values_hold_after_a_resume(tmp_path):
    """As `run.json` says, from the first step on, whatever is kept by ZeRO; and the moments and the steps go on."""
    first, rest = (
        overrides(scheduling_unit=1, hyperparameters__max_length=f"{{batches: {n}}}") for n in (3, 6)
    )
    constant, warm = "scheduler=null", "scheduler={type: WarmupLR, params: {warmup_num_steps: 9}}"
    cycle, over = (
        f"scheduler={{type: OneCycleLR, params: {{cycle_momentum: true, {n}}}}}"
        for n in ("total_steps: 6", "total_steps: 3")
    )
    line = "scheduler={type: LinearLR, params: {start_factor: 1, end_factor: 0}}"  # as long as the training
    changes = {
        "cycle": ([cycle], []),
        "cycle that is over": ([over], []),
        "longer line": ([line, "zero_optimization.stage=1"], []),
        "same": ([constant], []),
        "rate": ([constant], ["optimizer.params.lr=0.0005"]),
        "decay": ([constant], ["optimizer.params.weight_decay=0.3"]),
        "betas": ([constant], ["optimizer.params.betas=[0.5, 0.9]"]),
        "schedule": ([constant], [warm]),
        "lower schedule": ([warm], ["optimizer.params.lr=0.0005"]),
        "stage 1": ([constant, "zero_optimization.stage=1"], []),
        "clipped in stage 1": ([constant, "zero_optimization.stage=1"], ["gradient_clipping=1e-9"]),
    }

    def row(length, *settings):
        return [*DIGITS, *length, *(part for each in settings for part in ("--set", f"{D}.{each}"))]

    runs = train_many(tmp_path, {name: row(first, *before) for name, (before, _) in changes.items()})
    assert [run.code for run in runs.values()] == [0] * len(runs)
    rows = {name: [*row(rest, *before, *then), *LATEST] for name, (before, then) in changes.items()}
    straight = {"warm": row(rest, warm), "lower": row(rest, warm, "optimizer.params.lr=0.0005")}
    straight |= {"whole cycle": row(rest, cycle), "whole line": row(rest, line)}
    runs = train_many(tmp_path, {**rows, **straight})
    assert [run.code for run in runs.values()] == [0] * len(runs)
    rates = {
        name: [entry["learning_rate"] for entry in run.metrics if entry["group"] == "training"]
        for name, run in runs.items()
    }
    assert rates["rate"] == [0.002] * 3 + [0.0005] * 3
    assert rates["schedule"][3:] == rates["warm"][3:] and rates["lower schedule"][3:] == rates["lower"][3:]
    assert rates["longer line"][3:] == rates["whole line"][3:]
    assert rates["cycle that is over"][3:] == rates["cycle that is over"][2:3] * 3
    weights = {name: run.summary["weights_sha256"] for name, run in runs.items()}
    assert len(set(weights.values())) == len(runs) - 2
    assert weights["stage 1"] == weights["same"] and weights["cycle"] == weights["whole cycle"]


def test_auto_begins_or_goes_on(two_checkpoints, tmp_path):
    """As a launcher wants it that starts again by itself; past a damaged checkpoint, but not without any whole one."""
    auto = [*TWO, "--resume", "auto"]
    for name, damaged in {"latest": [4], "all": [4, 2]}.items():
        shutil.copytree(two_checkpoints.output, tmp_path / name)
        held = checkpoints(Run(0, "", "", tmp_path / name))
        for step in damaged:
            truncate_model(held[step])
    stopped = train_many(tmp_path, {"new": auto}, sigterm_at=3)["new"]
    assert stopped.code == 130, stopped.stderr
    assert 3 in checkpoints(stopped)
    runs = train_many(tmp_path, dict.fromkeys(("new", "latest", "all"), auto))
    for name in ("new", "latest"):
        assert runs[name].code == 0, runs[name].stderr
        assert runs[name].summary["weights_sha256"] == two_checkpoints.summary["weights_sha256"], name
    second = checkpoints(two_checkpoints)[2].name
    assert f"is truncated; goes on from {second}" in runs["latest"].stderr
    assert runs["all"].code == 2 and "there is no other whole one" in runs["all"].stderr
