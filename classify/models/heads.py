"""Which layers of a network give the class scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def head_layers(net: nn.Module) -> list[str]:
    """The names of a network's last layers: what timm calls the classifier, else the last with weights."""
    own = [name for name, _ in _classifier(net)]
    if own:
        return own
    names = [name for name, _ in net.named_parameters()]
    return [names[-1].rpartition(".")[0]] if names else []


def _classifier(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers with weights of what ``get_classifier`` gives, which every network of timm has."""
    get: Any = getattr(net, "get_classifier", None)
    found = get() if callable(get) else ()
    parts = found if isinstance(found, (tuple, list)) else [found]
    inside = {id(each) for part in parts if isinstance(part, nn.Module) for each in part.modules()}
    for name, module in net.named_modules():
        if id(module) in inside and any(True for _ in module.parameters(recurse=False)):
            yield name, module
