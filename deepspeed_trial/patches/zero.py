"""Patches for DeepSpeed's ZeRO optimizers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from deepspeed_trial.patches import patch
from deepspeed_trial.schedules import GroupSchedule

UTILS = "deepspeed.runtime.utils"
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


def _remade(engine: deepspeed.DeepSpeedEngine) -> torch.optim.Optimizer | None:
    made = getattr(engine.optimizer, "optimizer", None)
    is_other = isinstance(made, torch.optim.Optimizer) and made is not engine.basic_optimizer
    return made if is_other else None


@patch(
    f"{ZERO}.optimizer",
    versions=">=0.13",
    report="deepspeedai/DeepSpeed#3401",
    guards=(f"{ZERO}.initialize_optimizer_states", f"{ZERO3}.initialize_optimizer_states"),
    digests=("ca823a797a6a", "956a405b8c7c", "83b7310ea3d8"),
    when=lambda engine: _remade(engine) is not None,
)
def follow_remade_optimizer(engine: deepspeed.DeepSpeedEngine) -> None:
    """ZeRO replaces Adagrad by a new instance with one group; the schedule still changes the old one."""
    engine.basic_optimizer = _remade(engine)
    if isinstance(engine.lr_scheduler, GroupSchedule):
        engine.lr_scheduler.act_on(engine.basic_optimizer)


@patch(
    f"{ZERO}._link_all_hp_params",
    versions=">=0.13",
    guards=(f"{ZERO}._link_all_hp_params", f"{ZERO}._create_param_mapping"),
    digests=("3b53a6ef65c8", "e0f8a7111604", "3e84c39b3a27"),
    when=lambda engine: getattr(engine.optimizer, "round_robin_gradients", False),
)
def find_weights_in_round_robin(engine: deepspeed.DeepSpeedEngine) -> None:
    """With ``round_robin_gradients`` DeepSpeed looks for a weight and its moments in the wrong place.

    It partitions the weights in round-robin order, but looks them up in the network's order.
    """
    zero = engine.optimizer
    link = zero._link_all_hp_params

    @functools.wraps(link)
    def link_in_order_of_partitions() -> None:
        of_network, zero.bit16_groups = zero.bit16_groups, zero.round_robin_bit16_groups
        try:
            link()
        finally:
            zero.bit16_groups = of_network

    zero._link_all_hp_params = link_in_order_of_partitions  # DeepSpeed calls it when it loads a checkpoint
    link_in_order_of_partitions()
    zero._param_slice_mappings = zero._create_param_mapping()


def _has_groups(engine: deepspeed.DeepSpeedEngine) -> bool:
    zero = engine.optimizer
    return (
        type(zero) is stage_1_and_2.DeepSpeedZeroOptimizer
        and not engine.has_moe_layers
        and not zero.cpu_offload
        and len(zero.param_groups) >= 2
        and comm.has_all_gather_into_tensor()
    )


@patch(
    f"{ZERO}.scaled_global_norm",
    versions=">=0.19",
    report="deepspeedai/DeepSpeed#6873",
    guards=(
        f"{ZERO}.scaled_global_norm",
        f"{ZERO}.get_grad_norm_direct",
        f"{ZERO}._muon_update_lacks_loss_scale",
        f"{UTILS}:all_gather_dp_groups",
        f"{UTILS}:all_gather_into_tensor_dp_groups",
    ),
    digests=("09bd6d7eef65",),
    when=_has_groups,
)
def join_collectives_of_groups(engine: deepspeed.DeepSpeedEngine) -> None:
    """ZeRO 1 and 2 wait for each parameter group in turn, so a step with many learning rates is slow.

    With the patch a step waits for all groups together: once in the norm of the gradients, and once after the
    update.
    """
    zero = engine.optimizer
    of_each_group = zero.scaled_global_norm

    @functools.wraps(of_each_group)
    def of_all_groups(norm_type: int = 2) -> Tensor:
        if any(zero._muon_update_lacks_loss_scale(index) for index in range(len(zero.param_groups))):
            return of_each_group(norm_type)
        gradients: list[Tensor] = []
        parameters: list[Tensor] = []
        for index, mine in enumerate(zero.params_in_partition):
            given = zero.averaged_gradients[index]
            held = [each for each in given if not getattr(each, "_zero_padding", False)]
            gradients += held[: len(mine)]
            parameters += mine
        norm = zero.get_grad_norm_direct(gradients, parameters)
        return stage_1_and_2.combine_grad_norm_groups([norm])

    zero.scaled_global_norm = of_all_groups
    stage_1_and_2.all_gather_dp_groups = _gather_together


def _gather_together(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    **_: Any,
) -> None:
    """Do the work of DeepSpeed's ``all_gather_dp_groups``, and wait for all groups together."""
    under_way = [
        comm.all_gather_into_tensor(flat, parts[comm.get_rank(group=group)], group, async_op=True)
        for flat, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True)
        if comm.get_world_size(group=group) > 1
    ]
    for gathering in under_way:
        gathering.wait()
