"""Runs that are stopped, killed, damaged or changed, and then resumed: real processes, real signals, real files."""

import json
import math
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import DIGITS, PROJECT, TIME_LIMIT, Run, execute, launcher, overrides, train_many
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from modes import DEEPSPEED, STEPS, losses, mode_rows

import resume

STOP, D = 17, "hyperparameters.overwrite_deepspeed_args"
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
    stopped = train_many(tmp_path, {mode: rows[mode] for mode in [*ELASTIC, "moe"]}, processes, sigterm_at=STOP)
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
        relative, absolute = (None, 0.1) if name == "bf16" else (1e-4, None)
        assert losses(run) == pytest.approx(losses(whole), rel=relative, abs=absolute), name
        expected = whole.summary["validation"]["loss"]
        assert run.summary["validation"]["loss"] == pytest.approx(expected, rel=relative, abs=absolute), name


LONG = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 240}", min_checkpoint_period="{batches: 4}")]
KILLS = 10


def test_sigkill_at_any_moment_loses_nothing(tmp_path):
    """One rank of two is killed ten times, checkpoints being written or not; what is left always goes on."""
    torchrun = [*launcher("torchrun", 2), "train.py", *LONG, "--output"]
    straight = execute([*torchrun, str(tmp_path / "straight")], tmp_path / "straight")
    assert straight.code == 0, straight.stderr
    output, choose = tmp_path / "killed", random.Random(0)
    killed = 0
    while killed < KILLS:
        resume = LATEST if list(output.glob("checkpoints/*/metadata.json")) else []
        command = [*launcher("torchrun", 2), "train.py", *LONG, "--output", str(output), *resume]
        process = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE)
        family = wait_for_checkpoint(process, output)
        time.sleep(choose.uniform(0, 0.4))
        victim = choose.choice(family)
        assert victim.is_running(), "the run ended before it could be killed; make it longer"
        victim.kill()
        killed += 1
        assert process.wait(TIME_LIMIT) != 0
        _, alive = psutil.wait_procs(family, timeout=TIME_LIMIT)
        assert not alive, "a rank hangs"
    last = execute([*torchrun, str(output), *LATEST], output)
    assert last.code == 0, last.stderr
    assert last.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert not list(output.glob("checkpoints/.partial*"))


def wait_for_checkpoint(process, output):
    """The two ranks, once they are training, i.e. when there is a checkpoint that was not there before."""
    before = set(output.glob("checkpoints/*/metadata.json"))
    deadline = time.monotonic() + TIME_LIMIT
    while set(output.glob("checkpoints/*/metadata.json")) <= before:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return psutil.Process(process.pid).children()


TWO = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 4}", min_checkpoint_period="{batches: 2}")]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A run with whole checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two")
    (run,) = train_many(folder, {"run": [*TWO, *overrides(checkpoint_storage__save_trial_latest=2)]}).values()
    assert run.code == 0, run.stderr
    assert set(checkpoints(run)) == {2, 4}
    return run


MODEL, METADATA = "model0/mp_rank_00_model_states.pt", "metadata.json"


