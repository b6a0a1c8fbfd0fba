"""The teacher of a distillation: a trained network whose scores a smaller network learns.

Source: https://arxiv.org/abs/1503.02531
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classify.models import net_file, registry, state_dicts
from deepspeed_trial.errors import InvalidInput

KEY = "hyperparameters.teacher"


class Teacher:
    """A network without gradients, from ``net.pt``, ``net.safetensors`` or a published folder.

    Args:
        path: ``hyperparameters.teacher``.
        classes: the training's class names.

    Attributes:
        digest: SHA-256 checksum of the weights.

    Raises:
        InvalidInput: if the file cannot be read, or its classes differ from the training's.
    """

    def __init__(self, path: str, classes: Sequence[str]) -> None:
        place = pathlib.Path(path)
        try:
            description = net_file.read_description(place)
            self._check(description, path, classes)
            self.net: nn.Module = net_file.read(place)[0].requires_grad_(False)
        except InvalidInput as error:
            lines = (line if line.startswith(KEY) else f"{KEY}: {line}" for line in error.errors)
            raise InvalidInput(lines) from error
        self.digest = state_dicts.sha256(state_dicts.of_module(self.net))
        self.seen = description["input"]
        self.dtype = torch.float32

    @staticmethod
    def _check(description: dict[str, Any], path: str, classes: Sequence[str]) -> None:
        if description["net"]["name"] == registry.MOE:
            raise InvalidInput(f"{KEY}: {path}: is a mixture of experts; give another network")
        if "thresholds" in description:
            raise InvalidInput(f"{KEY}: {path}: gives an image several labels; give a network of one label")
        if description["classes"] != list(classes):
            names = ", ".join(description["classes"][:12])
            reason = f"its classes ({names}) differ from the classes of the data"
            raise InvalidInput(f"{KEY}: {path}: {reason}; give a network of these classes, in this order")

    def prepare(self, device: torch.device, dtype: torch.dtype, mean: Sequence[float], std: Any) -> None:
        """Move the network to a device, and adapt it to the training's normalization.

        Args:
            device: the training's device.
            dtype: the dtype of the computation.
            mean: mean of each channel in the training's normalization.
            std: standard deviation of each channel in the training's normalization.
        """
        self.net, self.dtype = self.net.to(device, dtype), dtype
        theirs, ours = ((self.seen["mean"], self.seen["std"]), (mean, std))
        means, stds = zip(theirs, ours, strict=True)
        shift, scale = (torch.tensor(pair, dtype=torch.float64).view(2, 3, 1, 1) for pair in (means, stds))
        self.scale = (scale[1] / scale[0]).float().to(device)
        self.shift = ((shift[1] - shift[0]) / scale[0]).float().to(device)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the teacher's logits (B, C) float32 of the training's inputs (B, 3, H, W)."""
        seen, size = inputs.float() * self.scale + self.shift, (self.seen["height"], self.seen["width"])
        if seen.shape[2:] != size:
            seen = F.interpolate(seen, size, mode="bilinear", antialias=True)
        return registry.logits(self.net(seen.to(self.dtype))).float()
