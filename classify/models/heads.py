"""The head of a network: the layers that compute the class scores."""

from __future__ import annotations

from typing import Any

from torch import nn


def head_layers(net: nn.Module) -> list[str]:
    """Return the names of the head's layers: timm's classifier, or else the last layer with parameters."""
    get: Any = getattr(net, "get_classifier", None)  # every network of timm has it
    heads = get() if callable(get) else ()
    parts = heads if isinstance(heads, (tuple, list)) else [heads]
    inside = {id(module) for part in parts if isinstance(part, nn.Module) for module in part.modules()}
    modules = [(name, module) for name, module in net.named_modules() if id(module) in inside]
    names = [name.rpartition(".")[0] for name, _ in net.named_parameters()]
    return [name for name, module in modules if list(module.parameters(recurse=False))] or names[-1:]
