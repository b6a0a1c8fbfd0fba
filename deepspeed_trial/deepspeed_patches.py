"""Every patch of DeepSpeed's objects, each a function named after what it cures, and where it is applied.

- ``prepare_accelerator``, once a process: ``silence_misleading_warnings``, ``allow_fp16_on_cpu``,
  ``reduce_over_gloo``, and those of Muon, in ``muon_patches.py``; ``limit_waiting`` before its group is made;
- ``patch_engine``, to a new engine: those from ``scale_fp16_loss_without_zero`` on,
  ``patch_pipeline`` and the patches in ``zero_patches.py``;
- before an engine is made: ``partition_for_zero3`` to a network, ``clip_stages_together`` to a pipeline, both
  of whose patches are in ``pipeline_patches.py``;
- before each validation: ``broadcast_buffers``;
- while a checkpoint is loaded: ``keep_configured_hyperparameters``.

At the end are getters that work in every mode. Checked with DeepSpeed 0.19.8. Older ones need a part of it
(0.13 is in Determined's image), so some patches ask first for what they replace.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.utils import clip_grad_norm_

from deepspeed_trial import redaction
from deepspeed_trial.muon_patches import mend_muon_on_demand
from deepspeed_trial.pipeline_patches import patch_pipeline
from deepspeed_trial.schedules import SETTINGS, follow_remade_optimizer
from deepspeed_trial.zero_patches import find_weights_in_round_robin, join_collectives_of_groups

# ----------------------------------------------------------------------------------------------- the process


@functools.cache  # once a process
def prepare_accelerator() -> None:
    """Makes DeepSpeed's accelerator and its messages fit for a CPU."""
    silence_misleading_warnings()
    mend_muon_on_demand()
    if get_accelerator().device_name() == "cpu":
        allow_fp16_on_cpu()
        reduce_over_gloo()


def allow_fp16_on_cpu() -> None:
    """Lets fp16 train on any CPU.

    DeepSpeed refuses it on a CPU without instructions for fp16, on which torch computes it all the same,
    slowly.
    """
    get_accelerator().is_fp16_supported = lambda: True


def reduce_over_gloo() -> None:
    """Has a CPU's gradients reduced by gloo, which gives the same bits everywhere.

    DeepSpeed would compile an all-reduce over shared memory of its own, for most of a minute.
    """
    builder = get_accelerator().create_op_builder
    get_accelerator().create_op_builder = lambda op: None if op == "ShareMemCommBuilder" else builder(op)


def limit_waiting(limit: datetime.timedelta) -> None:
    """Gives the groups that DeepSpeed makes a time limit; it leaves them torch's, whatever the first one has.

    Args:
        limit: for which a collective waits for the other ranks.
    """
    TorchBackend.new_group = lambda _, ranks: torch.distributed.new_group(ranks, timeout=limit)


def silence_misleading_warnings() -> None:
    """Keeps back three warnings that come at every start and ask for nothing.

    Determined's that APEX is missing, not needed since DeepSpeed 0.3; DeepSpeed's that a rate was asked for
    before the first step, which its own engine does; torch's that DeepSpeed uses names it will rename.
    """
    misleading = ("Missing package APEX", "learning rate from scheduler before it has started")
    for name in ("determined.pytorch", "DeepSpeed"):
        logging.getLogger(name).addFilter(
            lambda record: not any(text in record.getMessage() for text in misleading)
        )
    deprecated = ".*torch.distributed.* is deprecated"
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)


# ------------------------------------------------------------------------------------------------ the engine


def patch_engine(engine: deepspeed.DeepSpeedEngine) -> None:
    """Applies what every new engine needs."""
    scale_fp16_loss_without_zero(engine)
    let_other_losses_pass(engine)
    keep_gradient_norm(engine)
    skip_reductions_over_one_rank(engine)
    save_plain_configuration(engine)
    follow_remade_optimizer(engine)
    patch_pipeline(engine)
    find_weights_in_round_robin(engine)
    join_collectives_of_groups(engine)


def scale_fp16_loss_without_zero(engine: deepspeed.DeepSpeedEngine) -> None:
    """Multiply the loss by fp16's loss scale in ``engine.backward`` without ZeRO, too.

    Since DeepSpeed 0.18 it scales for ZeRO's optimizers only, but ``step`` divides the gradients by the
    scale in either case: they would be too small by that factor, and overflow would never be noticed.
    """
    if not (engine.fp16_enabled() and not engine.zero_optimization() and hasattr(engine, "scale")):
        return
    backward = engine.backward

    def scaled_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scale = engine.optimizer.loss_scale_config.cur_scale
        scaled = backward(loss.float() * scale, *args, **kwargs)  # in fp16 it may overflow
        return (scaled / scale).to(loss.dtype)

    engine.backward = scaled_backward


