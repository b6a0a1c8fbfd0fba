"""The forecast of memory: states by hand, activations by another way, and a run's own measure."""

import json

import pytest
import torch
from matrix import DEEPSPEED, TEACHER
from matrix import VIT as SMALL
from support import DIGITS, execute, launcher, overrides

import train
from classify.config import experiment_file
from classify.engine import memory
from classify.engine.memory import (
    HOLES,
    MIB,
    Forecaster,
    measure_activations,
    model_states,
    partition_copies,
)
from classify.engine.trial_config import TrialConfig
from classify.models import net_file, registry
from classify.models.registry import NetSpec
from deepspeed_trial import machine

NET = 62_006  # parameters of Net, an even number
VIT = {
    "hyperparameters__net": "vit_b_32",
    "hyperparameters__net_args": json.dumps({**SMALL, "patch_size": 4}),
    "data__image_size": 64,
}


def resolve(processes=1, device="cpu", **changes) -> TrialConfig:
    arguments = overrides(**changes)[1::2]
    experiment = experiment_file.load("experiments/digits.yaml", arguments)
    return TrialConfig.resolve(experiment.hyperparameters, experiment.config, processes, device)


def forecast(config: TrialConfig) -> memory.Forecast:
    return Forecaster(config)(config.micro_batch)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [
        (0, 4 * NET, 4 * NET, 8 * NET),
        (1, 4 * NET, 4 * NET, 12 * NET // 2),  # fp32 weights of the partition, and Adam's two numbers
        (2, 4 * NET, 4 * NET // 2, 12 * NET // 2),
        (3, 4 * NET // 2, 4 * NET // 2, 12 * NET // 2),
    ],
)
def test_states_of_two_processes_by_hand(stage, weights, gradients, optimizer):
    config = resolve(2, **{f"{DEEPSPEED}zero_optimization__stage": stage})
    assert model_states(config) == {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    parts = Forecaster(config)(32).parts
    # ZeRO 3 has its half and the gathered weights
    assert parts["weights"] == (4 * NET if stage < 3 else 6 * NET)
    assert parts["optimizer"] == optimizer


@pytest.mark.parametrize(
    "changes", [{"stage": 1}, {"stage": 2}, {"stage": 2, "reduce_bucket_size": 1000}, {"stage": 3}], ids=str
)
def test_copies_of_zero_by_hand(changes):
    copies = 12 * NET // 2  # the flat gradients of the partition, and Adam's two temporaries
    config = resolve(2, **{f"{DEEPSPEED}zero_optimization": json.dumps(changes)})
    assert partition_copies(config) == forecast(config).parts["copies"] == copies
    # With 8 processes the bucket of all gradients is larger than a step on an eighth of them, without it not
    config = resolve(8, **{f"{DEEPSPEED}zero_optimization": json.dumps(changes)})
    share = -(-NET // 8)
    whole = changes["stage"] > 1 and "reduce_bucket_size" not in changes
    assert partition_copies(config) == (4 * NET if whole else 12 * share)
    bf16 = {f"{DEEPSPEED}bf16__enabled": "true", f"{DEEPSPEED}zero_optimization": json.dumps(changes)}
    assert partition_copies(resolve(2, **bf16)) == 16 * NET // 2  # 16-bit gradients are summed in fp32
    assert "copies" not in forecast(resolve(2)).parts


def test_states_of_other_optimizers_precisions_and_frozen_layers():
    sgd = {f"{DEEPSPEED}optimizer": '{"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}'}
    assert model_states(resolve(**sgd))["optimizer"] == 4 * NET
    bf16 = {f"{DEEPSPEED}bf16__enabled": "true"}
    assert model_states(resolve(**bf16)) == {"weights": 2 * NET, "gradients": 2 * NET, "optimizer": 12 * NET}
    head = model_states(resolve(hyperparameters__head_only="true"))
    assert head["optimizer"] == 8 * (84 * 10 + 10)


def test_activations_grow_with_the_micro_batch_as_a_measure_of_it_does():
    config = resolve(**VIT)
    forecaster = Forecaster(config)
    sizes = [forecaster(size).parts["activations"] for size in (16, 32, 48)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.01) and sizes[1] > 1.8 * sizes[0]
    assert sizes[2] == pytest.approx(HOLES * measure_activations(config, 48), rel=0.01)


def test_recomputed_and_16_bit_activations_are_fewer_and_an_average_has_the_size_of_the_weights():
    plain = forecast(resolve(**VIT)).parts
    recomputed = forecast(resolve(**VIT, hyperparameters__checkpoint_activations="true")).parts
    bf16 = forecast(resolve(**VIT, **{f"{DEEPSPEED}bf16__enabled": "true"})).parts
    assert recomputed["activations"] < 0.7 * plain["activations"]
    assert bf16["activations"] < 0.6 * plain["activations"]
    average = forecast(resolve(**VIT, hyperparameters__weight_average="{decay: 0.99}")).parts
    assert average["average"] == plain["weights"]


def test_frozen_weights_need_fewer_activations():
    plain, head = forecast(resolve(**VIT)), forecast(resolve(**VIT, hyperparameters__head_only="true"))
    assert head.note is None and head.parts["weights"] < plain.parts["weights"]
    assert head.parts["activations"] < 0.2 * plain.parts["activations"]
    airbench = forecast(resolve(hyperparameters__net="airbench"))  # its first layer is frozen
    assert airbench.note is None and airbench.parts["activations"] > 0


def test_a_teacher_adds_its_weights_and_what_it_needs_more_than_the_network(tmp_path):
    plain, large = forecast(resolve()).parts, {"height": 224, "width": 224, "resize": [224, 224]}
    described = {
        "net": {**TEACHER, "net": {"name": "net", "num_classes": 10}},
        "resnet18": {
            **TEACHER,
            "net": {"name": "resnet18", "num_classes": 10},
            "input": {**TEACHER["input"], **large},
        },
    }
    found, weights = {}, {}
    for name, description in described.items():
        net = registry.build(NetSpec(name, 10, (224, 224), None))
        weights[name] = 4 * sum(parameter.numel() for parameter in net.parameters())
        net_file.write(tmp_path / f"{name}.pt", net.state_dict(), description)
        taught = forecast(resolve(hyperparameters__teacher=tmp_path / f"{name}.pt"))
        assert taught.note is None
        found[name] = taught.parts
        assert found[name]["teacher"] == weights[name]
    assert found["net"]["activations"] == plain["activations"]
    first_layer = 32 * 4 * 64 * 112 * 112  # bytes of its output, of a micro-batch
    assert first_layer < found["resnet18"]["activations"] < 6 * first_layer


def test_offloaded_states_are_the_hosts_beside_a_gpu():
    zero = '{"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000000}'
    config = resolve(2, "cuda", **VIT, **{f"{DEEPSPEED}zero_optimization": zero})
    offloaded, states = forecast(config), model_states(config)
    assert "optimizer" not in offloaded.parts
    assert offloaded.host >= states["optimizer"] + states["gradients"]


def test_a_network_that_cannot_be_traced_has_its_states_alone():
    found = forecast(resolve(2, hyperparameters__pipe_parallel_size=2))
    assert found.note and set(found.parts) == {"base", "weights", "gradients", "optimizer"}


def test_check_prints_whether_it_fits(capsys):
    assert train.main(["--check", *DIGITS, *overrides(**VIT), "--slots", "2"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "memory " in line]
    assert len(lines) == 2, lines
    assert "MiB for each of 2 processes with micro-batches of 16: base " in lines[0]
    assert (
        "memory fits into the" in lines[1] and "the largest micro-batch that fits has 718 images" in lines[1]
    )


def test_what_does_not_fit_says_what_does():
    config = resolve(**VIT)
    forecaster = Forecaster(config)
    limit = forecaster(20).total
    assert forecaster.largest(limit) == 20
    assert "does not fit" in memory.describe(config, limit)[1]
    assert "a micro-batch of 1 image does not fit either" in memory.describe(config, 1)[1]
    whole, half = (machine.memory_limit(processes, "cpu") for processes in (1, 2))
    assert whole and half and 2 * half <= whole < 2 * half + 2


@pytest.mark.soak
def test_a_run_takes_what_was_forecast(tmp_path):
    chosen = {
        "hyperparameters__net": "resnet50",
        "data__image_size": 64,
        "hyperparameters__max_length": "{batches: 3}",
        f"{DEEPSPEED}train_batch_size": 64,
        f"{DEEPSPEED}scheduler": "null",
    }
    command = [*launcher("python", 1), "train.py", *DIGITS, *overrides(**chosen)]
    run = execute([*command, "--output", str(tmp_path)], tmp_path, OMP_NUM_THREADS="1")
    assert run.code == 0, run.stderr
    foreseen = forecast(resolve(**chosen))
    (measured,) = run.summary["peak_memory_mib"]
    base = foreseen.parts["base"] / MIB
    assert not torch.cuda.is_available()
    assert foreseen.total / MIB - base == pytest.approx(measured - base, rel=0.25)
