"""Checkpoints that are damaged, smuggle code or are of something else: refused, nothing changed."""

import json
import os
import pickle
import shutil

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from modes import DEEPSPEED, mode_rows
from support import (
    LATEST,
    MODEL,
    TWO,
    Run,
    checkpoints,
    error_line,
    overrides,
    train_many,
    truncate_model,
)
from support import contents as every_byte

from harness.checkpoints import contents, files, identity, safe_load

METADATA = "metadata.json"


class Smuggled:
    """What runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def alter(folder):
    file = folder / MODEL
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def forget_digests(folder):
    """Leaves the checkpoint as one that was downloaded from a cluster."""
    metadata = json.loads((folder / "metadata.json").read_text())
    del metadata["files"], metadata["sha256"]
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


def change_in(file, change):
    """Changes what the files of a checkpoint that a pattern names hold; ``change`` may give a value instead."""

    def damage(folder):
        for path in sorted(folder.glob(file)):
            if path.suffix == ".json":
                held = json.loads(path.read_text())
                path.write_text(json.dumps(change(held) or held))
            elif path.suffix == ".pkl":
                held = pickle.loads(path.read_bytes())
                path.write_bytes(pickle.dumps(change(held) or held))
            else:
                with safe_load.allowed_globals():
                    held = torch.load(path, weights_only=True)
                torch.save(change(held) or held, path)

    return damage


def signed_again(damage):
    """With the digests of what there is then, so that only its content tells."""

    def damage_and_sign(folder):
        damage(folder)
        metadata = json.loads((folder / METADATA).read_text())
        (folder / METADATA).unlink()
        files.write_metadata(folder, {k: v for k, v in metadata.items() if k not in ("files", "sha256")})

    return damage_and_sign


def resigned(file, change):
    return signed_again(change_in(file, change))


def put(*place, value):
    """Puts a value in its place among nested mappings and lists."""

    def change(held):
        for key in place[:-1]:
            held = held[key]
        held[place[-1]] = value

    return change


def drop(*place):
    def change(held):
        for key in place[:-1]:
            held = held[key]
        del held[place[-1]]

    return change


# What is done to the last checkpoint, what else is asked for, and what the one line has to say.
OTHER = "the last whole one is --resume"
MEND = "go on from another checkpoint"
STAGE_2 = overrides(**{f"{DEEPSPEED}zero_optimization__stage": 2})
RANK0 = "det_state_dict_rank0.pth"
STEPS = put("steps_completed", value=2)
# Of wrong structure, in files whose digests are right: the file, the change, what the line has to say.
WRONG = {
    "steps in the metadata": (
        METADATA,
        STEPS,
        [f"{METADATA}: steps_completed: 2: but trial_state.pkl has 4"],
    ),
    "no state": ("trial_state.pkl", dict.clear, ["trial_state.pkl: cannot be read (batches_trained"]),
    "steps as text": ("trial_state.pkl", put("batches_trained", value="4"), ["(batches_trained: '4')"]),
    "other epochs": ("trial_state.pkl", put("epochs_trained", value=3), ["epochs_trained: 3: but identity"]),
    "other trial": ("trial_state.pkl", put("trial_id", value=7), ["trial_id: 7: but identity.json has 0"]),
    "processes as text": ("identity.json", put("mode", "processes", value="1"), ["(processes: '1')"]),
    "no processes": ("identity.json", drop("mode", "processes"), ["identity.json", "(processes: None)"]),
    "no mode": ("identity.json", put("mode", value={}), ["identity.json: cannot be read"]),
    "an odd mode": ("identity.json", put("mode", value=[]), ["identity.json: cannot be read (mode: [])"]),
    "odd steps": ("identity.json", put("progress", "engines", value=[5]), ["cannot be loaded"]),
    "no random state": (RANK0, put("rng_state", value={}), [RANK0, "rng_state: is no state"]),
    "random state of a list": (RANK0, put("rng_state", value=[1]), [RANK0, "rng_state is missing"]),
    "random state of zeros": (
        RANK0,
        put("rng_state", "cpu_rng_state", value=torch.zeros(4)),
        ["is no state"],
    ),
    "no callbacks": (RANK0, drop("callbacks"), [RANK0, "callbacks is missing"]),
    "no mapping": (MODEL, lambda held: [held], [f"{MODEL}: is a list, no mapping"]),
    "no weights": (MODEL, drop("module"), [f"{MODEL}: holds no weights"]),
    "a weight less": (MODEL, drop("module", "fc3.bias"), [MODEL, "fc3.bias is none, but (10,)"]),
    "a weight more": (MODEL, put("module", "fc4", value=torch.zeros(3)), ["fc4 is (3,), but none"]),
    "a small weight": (MODEL, put("module", "fc3.bias", value=torch.zeros(3)), ["is (3,), but (10,)"]),
    "whole numbers": (
        MODEL,
        put("module", "fc3.bias", value=torch.zeros(10, dtype=torch.int32)),
        ["fc3.bias is (10,) of int32, but (10,) of float32"],
    ),
    "no optimizer": (MODEL, put("optimizer", value=None), ["model0", "is missing"]),
    "an empty optimizer": (MODEL, put("optimizer", value={}), ["cannot be loaded (KeyError 'param_groups')"]),
    "no moments": (MODEL, put("optimizer", "state", value={}), ["the optimizer's moments are missing"]),
    "small moments": (MODEL, put("optimizer", "state", 0, "exp_avg", value=torch.zeros(3)), ["exp_avg"]),
    "moments of a kind": (MODEL, drop("optimizer", "state", 0, "exp_avg"), ["are not alike"]),
    "engine's steps as text": (MODEL, put("global_steps", value="4"), ["global_steps: '4': must be a whole"]),
    "engine's other steps": (
        MODEL,
        put("global_steps", value=3),
        ["global_steps: 3: but identity.json has 4"],
    ),
    "images as text": (MODEL, put("global_samples", value="4"), ["global_samples: '4'"]),
    "schedule's other steps": (
        MODEL,
        put("lr_scheduler", "last_batch_iteration", value=99),
        ["last_batch_iteration: 99: but identity.json has 3"],
    ),
    "an odd schedule": (MODEL, put("lr_scheduler", value="x"), ["cannot be loaded"]),
}


DAMAGE = {
    **{
        name: (resigned(file, change), [], [*words, MEND] if file != "identity.json" else words)
        for name, (file, change, words) in WRONG.items()
    },
    "no engine": (
        signed_again(lambda folder: shutil.rmtree(folder / "model0")),
        [],
        ["It holds 0 engines, and the trial has 1", MEND],
    ),
    "a file that would be loaded first": (
        signed_again(lambda folder: torch.save({}, folder / "checkpoint.pt")),
        [],
        ["checkpoint.pt: does not belong to it"],
    ),
    "other steps": (change_in(METADATA, STEPS), [], [f"{METADATA}: cannot be read (it is not", OTHER]),
    "other steps, downloaded": (
        without_digests(change_in(METADATA, STEPS)),
        [],
        ["steps_completed: 2: but trial_state.pkl has 4", MEND],
    ),
    "no state, downloaded": (
        without_digests(change_in("trial_state.pkl", dict.clear)),
        [],
        ["trial_state.pkl: cannot be read (batches_trained", MEND],
    ),
    "truncated": (truncate_model, [], [MODEL, "is truncated", OTHER, "(step 2)"]),
    "altered": (alter, [], [MODEL, "is not what was written", OTHER]),
    "missing": (lambda folder: (folder / MODEL).unlink(), [], [MODEL, "is missing", OTHER]),
    "no metadata": (lambda folder: (folder / METADATA).unlink(), [], [f"{METADATA}: is missing", OTHER]),
    "metadata of nothing": (
        lambda folder: (folder / METADATA).write_text("[" * 100_000),
        [],
        [f"{METADATA}: cannot be read", OTHER],
    ),
    "foreign": (
        lambda folder: (folder / "model0/other.pt").touch(),
        [],
        ["other.pt", "does not belong", OTHER],
    ),
    "truncated, downloaded": (without_digests(truncate_model), [], [MODEL, "cannot be loaded safely"]),
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
    "command in the callbacks": (
        smuggle("det_state_dict_rank0.pth"),
        [],
        ["det_state_dict_rank0.pth", "posix.system"],
    ),
    "command in the engine": (smuggle(MODEL), [], [MODEL, "posix.system"]),
    "other net": (
        None,
        overrides(hyperparameters__moe="true"),
        ["hyperparameters.moe: True", "made with False"],
    ),
    "other optimizer": (
        None,
        overrides(**{f"{DEEPSPEED}optimizer__type": "SGD"}),
        ["optimizer.type", "adam"],
    ),
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
    "other batch": (
        None,
        overrides(**{f"{DEEPSPEED}train_batch_size": 48}),
        ["train_batch_size: 48", "made with 32"],
    ),
    "other inputs": (
        None,
        overrides(data__normalize="imagenet"),
        ["data.normalize: [[0.485, 0.456, 0.406]", "made with [[0.5, 0.5, 0.5]"],
    ),
    "other seed": (
        None,
        overrides(reproducibility__experiment_seed=9),
        ["experiment_seed: 9", "made with 0"],
    ),
    # What another ZeRO stage goes on from
    "stage 0 to 2, no states": (
        signed_again(lambda folder: shutil.rmtree(folder / "by_name")),
        STAGE_2,
        ["zero_optimization.stage: 2", "it holds no states by the weights' names"],
    ),
    **{
        f"stage 0 to 2, {name}": (damage, STAGE_2, [words, MEND])
        for name, (damage, words) in {
            "a command": (smuggle("by_name/model0/exp_avg.pt"), "exp_avg.pt: cannot be loaded safely"),
            "no moments": (
                signed_again(lambda folder: (folder / "by_name/model0/exp_avg_sq.pt").unlink()),
                "exp_avg_sq.pt: cannot be loaded safely",
            ),
            "a moment's shape": (
                resigned("by_name/*/exp_avg.pt", put("fc1.bias", value=torch.zeros(9))),
                "exp_avg.pt: fc1.bias is (9,), but (120,) in this network",
            ),
            "a weight less": (
                resigned("by_name/*/weights.pt", drop("fc3.bias")),
                "weights.pt: fc3.bias is none, but (10,) in this network",
            ),
            "no counts": (resigned("by_name/*/state.pt", drop("counts")), "state.pt: counts is missing"),
            "other steps": (
                resigned("by_name/*/state.pt", put("counts", "global_steps", value=3)),
                "state.pt: global_steps: 3: but identity.json has 4",
            ),
        }.items()
    },
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
    with safe_load.allowed_globals():
        assert torch.load(tmp_path / "good.pt", weights_only=True) == {"zero_stage": ZeroStageEnum.gradients}
        with pytest.raises(pickle.UnpicklingError, match=r"getattr of .*LossScaler"):
            torch.load(tmp_path / "bad.pt", weights_only=True)


@pytest.fixture(scope="module")
def damaged_runs(two_checkpoints, tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("damaged"), {}
    for case, (damage, _, _) in DAMAGE.items():
        shutil.copytree(two_checkpoints.output, folder / case)
        if damage:
            damage(checkpoints(Run(0, "", "", folder / case))[4])
        before[case] = every_byte(folder / case)
    return before, train_many(folder, {case: [*TWO, *more, *LATEST] for case, (_, more, _) in DAMAGE.items()})


@pytest.mark.parametrize("case", DAMAGE)
def test_a_checkpoint_that_cannot_be_used_is_refused(damaged_runs, case):
    """Exit code 2, the file or key named, no command run, and not a byte of the run's folder changed."""
    before, runs = damaged_runs
    run = runs[case]
    assert run.code == 2, run.stderr
    for words in DAMAGE[case][2]:
        assert words in run.stderr
    assert len(run.stderr.splitlines()) == (2 if case == "stage 0 to 2, no states" else 1)
    assert not (run.output / "checkpoints/called").exists()
    assert every_byte(run.output) == before[case]


