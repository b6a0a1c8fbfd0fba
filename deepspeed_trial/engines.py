"""Operations and queries on an engine that work in every mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch

from deepspeed_trial.schedules import SETTINGS


def partition_for_zero3(net: torch.nn.Module, dtype: torch.dtype, config: Mapping[str, Any]) -> None:
    """Cast a network in the host's memory, and partition it over the ranks for ZeRO 3.

    The alternatives have faults: ``zero.Init`` as a context skips weights that the network initialises
    itself, and the engine first moves the whole network to the device. Neither casts partitioned weights.
    """
    for parameter in net.parameters():
        parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=net, config_dict_or_path=config)


def broadcast_buffers(engine: deepspeed.DeepSpeedEngine) -> None:
    """Give every rank the first rank's running statistics, as ``DistributedDataParallel`` does.

    DeepSpeed does not: in validation each rank would normalise by the statistics of its share of the data.
    """
    parallel = getattr(engine, "grid", None) or engine.mpu  # of a pipeline; of another parallel model
    group: Any = parallel.get_data_parallel_group() if parallel else torch.distributed.group.WORLD
    if torch.distributed.get_world_size(group) == 1:
        return
    first = torch.distributed.get_global_rank(group, 0)
    for layer in engine.module.modules():
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase):
            for buffer in layer.buffers():
                torch.distributed.broadcast(buffer, first, group=group)


@contextlib.contextmanager
def keep_configured_hyperparameters(engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
    """Keep the configured values of the optimizer and the schedule while the block loads a checkpoint.

    DeepSpeed replaces these values and the gradient clipping by the checkpoint's values, so a resume could
    not change a learning rate. DeepSpeed also fails if the checkpoint has no schedule. After the block,
    learning rate and momentum have the values of the configured schedule at the checkpoint's step.
    """
    optimizer, schedule = engine.basic_optimizer, engine.lr_scheduler
    if optimizer is None or (schedule and not hasattr(schedule, "last_batch_iteration")):
        yield  # the trial's own schedule restores itself
        return
    clipping = getattr(engine.optimizer, "clip_grad", None)
    settings = {*optimizer.defaults, *SETTINGS}
    groups = [{key: group[key] for key in settings & group.keys()} for group in optimizer.param_groups]
    if schedule:
        load, schedule.last_batch_iteration = schedule.load_state_dict, None
        schedule.load_state_dict = lambda state: load(state) if state else None
    try:
        yield
    finally:
        if schedule:
            del schedule.load_state_dict  # which uncovers the class's method
    for group, configured in zip(optimizer.param_groups, groups, strict=True):
        group.update(configured)
    if clipping is not None:
        engine.optimizer.clip_grad = clipping
    if schedule:
        done = schedule.last_batch_iteration
        done = engine.global_steps - engine.skipped_steps - 1 if done is None else done
        if done >= 0:
            schedule.step(done)


def engine_dtype(engine: deepspeed.DeepSpeedEngine) -> torch.dtype:
    """Return the floating-point type of an engine's inputs."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def loss_scale(engine: deepspeed.DeepSpeedEngine) -> float:
    """Return the loss scale of fp16; 1 in other precisions."""
    if not engine.fp16_enabled():
        return 1.0
    config = getattr(engine.optimizer, "loss_scale_config", None)
    return float(config.cur_scale if config else engine.optimizer.loss_scale)


def data_parallel_rank(engine: deepspeed.DeepSpeedEngine) -> int:
    """Return the index of this rank's share of the data; the stages of a pipeline have the same share."""
    grid = getattr(engine, "grid", None)
    return grid.get_data_parallel_rank() if grid else torch.distributed.get_rank()
