"""Resumed runs: with new values, with ``--resume auto``, and on other CPUs."""

import json
import shutil
from typing import Any

import pytest
import support
from matrix import Runs
from support import (
    DIGITS,
    LATEST,
    TWO,
    Run,
    checkpoints,
    losses,
    overrides,
    rates,
    run,
    train_many,
    truncate_model,
)
from warm import Warm

from deepspeed_trial.checkpoints import files

# One machine computes as CPUs of other kinds do: by what torch, oneDNN and MKL ask of it.
INSTRUCTIONS: dict[str, dict[str, Any]] = {
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}
SHORT, LONG = (
    overrides(scheduling_unit=1, hyperparameters__max_length=f"{{batches: {steps}}}") for steps in (3, 6)
)
SCHEDULES = {
    "constant": "scheduler=null",
    "warm-up": "scheduler={type: WarmupLR, params: {warmup_num_steps: 9}}",
    "cycle": "scheduler={type: OneCycleLR, params: {cycle_momentum: true, total_steps: 3}}",
    "line": "scheduler={type: LinearLR, params: {start_factor: 1, end_factor: 0}}",  # as long as the training
}
BEGUN = {name: [schedule] for name, schedule in SCHEDULES.items()}
BEGUN["ZeRO 1"] = ["scheduler=null", "zero_optimization.stage=1"]
DEEPSPEED, RATE = "hyperparameters.overwrite_deepspeed_args.", "optimizer.params.lr=0.0005"
# A resumed run: the beginning, and the changed settings
CHANGES = {
    "same": ("constant", []),
    "rate": ("constant", [RATE]),
    "decay": ("constant", ["optimizer.params.weight_decay=0.3"]),
    "betas": ("constant", ["optimizer.params.betas=[0.5, 0.9]"]),
    "schedule": ("constant", [SCHEDULES["warm-up"]]),
    "lower schedule": ("warm-up", [RATE]),
    "cycle that is over": ("cycle", []),
    "longer line": ("line", []),
    "rate of ZeRO 1": ("ZeRO 1", [RATE]),
    "clipping of ZeRO 1": ("ZeRO 1", ["gradient_clipping=1e-9"]),
}


def row(length, *settings):
    return [*DIGITS, *length, *(f"--set={DEEPSPEED}{setting}" for setting in settings)]


def test_new_values_hold_from_the_first_step_after_a_resume(tmp_path):
    """Moments and steps stay, whether or not ZeRO keeps the optimizer's groups."""
    begun = train_many(tmp_path, {f"to {name}": row(SHORT, *settings) for name, settings in BEGUN.items()})
    assert [run.code for run in begun.values()] == [0] * len(begun)
    for name, (before, _) in CHANGES.items():
        shutil.copytree(tmp_path / f"to {before}", tmp_path / name)
    rows = {name: [*row(LONG, *BEGUN[before], *then), *LATEST] for name, (before, then) in CHANGES.items()}
    rows |= {name: row(LONG, SCHEDULES[name]) for name in ("warm-up", "line")}
    runs = train_many(tmp_path, rows | {"lower": row(LONG, SCHEDULES["warm-up"], RATE)})
    assert [run.code for run in runs.values()] == [0] * len(runs)
    found = {name: rates(run) for name, run in runs.items()}
    assert found["rate"] == found["rate of ZeRO 1"] == [0.002] * 3 + [0.0005] * 3
    for changed, straight in {
        "schedule": "warm-up",
        "lower schedule": "lower",
        "longer line": "line",
    }.items():
        assert found[changed][3:] == found[straight][3:] and len(found[straight]) == 6
    assert found["cycle that is over"][3:] == found["cycle that is over"][2:3] * 3
    weights = {name: run.summary["weights_sha256"] for name, run in runs.items()}
    assert losses(runs["rate of ZeRO 1"]) == pytest.approx(losses(runs["rate"]), rel=1e-5)
    del weights["rate of ZeRO 1"]
    assert len(set(weights.values())) == len(weights)


def make_as_earlier_versions(checkpoint, steps):
    """Leave out the progress in the identity, and the digest of the metadata."""
    forget(checkpoint / "identity.json", "progress")
    (checkpoint / "metadata.json").unlink()
    files.write_metadata(checkpoint, {"steps_completed": steps})
    forget(checkpoint / "metadata.json", "sha256")


def forget(file, key):
    held = json.loads(file.read_text())
    del held[key]
    file.write_text(json.dumps(held))


def test_auto_begins_or_resumes(two_checkpoints, tmp_path):
    """A launcher may repeat one command: ``auto`` passes a damaged checkpoint, and a UUID names an older one."""
    for name in ("latest", "all", "earlier"):
        shutil.copytree(two_checkpoints.output, tmp_path / name)
        for step, folder in checkpoints(Run(0, "", "", tmp_path / name)).items():
            if name == "earlier":
                make_as_earlier_versions(folder, step)
            elif step == 4 or name == "all":
                truncate_model(folder)
    auto = [*TWO, "--resume", "auto"]
    stopped = train_many(tmp_path, {"new": auto}, sigterm_at=3)["new"]
    assert stopped.code == 130, stopped.stderr
    assert 3 in checkpoints(stopped)
    second = checkpoints(two_checkpoints)[2].name
    rows = {**dict.fromkeys(("new", "latest", "all"), auto), "earlier": [*TWO, "--resume", second]}
    runs = train_many(tmp_path, rows)
    for name in ("new", "latest", "earlier"):
        assert runs[name].code == 0, runs[name].stderr
        assert runs[name].summary["weights_sha256"] == two_checkpoints.summary["weights_sha256"], name
    assert f"is truncated; the run continues from {second}" in runs["latest"].stderr
    assert runs["all"].code == 2 and "no undamaged checkpoint is left" in runs["all"].stderr


@pytest.mark.soak
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_other_cpus_compute_alike(tmp_path, monkeypatch, instructions):
    """A resume gives the same bits there; other processes give the same losses, apart from rounding."""
    for name, value in INSTRUCTIONS[instructions].items():
        monkeypatch.setenv(name, value)
    interpreter, runs = Warm(), Runs(tmp_path)
    monkeypatch.setattr(support, "warm", lambda: interpreter)
    shown = run(["-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"], tmp_path).stdout
    assert shown.strip() == {"SSE": "DEFAULT"}.get(instructions, instructions)
    for name in ("zero0", "accumulate", "zero3"):
        straight, resumed = runs.straight(name, 1), runs.resumed(name, 1)
        assert (straight.code, resumed.code) == (0, 0), resumed.stderr
        assert resumed.summary["weights_sha256"] == straight.summary["weights_sha256"], name
        for other in (runs.resumed(name, 2), runs.onward(name, name, 1)):
            assert other.code == 0, other.stderr
            assert losses(other) == pytest.approx(losses(straight), rel=1e-5), name
    interpreter.close()
