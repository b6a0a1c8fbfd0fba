"""How the memory of a step is kept for the next, and what to change when there is not enough."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

from classify.engine.combinations import dtype_name
from classify.engine.deepspeed_keys import ACCUMULATION, MICRO_BATCH
from classify.engine.memory_forecast import MIB, model_states
from classify.engine.trial_config import TrialConfig
from classify.models import recompute, registry

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt


def keep_freed_memory(keeps: bool) -> None:
    """Tell the C library of this process to keep the blocks that a step frees, or to return large ones.

    The next step needs the same again, and from the system they cost a page fault every 4 KiB: kept,
    ``Net`` trains 1.2 times as fast in micro-batches of 256 and 1,024 images. They are returned in runs
    that trade time for memory: gathered weights and recomputed activations are of many sizes, which add up.
    Left alone, glibc does some of either. The user's own setting wins. Source:
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # of another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, 32 * MIB if keeps else MIB)  # 32 is the most that glibc takes
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if keeps else MIB)


def advise(config: TrialConfig, engine: Any | None, images_on_gpu: int) -> str:
    """Advise in one line on ways to need less memory, the cheapest first.

    Args:
        config: the trial's.
        engine: its engine; if None, the weights alone have been too much.
        images_on_gpu: the bytes of images in a GPU's memory.
    """
    training, pipeline, experts = engine is not None, config.stages > 1, config.hyper.has_experts
    net = registry.on_meta_device(config.net) if engine is None else engine.module
    micro, accumulation = config.deepspeed[MICRO_BATCH], config.deepspeed[ACCUMULATION]
    largest_stage = 1 if pipeline else 2 if experts else 3
    advice = []
    if images_on_gpu:
        advice.append(f"data.device: cpu (the {images_on_gpu / MIB:,.0f} MiB of images to the host)")
    if micro > 1 and training:
        part = next(each for each in range(micro // 2, 0, -1) if micro % each == 0)
        advice.append(
            f"{MICRO_BATCH}: {part} with {ACCUMULATION}: {accumulation * micro // part} (now {micro} and"
            f" {accumulation}; the same steps with the activations of {part} images)"
        )
    if config.replicas > 1 and config.zero_stage < largest_stage:
        advice.append(_next_stage(config, largest_stage))
    can_recompute = training and not (config.hyper.checkpoint_activations or pipeline or experts)
    if can_recompute and any(True for _ in recompute.blocks(net)):
        advice.append(
            "hyperparameters.checkpoint_activations: true (a block's activations are computed twice)"
        )
    if dtype_name(config.deepspeed) == "fp32":
        what = "activations" if training else "weights and gradients"
        advice.append(f"bf16.enabled: true ({what} of half the size)")
    zero = config.deepspeed.get("zero_optimization") or {}
    if config.device == "cuda" and not pipeline and not zero.get("offload_optimizer"):
        size = model_states(config, largest_stage)["optimizer"] / MIB
        offload = f"{{stage: {largest_stage}, offload_optimizer: {{device: cpu}}}}"
        advice.append(f"zero_optimization: {offload} ({size:,.0f} MiB to the host)")
    return "; then ".join([*advice, "a smaller net or data.image_size" if training else "a smaller net"])


def _next_stage(config: TrialConfig, largest: int) -> str:
    """Advise on the next ZeRO stage, with the sizes at all of them."""
    stage = config.zero_stage
    sizes = [sum(model_states(config, each).values()) / MIB for each in range(4)]
    others = ", ".join(f"{each}: {sizes[each]:,.0f}" for each in range(stage + 1, largest + 1))
    return (
        f"zero_optimization.stage: {stage + 1} (now {stage}; weights, gradients and optimizer take"
        f" {sizes[stage]:,.0f} MiB a process, at stage {others})"
    )
