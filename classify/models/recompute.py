"""Activation checkpointing: a block keeps its inputs alone, and is computed again in the backward pass.

Source: https://arxiv.org/abs/1604.06174, by torch.utils.checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.errors import InvalidInput

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def enable(net: nn.Module) -> None:
    """Has every block of a network keep no activations; its names and weights stay as they are.

    Raises:
        InvalidInput: if it has no blocks.
    """
    found = list(blocks(net))
    if not found:
        raise InvalidInput(
            f"hyperparameters.checkpoint_activations: True: {type(net).__name__} has no blocks of layers in a"
            " sequence; use smaller micro-batches"
        )
    for block in found:
        block.forward = _recomputed(block)


def blocks(module: nn.Module, inside: bool = False) -> Iterator[nn.Module]:
    """The outermost modules that stand in a sequence and consist of several, such as a residual block."""
    for child in module.children():
        if type(child) in CONTAINERS:
            yield from blocks(child, True)
        elif inside and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child, False)


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        computed = False

        def compute(*again: Any) -> Any:
            nonlocal computed
            with _still_statistics(block) if computed else contextlib.nullcontext():
                computed = True
                return forward(*again)

        return checkpoint(compute, *inputs, use_reentrant=False)

    return run


@contextlib.contextmanager
def _still_statistics(block: nn.Module) -> Iterator[None]:
    """Has batch normalization count a micro-batch once, however often it is computed."""
    norms = [each for each in block.modules() if isinstance(each, nn.modules.batchnorm._NormBase)]
    kept = [(each, each.momentum, each.num_batches_tracked) for each in norms]
    for each in norms:
        each.momentum = 0.0
        if each.num_batches_tracked is not None:
            each.num_batches_tracked = each.num_batches_tracked.clone()
    try:
        yield
    finally:
        for each, momentum, count in kept:
            each.momentum, each.num_batches_tracked = momentum, count
