"""The depth of each parameter in its network, for learning rates by layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from classify.models.heads import head_layers
from classify.models.recompute import blocks


def depths(net: nn.Module) -> dict[str, int]:
    """Return each parameter's layer number by name: 0 next to the image, the largest in the head.

    timm groups the layers of its networks. In any other network a layer is a block of ``recompute.blocks``,
    such as a residual block. If the network has no blocks, each module with parameters is a layer. A
    parameter between two blocks belongs to the block before it.
    """
    matcher: Any = getattr(net, "group_matcher", None)
    if callable(matcher):
        from timm.models import group_parameters

        depth_of: dict[str, int] = group_parameters(net, matcher(coarse=False), reverse=True)
    else:
        layers = list(blocks(net)) or [m for m in net.modules() if any(True for _ in m.parameters(False))]
        layer_of = {id(p): index for index, layer in enumerate(layers, 1) for p in layer.parameters()}
        heads, depth, depth_of = head_layers(net), 0, {}
        for name, parameter in net.named_parameters():
            depth = layer_of.get(id(parameter), depth)
            depth_of[name] = len(layers) + 1 if name.rpartition(".")[0] in heads else depth
    # Number the layers without gaps
    order = {layer: index for index, layer in enumerate(sorted(set(depth_of.values())))}
    return {name: order[layer] for name, layer in depth_of.items()}
