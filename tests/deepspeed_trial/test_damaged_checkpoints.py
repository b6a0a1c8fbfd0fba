"""Checkpoints that are damaged, smuggle code or belong to another run: refused, nothing changed."""

import functools
import json
import operator
import os
import pickle
import shutil
from collections.abc import Callable

import pytest
import safetensors
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from matrix import DEEPSPEED, ROWS
from matrix import train as train_row
from safetensors.torch import load_file, save_file
from support import LATEST, MODEL, TWO, Run, checkpoints, error_line, overrides, truncate_model
from support import contents as every_byte

import train
from deepspeed_trial.checkpoints import contents, files, identity, safe_load, shards
from deepspeed_trial.errors import InvalidInput

METADATA, RANK0, STATE = files.METADATA, "det_state_dict_rank0.pth", "trial_state.pkl"


class Smuggled:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def alter(folder):
    file = folder / MODEL
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def signed(damage, digests=True):
    """Write the digests of the damaged files, so that only the content tells; or none, as on a cluster."""

    def damage_and_sign(folder):
        damage(folder)
        metadata = json.loads((folder / METADATA).read_text())
        for key in ("files", "sha256"):
            del metadata[key]
        (folder / METADATA).unlink()
        if digests:
            files.write_metadata(folder, metadata)
        else:
            (folder / METADATA).write_text(json.dumps(metadata))

    return damage_and_sign


def downloaded(damage):
    return signed(damage, digests=False)


def smuggle(file):
    def damage(folder):
        held = Smuggled(folder.parent / "called")
        if file.endswith(".pkl"):
            (folder / file).write_bytes(pickle.dumps({"trial_id": held}))
        else:
            torch.save({"module": held}, folder / file)

    return downloaded(damage)


def edit(pattern, change):
    """Change the content of each file that matches a pattern; ``change`` may return another content."""

    def damage(folder):
        paths = sorted(folder.glob(pattern))
        assert paths
        for path in paths:
            if path.suffix == ".safetensors":
                change_shard(path, change)
            elif path.suffix == ".json":
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