class Smuggled:
    """What runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def truncate(folder):
    os.truncate(folder / MODEL, 1000)


def alter(folder):
    file = folder / MODEL
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def forget_digests(folder):
    """Leaves the checkpoint as one that was downloaded from a cluster."""
    metadata = json.loads((folder / "metadata.json").read_text())
    del metadata["files"]
    (folder / "metadata.json").write_text(json.dumps(metadata))


def smuggle(file):
    def damage(folder):
        forget_digests(folder)
        held = Smuggled(folder.parent / "called")
        if file.endswith(".pkl"):
            (folder / file).write_bytes(pickle.dumps({"trial_id": held}))
        else:
            torch.save({"module": held}, folder / file)

    return damage


def without_digests(damage):
    return lambda folder: (forget_digests(folder), damage(folder))


# What is done to the last checkpoint, what else is asked for, and what the one line has to say.
OTHER = "the last whole one is --resume"
DAMAGE = {
    "truncated": (truncate, [], [MODEL, "is truncated", OTHER, "(step 2)"]),
    "altered": (alter, [], [MODEL, "is not what was written", OTHER]),
    "missing": (lambda folder: (folder / MODEL).unlink(), [], [MODEL, "is missing", OTHER]),
    "no metadata": (lambda folder: (folder / METADATA).unlink(), [], [f"{METADATA}: is missing", OTHER]),
    "metadata of nothing": (
        lambda folder: (folder / METADATA).write_text("[" * 100_000),
        [],
        [f"{METADATA}: cannot be read", OTHER],
    ),
    "foreign": (lambda folder: (folder / "model0/other.pt").touch(), [], ["other.pt", "does not belong", OTHER]),
    "truncated, downloaded": (without_digests(truncate), [], [MODEL, "cannot be loaded safely"]),
    "missing, downloaded": (
        without_digests(lambda folder: (folder / "det_state_dict_rank0.pth").unlink()),
        [],
        ["det_state_dict_rank0.pth", "is missing"],
    ),
    "no identity": (
        without_digests(lambda folder: (folder / "identity.json").unlink()),
        [],
        ["identity.json", "cannot be read"],
    ),
    "command in the state": (smuggle("trial_state.pkl"), [], ["trial_state.pkl", "posix.system"]),
    "command in the callbacks": (smuggle("det_state_dict_rank0.pth"), [], ["det_state_dict_rank0.pth", "posix.system"]),
    "command in the engine": (smuggle(MODEL), [], [MODEL, "posix.system"]),
    "other net": (None, overrides(hyperparameters__moe="true"), ["hyperparameters.moe: True", "made with False"]),
    "other optimizer": (None, overrides(**{f"{DEEPSPEED}optimizer__type": "SGD"}), ["optimizer.type", "adam"]),
    "other state": (
        None,
        overrides(**{f"{DEEPSPEED}optimizer__params__amsgrad": "true"}),
        ["optimizer.params.amsgrad: True", "holds no state for it"],
    ),
    "other precision": (
        None,
        overrides(**{f"{DEEPSPEED}bf16__enabled": "true"}),
        ["precision: 'bfloat16'", "'float32'"],
    ),
    "other batch": (None, overrides(**{f"{DEEPSPEED}train_batch_size": 48}), ["train_batch_size: 48", "made with 32"]),
    "other inputs": (
        None,
        overrides(data__normalize="imagenet"),
        ["data.normalize: [[0.485, 0.456, 0.406]", "made with [[0.5, 0.5, 0.5]"],
    ),
    "other seed": (None, overrides(reproducibility__experiment_seed=9), ["experiment_seed: 9", "made with 0"]),
    "stage 0 to 2": (
        None,
        overrides(**{f"{DEEPSPEED}zero_optimization__stage": 2}),
        ["zero_optimization.stage: 2", "DeepSpeed cannot turn a checkpoint of ZeRO stage 0 into one of stage 2"],
    ),
}


class ByName:
    """An attribute of a class, as Python 3.11.2 pickles the members of an enumeration."""

    def __init__(self, *where):
        self.where = where

    def __reduce__(self):
        return getattr, self.where


def test_a_stage_is_read_however_python_pickles_it(tmp_path):
    """And nothing else is looked up in the same way."""
    torch.save({"zero_stage": ByName(ZeroStageEnum, "gradients")}, tmp_path / "good.pt")
    torch.save({"zero_stage": ByName(LossScaler, "backward")}, tmp_path / "bad.pt")
    with resume.allowed():
        assert torch.load(tmp_path / "good.pt", weights_only=True) == {"zero_stage": ZeroStageEnum.gradients}
        with pytest.raises(pickle.UnpicklingError, match=r"getattr of .*LossScaler"):
            torch.load(tmp_path / "bad.pt", weights_only=True)


def contents(folder):
    return {
        str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def damaged_runs(two_checkpoints, tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("damaged"), {}
    for case, (damage, _, _) in DAMAGE.items():
        shutil.copytree(two_checkpoints.output, folder / case)
        if damage:
            damage(checkpoints(Run(0, "", "", folder / case))[4])
        before[case] = contents(folder / case)
    return before, train_many(folder, {case: [*TWO, *more, *LATEST] for case, (_, more, _) in DAMAGE.items()})


@pytest.mark.parametrize("case", DAMAGE)
def test_a_checkpoint_that_cannot_be_used_is_refused(damaged_runs, case):
    """Exit code 2, the file or key named, no command run, and not a byte of the run's folder changed."""
    before, runs = damaged_runs
    run = runs[case]
    assert run.code == 2, run.stderr
    for words in DAMAGE[case][2]:
        assert words in run.stderr
    assert len(run.stderr.splitlines()) == (2 if case == "stage 0 to 2" else 1)
    assert not (run.output / "checkpoints/called").exists()
    assert contents(run.output) == before[case]


