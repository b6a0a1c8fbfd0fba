"""Runs that are stopped and resumed, also otherwise than they were: real processes, real signals."""

import shutil

import pytest
from modes import DEEPSPEED, STEPS, losses, mode_rows
from support import (
    DIGITS,
    INSTRUCTIONS,
    LATEST,
    checkpoints,
    overrides,
    train_many,
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


STAGE_2 = overrides(**{f"{DEEPSPEED}zero_optimization__stage": 2})


# Modes that go on with another number of processes, and as what else; the rest is refused.
ELASTIC: dict[str, dict[str, list[str]]] = {
    "digits": {"": []},
    "accumulate": {"": []},
    "zero1": {"": [], " as stage 2": STAGE_2},
    "zero2": {"": []},
    "zero3": {"": []},
    "bf16": {"": []},
    "offload": {"": []},
}


INELASTIC = {
    "moe": "cannot spread the experts or stages",
    "zero1 as stage 0": "ZeRO stage 1 into one of stage 0",
}


def test_other_processes_and_stages(mode_runs, tmp_path):
    """Saved with 1 process and resumed with 2, or the other way; ZeRO stage 1 goes on as stage 2."""
    processes, _, straight = mode_runs
    rows = mode_rows(processes)
    stopped = train_many(
        tmp_path, {mode: rows[mode] for mode in [*ELASTIC, "moe"]}, processes, sigterm_at=STOP
    )
    changed: dict[str, list[str]] = {}
    refused: dict[str, dict[str, list[str]]] = {name: {"": []} for name in INELASTIC}
    for mode, forms in {**ELASTIC, **refused}.items():
        for form, more in forms.items():
            source = mode.split()[0]
            if mode + form != source:
                shutil.copytree(stopped[source].output, tmp_path / (mode + form))
                more = more or overrides(**{f"{DEEPSPEED}zero_optimization__stage": 0})
            changed[mode + form] = [*rows[source], *more, *LATEST]
    for name, run in train_many(tmp_path, changed, 3 - processes).items():
        if name in INELASTIC:
            assert run.code == 2, run.stderr
            assert INELASTIC[name] in run.stderr and f"processes: {3 - processes}" in run.stderr
            continue
        assert run.code == 0, f"{name}: {run.stderr}"
        whole = straight[name.split()[0]]
        assert run.summary["zero_stage"] == (2 if "as stage 2" in name else whole.summary["zero_stage"])
        # bf16 keeps 8 bits: how much two orders of a sum differ by in the end depends on the CPU's kernels
        relative, absolute = (None, 0.1) if name == "bf16" else (1e-5, None)
        assert losses(run) == pytest.approx(losses(whole), rel=relative, abs=absolute), name
        expected = whole.summary["validation"]["loss"]
        assert run.summary["validation"]["loss"] == pytest.approx(expected, rel=relative, abs=absolute), name


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
