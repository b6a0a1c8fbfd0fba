"""Activation checkpointing: a block keeps only its inputs, and the backward pass runs the block again.

Source: https://arxiv.org/abs/1604.06174; ``torch.utils.checkpoint`` implements it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_trial.errors import InvalidInput

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def enable(net: nn.Module) -> None:
    """Enable activation checkpointing in every block of a network; names and weights stay the same.

    Raises:
        InvalidInput: if the network has no blocks.
    """
    for norm in net.modules():
        if isinstance(norm, nn.modules.batchnorm._NormBase):
            norm.forward = _counted_once(norm)
    known: Any = net  # most networks of timm have the method
    with contextlib.suppress(AttributeError, AssertionError, NotImplementedError):
        known.set_grad_checkpointing(True)
        return
    in_sequence = list(blocks(net))
    if not in_sequence:
        raise InvalidInput(
            f"hyperparameters.checkpoint_activations: True: {type(net).__name__} has no blocks of layers in a"
            " sequence; use smaller micro-batches"
        )
    for block in in_sequence:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def blocks(module: nn.Module, inside: bool = False) -> Iterator[nn.Module]:
    """Yield a network's blocks, such as residual blocks.

    A block is an entry of a container, has child modules and parameters, and is not in another block.

    Args:
        module: the network, or a part of it.
        inside: whether ``module`` is a container.
    """
    for child in module.children():
        if type(child) in CONTAINERS:
            yield from blocks(child, True)
        elif inside and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child, False)


def _counted_once(norm: nn.modules.batchnorm._NormBase) -> Callable[..., Any]:
    """Return a layer's forward function that does not update running statistics in a recomputation."""
    forward = norm.forward

    def run(*inputs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not within a backward pass
            return forward(*inputs)
        momentum, count = norm.momentum, norm.num_batches_tracked
        norm.momentum = 0.0
        if count is not None:
            norm.num_batches_tracked = count.clone()
        try:
            return forward(*inputs)
        finally:
            norm.momentum, norm.num_batches_tracked = momentum, count

    return run
