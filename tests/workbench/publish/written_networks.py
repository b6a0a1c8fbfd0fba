"""Networks with few weights, and the checkpoints that publish them."""

import pathlib
from typing import Any

import torch
from torch import nn

from classify.models import net_file, registry, state_dicts
from classify.models.registry import NetSpec

VIT = {"num_layers": 1, "hidden_dim": 32, "num_heads": 2, "mlp_dim": 32}
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


def changed(name: str, classes: int, arguments: dict[str, Any]) -> nn.Module:
    """Build a network with random running statistics, biases and scales."""
    torch.manual_seed(0)
    net = registry.build(NetSpec(name, classes, (32, 32), arguments))
    with torch.no_grad():
        net(torch.randn(64, 3, 32, 32))
        for each in net.parameters():
            each.add_(0.05 * torch.randn_like(each))
    return net


def write_checkpoint(folder, name, net, classes, resize=(32, 32), arguments=None, **seen) -> pathlib.Path:
    """Write the files of a checkpoint that an export reads."""
    description = {
        "net": {"name": name, "num_classes": len(classes), "net_args": arguments or {}},
        "classes": classes,
        "input": {"height": 32, "width": 32, "resize": list(resize), "mean": MEAN, "std": STD, **seen},
        "dtype": "float32",
        "confidence": {"temperature": 0.5, "confidence_threshold": 0.3},
        "provenance": {"steps": 1, "data": {"dataset": "imagefolder", "root": "/of/this/machine/digits"}},
    }
    folder.mkdir()
    net_file.write(folder / "net.pt", state_dicts.of_module(net), description)
    (folder / "metadata.json").write_text('{"steps_completed": 1}')
    return folder
