"""Floating-point operations of a network, counted by torch on its meta device."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from classify.models.registry import logits

IMAGES = 2  # batch normalization does not train on one


def forward(net: nn.Module, size: tuple[int, int]) -> int | None:
    """Return the operations of a forward pass over an image; None if the network cannot run without values.

    Convolutions, matrix products and attention count, a multiply-add as two operations.

    Args:
        net: on the meta device.
        size: height and width of the images.
    """
    with torch.random.fork_rng(devices=[]):  # a user's network may sample
        try:
            return _count(net, size)[0]
        except Exception:  # networks raise different types
            return None


def training(net: nn.Module, size: tuple[int, int], frozen: Collection[str] = ()) -> int | None:
    """Return the operations of a forward and backward pass over an image, without activation checkpointing.

    The result is at most three times the operations of a forward pass, the value if all layers are trained:
    torch counts too many operations for the backward pass of grouped convolutions.

    Args:
        net: on the meta device.
        size: height and width of the images.
        frozen: names of parameters that are not trained.

    Returns:
        The operations, or None if the network cannot run on the meta device.
    """
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    with torch.random.fork_rng(devices=[]):
        try:
            operations, scores = _count(net, size)
            with FlopCounterMode(display=False) as counter:
                scores.sum().backward()
        except Exception:
            return None
    return min(operations + counter.get_total_flops() // IMAGES, 3 * operations)


def _count(net: nn.Module, size: tuple[int, int]) -> tuple[int, Tensor]:
    with FlopCounterMode(display=False) as counter:
        scores = logits(net.train()(torch.zeros(IMAGES, 3, *size, device="meta")))
    return counter.get_total_flops() // IMAGES, scores
