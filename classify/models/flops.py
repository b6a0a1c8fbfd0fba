"""Floating-point operations of a network, counted by torch on its meta device."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from classify.models.registry import logits

IMAGES = 2  # batch normalization does not train on one


def forward(net: nn.Module, size: tuple[int, int]) -> int | None:
    """The operations of a forward pass over an image; None if the network cannot run without values.

    Those of convolutions, matrix products and attention, two for a multiply-add.

    Args:
        net: on the meta device.
        size: height and width of the images.
    """
    with torch.random.fork_rng(devices=[]):  # a network of one's own may draw
        try:
            return _count(net, size)[0]
        except Exception:  # as many kinds as there are networks
            return None


def training(net: nn.Module, size: tuple[int, int], frozen: Collection[str] = ()) -> int | None:
    """Those of a training's forward and backward pass, without what is computed anew to spare memory.

    At most three times those of the forward pass, which is what they are where all layers are trained: torch
    counts a backward pass of convolutions in groups too high.

    Args:
        net: as above.
        size: as above.
        frozen: names of parameters that are not trained.
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
