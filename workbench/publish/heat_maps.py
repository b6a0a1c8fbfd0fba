"""Heat maps: the parts of an image that raise the score of a class.

Source: HiResCAM, https://arxiv.org/abs/2011.08891. For a network that averages its last features over the
image, HiResCAM equals Grad-CAM, https://arxiv.org/abs/1610.02391.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2 import functional

from classify.models import registry
from deepspeed_trial.errors import InvalidInput
from workbench.publish import scoring
from workbench.publish.network import Classifier

BATCH = 16  # images at a time
GRID = 7  # the maximum cells of a map in each direction; after max pooling, a finer map has isolated dots

# Rows: the heat, its red, green and blue, and its opacity
HEAT = np.array(
    [[0.0, 0.35, 0.75, 1.0], [40, 90, 255, 255], [40, 200, 190, 40], [200, 120, 0, 0], [0.0, 0.2, 0.5, 0.65]]
)


def drawn(classifier: Classifier, images: Tensor, classes: Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each image, cropped for the network, without and with its heat map: both uint8 (H, W, 3).

    Args:
        classifier: a classifier from a file of weights.
        images: (N, 3, h, w) uint8.
        classes: int64 (N,), the class of each heat map.

    Raises:
        InvalidInput: in the same cases as ``heat_maps``.
    """
    seen = classifier.description["input"]
    for part, of_part in zip(images.split(BATCH), classes.split(BATCH), strict=True):
        (inputs,) = scoring.inputs_of(classifier.description, part, BATCH)
        cropped = functional.center_crop(part, [seen["height"], seen["width"]]).permute(0, 2, 3, 1).numpy()
        for image, heat in zip(cropped, heat_maps(classifier, inputs, of_part).numpy(), strict=True):
            yield image, overlay(image, heat)


def heat_maps(classifier: Classifier, inputs: Tensor, classes: Tensor) -> Tensor:
    """Return each pixel's heat for a class: (B, H, W) float32, 0 to 1; zeros if no part raises the score.

    The map comes from the last convolution whose output is larger than 1x1. In a transformer this
    convolution cuts the image into patches. Then the map is averaged to at most 7x7 cells.

    Args:
        classifier: a classifier from a file of weights.
        inputs: (B, 3, H, W) float32.
        classes: int64 (B,), a class for each image.

    Raises:
        InvalidInput: if the form has no gradients, or if the network has no such convolution.
    """
    if classifier.net is None:
        raise InvalidInput(
            "heat map: needs gradients, which this format cannot give; use .pt or .safetensors"
        )
    seen = _features(classifier.net, inputs, classes)
    if seen is None:
        raise InvalidInput("heat map: the network has no convolution with an output larger than a pixel")
    features, gradients = seen
    heat = (gradients * features).sum(1, keepdim=True)
    height, width = (min(side, GRID) for side in heat.shape[2:])
    heat = F.adaptive_avg_pool2d(heat, (height, width)).clamp(min=0)
    heat = F.interpolate(heat, inputs.shape[2:], mode="bilinear", align_corners=False)[:, 0]
    return heat / heat.amax((1, 2), keepdim=True).clamp(min=1e-12)


def _features(net: nn.Module, inputs: Tensor, classes: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the last convolution's features (B, C, h, w) float32, and the gradients of the logits."""
    outputs: list[Tensor] = []
    thread = threading.get_ident()  # other threads may use the same network

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if threading.get_ident() == thread and output.ndim == 4 and output.shape[2] * output.shape[3] > 1:
            outputs[:] = [output]

    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    handles = [module.register_forward_hook(keep) for module in convolutions]
    dtype = next(net.parameters()).dtype
    try:
        with torch.enable_grad():
            logits = registry.logits(net(inputs.to(dtype).requires_grad_())).float()
            if not outputs:
                return None
            chosen = logits.gather(1, classes[:, None]).sum()
            (gradients,) = torch.autograd.grad(chosen, outputs[0])
    finally:
        for handle in handles:
            handle.remove()
    return outputs[0].detach().float(), gradients.float()


def overlay(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Draw heat (H, W) over an image, both of the same size: uint8 (H, W, 3)."""
    places, *colours, opacity = HEAT
    painted = np.stack([np.interp(heat, places, colour) for colour in colours], axis=2)
    share = np.interp(heat, places, opacity)[..., None]
    grey = image.mean(2, keepdims=True) * 0.5 + image * 0.5  # less colour, so that the heat stands out
    return (grey * (1 - share) + painted * share).round().astype(np.uint8)
