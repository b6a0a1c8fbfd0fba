"""The network of PyTorch's CIFAR-10 tutorial; add your networks and losses here.

Imports only torch. Source: https://pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NETS: dict[str, Callable[..., nn.Module]] = {}  # by name, for hyperparameters.net
LOSSES: dict[str, Callable[..., Tensor]] = {}  # by name, for hyperparameters.loss


def register(name: str) -> Callable[[Any], Any]:
    """Register a function or class as a network; its arguments are the number of classes and ``net_args``."""

    def keep(function: Any) -> Any:
        NETS[name] = function
        return function

    return keep


def register_loss(name: str) -> Callable[[Any], Any]:
    """Register a function as a loss.

    The function gets logits (B, C) float32, targets (B, C) float32 after label smoothing and MixUp, and the
    arguments in ``hyperparameters.loss``. It returns the loss of each image, (B,).
    """

    def keep(function: Any) -> Any:
        LOSSES[name] = function
        return function

    return keep


@register("net")
class Net(nn.Module):
    """Two convolutions and three fully connected layers; 62,006 parameters for 10 classes.

    Args:
        num_classes: the number of classes, the width of the last layer.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores (logits).

        Args:
            x: images (B, 3, 32, 32), normalised to [-1, 1].

        Returns:
            Logits (B, num_classes), in the dtype of ``x``.
        """
        x = self.pool(F.relu(self.conv1(x)))  # (B, 6, 14, 14)
        x = self.pool(F.relu(self.conv2(x)))  # (B, 16, 5, 5)
        x = torch.flatten(x, 1)  # (B, 400)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)
