"""All weights of an engine in fp32, gathered from the ranks, in every mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from deepspeed_trial import messages
from deepspeed_trial.checkpoints import pieces
from deepspeed_trial.checkpoints.pieces import plain_name


@torch.no_grad()
def gather_full_state_dict(
    engine: deepspeed.DeepSpeedEngine,
    stage_layers: Sequence[str] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return every weight of the network on the CPU in fp32: the optimizer's master copy, if there is one.

    Every rank calls it, because the weights are gathered from all ranks.

    Args:
        engine: the engine.
        stage_layers: the names of a pipeline's layers in the plain network; None without a pipeline.
        buffers: values by the engine's names, which replace the engine's buffers in the result.

    Returns:
        The weights and buffers by name, in the order of the names.
    """
    trained = pieces.trained(engine)
    held: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        whole = safe_get_full_fp32_param(parameter)
        if whole is None and hasattr(parameter, "ds_id"):  # partitioned by ZeRO 3
            with GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        if whole is None:
            piece = trained.get(parameter)
            whole = piece.of(piece.owner) if piece else parameter
        shape = getattr(parameter, "ds_shape", parameter.shape)
        held[plain_name(engine, name, stage_layers)] = whole.detach().float().cpu().reshape(shape)
    for name, buffer in {**dict(pieces.buffers(engine.module)), **(buffers or {})}.items():
        held[plain_name(engine, name, stage_layers)] = buffer.detach().float().cpu()
    if stage_layers or engine.has_moe_layers:  # ranks hold different weights
        everyone = messages.all_gather(held)
        held = {name: weight for each in reversed(everyone) for name, weight in each.items()}
    return dict(sorted(held.items()))


@torch.no_grad()
def exchange_masters(engine: deepspeed.DeepSpeedEngine, values: Sequence[Tensor]) -> None:
    """Swap ``master_weights`` with values of the same layout."""
    for value, weight in zip(values, master_weights(engine), strict=True):
        kept = weight.clone()
        weight.copy_(value)
        value.copy_(kept)


def master_weights(engine: deepspeed.DeepSpeedEngine) -> list[Tensor]:
    """Return the fp32 tensors that this rank's optimizer updates; under ZeRO, the rank's share."""
    shares = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # of ZeRO 3
    if shares is not None:
        return list(shares)
    return [weight for group in engine.basic_optimizer.param_groups for weight in group["params"]]


@torch.no_grad()
def update_network(engine: deepspeed.DeepSpeedEngine) -> None:
    """Copy the ``master_weights`` into the network, as an optimizer step does.

    Every rank calls it, because each rank sends its share to the others.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        optimizer.checkpoint_event_prologue()  # partitions every parameter ...
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # ... and gathers the ones that stay whole
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for parameter, piece in pieces.trained(engine).items():
            if piece.owner is not parameter:
                parameter.copy_(piece.of(piece.owner).view_as(parameter))
