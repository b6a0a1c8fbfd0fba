"""Patches of DeepSpeed's pipelines: gradients are clipped by the norm over all stages.

``patch_pipeline``, to a new engine; before one is made ``clip_stages_together``, to its network. Checked with
DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from deepspeed_trial import messages


def clip_stages_together(stage: torch.nn.Module) -> None:
    """Has a pipeline's gradients clipped by their norm over all stages.

    DeepSpeed treats parameters without this mark as replicated, and clips by the first stage's norm alone.
    """
    for parameter in stage.parameters():
        parameter.model_parallel = True  # type: ignore[attr-defined]


def patch_pipeline(engine: deepspeed.DeepSpeedEngine) -> None:
    """Sums the gradients' norm over stages that hold different numbers of parameter groups.

    With ZeRO, DeepSpeed sums it for each group by itself, and waits for ever where another stage has fewer.
    """
    optimizer: Any = engine.optimizer
    grid = getattr(engine, "grid", None)
    if grid is None or not hasattr(optimizer, "scaled_global_norm"):
        return
    group = grid.get_model_parallel_group()
    if len(set(messages.all_gather(len(optimizer.param_groups), group))) == 1:
        return
    measure, reduce = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def scaled_global_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        optimizer._model_parallel_all_reduce = lambda tensor, op: None
        try:
            norm = torch.as_tensor(measure(*args, **kwargs))
        finally:
            optimizer._model_parallel_all_reduce = reduce
        squared = torch.where(norm < 0, torch.inf, norm.square())  # -1 stands for what is not finite
        reduce(tensor=squared, op=torch.distributed.ReduceOp.SUM)
        return torch.where(squared.isfinite(), squared.sqrt(), -1.0)

    optimizer.scaled_global_norm = scaled_global_norm