def change_shard(path, change):
    """Change the tensors, by their keys, and the places of their parts, under ``saved_offsets``."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    offsets = json.loads(metadata[shards.OFFSETS])
    held = {**load_file(path), "saved_offsets": offsets}
    change(held)
    del held["saved_offsets"]
    save_file(held, path, {**metadata, shards.OFFSETS: json.dumps(offsets)})


def inside(held, place):
    return functools.reduce(operator.getitem, place[:-1], held)


def put(*place, value):
    return lambda held: inside(held, place).__setitem__(place[-1], value)


def drop(*place):
    return lambda held: inside(held, place).__delitem__(place[-1])


def remove(file):
    return lambda folder: (folder / file).unlink()


OTHER, REMEDY = "the last undamaged one is of step", "resume from another checkpoint"
RECORD = f"model0/{shards.RECORD}"
BIAS = "weights/fc3.bias"
EARLIER = "model0/mp_rank_00_model_states.pt"  # as DeepSpeed saves
STEPS = put("steps_completed", value=2)
# Files with wrong contents and right digests: the file, the change, the words of the line
WRONG = {
    "steps in the metadata": (METADATA, STEPS, [f"{METADATA}: steps_completed: 2: differs from 4 in trial_state.pkl"]),
    "no state": (STATE, dict.clear, [f"{STATE}: cannot be read (batches_trained"]),
    "steps before the first": (STATE, put("batches_trained", value=-3), [f"{STATE}: cannot be read", "trained: -3)"]),
    "steps above any count": (STATE, put("batches_trained", value=10**30), [f"{STATE}: cannot be read (batches_tr"]),
    "a value without end": (identity.FILE, put("mode", "precision", value="x" * 9_999), ["was made with 'xxx", "xxx ..."]),
    "steps as text": (STATE, put("batches_trained", value="4"), ["(batches_trained: '4')"]),
    "processes as text": (identity.FILE, put("mode", "processes", value="1"), ["(processes: '1')"]),
    "no processes": (identity.FILE, drop("mode", "processes"), ["identity.json", "(processes: None)"]),
    "no mode": (identity.FILE, put("mode", value={}), ["identity.json: cannot be read"]),
    "an odd mode": (identity.FILE, put("mode", value=[]), ["identity.json: cannot be read (mode: [])"]),
    "no random state": (RANK0, put("rng_state", value={}), [RANK0, "rng_state: is invalid"]),
    "random state of a list": (RANK0, put("rng_state", value=[1]), [RANK0, "rng_state is missing"]),
    "random state of zeros": (RANK0, put("rng_state", "cpu_rng_state", value=torch.zeros(4)), ["is invalid"]),
    "no callbacks": (RANK0, drop("callbacks"), [RANK0, "callbacks is missing"]),
    "no numbers of the engine": (RANK0, drop("engines"), ["cannot be loaded (KeyError 'engines')"]),
    "no steps of the engine": (RANK0, drop("engines", 0, "counts", "global_steps"), ["KeyError 'global_steps'"]),
    "steps of the engine as text": (RANK0, put("engines", 0, "counts", "global_steps", value="4"),
                                    ["cannot be loaded (global_steps: '4': must be a whole number)"]),
    "an odd schedule": (RANK0, put("engines", 0, "schedule", value="x"), ["cannot be loaded"]),
    "no tensors": (RECORD, drop("tensors"), [f"{RECORD}: cannot be read (KeyError 'tensors')"]),
    "an odd shape": (RECORD, put("tensors", BIAS, value=[-1]), [f"{RECORD}: cannot be read ([-1]: must be"]),
    "ranks as text": (RECORD, put("ranks", value="1"), [f"{RECORD}: cannot be read (['1']: must be"]),
    "more ranks": (RECORD, put("ranks", value=2), ["shard-00002-model-00001-of-00001.safetensors: cannot be read"]),
    "a weight that is not in the record": (RECORD, drop("tensors", BIAS), [f"{BIAS}: is not in state.json"]),
    "a weight less": (MODEL, drop(BIAS), [f"{BIAS}: has 0 elements of 10"]),
    "a small weight": (MODEL, put(BIAS, value=torch.zeros(3)), [f"{BIAS}: has 3 elements of 10"]),
    "a weight elsewhere": (MODEL, put("saved_offsets", BIAS, "saved_offsets", value=[2]),
                           [f"{BIAS}: elements 0 to 2 are missing"]),
    "an odd place": (MODEL, put("saved_offsets", BIAS, "saved_offsets", value="2"), [f"{MODEL}: cannot be read"]),
    "a weight's shape": (RECORD, put("tensors", BIAS, value=[5, 2]), ["fc3.bias is (5, 2), but (10,) in this"]),
    "whole numbers": (MODEL, put(BIAS, value=torch.zeros(10, dtype=torch.int32)),
                      ["fc3.bias is (10,) of int32, but (10,) of float32"]),
    "a moment's shape": (RECORD, put("tensors", "exp_avg/fc3.bias", value=[5, 2]),
                         ["exp_avg/fc3.bias is (5, 2), but (10,) in this network"]),
    "a moment of whole numbers": (MODEL, put("exp_avg/fc3.bias", value=torch.zeros(10, dtype=torch.int32)),
                                  ["exp_avg/fc3.bias: torch.int32 is no type of an optimizer"]),
    "a count below 0": (MODEL, put("step/fc3.bias", value=torch.tensor([-1.0])),
                        ["cannot be loaded (step/fc3.bias: -1.0: must be at least 0 and finite)"]),
    "a learning rate as text": (RANK0, put("engines", 0, "groups", 0, "lr", value="1"),
                                ["cannot be loaded (groups.0.lr: '1': must be a number"]),
    "a moment less": (MODEL, drop("exp_avg/fc3.bias"), ["exp_avg/fc3.bias: has 0 elements of 10"]),
}  # fmt: skip
# Settings of another run
ANOTHER = {
    "net": ("hyperparameters__moe", "true", ["hyperparameters.moe: True", "made with False"]),
    "optimizer": (f"{DEEPSPEED}optimizer__type", "SGD", ["optimizer.type", "adam"]),
    "state": (f"{DEEPSPEED}optimizer__params__amsgrad", "true", ["amsgrad: True", "has no state for it"]),
    "precision": (f"{DEEPSPEED}bf16__enabled", "true", ["precision: 'bfloat16'", "'float32'"]),
    "batch": (f"{DEEPSPEED}train_batch_size", 48, ["train_batch_size: 48", "made with 32"]),
    "inputs": ("data__normalize", "imagenet", ["data.normalize: [[0.485, 0.456, 0.406]", "made with [[0.5, 0.5, 0.5]"]),
    "loss": ("hyperparameters__loss", "bce", ["hyperparameters.loss: 'bce'", "made with the default"]),
    "seed": ("reproducibility__experiment_seed", 9, ["experiment_seed: 9", "made with 0"]),
}  # fmt: skip
# The damage to the last checkpoint, further arguments, the words of the line
DAMAGE = {
    "no engine": (signed(lambda folder: shutil.rmtree(folder / "model0")), [],
                  ["It holds 0 engines, and the trial has 1", REMEDY]),
    "other steps": (edit(METADATA, STEPS), [], [f"{METADATA}: cannot be read (it has changed since it was written", OTHER]),
    "truncated": (truncate_model, [], [MODEL, "is truncated", OTHER, "of step 2; use"]),
    "altered": (alter, [], [MODEL, "has changed since it was written", OTHER]),
    "missing": (remove(MODEL), [], [MODEL, "is missing", OTHER]),
    "no metadata": (remove(METADATA), [], [f"{METADATA}: is missing", OTHER]),
    "metadata of nothing": (lambda folder: (folder / METADATA).write_text("[" * 100_000), [],
                            [f"{METADATA}: cannot be read", OTHER]),
    "foreign": (lambda folder: (folder / "model0/other.pt").touch(), [], ["other.pt", "does not belong", OTHER]),
    "other steps, downloaded": (downloaded(edit(METADATA, STEPS)), [],
                                ["steps_completed: 2: differs from 4 in trial_state.pkl", REMEDY]),
    "no state, downloaded": (downloaded(edit(STATE, dict.clear)), [],
                             [f"{STATE}: cannot be read (batches_trained", REMEDY]),
    "truncated, downloaded": (downloaded(truncate_model), [], [MODEL, "cannot be read"]),
    "missing, downloaded": (downloaded(remove(RANK0)), [], [RANK0, "is missing"]),
    "no identity": (downloaded(remove(identity.FILE)), [], ["identity.json", "cannot be read"]),
    **{f"a command in {file}": (smuggle(file), [], [file, "posix.system"]) for file in (STATE, RANK0, EARLIER)},
    **{name: (signed(edit(file, change)), [], [*words, *([] if file == identity.FILE else [REMEDY])])
       for name, (file, change, words) in WRONG.items()},
    **{f"another {name}": (None, overrides(**{key: value}), words)
       for name, (key, value, words) in ANOTHER.items()},
}  # fmt: skip


class ByName:
    """Pickles an attribute of a class as Python 3.11.2 pickles a member of an enumeration."""

    def __init__(self, *where):
        self.where = where

    def __reduce__(self):
        return getattr, self.where


def test_only_members_of_enumerations_load_by_their_names(tmp_path):
    torch.save({"zero_stage": ByName(ZeroStageEnum, "gradients")}, tmp_path / "good.pt")
    torch.save({"zero_stage": ByName(LossScaler, "backward")}, tmp_path / "bad.pt")
    with safe_load.allowed_globals():
        assert torch.load(tmp_path / "good.pt", weights_only=True) == {"zero_stage": ZeroStageEnum.gradients}
        with pytest.raises(pickle.UnpicklingError, match=r"getattr of .*LossScaler"):
            torch.load(tmp_path / "bad.pt", weights_only=True)


def test_pipes_and_devices_are_not_read(tmp_path):
    """A pipe would be waited for, for ever."""
    reads: dict[str, Callable] = {METADATA: files.read_metadata, STATE: safe_load.read_trial_state}
    reads[identity.FILE] = functools.partial(identity.read, name="uuid")
    reads[RANK0] = lambda folder: safe_load.read(folder / RANK0)
    for name, read in reads.items():
        (tmp_path / name).symlink_to("/dev/null")
        with pytest.raises((InvalidInput, OSError), match="is a pipe or a device"):
            read(tmp_path)


@pytest.mark.parametrize("place", [b"r" + (2**26).to_bytes(4, "little"), b"p67108864\n"])
def test_a_small_pickle_takes_no_gigabyte(tmp_path, place):
    """The unpickler would make a list of so many places."""
    (tmp_path / STATE).write_bytes(b"\x80\x02}" + place + b".")
    assert "object 67,108,864 of" in error_line(safe_load.read_trial_state, tmp_path)


def copy(source, target):
    """Link the hundreds of files of a checkpoint's code, and copy the rest."""
    (os.link if "/code/" in source else shutil.copy2)(source, target)


