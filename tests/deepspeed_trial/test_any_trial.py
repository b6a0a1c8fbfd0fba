"""Any ``DeepSpeedTrial``: this package keeps Determined's promises to it, on a CPU and with equal bits."""

import json
import os
import pathlib
import re
import shutil
import signal
from typing import Any

import deepspeed
import determined as det
import numpy as np
import pytest
import torch
from determined import pytorch
from line_trial import ACCUMULATION, CONFIG, MICRO_BATCH, POINTS, LineTrial, Points, fit
from support import PROJECT, Run, checkpoints, error_line, run, truncate_model
from torch import nn

from deepspeed_trial.engines import engine_dtype, loss_scale


def saved_in(output):
    return checkpoints(Run(0, "", "", output))


EPOCH = POINTS // (MICRO_BATCH * ACCUMULATION)  # 6 steps


@pytest.mark.parametrize(("form", "calls"), [("plain", ACCUMULATION), ("manual", 1)])
def test_a_run_resumes_to_the_same_bits_from_a_checkpoint_that_a_validation_saves(tmp_path, form, calls):
    """Step 10 is within an epoch, a validation draws random numbers, and a run may validate as often as it likes."""
    periods: dict[str, Any] = {
        "form": form,
        "validation_period": pytorch.Batch(5),
        "checkpoint_policy": "all",
    }
    straight, done = fit(tmp_path / "run", **periods)
    torch.manual_seed(99)
    at_10 = str(saved_in(tmp_path / "run")[10])
    resumed, again = fit(tmp_path / "other", latest_checkpoint=at_10, **periods)
    rarely, _ = fit(tmp_path / "rarely", form=form)
    assert (again.steps, again.epochs, again.validation) == (20, 3, done.validation)
    for other in (resumed, rarely):
        assert all(map(torch.equal, straight.weights(), other.weights()))
    assert straight.places == [(step // EPOCH, step) for step in range(20) for _ in range(calls)]
    assert resumed.places == straight.places[10 * calls :]
    assert all(map(torch.equal, straight.seen[10 * ACCUMULATION :], resumed.seen))
    epochs = torch.cat(straight.seen)[: 3 * POINTS].view(3, POINTS)
    assert all(sorted(epoch.tolist()) == list(range(POINTS)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_periods_epochs_and_callbacks(tmp_path):
    """Upstream's loop validates once instead of four times, always in epoch 0."""
    trial, _ = fit(tmp_path, validation_period=pytorch.Batch(5), form="own loader")
    counts = trial.calls.counts
    assert counts["validation_start"] == counts["validation_end"] == 4
    assert trial.calls.epochs == [0, 1, 2, 3]
    assert trial.places == [(step // EPOCH, step) for step in range(20) for _ in range(ACCUMULATION)]
    once = (
        "trial_startup",
        "training_start",
        "checkpoint_write_end",
        "checkpoint_upload_end",
        "trial_shutdown",
    )
    assert all(counts[name] == 1 for name in once) and counts["training_epoch_end"] == 3
    # A workload ends with an epoch, a validation or the training: after 5, 6, 10, 12, 15, 18 and 20 steps.
    assert [len(batches) for _, batches in trial.calls.workloads] == [10, 2, 8, 4, 6, 6, 4]
    trial, _ = fit(tmp_path / "epochs", max_length=pytorch.Epoch(4), validation_period=pytorch.Epoch(2))
    assert trial.calls.counts["validation_end"] == 2 and len(trial.calls.workloads) == 4


class WithTestData(LineTrial):
    """A trial with test data, half of the points."""

    def build_test_data_loader(self):
        return pytorch.DataLoader(torch.utils.data.Subset(Points(), range(24)), MICRO_BATCH)


TESTED_ON_TWO_RANKS = """
import pathlib, sys
from line_trial import *
from deepspeed_trial.errors import InvalidInput

class Trial(LineTrial):
    def build_test_data_loader(self):
        return pytorch.DataLoader(torch.utils.data.Subset(Points(), range(int(sys.argv[1]))), MICRO_BATCH)

try:
    _, done = fit(pathlib.Path(sys.argv[2]), Trial, max_length=pytorch.Batch(2))
except InvalidInput as error:
    sys.exit(str(error))
assert done.test["error"] > 0
"""


@pytest.mark.parametrize(
    ("batches", "code", "words"),
    [(3, 0, "ranks have 1 to 2 batches of test data"), (1, 1, "test data: a rank gets no batch; use more")],
)
def test_ranks_test_on_as_many_batches_as_each_has(tmp_path, batches, code, words):
    program = ["-c", TESTED_ON_TWO_RANKS, str(batches * MICRO_BATCH), str(tmp_path / "run")]
    done = run(program, tmp_path / "run", processes=2)
    assert done.code == code and words in done.stderr, done.stderr


@pytest.mark.parametrize("form", ["plain", "pipeline"])
def test_the_test_at_the_end_changes_nothing(tmp_path, form):
    periods: dict[str, Any] = {"validation_period": pytorch.Batch(5), "form": form}
    plain, without = fit(tmp_path / "plain", **periods)
    trial, done = fit(tmp_path / "tested", WithTestData, **periods)
    assert done.test.keys() >= {"error", "twice"} and not without.test
    assert done.validation == without.validation
    assert all(map(torch.equal, plain.weights(), trial.weights()))
    assert trial.calls.counts == plain.calls.counts  # the hooks of a validation keep silent
    lines = [json.loads(line) for line in (tmp_path / "tested/metrics.jsonl").read_text().splitlines()]
    (tested,) = (line for line in lines if line["group"] == "test")
    assert tested["steps_completed"] == 20 and tested["error"] == done.test["error"] > 0
    assert tested["error"] != done.validation["error"]


def test_metrics_are_as_upstream_takes_them(tmp_path):
    """Each report fetches scalars once and drops their graphs; arrays stay; a reducer covers the validation."""

    class Trial(LineTrial):
        def train_batch(self, *args):
            metrics = super().train_batch(*args)
            self.held.add_(1)
            return {**metrics, "counted": self.held, "pair": torch.ones(2) * self.held, "odd": [1, "two"]}

        def __init__(self, context):
            super().__init__(context)
            self.held = torch.zeros(())

    trial, done = fit(tmp_path, Trial, reporting_period=pytorch.Batch(3), max_length=pytorch.Batch(6))
    averages, batches = trial.calls.workloads[-1]
    assert [each["counted"] for each in batches] == [7, 8, 9, 10, 11, 12]  # the trial changes it in place
    assert averages["counted"] == 9.5 and type(batches[0]["loss"]) is float
    assert batches[0]["pair"].tolist() == [7, 7] and batches[0]["odd"] == [1, "two"]
    assert done.validation["twice"] == pytest.approx(2 * done.validation["error"])


def test_a_trial_s_mistakes_raise_upstream_s_errors(tmp_path):
    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.disable_auto_grad_accumulation()

    with pytest.raises(AssertionError, match="did not train for gradient accumulation steps"):
        fit(tmp_path, Trial)
    Trial.train_batch = lambda *arguments: (0, 0)  # type: ignore[method-assign]
    with pytest.raises(det.errors.InvalidExperimentException, match="train_batch must return a dictionary"):
        fit(tmp_path, Trial)


def test_unfit_checkpoints_and_data_are_refused_in_one_line(tmp_path):
    """A checkpoint of another number of engines raises an AssertionError, too, as upstream."""
    fit(tmp_path / "run", max_length=pytorch.Batch(2))
    (saved,) = saved_in(tmp_path / "run").values()

    def refused(trial_class=LineTrial, **arguments):
        return error_line(lambda: fit(tmp_path / "other", trial_class, resumes=True, **arguments))

    two_engines: dict[str, Any] = {"latest_checkpoint": str(saved), "form": "two engines"}
    assert "It holds 1 engines, and the trial has 2" in refused(**two_engines)
    with pytest.raises(AssertionError, match="Failed to load deepspeed checkpoint"):
        fit(tmp_path / "other", resumes=True, **two_engines)
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    assert "optimizer.type: 'SGD'" in refused(latest_checkpoint=str(saved), deepspeed_config=sgd)
    truncate_model(saved)
    assert ".safetensors: cannot be read" in refused(latest_checkpoint=str(saved))
    assert refused(latest_checkpoint="nope").startswith("latest_checkpoint: 'nope': not found, or damaged")

    class Empty(LineTrial):
        def build_validation_data_loader(self):
            return pytorch.DataLoader(Points(), POINTS + 1, drop_last=True)

    assert refused(Empty).startswith("validation data: a rank gets no batch")
    line = refused(deepspeed_config={"gradient_accumulation_steps": 50})
    assert line.startswith("training data: a rank has fewer than the 50 micro-batches of an optimizer step")


def test_callbacks_keep_their_names_and_numpy_numbers(tmp_path):
    """A callback called monitor gets its calls; a state with numpy's numbers loads; another type is named."""

    class Trial(LineTrial):
        kept: Any = np.float64(0.5)

        def build_callbacks(self):
            self.calls.state_dict = lambda: {"kept": self.kept}
            self.calls.load_state_dict = lambda state: setattr(self, "loaded", state["kept"])
            return {"monitor": self.calls}

    class Other(Trial):
        kept = pathlib.PurePosixPath("x")

    def resumed(trial_class):
        output = tmp_path / trial_class.__name__
        trial, _ = fit(output, trial_class, max_length=pytorch.Batch(2))
        assert trial.calls.counts["training_start"] == 1
        (saved,) = saved_in(output).values()
        more = {"resumes": True, "max_length": pytorch.Batch(3), "latest_checkpoint": str(saved)}
        return fit(output, trial_class, **more)[0]

    assert resumed(Trial).loaded == 0.5
    assert "call torch.serialization.add_safe_globals" in error_line(resumed, Other)


class Linear(LineTrial):
    """A trial of networks without batch normalization, which a CPU does not compute in fp16."""

    def _engine(self, config):
        net = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        return self.context.wrap_model_engine(engine)

    def evaluate_batch(self, dataloader_iter, batch_idx):
        x, y = (each.to(engine_dtype(self.engines[0])) for each in next(dataloader_iter))
        error = nn.functional.mse_loss(self.engines[0](x), y)
        self.reducer.update(error.item())
        return {"error": error}


class Gan(Linear):
    """The loss of the first engine passes through the second one, as in Determined's example ``dcgan``."""

    def __init__(self, context):
        super().__init__(context)
        self.generator, self.discriminator = self.engines

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        x, y = (each.to(engine_dtype(self.generator)) for each in next(dataloader_iter))
        self.discriminator.zero_grad()
        made = self.generator(x)
        real = nn.functional.mse_loss(self.discriminator(x), y)
        fake = nn.functional.mse_loss(self.discriminator(made.detach()), -y)
        self.discriminator.backward(real + fake)
        self.discriminator.step()
        self.discriminator.module.requires_grad_(self.discriminator.zero_optimization_stage() < 2)
        loss = nn.functional.mse_loss(self.discriminator(made), y)
        self.generator.backward(loss)
        self.discriminator.module.requires_grad_(True)
        self.generator.step()
        return {"loss": loss}


def test_a_loss_passes_through_a_second_engine_in_every_stage_and_precision(tmp_path):
    """All train to the same weights; with ZeRO 2 the trial freezes the second engine meanwhile."""
    sgd = {"type": "SGD", "params": {"lr": 0.02}}
    fixed = {"gradient_accumulation_steps": 1, "gradient_clipping": 0, "optimizer": sgd}
    fixed["zero_allow_untested_optimizer"] = True

    def trained(stage, **precision):
        config = {**fixed, "zero_optimization": {"stage": stage}, **precision}
        output = tmp_path / f"{stage}{len(precision)}"
        trial, _ = fit(output, Gan, form="two engines", deepspeed_config=config)
        assert not any(engine.skipped_steps for engine in trial.engines)
        return torch.cat([weight.float().flatten() for weight in trial.weights()])

    expected, fp16 = trained(1), {"enabled": True, "initial_scale_power": 8}
    torch.testing.assert_close(trained(0), expected)
    for stage in (0, 1, 2):
        torch.testing.assert_close(trained(stage, fp16=fp16), expected, rtol=0.01, atol=0.002)


def test_a_trial_s_own_backward_without_zero_is_still_refused(tmp_path):
    """DeepSpeed would not reduce its gradients."""

    class Trial(LineTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            x, y = next(dataloader_iter)
            nn.functional.mse_loss(self.engines[0](x), y).backward()

    with pytest.raises(RuntimeError, match="Please use engine"):
        fit(tmp_path, Trial)


def test_an_engine_without_an_optimizer_trains_none_and_resumes(tmp_path):
    """A teacher, whose outputs a second engine learns."""

    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            batch = {key: CONFIG[key] for key in CONFIG if key not in ("optimizer", "scheduler")}
            untrained = {**batch, "gradient_clipping": 0}
            engine, *_ = deepspeed.initialize(model=nn.Linear(1, 1), config=untrained)
            self.teacher = context.wrap_model_engine(engine)

        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            x, _ = next(dataloader_iter)
            with torch.no_grad():
                y = self.teacher(x)
            loss = nn.functional.mse_loss(self.engines[0](x), y)
            self.engines[0].backward(loss)
            self.engines[0].step()
            return {"loss": loss}

        def weights(self):
            return [*super().weights(), *self.teacher.module.state_dict().values()]

    straight, _ = fit(tmp_path / "run", Trial, checkpoint_period=pytorch.Batch(10))
    at_10 = str(saved_in(tmp_path / "run")[10])
    torch.manual_seed(99)
    resumed, _ = fit(tmp_path / "other", Trial, latest_checkpoint=at_10)
    assert all(map(torch.equal, straight.weights(), resumed.weights()))


def test_an_fp16_loss_times_its_scale_may_exceed_fp16(tmp_path):
    """Without ZeRO, too; ``backward`` returns the loss of a micro-batch's share, as in every stage."""

    class Trial(Linear):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            x, y = (each.half() for each in next(dataloader_iter))
            loss = nn.functional.mse_loss(self.engines[0](x), y) + 16
            assert not (loss * self.scale).isfinite()
            returned = self.engines[0].backward(loss)
            assert returned.dtype == loss.dtype
            assert returned.item() == pytest.approx(loss.item() / ACCUMULATION, rel=1e-3)
            self.engines[0].step()
            return {"loss": loss}

        @property
        def scale(self):
            return loss_scale(self.engines[0])

    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 1000}
    trial, _ = fit(tmp_path, Trial, deepspeed_config={"fp16": fp16}, max_length=pytorch.Batch(4))
    assert trial.engines[0].skipped_steps == 0 and trial.scale == 2**12


VOTE = """
import pathlib, sys, time, torch
from deepspeed_trial.context import init
from deepspeed_trial.stops import Vote

with init(output=pathlib.Path(sys.argv[1])) as context:
    rank, vote, step = context.distributed.rank, Vote(context.distributed), 0
    while True:
        step += 1
        torch.distributed.all_reduce(torch.ones(1))  # no rank is more than a step ahead
        if rank == int(sys.argv[2]) and step == int(sys.argv[3]):
            vote.ask()
        time.sleep(0.01 * ((rank + step) % 3))
        if vote.is_last(step, meets=step == 300) or step == 300:
            break
    steps = context.distributed.allgather(step)
    sys.exit(0 if len(set(steps)) == 1 and int(sys.argv[3]) <= step < 300 else str(steps))
"""


@pytest.mark.parametrize(("rank", "step"), [(0, 1), (2, 30)])
def test_ranks_agree_on_the_last_step(tmp_path, rank, step):
    done = run(["-c", VOTE, str(tmp_path / "run"), str(rank), str(step)], tmp_path, processes=3)
    assert done.code == 0, done.stderr


def test_a_stop_leaves_a_due_validation_to_the_resumed_run(tmp_path):
    """The validation there knows its step."""
    steps = []

    class Stopped(LineTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            if batch_idx == 8:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

        def build_callbacks(self):
            callback = pytorch.PyTorchCallback()
            callback.on_validation_start = lambda: steps.append(self.context.current_train_batch() + 1)
            return {"steps": callback}

    arguments = {"validation_period": pytorch.Batch(9), "max_length": pytorch.Batch(12)}
    _, stopped = fit(tmp_path / "run", Stopped, **arguments)
    assert stopped.interrupted and stopped.steps == 9 and not steps
    fit(tmp_path / "run", Stopped, resumes=True, latest_checkpoint=stopped.checkpoint, **arguments)
    assert steps == [9, 12]


TWO_RANKS = """
import pathlib, sys
from line_trial import *
from determined.pytorch.deepspeed import ModelParallelUnit
rank = int(__import__("os").environ["RANK"])

class Trial(LineTrial):
    def __init__(self, context):
        super().__init__(context)
        torch.manual_seed(rank)  # as after a dropout that differs by rank
        context.set_mpu(ModelParallelUnit(rank, 2, rank == 0, True))  # rank 1 reports nothing
    def train_batch(self, *args):
        metrics = super().train_batch(*args)
        return metrics if rank == 0 else None

with init(output=pathlib.Path(sys.argv[1])) as context:
    trial = Trial(context)
    Trainer(trial, context).fit(max_length=pytorch.Epoch(2))
    seen = context.distributed.gather(torch.cat(trial.seen).tolist())
if rank == 0:
    for epoch in range(2):
        of_ranks = [each[epoch * POINTS // 2 : (epoch + 1) * POINTS // 2] for each in seen]
        assert sorted(sum(of_ranks, [])) == list(range(POINTS)), of_ranks
    assert len(trial.calls.workloads[-1][1]) == 3 * ACCUMULATION
"""


def test_ranks_share_one_order_and_only_reporting_ranks_report(tmp_path):
    """Though the ranks' generators differ, an epoch has every point once."""
    done = run(["-c", TWO_RANKS, str(tmp_path / "run")], tmp_path, processes=2)
    assert done.code == 0, done.stderr


def test_the_example_trains_and_resumes_in_two_processes(tmp_path):
    shutil.copytree(PROJECT / "examples", tmp_path / "examples")
    config = tmp_path / "examples/text.yaml"
    for steps, arguments in ("4", []), ("8", ["--resume"]):
        config.write_text(re.sub(r"steps: \d+", f"steps: {steps}", config.read_text()))
        program = ["-m", "examples.text", *arguments]
        done = run(program, tmp_path / "runs/text", processes=2, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.code == 0, done.stderr
    assert done.validated_at == [4, 8]
