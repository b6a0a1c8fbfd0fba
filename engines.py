"""What a DeepSpeed engine has to be asked, told and helped with."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.utils import clip_grad_norm_

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


def _is_data_parallel_alone(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether all ranks have the same network, so that a norm needs no sum over parts of one or over experts."""
    return engine.mpu is None and not engine.has_moe_layers


def leave_out_reductions_to_oneself(engine: deepspeed.DeepSpeedEngine) -> None:
    """Spares a single process without ZeRO the sum of its gradients over itself: 4 % of a small step on a CPU."""
    if engine.dp_world_size == 1 and engine.zero_optimization_stage() == 0:
        engine.enable_backward_allreduce = False


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
