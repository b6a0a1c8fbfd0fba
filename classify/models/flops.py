"""The floating-point operations of a network, which torch counts on the meta device."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from classify.models.registry import logits

IMAGES = 2  # batch normalization does not train on one image


def forward(net: nn.Module, size: tuple[int, int]) -> int | None:
    """Return the operations of a forward pass over an image; None if it fails on the meta device.

    Convolutions, matrix products and attention count, and nothing else. A multiply-add is two operations.

    Args:
        net: the network, on the meta device.
        size: height and width of the images.
    """
    return _count(net, size, trains=False)


def training(net: nn.Module, size: tuple[int, int], frozen: Collection[str] = ()) -> int | None:
    """Return the operations of a forward and backward pass over an image, without activation checkpointing.

    The function returns at most three times a forward pass, because torch counts too many operations for
    the backward pass of grouped convolutions.

    Args:
        net: the network, on the meta device; the function clears ``requires_grad`` of frozen parameters.
        size: height and width of the images.
        frozen: names of parameters that are not trained.

    Returns:
        The operations, or None if the network cannot run on the meta device.
    """
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    return _count(net, size, trains=True)


def _count(net: nn.Module, size: tuple[int, int], trains: bool) -> int | None:
    try:
        with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
            scores = logits(net.train()(torch.zeros(IMAGES, 3, *size, device="meta")))  # dropout draws
            forward = counter.get_total_flops()
            if trains:
                scores.sum().backward()
    except Exception:  # networks raise different types
        return None
    backward = counter.get_total_flops() - forward
    return min(forward // IMAGES + backward // IMAGES, 3 * (forward // IMAGES))
