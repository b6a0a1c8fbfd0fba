"""A checkpoint of a Determined cluster becomes a run that continues."""

import json
import pickle
from dataclasses import asdict
from typing import Any

import pytest
import torch
from determined import pytorch
from line_trial import fit
from support import PROJECT, error_line, run

import checkpoint
from deepspeed_trial.checkpoints import safe_load
from deepspeed_trial.checkpoints.files import known
from workbench.imported import import_checkpoint

METADATA = {"determined_version": "0.38.1", "steps_completed": 10, "framework": "torch", "format": "pickle"}
# Determined's own trainer
STOCK = """
import pathlib, shutil, sys
import deepspeed, torch
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from line_trial import LineTrial, train_on_a_cpu
from deepspeed_trial.random_state import seed_everything

train_on_a_cpu(det_ds)

target, stage = pathlib.Path(sys.argv[1]), int(sys.argv[2])
deepspeed.init_distributed()
seed_everything(3)
hparams = {"deepspeed_config": {"zero_optimization": {"stage": stage}}}
with det_ds.init(hparams=hparams, exp_conf={}) as context:
    context._trial_seed = 3  # as a master gives it
    trial = LineTrial(context)

    def on_checkpoint_write_end(path):
        if not target.exists():
            shutil.copytree(path, target)
            torch.save(trial.weights(), sys.argv[3])

    trial.calls.on_checkpoint_write_end = on_checkpoint_write_end
    every = {"checkpoint_period": pytorch.Batch(6), "checkpoint_policy": "none"}  # an epoch at most
    det_ds.Trainer(trial, context).fit(max_length=pytorch.Batch(12), **every)
"""


def hparams(stage):
    return {"deepspeed_config": {"zero_optimization": {"stage": stage}}}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_of_determined_s_own_trainer_continues(stage, tmp_path):
    """Its weights and its optimizer are those that Determined's own trainer saved."""
    source, weights = tmp_path / "downloaded", tmp_path / "weights.pt"
    places = {
        "PYTHONPATH": f"{PROJECT}:{PROJECT}/tests/deepspeed_trial",
        "XDG_DATA_HOME": str(tmp_path / "stored"),
    }
    words = ["-c", STOCK, str(source), str(stage), str(weights)]
    (tmp_path / "code").mkdir()
    done = run(words, tmp_path, processes=1, cwd=tmp_path / "code", **places)
    assert done.code == 0, done.stderr
    state = safe_load.read_trial_state(source)
    (source / "trial_state.pkl").write_bytes(pickle.dumps({**asdict(state), "trial_id": 7}))
    (source / "metadata.json").write_text(json.dumps(METADATA))
    assert checkpoint.main(["import", str(source), str(tmp_path / "run")]) == 0
    (name,) = known(tmp_path / "run/checkpoints")
    assert known(tmp_path / "run/checkpoints")[name]["steps_completed"] == 6
    found: dict[str, Any] = {"resumes": True, "latest_checkpoint": name, **hparams(stage)}
    loaded, _ = fit(tmp_path / "run", max_length=pytorch.Batch(6), **found)
    assert all(torch.equal(*pair) for pair in zip(loaded.weights(), torch.load(weights), strict=True))
    (engine,) = loaded.engines
    assert engine.global_steps == 6
    states = engine.optimizer.optimizer.state if stage else engine.optimizer.state
    assert {int(state["step"]) for state in states.values()} == {6}
    _, fitted = fit(tmp_path / "run", max_length=pytorch.Batch(9), **found)
    assert fitted.steps == 9


def test_a_cluster_s_checkpoint_continues_to_the_same_bits(tmp_path):
    """The trial on the cluster had this package; its metadata has no digests there, and its trial a number."""
    fit(tmp_path / "cluster", max_length=pytorch.Batch(10), checkpoint_policy="all")
    (saved,) = (tmp_path / "cluster/checkpoints").glob("[!.]*")
    state = {**asdict(safe_load.read_trial_state(saved)), "trial_id": 7}
    (saved / "trial_state.pkl").write_bytes(pickle.dumps(state))
    (saved / "metadata.json").write_text(json.dumps(METADATA))
    assert import_checkpoint(saved, tmp_path / "run") == 10
    trial, _ = fit(tmp_path / "run", resumes=True, latest_checkpoint=saved.name)
    straight, _ = fit(tmp_path / "straight")
    assert all(torch.equal(*pair) for pair in zip(trial.weights(), straight.weights(), strict=True))
    assert "holds a run" in error_line(import_checkpoint, saved, tmp_path / "run")
    import_checkpoint(saved, tmp_path / "finished")
    _, fitted = fit(
        tmp_path / "finished", resumes=True, latest_checkpoint=saved.name, max_length=pytorch.Batch(10)
    )
    assert fitted.steps == 10 and fitted.validation  # the new run's own


def test_no_other_folder_is_imported(tmp_path, capsys):
    (tmp_path / "odd").mkdir()
    assert checkpoint.main(["import", str(tmp_path / "none"), str(tmp_path / "run")]) == 2
    assert "no such folder; give a folder that `det checkpoint download` wrote" in capsys.readouterr().err
    assert "has no trial_state.pkl" in error_line(import_checkpoint, tmp_path / "odd", tmp_path / "run")
    (tmp_path / "odd/trial_state.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "cannot be read" in error_line(import_checkpoint, tmp_path / "odd", tmp_path / "run")
    (tmp_path / "odd/link").symlink_to("/etc/passwd")
    assert "is a link, a pipe or a device" in error_line(
        import_checkpoint, tmp_path / "odd", tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()
