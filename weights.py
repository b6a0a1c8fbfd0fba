"""The weights of an engine, whole and in fp32, however its ranks hold them."""

from __future__ import annotations

import hashlib

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor


@torch.no_grad()
def consolidate(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
    """Gives every weight of the network on the CPU in fp32: the optimizer's master copy where it keeps one.

    Every rank has to call it, for ZeRO's shards are gathered from all of them.

    Returns:
        The weights and buffers by name, in the order of the names.
    """
    module = engine.module
    weights = {}
    for name, parameter in module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        weights[name] = (
            (parameter if master is None else master).detach().float().cpu().view(parameter_shape(parameter))
        )
    for name, buffer in module.named_buffers():
        weights[name] = buffer.detach().float().cpu()
    return dict(sorted(weights.items()))


def parameter_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, also where ZeRO 3 leaves this rank with a shard."""
    return getattr(parameter, "ds_shape", parameter.shape)


def sha256(weights: dict[str, Tensor]) -> str:
    """The digest of the names, shapes and bytes of weights, in their order."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()
