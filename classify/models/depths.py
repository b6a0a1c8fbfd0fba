"""How deep in a network each parameter lies, for rates that differ from layer to layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from classify.models.heads import head_layers
from classify.models.recompute import blocks


def depths(net: nn.Module) -> dict[str, int]:
    """The layer of each parameter by its name, from 0 for those that see the image to the last, the head.

    As timm groups them, where the network is one of timm's. Else a layer is a block of several modules in a
    sequence, such as a residual block, or where there is none a module with parameters of its own; what lies
    between two blocks belongs to the first of them.
    """
    matcher: Any = getattr(net, "group_matcher", None)
    if callable(matcher):
        return _of_timm(net, matcher(coarse=False))
    found = list(blocks(net)) or [each for each in net.modules() if any(True for _ in each.parameters(False))]
    in_block = {id(each): index for index, block in enumerate(found, 1) for each in block.parameters()}
    heads, depth, layers = head_layers(net), 0, {}
    for name, parameter in net.named_parameters():
        depth = in_block.get(id(parameter), depth)
        layers[name] = len(found) + 1 if name.rpartition(".")[0] in heads else depth
    return _renumbered(layers)


def _of_timm(net: nn.Module, matcher: Any) -> dict[str, int]:
    from timm.models import group_parameters

    return _renumbered(group_parameters(net, matcher, reverse=True))


def _renumbered(layers: dict[str, int]) -> dict[str, int]:
    """The same layers, counted from 0 without gaps."""
    order = {layer: index for index, layer in enumerate(sorted(set(layers.values())))}
    return {name: order[layer] for name, layer in layers.items()}
