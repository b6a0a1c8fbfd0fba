"""Checkpoints that are damaged, smuggle code or are of something else: refused, nothing changed."""

import json
import os
import pickle
import shutil

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from modes import DEEPSPEED
from support import (
    LATEST,
    MODEL,
    TWO,
    Run,
    checkpoints,
    contents,
    overrides,
    train_many,
    truncate_model,
)

from harness.checkpoints import safe_load

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
    "stage 0 to 2": (
        None,
        overrides(**{f"{DEEPSPEED}zero_optimization__stage": 2}),
        [
            "zero_optimization.stage: 2",
            "DeepSpeed cannot turn a checkpoint of ZeRO stage 0 into one of stage 2",
        ],
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
