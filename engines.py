"""What a DeepSpeed engine has to be asked, told and helped with."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from errors import InvalidInput, one_line


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns what DeepSpeed refuses while it builds an engine, beyond the rules here, into ``InvalidInput``."""
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        # A RuntimeError, but for one, is a fault of the machine: a rank that is lost, or no memory.
        if isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, NotImplementedError):
            raise
        reason = one_line(error)
        if not str(error) or isinstance(error, KeyError):
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason += f" in {place.name}, {place.filename}"
        raise InvalidInput(
            f"deepspeed_config: DeepSpeed cannot build an engine from it ({reason}); change what it names"
        ) from error


def engine_dtype(engine: deepspeed.DeepSpeedEngine) -> torch.dtype:
    """The floating-point type in which an engine wants its inputs."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def scale_loss(engine: deepspeed.DeepSpeedEngine, loss: torch.Tensor) -> torch.Tensor:
    """Multiplies the loss by fp16's loss scale where the engine's ``backward`` does not.

    Since DeepSpeed 0.18 ``backward`` scales for ZeRO's optimizers only, but without ZeRO, too, ``step`` divides the
    gradients by the scale: they would be as small as if the learning rate were, and never tested for overflow.
    """
    if not (engine.fp16_enabled() and not engine.zero_optimization() and hasattr(engine, "scale")):
        return loss
    return loss * engine.optimizer.loss_scale_config.cur_scale


def keep_gradient_norm(engine: deepspeed.DeepSpeedEngine) -> None:
    """Has ``engine.get_global_grad_norm()`` answer without ZeRO in fp32, too, where the engine clips and forgets it.

    Where all ranks hold the same gradients, by torch's own clipping: the same but for rounding, in half the time, and
    with none of DeepSpeed's sum over the ranks, which is for experts and parallel models.
    """
    alike = _is_data_parallel_alone(engine)

    def clip_fp32_gradients() -> None:
        parameters, max_norm = engine.module.parameters(), engine.gradient_clipping()
        if alike:
            engine._global_grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        else:
            engine._global_grad_norm = clip_grad_norm_(parameters=parameters, max_norm=max_norm, mpu=engine.mpu)

    engine.clip_fp32_gradients = clip_fp32_gradients


def take_norms_at_once(engine: deepspeed.DeepSpeedEngine) -> None:
    """Has ZeRO 1 and 2 take the norm of a rank's gradients in one call of torch's, not in several for each parameter.

    The same but for rounding: for small micro-batches a twentieth of a step. Gradients of 16 bits, whose squares need
    32, are left to DeepSpeed, which converts one at a time.
    """
    optimizer = engine.optimizer
    if not (isinstance(optimizer, DeepSpeedZeroOptimizer) and _is_data_parallel_alone(engine)):
        return
    if engine_dtype(engine) != torch.float32:
        return
    if not hasattr(torch.nn.utils, "get_total_norm"):
        return  # before torch 2.6

    def get_grad_norm_direct(gradients: list[torch.Tensor], params: list[torch.Tensor], norm_type: int = 2) -> Any:
        mine = [each for each in gradients if not getattr(each, "_zero_padding", False)][: len(params)]
        norm = torch.nn.utils.get_total_norm(mine, norm_type).to(engine.device)
        if engine.dp_world_size > 1:
            square = norm.square()
            torch.distributed.all_reduce(square, group=optimizer.dp_process_group)
            norm = square.sqrt()
        return norm.masked_fill_(~norm.isfinite(), -1)  # by which ZeRO knows a step to skip

    optimizer.get_grad_norm_direct = get_grad_norm_direct


def _is_data_parallel_alone(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether all ranks have the same network, so that a norm needs no sum over parts of one or over experts."""
    return engine.mpu is None and not engine.has_moe_layers


def leave_out_reductions_to_oneself(engine: deepspeed.DeepSpeedEngine) -> None:
    """Spares a single process the sum of its gradients over itself: for small micro-batches a tenth of a step."""
    optimizer = engine.optimizer
    if engine.dp_world_size > 1:
        return
    if engine.zero_optimization_stage() == 0:
        engine.enable_backward_allreduce = False
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.allreduce_bucket = lambda bucket, *_, **__: optimizer.flatten(bucket)


def loss_scale(engine: deepspeed.DeepSpeedEngine) -> float:
    """By what fp16's losses are multiplied; 1 in other precisions."""
    if not engine.fp16_enabled():
        return 1.0
    config = getattr(engine.optimizer, "loss_scale_config", None)
    return float(config.cur_scale if config else engine.optimizer.loss_scale)


def data_rank(engine: deepspeed.DeepSpeedEngine) -> int:
    """Which share of the data this rank gets; all stages of a pipeline get the same."""
    grid = getattr(engine, "grid", None)
    return grid.get_data_parallel_rank() if grid else torch.distributed.get_rank()


def share_buffers(engine: deepspeed.DeepSpeedEngine) -> None:
    """Gives every rank the first one's running statistics of batch normalization, as ``DistributedDataParallel`` does.

    Only validation and exports use them. Without it every rank would judge by its own share of the images.
    """
    grid = getattr(engine, "grid", None)
    group: Any = grid.get_data_parallel_group() if grid else torch.distributed.group.WORLD
    if torch.distributed.get_world_size(group) == 1:
        return
    first = torch.distributed.get_global_rank(group, 0)
    for buffer in engine.module.buffers():
        torch.distributed.broadcast(buffer, first, group=group)
