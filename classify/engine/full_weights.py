"""All weights of an engine, whole and in fp32, however its ranks hold them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import Tensor

from classify.models.state_dicts import kept_buffers

_EXPERT = re.compile(
    r"^(?P<layer>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<local>\d+)(?P<rest>.*)$"
)


@torch.no_grad()
def gather_full_state_dict(
    engine: deepspeed.DeepSpeedEngine, stage_layers: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Gives every weight of the network on the CPU in fp32: the optimizer's master copy where it keeps one.

    Every rank has to call it, for the weights are gathered from all of them.

    Args:
        engine: the engine.
        stage_layers: the names of a pipeline's layers, by which its weights are called.

    Returns:
        The weights and buffers by name, in the order of the names.
    """
    masters = dict(_master_weights(engine))
    held: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        whole = safe_get_full_fp32_param(parameter)
        if whole is None and hasattr(parameter, "ds_id"):  # partitioned by ZeRO 3
            with GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        if whole is None:
            whole = masters.get(id(parameter), parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        held[_plain_name(engine, name, stage_layers)] = whole.detach().float().cpu().reshape(shape)
    for name, buffer in kept_buffers(engine.module):
        held[_plain_name(engine, name, stage_layers)] = buffer.detach().float().cpu()
    if stage_layers or engine.has_moe_layers:  # ranks hold different weights
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, held)
        held = {name: weight for each in reversed(everyone) for name, weight in each.items()}
    return dict(sorted(held.items()))


def _master_weights(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[int, Tensor]]:
    """The fp32 copies that DeepSpeed's 16-bit optimizers keep without ZeRO, by the parameter's identity."""
    optimizer = engine.optimizer
    halves = [] if engine.zero_optimization() else getattr(optimizer, "fp16_groups", [])
    flat = getattr(optimizer, "fp32_groups_flat", None)
    for index, group in enumerate(halves):
        wholes = optimizer.unflatten(flat[index], group) if flat is not None else optimizer.fp32_groups[index]
        yield from zip(map(id, group), wholes, strict=True)


def _plain_name(engine: deepspeed.DeepSpeedEngine, name: str, stage_layers: Sequence[str] | None) -> str:
    """What the plain network calls a weight that a pipeline's or an expert's rank calls by its own number."""
    if stage_layers:
        index, _, rest = name.partition(".")
        return f"{stage_layers[int(index)]}.{rest}"
    found = _EXPERT.match(name)
    if not found:
        return name
    layer = engine.module.get_submodule(found["layer"])
    first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
    expert = first + int(found["local"])
    return f"{found['layer']}.deepspeed_moe.experts.deepspeed_experts.{expert}{found['rest']}"
