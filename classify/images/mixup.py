"""MixUp and CutMix of micro-batches, drawn from the seed and the place in the training.

Sources: https://arxiv.org/abs/1710.09412, https://arxiv.org/abs/1905.04899; computed by
torchvision.transforms.v2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

Mixup = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def make_mixup(mixup: float | None, cutmix: float | None, num_classes: int) -> Mixup | None:
    """Return a function that mixes the images of a micro-batch; None without MixUp and CutMix.

    With both, each micro-batch gets one of them, with probability 1/2.

    Args:
        mixup: alpha of the Beta distribution that draws MixUp's weights; 0 or None for no MixUp.
        cutmix: alpha of the Beta distribution that draws the areas of CutMix's patches; 0 or None for no
            CutMix.
        num_classes: the number of classes.
    """
    kinds = (v2.MixUp, mixup), (v2.CutMix, cutmix)
    chosen = [kind(alpha=float(alpha), num_classes=num_classes) for kind, alpha in kinds if alpha]
    return v2.RandomChoice(chosen) if chosen else None


def apply_mixup(
    mixup: Mixup, inputs: Tensor, labels: Tensor, place: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Mix the images of a micro-batch.

    Args:
        mixup: the result of ``make_mixup``.
        inputs: (B, 3, H, W) floating-point.
        labels: (B,) int64.
        place: the seed, step, micro-batch and rank, which determine the draws.

    Returns:
        Inputs of the same shape, and labels (B, C) float32.
    """
    seed = int(np.random.SeedSequence([number + 1 for number in place]).generate_state(1, np.uint64)[0] >> 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mixup(inputs, labels)