def test_new_values_hold_after_a_resume(tmp_path):
    """As `run.json` says, from the first step on, whatever is kept by ZeRO; and the moments and the steps go on."""
    first, rest = (overrides(scheduling_unit=1, hyperparameters__max_length=f"{{batches: {n}}}") for n in (3, 6))
    constant, warm = "scheduler=null", "scheduler={type: WarmupLR, params: {warmup_num_steps: 9}}"
    changes = {
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
    runs = train_many(tmp_path, {**rows, **straight})
    assert [run.code for run in runs.values()] == [0] * len(runs)
    rates = {
        name: [entry["learning_rate"] for entry in run.metrics if entry["group"] == "training"]
        for name, run in runs.items()
    }
    assert rates["rate"] == [0.002] * 3 + [0.0005] * 3
    assert rates["schedule"][3:] == rates["warm"][3:] and rates["lower schedule"][3:] == rates["lower"][3:]
    assert len({run.summary["weights_sha256"] for name, run in runs.items() if name != "stage 1"}) == len(runs) - 1
    assert runs["stage 1"].summary["weights_sha256"] == runs["same"].summary["weights_sha256"]


def test_a_run_is_not_replaced(two_checkpoints, tmp_path):
    """Nor is a folder used whose parts are not what a run would write."""
    shutil.copytree(two_checkpoints.output, tmp_path / "again")
    (tmp_path / "odd/metrics.jsonl").mkdir(parents=True)
    before = contents(tmp_path / "again")
    runs = train_many(tmp_path, {"again": TWO, "odd": TWO})
    assert [run.code for run in runs.values()] == [2, 2]
    assert "holds a run; give another folder, or go on with it: train.py --resume latest" in runs["again"].stderr
    assert "metrics.jsonl: is a folder" in runs["odd"].stderr
    assert contents(tmp_path / "again") == before


def test_the_whole_checkpoint_offered_goes_on(two_checkpoints, tmp_path):
    """After damage to the last one; and where all are damaged, that is said."""
    for name in ("one", "all"):
        shutil.copytree(two_checkpoints.output, tmp_path / name)
        for step, folder in checkpoints(Run(0, "", "", tmp_path / name)).items():
            if step == 4 or name == "all":
                truncate(folder)
    uuid = checkpoints(two_checkpoints)[2].name
    rows = {"one": [*TWO, "--resume", uuid], "all": [*TWO, *LATEST]}
    runs = train_many(tmp_path, rows)
    assert runs["one"].code == 0, runs["one"].stderr
    assert runs["one"].summary["weights_sha256"] == two_checkpoints.summary["weights_sha256"]
    assert runs["all"].code == 2
    assert "there is no other whole one" in runs["all"].stderr


# The accuracies of a run's validations in order, from a learning rate that rises until it destroys.
KEPT = overrides(
    hyperparameters__max_length="{epochs: 6}",
    min_validation_period="{epochs: 1}",
    checkpoint_policy="all",
    **{f"{DEEPSPEED}optimizer__params__lr": 0.5, f"{DEEPSPEED}scheduler__params__warmup_num_steps": 4000},
)


def test_the_best_and_the_latest_checkpoints_are_kept(tmp_path):
    rows = {
        "default": [*DIGITS, *KEPT],
        "loss": [*DIGITS, *KEPT, *overrides(searcher__metric="loss", searcher__smaller_is_better="true")],
        "more": [
            *DIGITS,
            *KEPT,
            *overrides(checkpoint_storage="{save_trial_best: 2, save_trial_latest: 2}"),
        ],
    }
    for name, run in train_many(tmp_path, rows).items():
        assert run.code == 0, run.stderr
        of = {e["steps_completed"]: e for e in run.metrics if e["group"] == "validation"}
        assert len(of) == 6
        order = sorted(of, key=lambda step: of[step]["loss"] if name == "loss" else -of[step]["accuracy"])
        best, latest = (order[:2], sorted(of)[-2:]) if name == "more" else (order[:1], [max(of)])
        assert best != latest, "the test needs a run whose best validation is not its last"
        assert set(checkpoints(run)) == {*best, *latest}, name
        assert run.summary["checkpoint"] == checkpoints(run)[270].name


STOPPING = overrides(
    hyperparameters__max_length="{epochs: 30}",
    min_validation_period="{epochs: 1}",
    hyperparameters__early_stopping="{metric: accuracy, patience: 3, min_improvement: 0.02}",
)


def test_early_stopping_with_and_without_a_resume(tmp_path):
    """It stops where its formula says, also when a stop comes while it waits; a stopped run stays stopped."""
    (straight,) = train_many(tmp_path, {"straight": [*DIGITS, *STOPPING]}).values()
    assert straight.code == 0, straight.stderr
    accuracies = [entry["accuracy"] for entry in straight.metrics if entry["group"] == "validation"]
    best, waited, expected = 0.0, 0, 0
    while waited < 3:
        best, waited = (accuracies[expected], 0) if accuracies[expected] > best + 0.02 else (best, waited + 1)
        expected += 1
    assert straight.summary["epochs"] == expected == len(accuracies) < 30
    row = [*DIGITS, *STOPPING]
    (stopped,) = train_many(tmp_path, {"run": row}, sigterm_at=straight.summary["steps"] - 60).values()
    assert stopped.code == 130
    (rest,) = train_many(tmp_path, {"run": [*row, *LATEST]}).values()
    assert rest.summary["steps"] == straight.summary["steps"]
    assert rest.summary["weights_sha256"] == straight.summary["weights_sha256"]
    (again,) = train_many(tmp_path, {"run": [*row, *LATEST]}).values()
    assert again.code == 0, again.stderr
    measured = {name: again.summary[name] for name in ("seconds", "peak_memory_mib")}
    assert again.summary == {**rest.summary, **measured, "images_per_second": 0}


def test_a_loss_that_is_no_number_ends_the_training(tmp_path):
    """It names the step, the learning rate and the checkpoint from before; fp16 may skip steps while it scales down."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    hopeless = {**fp16, "initial_scale_power": 32, "min_loss_scale": 2**31}
    burst = {
        f"{DEEPSPEED}optimizer": "{type: SGD, params: {lr: 9.0e+5, momentum: 0.99}}",
        f"{DEEPSPEED}scheduler": "{type: WarmupLR, params: {warmup_num_steps: 40, warmup_type: linear}}",
        f"{DEEPSPEED}gradient_clipping": 0,
    }
    short = overrides(hyperparameters__max_length="{batches: 60}", min_checkpoint_period="{batches: 2}")
    rows = {
        "nan": [*DIGITS, *short, *overrides(**burst)],
        "fp16": [*DIGITS, *short, *overrides(**{f"{DEEPSPEED}fp16": json.dumps(fp16)})],
        "skips": [*DIGITS, *overrides(**{f"{DEEPSPEED}fp16": json.dumps(hopeless)})],
        "least scale": [
            *DIGITS,
            *overrides(**{f"{DEEPSPEED}fp16": json.dumps(hopeless), f"{DEEPSPEED}zero_optimization__stage": 1}),
        ],
    }
    runs = train_many(tmp_path, rows)
    assert runs["fp16"].code == 0, runs["fp16"].stderr
    assert losses(runs["fp16"])[-1] < 1  # as in fp32, once the first steps are skipped
    nan, skips, least = runs["nan"], runs["skips"], runs["least scale"]
    for run in (nan, skips, least):
        assert run.code == 1, run.stderr
        assert len(run.stderr.splitlines()) == 1, run.stderr
    bad = [entry for entry in nan.metrics if not math.isfinite(entry["loss"])]
    ((good, folder),) = checkpoints(nan).items()
    step = int(re.findall(r"the loss is (?:nan|inf) since step (\d+) \(learning rate \d+\)", nan.stderr)[0])
    assert good in (step - 1, step - 2) and bad[0]["steps_completed"] >= step
    assert f"the last good checkpoint is {folder.name}" in nan.stderr
    assert torch.load(folder / MODEL, weights_only=True)["module"]["fc3.weight"].isfinite().all()
    assert "no gradient is finite since step 1 (learning rate 0" in skips.stderr
    assert "overflow at the least loss scale in step 2 (learning rate 0" in least.stderr
    assert "no checkpoint was saved" in least.stderr


def test_a_full_disk_leaves_the_last_checkpoint(two_checkpoints, tmp_path):
    """Files may grow to a limit that holds the metrics but no checkpoint, as on a full disk."""
    shutil.copytree(two_checkpoints.output, tmp_path / "run")
    before = checkpoints(Run(0, "", "", tmp_path / "run"))
    script = (
        f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({200_000}, {200_000}));"
        "sys.argv.pop(0); runpy.run_path('train.py', run_name='__main__')"
    )
    longer = overrides(hyperparameters__max_length="{batches: 9}", checkpoint_storage__save_trial_latest=1)
    arguments = ["train.py", *TWO, *longer, *LATEST, "--output", str(tmp_path / "run")]
    run = execute([sys.executable, "-c", script, *arguments], tmp_path / "run")
    assert run.code == 1
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("train.py:")]
    assert "the checkpoint of step 6 cannot be written" in line and "MiB are free" in line
    assert f"the last whole one is {before[4].name} (step 4)" in line
    assert "Traceback" not in run.stderr
    assert checkpoints(run) == before
    assert not list(run.output.glob("checkpoints/.partial*"))


def test_a_run_keeps_others_out_of_its_folder(tmp_path):
    endless = overrides(hyperparameters__max_length="{epochs: 999}")
    command = [sys.executable, "train.py", *LONG, *endless, "--output", str(tmp_path / "run")]
    first = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE)
    wait_for_checkpoint(first, tmp_path / "run")
    second = execute(command, tmp_path / "run")
    first.send_signal(signal.SIGTERM)
    assert first.wait(TIME_LIMIT) == 130
    assert second.code == 2
    assert "another run is writing there" in second.stderr
