"""Muon on a network with a convolution, a head and a class token, against a reference implementation of its step."""

import json
import math
import shutil
from typing import Any

import pytest
import torch
from modes import SMALL, losses
from support import LATEST, overrides, train_many
from torch.nn import functional as F

import data
from classify.engine.trial_config import TrialConfig
from classify.models import registry

STEPS, STOP, LR, ADAM_LR, DECAY, MOMENTUM = 30, 17, 0.02, 0.002, 0.01, 0.9
HYPER: dict = {
    "net": "vit_b_16",
    "net_args": SMALL,
    "train_batch_size": 32,
    "optimizer": {
        "type": "Muon",
        "params": {"lr": LR, "adam_lr": ADAM_LR, "momentum": MOMENTUM, "weight_decay": DECAY, "eps": 1e-8},
    },
    "scheduler": {"type": "LinearLR", "params": {"start_factor": 1, "end_factor": 0}},
    "weight_decay_on": "weights",
    "parameter_groups": [
        {"match": r"conv_proj\.weight", "lr_factor": 0.5},
        {"match": "in_proj_weight", "muon": False},
    ],
    "max_length": {"batches": STEPS},
}
DATA = {"dataset": "digits", "image_size": 32}
# Those that Muon trains, and their learning rate's factor.
MATRICES = {"conv_proj.weight": 0.5}
for layer in (0, 1):
    for part in ("self_attention.out_proj", "mlp.0", "mlp.3"):
        MATRICES[f"encoder.layers.encoder_layer_{layer}.{part}.weight"] = 1


def orthogonal(matrix):
    """Five Newton-Schulz steps towards the nearest matrix of which all singular values are 1."""
    x = matrix.double() / (matrix.norm() + 1e-7)
    x = x.T if len(x) > len(x.T) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x if x.shape == matrix.shape else x.T).float()


def reference(weights):
    """The losses of a bare loop, and its weights in the end."""
    config = TrialConfig.resolve({**HYPER, "weights": str(weights)}, {"data": DATA}, 1, "cpu")
    images = data.Images(config.data, config.source, 0, torch.device("cpu"))
    net = registry.build(config.net)
    net.load_state_dict(torch.load(weights))
    named, momenta, lost = dict(net.named_parameters()), dict.fromkeys(MATRICES, 0), []
    rest = {name: each for name, each in named.items() if name not in MATRICES}
    decayed = [each for each in rest.values() if sum(size > 1 for size in each.shape) > 1]
    others = [each for each in rest.values() if sum(size > 1 for size in each.shape) < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0}]
    adam = torch.optim.AdamW(groups, lr=ADAM_LR, betas=(0.9, 0.95))
    for step, indices in zip(range(STEPS), images.training_sampler(32, 1), strict=False):
        loss = F.cross_entropy(
            net(images.inputs(images.train.images[indices], False)), images.train.labels[indices]
        )
        lost.append(loss.item())
        net.zero_grad()
        loss.backward()
        left = 1 - step / STEPS
        for group in adam.param_groups:
            group["lr"] = ADAM_LR * left
        adam.step()
        for name, factor in MATRICES.items():
            weight, rate = named[name], LR * factor * left
            grad: Any = weight.grad
            momenta[name] = MOMENTUM * momenta[name] + (1 - MOMENTUM) * grad
            update = orthogonal((MOMENTUM * momenta[name] + (1 - MOMENTUM) * grad).flatten(1))
            update *= math.sqrt(max(1, len(update) / len(update.T)))
            with torch.no_grad():
                weight.mul_(1 - rate * DECAY).sub_(rate * update.view(weight.shape))
    return lost, named


def row(weights, stage, **more):
    hyper = {**HYPER, "weights": str(weights), "zero_optimization": {"stage": stage}, **more}
    chosen = overrides(scheduling_unit=1, data=json.dumps(DATA), hyperparameters=json.dumps(hyper))
    return ["--config", "experiments/digits.yaml", *chosen]


@pytest.fixture(scope="module", params=[1, 2])
def muon_runs(request, tmp_path_factory):
    """Runs at every ZeRO stage, straight through and stopped."""
    folder, processes = tmp_path_factory.mktemp("muon"), request.param
    weights = folder / "first.pt"
    torch.manual_seed(0)
    torch.save(registry.build(registry.NetSpec("vit_b_16", 10, (32, 32), SMALL)).state_dict(), weights)
    rows = {f"zero{stage}": row(weights, stage) for stage in range(4)}
    whole = dict(rows)
    if processes == 1:
        whole |= {
            f"accumulated{stage}": row(weights, stage, gradient_accumulation_steps=4) for stage in (0, 2, 3)
        }
        whole |= {f"standard{stage}": row(weights, stage, optimizer=standard()) for stage in (0, 2)}
    for name in ("straight", "stopped"):
        (folder / name).mkdir()
    straight = train_many(folder / "straight", whole, processes)
    stopped = train_many(folder / "stopped", rows, processes, sigterm_at=STOP)
    return processes, weights, rows, straight, stopped


def standard():
    return {**HYPER["optimizer"], "params": {**HYPER["optimizer"]["params"], "ns_method": "standard"}}


def test_muon_is_its_reference(muon_runs):
    _, weights, _, straight, _ = muon_runs
    lost, named = reference(weights)
    assert lost[-1] < lost[0] - 0.5
    for name, run in straight.items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert not run.stderr, f"{name}: {run.stderr}"
        assert losses(run) == pytest.approx(lost, rel=1e-4), name
        trained = torch.load(run.output / "net.pt")
        for weight in ("conv_proj.weight", "heads.head.weight", "class_token"):
            assert torch.allclose(trained[weight], named[weight].detach(), rtol=1e-3, atol=1e-4), (
                name,
                weight,
            )


def test_muon_resumes_to_the_same_bits(muon_runs, tmp_path):
    """And with another number of processes, where DeepSpeed can turn its states into theirs."""
    processes, _, rows, straight, stopped = muon_runs
    assert {run.code for run in stopped.values()} == {130}
    folder = stopped["zero0"].output.parent
    for name in rows:
        shutil.copytree(folder / name, tmp_path / name)
    rest = {name: [*each, *LATEST] for name, each in rows.items()}
    for name, run in train_many(folder, rest, processes).items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert run.summary["weights_sha256"] == straight[name].summary["weights_sha256"], name
    for name, run in train_many(tmp_path, rest, 3 - processes).items():
        if name == "zero0":
            assert run.code == 0, run.stderr
            assert losses(run) == pytest.approx(losses(straight[name]), rel=1e-4)
            continue
        assert run.code == 2, f"{name}: {run.stderr}"
        assert "Muon with ZeRO goes on with the same processes" in run.stderr and "processes: " in run.stderr
