"""Patches for DeepSpeed's pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch

from deepspeed_trial import messages
from deepspeed_trial.patches import follow_calls, patch

UTILS = "deepspeed.runtime.utils"
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


@patch(
    f"{UTILS}:is_model_parallel_parameter",
    versions=">=0.13",
    guards=(
        f"{UTILS}:clip_grad_norm_",
        f"{UTILS}:is_model_parallel_parameter",
        f"{ZERO}.get_grad_norm_direct",
    ),
    digests=("4f2d2a0cbc35",),
)
def clip_stages_together(stage: torch.nn.Module) -> None:
    """DeepSpeed treats a pipeline's parameters as replicated, and clips by the norm of the first stage only.

    Args:
        stage: the stage's module, before its engine is created.
    """
    for parameter in stage.parameters():
        parameter.model_parallel = True  # type: ignore[attr-defined]


def _stages_are_uneven(engine: deepspeed.DeepSpeedEngine) -> bool:
    grid = getattr(engine, "grid", None)  # of a pipeline
    if grid is None or not hasattr(engine.optimizer, "scaled_global_norm"):
        return False
    counts = messages.all_gather(len(engine.optimizer.param_groups), grid.get_model_parallel_group())
    return len(set(counts)) > 1


@patch(
    f"{ZERO}.scaled_global_norm",
    versions=">=0.13",
    guards=(
        f"{ZERO}.scaled_global_norm",
        f"{ZERO}.get_grad_norm_direct",
        f"{ZERO}._model_parallel_all_reduce",
    ),
    digests=("7288e132f4fe",),
    when=_stages_are_uneven,
)
def join_norms_of_uneven_stages(engine: deepspeed.DeepSpeedEngine) -> None:
    """ZeRO sums the norm over stages per parameter group, and hangs if a stage has fewer groups."""
    optimizer: Any = engine.optimizer
    measure, reduce = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    @functools.wraps(measure)
    def scaled_global_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        optimizer._model_parallel_all_reduce = lambda tensor, op: None
        try:
            norm = torch.as_tensor(measure(*args, **kwargs))
        finally:
            optimizer._model_parallel_all_reduce = reduce
        squared = torch.where(norm < 0, torch.inf, norm.square())  # -1 stands for a norm that is not finite
        reduce(tensor=squared, op=torch.distributed.ReduceOp.SUM)
        return torch.where(squared.isfinite(), squared.sqrt(), -1.0)

    optimizer.scaled_global_norm = scaled_global_norm


@patch(
    "deepspeed.runtime.pipe.engine:PipelineEngine._INSTRUCTION_MAP",
    versions=">=0.13",
    guards=("deepspeed.runtime.pipe.engine:PipelineEngine._exec_schedule",),
    digests=("5c4e70f585dd",),
    when=lambda engine, _: hasattr(engine, "_INSTRUCTION_MAP"),
)
def follow_instructions(engine: Any, before: Callable[[str], None]) -> None:
    """DeepSpeed has no hooks before the instructions of a pipeline's schedule.

    Args:
        engine: a pipeline's engine.
        before: is called before each instruction with the name of its class, such as ``ForwardPass``.
    """
    engine._INSTRUCTION_MAP = {
        kind: follow_calls(call, functools.partial(before, kind.__name__))
        for kind, call in engine._INSTRUCTION_MAP.items()
    }
