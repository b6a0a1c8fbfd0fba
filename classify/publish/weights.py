"""Files of weights, ``net.pt`` and ``net.safetensors``, and folders of them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from classify.models import net_file, registry
from classify.publish.network import Classifier, Trained


def save_pt(path: pathlib.Path, trained: Trained) -> None:
    """Writes weights as ``torch.save`` does; raises ``OSError`` if the disk does not take them."""
    net_file.save(path, trained.weights)


def save_safetensors(path: pathlib.Path, trained: Trained) -> None:
    """Writes weights as safetensors, with their description; raises as ``save_pt`` does."""
    from safetensors.torch import save

    tensors = {name: weight.contiguous() for name, weight in trained.weights.items()}
    path.write_bytes(
        save(tensors, as_text(trained.description))
    )  # save_file makes files that only their owner may read


def as_text(description: Mapping[str, Any]) -> dict[str, str]:
    """Return a description for files that hold texts in UTF-8 alone: other values as JSON."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()
    }
    return {_utf8(key): _utf8(value) for key, value in texts.items()}


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def read(path: pathlib.Path) -> Classifier:
    """Reads a file or folder of weights, which is computed with as in validation: in its dtype.

    Raises:
        InvalidInput: if the file or its description is missing, damaged or of another network.
    """
    net, description = net_file.read(path)
    dtype = getattr(torch, description["dtype"])
    turned = registry.prefers_channels_last(description["net"]["name"])
    form = torch.channels_last if turned else torch.contiguous_format
    net = net.to(dtype)

    @torch.no_grad()
    def classify(inputs: Tensor) -> Tensor:
        return registry.logits(net(inputs.to(dtype, memory_format=form))).float()

    return Classifier(description, classify)