@pytest.mark.parametrize("case", DAMAGE)
def test_an_unusable_checkpoint_is_refused(two_checkpoints, tmp_path, capsys, case):
    """Exit code 2, a line with the file or key, no command run, no byte of the run's folder changed."""
    damage, more, words = DAMAGE[case]
    output = shutil.copytree(two_checkpoints.output, tmp_path / "run", copy_function=copy)
    if damage:
        damage(checkpoints(Run(0, "", "", output))[4])
    before = every_byte(output)
    code, said = train.main([*TWO, *more, *LATEST, "--output", str(output)]), capsys.readouterr().err
    assert code == 2, said
    assert all(word in said for word in words), said
    assert len(said.splitlines()) == 1
    assert not (output / "checkpoints/called").exists()
    assert every_byte(output) == before


def test_digests_cover_every_byte_and_file(tmp_path):
    large, whole = tmp_path / "large", bytes(3 << 20)
    large.write_bytes(whole)
    files.write_metadata(tmp_path, {"steps_completed": 1})
    assert files.damage(tmp_path) is None
    for place in (0, (1 << 20) + 5, (3 << 20) - 1):
        large.write_bytes(whole[:place] + b"x" + whole[place + 1 :])
        assert files.damage(tmp_path) == "large: has changed since it was written", place
    large.unlink()
    assert files.damage(tmp_path) == "large: is missing"