def test_steps_that_a_cluster_says_are_compared(two_checkpoints):
    """With those of the checkpoint; of another trial's a cluster takes the weights and starts at step 0."""
    path = checkpoints(two_checkpoints)[4]
    saved = identity.read(path, "uuid")
    for steps, trial_id in (4, 0), (0, 7):
        contents.check(path, saved, [], steps, trial_id)
    assert "batches_trained: 4: but the run has 3" in error_line(contents.check, path, saved, [], 3, 0)
    assert "trial_id: 0: is of a trial of a cluster" in error_line(contents.check, path, saved, [], 4, 7)


OPTIMIZER = "model0/*zero_pp_rank_{}_mp_rank_00_optim_states.pt"
FLAT = "single_partition_of_fp32_groups"
# Files of one rank, mode and layer that the others' do not tell of: so many processes, the mode, the file, the change.
OF_A_RANK = {
    "no states": (1, "zero1", OPTIMIZER.format(0), dict.clear, "holds no optimizer"),
    "a small partition": (1, "bf16", OPTIMIZER.format(0), put("optimizer_state_dict", FLAT, 0, value=torch.zeros(9)),
                          "its partitions hold less than the network's 62,006 weights"),
    "no experts": (1, "moe", "model0/layer_0_expert_1*", lambda held: [1], "is a list, no mapping"),
    "an expert's shape": (1, "moe", "model0/layer_0_expert_1*", dict.clear, "Missing key(s)"),
    "no master weights": (1, "fp16", MODEL, drop("optimizer", "fp32_groups"), "KeyError 'fp32_groups'"),
    "a rank's random state": (2, "digits", "det_state_dict_rank1.pth", drop("rng_state"), "rng_state is missing"),
    "a rank's partition": (2, "zero1", OPTIMIZER.format(1), put("optimizer_state_dict", FLAT, 0, value=torch.zeros(9)),
                           "is not partitioned as rank 0's"),
    "a rank's states": (2, "zero3", OPTIMIZER.format(1), drop("optimizer_state_dict", "fp32_flat_groups"),
                        "is not partitioned as rank 0's"),
    "a rank's weights": (2, "zero3", "model0/zero_pp_rank_1_mp_rank_00_model_states.pt",
                         drop("module", "fc3.bias"), "is missing, or not like rank 0's"),
    "a stage's weights": (2, "pipeline", "model0/layer_09-model_states.pt", drop("weight"), "Missing key(s)"),
}  # fmt: skip


def test_a_rank_s_files_are_looked_into(mode_runs, tmp_path):
    """In other modes: one line, from whichever rank, and no rank that waits for another."""
    processes, _, runs = mode_runs
    rows, modes = {}, mode_rows(processes)
    for case, (needed, mode, file, change, _) in OF_A_RANK.items():
        if needed == processes:
            shutil.copytree(runs[mode].output, tmp_path / case)
            (folder,) = checkpoints(Run(0, "", "", tmp_path / case)).values()
            assert list(folder.glob(file))
            resigned(file, change)(folder)
            rows[case] = [*modes[mode], *LATEST]
    for case, run in train_many(tmp_path, rows, processes).items():
        assert run.code == 2, f"{case}: {run.stderr}"
        (line,) = run.stderr.splitlines()
        assert OF_A_RANK[case][-1] in line and MEND in line, case
