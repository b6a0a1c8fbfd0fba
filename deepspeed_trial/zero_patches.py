"""Patches of DeepSpeed's ZeRO 1 and 2; checked with DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
from deepspeed import comm
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor


def find_weights_in_round_robin(engine: deepspeed.DeepSpeedEngine) -> None:
    """Find each weight and its moments where ``round_robin_gradients`` puts them.

    DeepSpeed 0.19.8 partitions the weights in another order than the network's, and then looks for them in
    the network's order, so that it reads and writes parts of other weights.
    """
    zero = engine.optimizer
    if not getattr(zero, "round_robin_gradients", False):  # which ZeRO 3 and other optimizers lack
        return
    link = zero._link_all_hp_params

    def link_in_order_of_partitions() -> None:
        of_network, zero.bit16_groups = zero.bit16_groups, zero.round_robin_bit16_groups
        try:
            link()
        finally:
            zero.bit16_groups = of_network

    zero._link_all_hp_params = link_in_order_of_partitions  # DeepSpeed calls it when a checkpoint is loaded
    link_in_order_of_partitions()
    zero._param_slice_mappings = zero._create_param_mapping()


def join_collectives_of_groups(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let ZeRO 1 and 2 wait once for all parameter groups in a step's norm, and once after it.

    DeepSpeed 0.19.8 waits for one group after the other, so that many learning rates slow a step. Not needed
    once it does not: see its issues 2125 and 6873. An older DeepSpeed keeps its own: it computes the norm in
    another way.
    """
    zero = engine.optimizer
    is_plain = type(zero) is stage_1_and_2.DeepSpeedZeroOptimizer and not engine.has_moe_layers
    if (
        not is_plain
        or not hasattr(zero, "_muon_update_lacks_loss_scale")
        or zero.cpu_offload
        or len(zero.param_groups) < 2
        or not comm.has_all_gather_into_tensor()
    ):
        return
    of_each_group = zero.scaled_global_norm

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
    """As DeepSpeed's ``all_gather_dp_groups``, but for the waiting."""
    under_way = [
        comm.all_gather_into_tensor(flat, parts[comm.get_rank(group=group)], group, async_op=True)
        for flat, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True)
        if comm.get_world_size(group=group) > 1
    ]
    for each in under_way:
        each.wait()
