"""Networks as sequences of named layers, which a pipeline splits into stages.

Source: https://www.deepspeed.ai/tutorials/pipeline/
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from net import Net

Layer = tuple[str, Callable[[Tensor], Tensor]]  # the prefix of the layer's weights, and the layer


def layers_of(net: nn.Module) -> list[Layer] | None:
    """Return the layers of a network in the order of its forward pass; None if it is not a sequence.

    Sequences are ``Net``, torchvision's AlexNet and VGG, and any ``nn.Sequential`` without shared weights.
    """
    if type(net) is Net:
        return _layers_of_net(net)
    if type(net) is nn.Sequential:
        shared = len(list(net.parameters())) < len(list(net.named_parameters(remove_duplicate=False)))
        return None if shared else list(_children(net))
    if isinstance(net, (torchvision.models.AlexNet, torchvision.models.VGG)):
        parts: dict[str, Any] = {"features": net.features, "classifier": net.classifier}
        named = {
            part: [(f"{part}.{name}", layer) for name, layer in _children(parts[part])] for part in parts
        }
        return [*named["features"], ("avgpool", net.avgpool), ("flatten", _flatten), *named["classifier"]]
    return None


def _layers_of_net(net: Net) -> list[Layer]:
    return [
        ("conv1", net.conv1),
        ("relu1", F.relu),
        ("pool1", net.pool),
        ("conv2", net.conv2),
        ("relu2", F.relu),
        ("pool2", net.pool),
        ("flatten", _flatten),
        ("fc1", net.fc1),
        ("relu3", F.relu),
        ("fc2", net.fc2),
        ("relu4", F.relu),
        ("fc3", net.fc3),
    ]


def _children(sequence: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the layers of a sequence by name, including repeated layers."""
    return ((name, layer) for name, layer in sequence._modules.items() if layer is not None)


def _flatten(x: Tensor) -> Tensor:
    """Flatten each image to a row."""
    return torch.flatten(x, 1)
