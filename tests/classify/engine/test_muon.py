"""Muon on a network with a convolution, a head and a class token, against a reference implementation of its step."""

import json
from typing import Any

import pytest
import torch
from matrix import BATCH, DEEPSPEED, MUON, ROWS, STEPS, VIT
from support import overrides, run
from test_matrix import losses
from torch.nn import functional as F

import data
from benchmarks.bare_recipe import orthogonal
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.models import registry

PARAMS = MUON["params"]
# The weights that Muon trains, with their learning rate's factor
MATRICES = {"conv_proj.weight": 0.5}
for layer in (0, 1):
    for part in ("self_attention.out_proj", "mlp.0", "mlp.3"):
        MATRICES[f"encoder.layers.encoder_layer_{layer}.{part}.weight"] = 1


def reference(net):
    """The losses of a bare loop; it trains the network."""
    settings = DataSettings.parse({"dataset": "digits"})
    images = data.Images(DataPlan.resolve(settings), 0, torch.device("cpu"))
    named, momenta, lost = dict(net.named_parameters()), dict.fromkeys(MATRICES, 0), []
    rest = [each for name, each in named.items() if name not in MATRICES]
    decays = [sum(size > 1 for size in each.shape) > 1 for each in rest]
    groups = [
        {
            "params": [each for each, decay in zip(rest, decays, strict=True) if decay is how],
            "weight_decay": rate,
        }
        for how, rate in ((True, PARAMS["weight_decay"]), (False, 0))
    ]
    adam = torch.optim.AdamW(groups, lr=PARAMS["adam_lr"], betas=(0.9, 0.95))
    epochs = images.training_order(BATCH, 1).share(0, 1, repeats=True)
    for step, (_, indices, *_) in zip(range(STEPS), epochs, strict=False):
        inputs = images.inputs(images.train.images[indices], False)
        loss = F.cross_entropy(net(inputs), images.train.labels[indices])
        lost.append(loss.item())
        net.zero_grad()
        loss.backward()
        left = 1 - step / STEPS
        for group in adam.param_groups:
            group["lr"] = PARAMS["adam_lr"] * left
        adam.step()
        for name, factor in MATRICES.items():
            weight, rate, momentum = named[name], PARAMS["lr"] * factor * left, PARAMS["momentum"]
            grad: Any = weight.grad
            momenta[name] = momentum * momenta[name] + (1 - momentum) * grad
            update = orthogonal((momentum * momenta[name] + (1 - momentum) * grad).flatten(1))
            with torch.no_grad():
                weight.mul_(1 - rate * PARAMS["weight_decay"]).sub_(rate * update.view(weight.shape))
    return lost


def test_muon_is_its_reference(runs, tmp_path):
    """Either method orthogonalises; test_matrix.py compares the ZeRO stages with stage 0."""
    standard = {**MUON, "params": {**PARAMS, "ns_method": "standard"}}
    chosen = [*ROWS["muon zero2"].arguments, *overrides(**{f"{DEEPSPEED}optimizer": json.dumps(standard)})]
    by_standard = run(["train.py", *chosen, "--output", str(tmp_path)], tmp_path)
    torch.manual_seed(0)  # the experiment's seed
    net = registry.build(registry.NetSpec("vit_b_16", 10, (32, 32), VIT))
    lost = reference(net)
    assert lost[-1] < lost[0] - 0.1
    for made in (runs.straight("muon", 1), by_standard):
        assert made.code == 0, made.stderr
        assert losses(made) == pytest.approx(lost, rel=1e-4)
        trained = torch.load(made.output / "net.pt")
        for name in ("conv_proj.weight", "heads.head.weight", "class_token"):
            torch.testing.assert_close(trained[name], net.state_dict()[name], rtol=1e-3, atol=1e-4)