def test_the_steps_of_a_cluster_are_compared(two_checkpoints):
    """A cluster takes the weights of another trial's checkpoint, and starts at step 0."""
    path = checkpoints(two_checkpoints)[4]
    check = functools.partial(contents.check, path, identity.read(path, "uuid"))
    for steps, trial_id in (4, 0), (0, 7):
        check(steps, trial_id)
    assert "batches_trained: 4: differs from 3 in the run" in error_line(check, 3, 0)
    assert "trial_id: 0: a trial of a cluster saved this checkpoint" in error_line(check, 4, 7)


SECOND = "model0/shard-00002-model-00001-of-00001.safetensors"
EXPERT = "weights/fc3.deepspeed_moe.experts.deepspeed_experts.1.weight"
# Files of one rank and mode: the ranks, the row, the file, the change, the words of the line
OF_A_RANK = {
    "a rank's random state": (2, "zero0", "det_state_dict_rank1.pth", drop("rng_state"), "rng_state is missing"),
    "a rank's part": (2, "zero3", SECOND, drop(BIAS), f"{BIAS}: has 5 elements of 10"),
    "a rank's part elsewhere": (2, "zero3", SECOND, put("saved_offsets", BIAS, "saved_offsets", value=[4]),
                                f"{BIAS}: elements 4 to 5 are there twice"),
    "a rank's type": (2, "zero3", SECOND, put(BIAS, value=torch.zeros(5).half()), "its parts differ in type"),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_A_RANK)
def test_each_rank_s_files_are_checked(runs, tmp_path, case):
    """The ranks print one line together, and none waits for another."""
    ranks, name, file, change, words = OF_A_RANK[case]
    output = shutil.copytree(runs.stopped(name, ranks).output, tmp_path / "run")
    (folder,) = checkpoints(Run(0, "", "", output)).values()
    signed(edit(file, change))(folder)
    run = train_row(ROWS[name], ranks, output, runs.files, (*LATEST,))
    assert run.code == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert words in line and REMEDY in line
