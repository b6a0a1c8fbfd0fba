"""The state of an engine in shards: the same bits in every mode, readable by torch, and stored once."""

from typing import Any

import deepspeed
import pytest
import torch
from determined import pytorch
from line_trial import CONFIG, KEEP, LineTrial, fit, saving_fast
from matrix import ROWS
from support import Run, checkpoints, error_line
from test_any_trial import Linear
from test_matrix import each
from torch import nn
from torch.distributed import checkpoint as dcp

from deepspeed_trial.checkpoints import shards, state
from deepspeed_trial.checkpoints.shards import Shards
from deepspeed_trial.engines import engine_dtype
from deepspeed_trial.full_weights import update_network
from deepspeed_trial.trainer import init

PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}


class Halves(Linear):
    """A trial that computes in the precision of its engine."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        (engine,) = self.engines
        x, y = (each.to(engine_dtype(engine)) for each in next(dataloader_iter))
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        return {"loss": loss.float()}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"error": super().evaluate_batch(dataloader_iter, batch_idx)["error"].float()}


def values(folder) -> dict[str, torch.Tensor]:
    saved = Shards(folder)
    return {key: saved.read(key).view(shape) for key, shape in saved.shapes.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_stage_reads_and_writes_the_same_bits(tmp_path, precision):
    """A state passes from stage to stage, through engines that have not trained."""
    config = {**PRECISIONS[precision], "gradient_accumulation_steps": 1}
    trial, _ = fit(tmp_path / "run", Halves, deepspeed_config=config)
    state.save(trial.engines[0], tmp_path / "first", None, {})
    first, before = values(tmp_path / "first"), tmp_path / "first"
    assert len(first) == 4 * 4 and all(each.abs().sum() for each in first.values())
    numbers = state.numbers(trial.engines[0])
    assert numbers["counts"]["global_steps"] == 20
    for stage in (2, 3, 1, 0):
        changed = {**config, "zero_optimization": {"stage": stage}}
        hparams, folder = {"deepspeed_config": changed}, tmp_path / f"{stage}"
        with saving_fast(), init(hparams, KEEP, output=tmp_path / f"run {stage}") as context:
            (engine,) = Linear(context).engines
            state.check(engine, before, None)
            state.read(engine, before, None, {})
            update_network(engine)
            state.load_numbers(engine, numbers)
            state.save(engine, folder, None, {})
            assert state.numbers(engine)["counts"] == numbers["counts"]
        found, before = values(folder), folder
        assert found.keys() == first.keys()
        for key, value in found.items():
            assert torch.equal(value.double(), first[key].double()), (stage, key)


PLAIN = {name: ROWS[name] for name in ("zero0", "zero2", "zero3", "bf16")}


@each(PLAIN, most=True)
def test_torch_reads_the_files_and_they_hold_nothing_twice(runs, name, ranks):
    """Weights, two moments and the count of steps: 62,006 parameters, ten tensors."""
    (checkpoint,) = checkpoints(runs.stopped(name, ranks)).values()
    folder = shards.folder_of(checkpoint)
    saved = values(folder)
    found = {key: torch.zeros(value.numel(), dtype=value.dtype) for key, value in saved.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for key, value in saved.items():
        assert torch.equal(found[key], value.flatten()), key
    size = sum(file.stat().st_size for file in [*folder.iterdir(), *checkpoint.glob("net.*")])
    weights = sum(value.numel() for key, value in saved.items() if key.startswith("weights/"))
    assert weights == 62_006 and size < 1.05 * 3 * 4 * weights


def test_missing_and_doubled_elements_are_named(tmp_path):
    """Parts of two ranks: whole, with a gap, twice, too short."""

    def written(*parts):
        for rank, (start, count) in enumerate(parts):
            part = shards.Part(torch.arange(start, start + count), start, (2, 5))
            shards.write_file(tmp_path / shards.NAME.format(rank + 1), {"weights/a": part})
        (tmp_path / shards.RECORD).write_text(
            f'{{"ranks": {len(parts)}, "tensors": {{"weights/a": [2, 5]}}}}'
        )

    written((6, 4), (0, 6))
    assert Shards(tmp_path).read("weights/a", 4, 4).tolist() == [4, 5, 6, 7]
    assert Shards(tmp_path).weights()["a"].shape == (2, 5)
    for parts, words in {
        ((0, 5), (6, 4)): "weights/a: elements 5 to 6 are missing",
        ((0, 6), (5, 5)): "weights/a: elements 5 to 6 are there twice",
        ((0, 5), (5, 4)): "weights/a: has 9 elements of 10",
    }.items():
        written(*parts)
        assert words in error_line(Shards, tmp_path)
    (tmp_path / shards.NAME.format(2)).unlink()
    assert "shard-00002" in error_line(Shards, tmp_path)


def resumed(output, trial_class, **arguments):
    """Train 6 steps, and 2 more from the checkpoint; return both trials."""
    before, _ = fit(output, trial_class, max_length=pytorch.Batch(6), **arguments)
    (checkpoint,) = checkpoints(Run(0, "", "", output)).values()
    more = {"resumes": True, "latest_checkpoint": checkpoint.name, "max_length": pytorch.Batch(8)}
    return before, fit(output, trial_class, **more, **arguments)[0]


KEPT = {"row": torch.zeros(3), "counts": torch.zeros(1, 2, dtype=torch.int32)}


class Notes(torch.optim.SGD):
    """Keeps more of each weight."""

    kept: dict[str, Any]

    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            for key, start in self.kept.items():
                state[key] = state.get(key, start) + 1
        return super().step(closure)


class NotesTrial(LineTrial):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        (engine,) = self.engines
        loss = engine(next(dataloader_iter)[0].expand(-1, 2)).square().mean()
        engine.backward(loss)
        engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"error": self.engines[0](next(dataloader_iter)[0].expand(-1, 2)).square().mean()}

    def _engine(self, config):
        net = nn.Linear(2, 1, bias=False)
        config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        optimizer = Notes(net.parameters(), lr=0.01)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        return self.context.wrap_model_engine(engine)


@pytest.mark.parametrize("kind", KEPT)
def test_an_optimizer_with_states_of_other_shapes_resumes(tmp_path, monkeypatch, kind):
    """Shards have no place for these states, so DeepSpeed saves them."""
    monkeypatch.setattr(Notes, "kept", {kind: KEPT[kind]}, raising=False)
    _, again = resumed(tmp_path, NotesTrial)
    (optimizer,) = (engine.basic_optimizer for engine in again.engines)
    steps = {"row": [8, 8, 8], "counts": [[8, 8]]}[kind]
    for state_of_weight in optimizer.state.values():
        assert state_of_weight[kind].tolist() == steps


class EmptyTrial(LineTrial):
    def _engine(self, config):
        net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1))
        net[0].register_buffer("no_values", torch.empty(0, 3))
        net[0].no_weights = nn.Parameter(torch.empty(2, 0))
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        return self.context.wrap_model_engine(engine)


@pytest.mark.parametrize("stage", range(4))
def test_a_network_with_empty_tensors_resumes(tmp_path, stage):
    config = {"gradient_accumulation_steps": CONFIG["gradient_accumulation_steps"]}
    _, again = resumed(
        tmp_path, EmptyTrial, deepspeed_config={**config, "zero_optimization": {"stage": stage}}
    )
    assert again.engines[0].global_steps == 8
    (*_, checkpoint) = checkpoints(Run(0, "", "", tmp_path)).values()
    weights = Shards(shards.folder_of(checkpoint)).weights()
    assert (weights["0.no_values"].shape, weights["0.no_weights"].shape) == ((0, 3), (2, 0))


def without_a_moment(saved):
    del saved["exp_avg/0.bias"]


def with_another_shape(saved):
    saved["average/0.bias"] = saved.pop("weights/0.bias")
    saved["weights/0.bias"] = torch.zeros(9)


@pytest.mark.parametrize("change, line", [
    (without_a_moment, "exp_avg/0.bias is missing, but exp_avg/0.weight is there"),
    (with_another_shape, "weights/0.bias is (9,), but average/0.bias is (8,)"),
])  # fmt: skip
def test_tensors_that_do_not_fit_each_other_are_refused(tmp_path, change, line):
    trial, _ = fit(tmp_path / "run", LineTrial, deepspeed_config={"gradient_accumulation_steps": 2})
    (engine,) = trial.engines
    state.save(engine, tmp_path / "saved", None, {})
    saved = values(tmp_path / "saved")
    change(saved)
    parts = {key: shards.Part(value, 0, tuple(value.shape)) for key, value in saved.items()}
    shards.write(tmp_path / "saved", 0, parts)
    assert line in error_line(state.check, engine, tmp_path / "saved", None)
