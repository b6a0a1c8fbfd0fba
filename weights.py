"""The weights of an engine, whole and in fp32, however its ranks hold them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import Tensor

_EXPERT = re.compile(r"^(?P<layer>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<local>\d+)(?P<rest>.*)$")


@torch.no_grad()
def consolidate(engine: deepspeed.DeepSpeedEngine, layer_names: list[str] | None = None) -> dict[str, Tensor]:
    """Gives every weight of the network on the CPU in fp32: the optimizer's master copy where it keeps one.

    Every rank has to call it, for the weights are gathered from all of them.

    Args:
        engine: the engine.
        layer_names: the names of a pipeline's layers, by which its weights are called.

    Returns:
        The weights and buffers by name, in the order of the names.
    """
    masters = dict(_masters(engine))
    held: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        if whole is None and hasattr(parameter, "ds_id"):
            with GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        if whole is None:
            whole = masters.get(id(parameter), parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        held[_name(engine, name, layer_names)] = whole.detach().float().cpu().reshape(shape)
    for name, buffer in engine.module.named_buffers():
        held[_name(engine, name, layer_names)] = buffer.detach().float().cpu()
    if layer_names or engine.has_moe_layers:  # ranks hold different weights
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, held)
        held = {name: weight for each in reversed(everyone) for name, weight in each.items()}
    return dict(sorted(held.items()))


def _masters(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[int, Tensor]]:
    """The fp32 copies that DeepSpeed's optimizers for 16 bits keep without ZeRO, by the parameter's identity."""
    optimizer = engine.optimizer
    halves = [] if engine.zero_optimization() else getattr(optimizer, "fp16_groups", [])
    flat = getattr(optimizer, "fp32_groups_flat", None)
    for index, group in enumerate(halves):
        wholes = optimizer.unflatten(flat[index], group) if flat is not None else optimizer.fp32_groups[index]
        yield from zip(map(id, group), wholes, strict=True)


def _name(engine: deepspeed.DeepSpeedEngine, name: str, layer_names: list[str] | None) -> str:
    """What the plain network calls a weight that a pipeline or an expert-parallel rank calls by a number of its own."""
    if layer_names:
        index, _, rest = name.partition(".")
        return f"{layer_names[int(index)]}.{rest}"
    found = _EXPERT.match(name)
    if not found:
        return name
    layer = engine.module.get_submodule(found["layer"])
    first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
    expert = first + int(found["local"])
    return f"{found['layer']}.deepspeed_moe.experts.deepspeed_experts.{expert}{found['rest']}"


def sha256(weights: dict[str, Tensor]) -> str:
    """The digest of the names, shapes and bytes of weights, in their order."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()