def let_other_losses_pass(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let the loss of another engine pass through this one, as a GAN's generator needs it.

    DeepSpeed 0.19 takes such a loss for one whose ``backward`` the trial itself has called. It refuses that
    without ZeRO, and in fp16, where it misses the scale that the other engine has applied. This engine's
    weights keep gradients of that loss until the trial calls the engine's ``zero_grad``.
    """
    losses = getattr(engine_module, "_ENGINE_BACKWARD_GRAPH_TRACKER", None)
    if losses is None:  # an older DeepSpeed lets every loss pass
        return
    begin = engine._backward_prologue

    def begin_own_backward() -> None:
        is_other = losses.is_current_graph_registered() and not engine._running_engine_backward
        if is_other and not engine._support_torch_style_backward:
            return  # without ZeRO there is nothing to prepare
        engine._manual_backward_expected |= is_other
        begin()

    engine._backward_prologue = begin_own_backward


def keep_gradient_norm(engine: deepspeed.DeepSpeedEngine) -> None:
    """Keeps the norm of fp32 gradients without ZeRO, for ``get_global_grad_norm()``.

    DeepSpeed computes it to clip by it alone, and forgets it. Where all ranks hold the same gradients torch's
    own clipping serves: the same but for rounding, in half the time, and without DeepSpeed's sum over the
    ranks, which is for experts and parallel models. There it is computed without clipping, too, for 1 % of a
    small step on a CPU; the gradients are only read.
    """
    replicated = engine.mpu is None and not engine.has_moe_layers
    parameters = list(engine.module.parameters())  # once: a walk over the modules in every step shows

    def clip_fp32_gradients() -> None:
        max_norm = engine.gradient_clipping()
        if replicated:
            engine._global_grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        else:
            norm = clip_grad_norm_(parameters=parameters, max_norm=max_norm, mpu=engine.mpu)
            engine._global_grad_norm = norm

    def take_norm(*_: object) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients)

    engine.clip_fp32_gradients = clip_fp32_gradients
    is_plain = not (engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())
    if (
        engine.basic_optimizer is not None  # or the engine only computes
        and replicated
        and is_plain
        and not engine.gradient_clipping()
        and hasattr(torch.nn.utils, "get_total_norm")
    ):
        engine.basic_optimizer.register_step_pre_hook(take_norm)


def skip_reductions_over_one_rank(engine: deepspeed.DeepSpeedEngine) -> None:
    """Spares a single process without ZeRO the all-reduce over itself: 4 % of a small step on a CPU."""
    if engine.dp_world_size == 1 and engine.zero_optimization_stage() == 0:
        engine.enable_backward_allreduce = False


def save_plain_configuration(engine: deepspeed.DeepSpeedEngine) -> None:
    """Has checkpoints hold the configuration as plain dictionaries without credentials.

    DeepSpeed saves the very object that the trial gave it. As an ``AttrDict``, usual in Determined's trials,
    it is more than a safe ``torch.load`` reads, and ``comet.api_key`` stands in it.
    """
    if isinstance(engine.config, Mapping):
        engine.config = redaction.values(json.loads(json.dumps(engine.config, default=str)))


# ---------------------------------------------------------------------------- the network, before its engine


def partition_for_zero3(net: torch.nn.Module, dtype: torch.dtype, config: Mapping[str, Any]) -> None:
    """Casts a network that lies whole in the host's memory and partitions it over the ranks, for ZeRO 3.

    As a context, ``zero.Init`` skips what a network itself initialises; left to the engine, all of the
    network goes to the device first; and neither casts weights that it finds partitioned.
    """
    for parameter in net.parameters():
        parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=net, config_dict_or_path=config)


# ------------------------------------------------------------------------------------------------ validation


def broadcast_buffers(engine: deepspeed.DeepSpeedEngine) -> None:
    """Gives every rank the first one's running statistics, as ``DistributedDataParallel`` does.

    DeepSpeed never does, so in validation every rank would judge by the statistics of its own share of the
    data.
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


# ----------------------------------------------------------------------------------------------- checkpoints


@contextlib.contextmanager
def keep_configured_hyperparameters(engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
    """Keeps the optimizer's and the schedule's configured values while a checkpoint is loaded inside.

    DeepSpeed replaces them, and the gradient clipping, by the checkpoint's, so that a learning rate could
    never be changed, and fails where the checkpoint has no schedule. A schedule's rate and momentum are set
    to what the configured schedule has after as many steps.
    """
    optimizer, schedule = engine.basic_optimizer, engine.lr_scheduler
    if optimizer is None or (schedule and not hasattr(schedule, "last_batch_iteration")):
        yield  # a schedule of the trial's own keeps its place as it likes
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
            del schedule.load_state_dict  # the class's again
    for group, configured in zip(optimizer.param_groups, groups, strict=True):
        group.update(configured)
    if clipping is not None:
        engine.optimizer.clip_grad = clipping
    if schedule:
        done = schedule.last_batch_iteration
        done = engine.global_steps - engine.skipped_steps - 1 if done is None else done
        if done >= 0:
            schedule.step(done)


# ------------------------------------------------------------------------------------------ asking an engine


def engine_dtype(engine: deepspeed.DeepSpeedEngine) -> torch.dtype:
    """The floating-point type in which an engine wants its inputs."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def loss_scale(engine: deepspeed.DeepSpeedEngine) -> float:
    """The factor by which fp16's losses are multiplied; 1 in other precisions."""
    if not engine.fp16_enabled():
        return 1.0
    config = getattr(engine.optimizer, "loss_scale_config", None)
    return float(config.cur_scale if config else engine.optimizer.loss_scale)


def data_parallel_rank(engine: deepspeed.DeepSpeedEngine) -> int:
    """Which share of the data this rank gets; all stages of a pipeline get the same."""
    grid = getattr(engine, "grid", None)
    return grid.get_data_parallel_rank() if grid else torch.distributed.get_rank()
