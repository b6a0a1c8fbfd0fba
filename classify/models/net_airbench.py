"""A small convolutional network of any width; ``experiments/cifar10-94.yaml`` trains it to 94 % on CIFAR-10.

Width 64 and depth 2 are ``airbench94_muon.py`` of https://github.com/KellerJordan/cifar10-airbench. Depth 3
has the third convolution and the residual connection of ``airbench96_faster.py`` there.
Paper: https://arxiv.org/abs/2404.00498
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from net import register

WHITENED = 2 * 3 * 2 * 2  # filters of the first convolution: eigenvectors of 2x2 patches, and their negatives


@register("airbench")
class Airbench(nn.Module):
    """A frozen whitening convolution, three groups of convolutions, and a head without a bias.

    Args:
        num_classes: the number of classes.
        width: filters of the first group; each other group has 4 * width. Width 64 has 1.97 M parameters.
        depth: convolutions per group, 1 to 3; the output of the third is added to the input of the second.
        eps: added to the variance of each channel. If images have areas of one colour, a channel may have
            almost no variance in one batch and more in the next. 0.001 limits the effect.
        bf16_whitening: whether the filters of the first convolution are rounded to bfloat16. On grey images
            the output of a colour filter is only rounding error, which normalization enlarges. Without
            rounding, a network that autocast trained in bfloat16 fails in float32 on such images.
    """

    def __init__(
        self,
        num_classes: int = 10,
        width: int = 64,
        depth: int = 2,
        eps: float = 1e-12,
        bf16_whitening: bool = False,
    ) -> None:
        super().__init__()
        self.bf16_whitening = bf16_whitening
        for name, value, most in (("width", width, 4096), ("depth", depth, 3)):
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}: {value!r}: must be a whole number from 1 to {most}")
        self.whiten = nn.Conv2d(3, WHITENED, 2)
        self.whiten.weight.requires_grad = False
        self.groups = nn.Sequential(
            *(
                _Group(channels, filters, depth, eps)
                for channels, filters in ((WHITENED, width), (width, 4 * width), (4 * width, 4 * width))
            )
        )
        self.head = nn.Linear(4 * width, num_classes, bias=False)
        with torch.no_grad():
            self.head.weight /= self.head.weight.std()

    @torch.no_grad()
    def initialize_from_images(self, images: Tensor) -> None:
        """Make the first convolution whiten patches of 2x2 pixels.

        Its filters are the eigenvectors of the patches' covariance, each divided by the square root of its
        eigenvalue, and their negatives.

        Args:
            images: training inputs, (N, 3, H, W) float32.
        """
        patches = F.unfold(images, 2).transpose(1, 2).reshape(-1, WHITENED // 2).double()
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        # An eigenvector's sign is arbitrary: make its largest entry positive
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        filters = (vectors * largest.sign() / (values + 5e-4).sqrt()).T.reshape(-1, 3, 2, 2)
        if self.bf16_whitening:
            filters = filters.bfloat16()
        self.whiten.weight.copy_(torch.cat([filters, -filters]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores (logits).

        Args:
            x: images (B, 3, H, W) of at least 9 pixels a side, each channel normalised to mean 0 and
                standard deviation 1.

        Returns:
            Logits (B, num_classes), in the dtype of ``x``.
        """
        x = self.groups(F.gelu(self.whiten(x)))  # (B, 4 width, H / 8, W / 8)
        x = x.flatten(2).max(2).values  # on a GPU adaptive_max_pool2d has no deterministic gradient
        return self.head(x) / x.shape[1]


class _Group(nn.Module):
    """Convolutions with batch normalization and GELU; the output of the first convolution is pooled."""

    def __init__(self, channels: int, filters: int, depth: int, eps: float) -> None:
        super().__init__()
        inputs = [channels, *[filters] * (depth - 1)]
        convs = [nn.Conv2d(width, filters, 3, padding=1, bias=False) for width in inputs]
        norms = [nn.BatchNorm2d(filters, eps=eps, momentum=0.4) for _ in inputs]  # averages few batches
        for width, conv, norm in zip(inputs, convs, norms, strict=True):
            nn.init.dirac_(conv.weight.data[:width])  # the first filters start as the identity
            norm.weight.requires_grad = False  # it learns only a bias
        self.convs, self.norms = nn.ModuleList(convs), nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        before: Any = None
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = conv(x)
            if i == 0:
                x = F.max_pool2d(x, 2)
            x = norm(x)
            if i == 2:
                x = x + before
            x = F.gelu(x)
            before = x if i == 0 else before
        return x
