"""A patch of DeepSpeed's ZeRO 1 and 2 for many parameter groups; checked with DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
from deepspeed import comm
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor


def join_collectives_of_groups(engine: deepspeed.DeepSpeedEngine) -> None:
    """Has ZeRO 1 and 2 wait once for all parameter groups in a step's norm, and once after it.

    DeepSpeed 0.19.8 waits for one group after the other, so that many learning rates slow a step. Not needed
    once it does not: see its issues 2125 and 6873.
    """
    zero = engine.optimizer
    is_plain = type(zero) is stage_1_and_2.DeepSpeedZeroOptimizer and not engine.has_moe_layers
    if (
        not is_plain
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
