"""The head of a network: the layers that give the class scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def head_layers(net: nn.Module) -> list[str]:
    """Return the names of timm's classifier layers, or of the last layer with weights."""
    if classifier := [name for name, _ in _classifier(net)]:
        return classifier
    names = [name for name, _ in net.named_parameters()]
    return [names[-1].rpartition(".")[0]] if names else []


def _classifier(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers with weights of ``get_classifier``, a method of every network of timm."""
    get: Any = getattr(net, "get_classifier", None)
    heads = get() if callable(get) else ()
    parts = heads if isinstance(heads, (tuple, list)) else [heads]
    inside = {id(module) for part in parts if isinstance(part, nn.Module) for module in part.modules()}
    for name, module in net.named_modules():
        if id(module) in inside and any(True for _ in module.parameters(recurse=False)):
            yield name, module
