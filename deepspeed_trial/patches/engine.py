"""Patches for every engine; ``patch_engine`` also applies the patches in ``zero`` and ``pipeline``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.utils import clip_grad_norm_

from deepspeed_trial import redaction
from deepspeed_trial.patches import follow_calls, patch
from deepspeed_trial.patches.pipeline import join_norms_of_uneven_stages
from deepspeed_trial.patches.zero import (
    find_weights_in_round_robin,
    follow_remade_optimizer,
    join_collectives_of_groups,
)

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
FP16 = "deepspeed.runtime.fp16"


def patch_engine(engine: deepspeed.DeepSpeedEngine) -> None:
    """Apply the patches that a new engine needs.

    Raises:
        InvalidInput: if DeepSpeed's code differs from the code for which a needed patch was written.
    """
    scale_fp16_loss_without_zero(engine)
    let_other_losses_pass(engine)
    keep_gradient_norm(engine)
    skip_reductions_over_one_rank(engine)
    save_plain_configuration(engine)
    follow_remade_optimizer(engine)
    join_norms_of_uneven_stages(engine)
    find_weights_in_round_robin(engine)
    join_collectives_of_groups(engine)


@patch(
    f"{ENGINE}.backward",
    versions=">=0.18",
    report="deepspeedai/DeepSpeed#8393",
    guards=(
        f"{ENGINE}.backward",
        f"{ENGINE}._backward_prologue",
        f"{ENGINE}._backward_prologue_per_tensor",
        f"{FP16}.fused_optimizer:FP16_Optimizer.step",
        f"{FP16}.fused_optimizer:FP16_Optimizer.unscale_and_clip_grads",
        f"{FP16}.unfused_optimizer:FP16_UnfusedOptimizer.step",
        f"{FP16}.unfused_optimizer:FP16_UnfusedOptimizer.unscale_and_clip_grads",
    ),
    digests=("11cf00ee7790",),
    when=lambda engine: engine.fp16_enabled() and not engine.zero_optimization(),
)
def scale_fp16_loss_without_zero(engine: deepspeed.DeepSpeedEngine) -> None:
    """Without ZeRO, ``backward`` does not scale an fp16 loss, and ``step`` divides gradients by the scale.

    The gradients would be too small by that factor, and no step would notice an overflow.
    """
    backward = engine.backward

    @functools.wraps(backward)
    def scaled_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scale = engine.optimizer.loss_scale_config.cur_scale
        scaled = backward(loss.float() * scale, *args, **kwargs)  # in fp16 the product may overflow
        return (scaled / scale).to(loss.dtype)

    engine.backward = scaled_backward


@patch(f"{ENGINE}._backward_prologue", versions=">=0.19", digests=("d6aa413dfa99",))
def let_other_losses_pass(engine: deepspeed.DeepSpeedEngine) -> None:
    """If one engine's loss passes through a second engine (a GAN's generator loss), the second refuses it.

    DeepSpeed assumes that the trial itself called ``backward`` on that loss. It refuses the loss without
    ZeRO, and in fp16, where the other engine's loss scale is missing. This engine's weights keep the loss's
    gradients until the trial calls the engine's ``zero_grad``.
    """
    losses = engine_module._ENGINE_BACKWARD_GRAPH_TRACKER
    begin = engine._backward_prologue

    @functools.wraps(begin)
    def begin_own_backward() -> None:
        is_other = losses.is_current_graph_registered() and not engine._running_engine_backward
        if is_other and not engine._support_torch_style_backward:
            return  # without ZeRO there is nothing to prepare
        engine._manual_backward_expected |= is_other
        begin()

    engine._backward_prologue = begin_own_backward


def _steps_in_fp32(engine: deepspeed.DeepSpeedEngine) -> bool:
    is_plain = not (engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())
    return is_plain and engine.basic_optimizer is not None


@patch(
    f"{ENGINE}.clip_fp32_gradients",
    versions=">=0.13",
    report="deepspeedai/DeepSpeed#1286",
    guards=(f"{ENGINE}.clip_fp32_gradients", f"{ENGINE}._take_model_step", f"{ENGINE}.get_global_grad_norm"),
    digests=("bf90e2bce853", "45873149b3c9", "e1a6b7c91a1e"),
    when=_steps_in_fp32,
)
def keep_gradient_norm(engine: deepspeed.DeepSpeedEngine) -> None:
    """Without ZeRO, DeepSpeed forgets the norm of fp32 gradients, and ``get_global_grad_norm()`` gives None.

    If all ranks have the same gradients, the patch uses torch's clipping: it takes half the time, needs no
    sum over ranks, and differs only by rounding. Without clipping these ranks compute the norm before each
    step, which takes 1 % of a small step on a CPU. With experts or parallel models, the patch uses
    DeepSpeed's clipping, which sums over ranks; without clipping there is then no norm.
    """
    replicated = engine.mpu is None and not engine.has_moe_layers
    parameters = list(engine.module.parameters())  # once, because a walk over the modules takes time

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
    if replicated and not engine.gradient_clipping() and hasattr(torch.nn.utils, "get_total_norm"):
        engine.basic_optimizer.register_step_pre_hook(take_norm)


@patch(
    f"{ENGINE}.enable_backward_allreduce",
    versions=">=0.18",
    guards=(f"{ENGINE}._backward_epilogue",),
    digests=("926f6d3a6aed",),
    when=lambda engine: engine.dp_world_size == 1 and engine.zero_optimization_stage() == 0,
)
def skip_reductions_over_one_rank(engine: deepspeed.DeepSpeedEngine) -> None:
    """A single process without ZeRO reduces gradients in vain, which takes 4 % of a small step on a CPU."""
    engine.enable_backward_allreduce = False


@patch(
    f"{ENGINE}.config",
    versions=">=0.13",
    guards=(f"{ENGINE}._save_zero_checkpoint",),
    digests=("4e6620c153c9", "e2328479c3aa"),
    when=lambda engine: isinstance(engine.config, Mapping),
)
def save_plain_configuration(engine: deepspeed.DeepSpeedEngine) -> None:
    """DeepSpeed saves the trial's configuration object, with credentials, in every checkpoint.

    Determined's trials often pass an ``AttrDict``, which a safe ``torch.load`` refuses. An example of a
    credential is ``comet.api_key``. With the patch, checkpoints contain plain dictionaries without
    credentials.
    """
    engine.config = redaction.values(json.loads(json.dumps(engine.config, default=str)))


@patch(
    f"{ENGINE}.step",
    versions=">=0.13",
    guards=(),
    when=lambda engine, *_: not hasattr(engine, "_INSTRUCTION_MAP"),
)
def follow_engine(
    engine: deepspeed.DeepSpeedEngine, backward: Callable[[], None], step: Callable[[], None]
) -> None:
    """An engine has no hooks before its backward pass and its optimizer step.

    Args:
        engine: an engine of any kind except a pipeline's.
        backward: called before each backward pass.
        step: called before each optimizer step.
    """
    engine.backward = follow_calls(engine.backward, backward)
    engine.step = follow_calls(engine.step, step)
