"""All weights of an engine, whole and in fp32, however its ranks hold them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    groups,
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_trial import messages

_EXPERT = re.compile(
    r"^(?P<layer>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<local>\d+)(?P<rest>.*)$"
)


@torch.no_grad()
def gather_full_state_dict(
    engine: deepspeed.DeepSpeedEngine,
    stage_layers: Sequence[str] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    trained_only: bool = False,
) -> dict[str, Tensor]:
    """Gives every weight of the network on the CPU in fp32: the optimizer's master copy where it keeps one.

    Every rank has to call it, for the weights are gathered from all of them.

    Args:
        engine: the engine.
        stage_layers: the names of a pipeline's layers, by which its weights are called.
        buffers: what to give in the place of buffers of the engine's network, by its names.
        trained_only: whether to leave out buffers, and weights that are frozen.

    Returns:
        The weights and buffers by name, in the order of the names.
    """
    masters = _masters_of_parameters(engine)
    held: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if trained_only and not parameter.requires_grad:
            continue
        whole = safe_get_full_fp32_param(parameter)
        if whole is None and hasattr(parameter, "ds_id"):  # partitioned by ZeRO 3
            with GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        if whole is None:
            whole = masters.get(parameter, parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        held[plain_name(engine, name, stage_layers)] = whole.detach().float().cpu().reshape(shape)
    kept = {} if trained_only else {**dict(kept_buffers(engine.module)), **(buffers or {})}
    for name, buffer in kept.items():
        held[plain_name(engine, name, stage_layers)] = buffer.detach().float().cpu()
    if stage_layers or engine.has_moe_layers:  # ranks hold different weights
        everyone = messages.all_gather(held)
        held = {name: weight for each in reversed(everyone) for name, weight in each.items()}
    return dict(sorted(held.items()))


@torch.no_grad()
def scatter_full_state_dict(
    engine: deepspeed.DeepSpeedEngine, state: Mapping[str, Tensor], stage_layers: Sequence[str] | None = None
) -> None:
    """Puts whole weights into those that the optimizer steps: the inverse of ``gather_full_state_dict``.

    The network computes with them after ``update_network``. Frozen weights and buffers stay as they are.

    Args:
        engine: the engine.
        state: the weights by name; may hold more.
        stage_layers: the names of a pipeline's layers.
    """
    masters = _masters_of_parameters(engine)
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        whole = state[plain_name(engine, name, stage_layers)]
        if hasattr(parameter, "ds_id"):  # of ZeRO 3; DeepSpeed's own cannot set one that it had to pad
            share, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank(parameter.ds_process_group)
            padded = F.pad(whole.flatten(), (0, share * (rank + 1) - whole.numel()))
            safe_set_local_fp32_param(parameter, padded.narrow(0, share * rank, share))
        elif hasattr(parameter, "_hp_mapping"):
            safe_set_full_fp32_param(parameter, whole)
        else:
            master = masters.get(parameter, parameter)
            master.copy_(whole.view_as(master))


@torch.no_grad()
def put_untrained(
    engine: deepspeed.DeepSpeedEngine, state: Mapping[str, Tensor], stage_layers: Sequence[str] | None = None
) -> None:
    """Puts what ``scatter_full_state_dict`` leaves as it is: frozen weights and buffers."""
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            with GatheredParameters([parameter], modifier_rank=0):
                whole = state[plain_name(engine, name, stage_layers)]
                if parameter.shape == whole.shape:  # elsewhere it is the first rank that sets it
                    parameter.copy_(whole)
    for name, buffer in kept_buffers(engine.module):
        buffer.copy_(state[plain_name(engine, name, stage_layers)])


def kept_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a ``state_dict`` holds, by name."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


@torch.no_grad()
def exchange_masters(engine: deepspeed.DeepSpeedEngine, values: Sequence[Tensor]) -> None:
    """Exchanges ``master_weights`` with values that lie as they do."""
    for value, weight in zip(values, master_weights(engine), strict=True):
        kept = weight.clone()
        weight.copy_(value)
        value.copy_(kept)


def master_weights(engine: deepspeed.DeepSpeedEngine) -> list[Tensor]:
    """The fp32 tensors that this rank's optimizer steps: its share of them, where ZeRO partitions them."""
    shares = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # of ZeRO 3
    if shares is not None:
        return list(shares)
    return [weight for group in engine.basic_optimizer.param_groups for weight in group["params"]]


@torch.no_grad()
def update_network(engine: deepspeed.DeepSpeedEngine) -> None:
    """Has the network compute with ``master_weights`` as they are now, as after a step.

    Every rank has to call it, for each updates the others with its share.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        optimizer.checkpoint_event_prologue()  # partitions every parameter ...
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # ... and gathers those that stay whole
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for parameter, master in _masters_of_parameters(engine).items():
            parameter.copy_(master.view_as(parameter))


def _masters_of_parameters(engine: deepspeed.DeepSpeedEngine) -> dict[Tensor, Tensor]:
    """The fp32 copies that DeepSpeed's 16-bit optimizers keep without ZeRO, by the parameter."""
    optimizer = engine.optimizer
    halves = [] if engine.zero_optimization() else getattr(optimizer, "fp16_groups", [])
    flat = getattr(optimizer, "fp32_groups_flat", None)
    masters: dict[Tensor, Tensor] = {}
    for index, group in enumerate(halves):
        wholes = optimizer.unflatten(flat[index], group) if flat is not None else optimizer.fp32_groups[index]
        masters.update(zip(group, wholes, strict=True))
    return masters


def name_in_stage(name: str, stage_layers: Sequence[str]) -> str:
    """What the plain network calls a weight that a pipeline calls by the number of its layer."""
    index, _, rest = name.partition(".")
    return f"{stage_layers[int(index)]}.{rest}"


def plain_name(engine: deepspeed.DeepSpeedEngine, name: str, stage_layers: Sequence[str] | None) -> str:
    """What the plain network calls a weight that a pipeline's or an expert's rank calls by its own number."""
    if stage_layers:
        return name_in_stage(name, stage_layers)
    found = _EXPERT.match(name)
    if not found:
        return name
    layer = engine.module.get_submodule(found["layer"])
    first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
    expert = first + int(found["local"])
    return f"{found['layer']}.deepspeed_moe.experts.deepspeed_experts.{expert}{found['rest']}"
