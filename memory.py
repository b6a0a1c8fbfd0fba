"""How much memory a process has used, and what to change when it is not enough."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from typing import Any

import torch

import checkpointing
from engine_rules import dtype_name, zero_stage

BYTES = {
    "fp32": (4, 4, 8),
    "16 bits": (2, 2, 12),
}  # a parameter's weight, gradient, and Adam's state with a master copy
MIB = 2**20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt


def peak() -> float:
    """The most memory that this process has used so far, in MiB: of its GPU, or of the host where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / MIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def keep_what_is_freed(kept: bool) -> None:
    """Has the C library keep the blocks that a step frees, or return the large ones to the system at once.

    The next step needs the same again, and from the system they cost a page fault every 4 KiB: a quarter of a step of
    1,024 images. Returned is for runs that trade time for memory: gathered weights and recomputed activations are of
    many sizes, which add up. Left alone, glibc does some of either. The user's own setting wins.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html

    Args:
        kept: whether to keep them.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # of another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, 32 * MIB if kept else MIB)  # 32 is the most that glibc takes
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if kept else MIB)


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        said in str(error) for said in ("not enough memory", "can't allocate memory", "out of memory")
    )


def advice(trial: Any) -> str:
    """What would need less memory, the cheapest first, in one line.

    Args:
        trial: a ``CIFARTrial``.
    """
    config, processes = trial.ds_config, trial.model_engine.dp_world_size
    parameters = sum(getattr(each, "ds_numel", each.numel()) for each in trial.model_engine.module.parameters())
    checkpointed, device = trial.args.get("checkpoint_activations"), trial.context.device.type
    micro, accumulate = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    zero, stage, low = config.get("zero_optimization") or {}, zero_stage(config), dtype_name(config) != "fp32"
    pipeline = trial.context.use_pipeline_parallel
    most = 1 if pipeline else 2 if trial.moe else 3  # the stage
    steps = []
    if micro > 1:
        part = next(each for each in range(micro // 2, 0, -1) if micro % each == 0)
        steps.append(
            f"train_micro_batch_size_per_gpu: {part} with gradient_accumulation_steps: {accumulate * micro // part}"
            f" (now {micro} and {accumulate}; the same steps with the activations of {part} images)"
        )
    if processes > 1 and stage < most:
        held = [_held(parameters, processes, each, low) / MIB for each in range(4)]
        steps.append(
            f"zero_optimization.stage: {stage + 1} (now {stage}; weights, gradients and optimizer take"
            f" {held[stage]:,.0f} MiB a process, at stage "
            + ", ".join(f"{each}: {held[each]:,.0f}" for each in range(stage + 1, most + 1))
            + ")"
        )
    if not (checkpointed or pipeline or trial.moe) and any(
        True for _ in checkpointing.blocks(trial.model_engine.module)
    ):
        steps.append("hyperparameters.checkpoint_activations: true (a block's activations are computed twice)")
    if not low:
        steps.append("bf16.enabled: true (activations of half the size)")
    if device == "cuda" and not pipeline and not zero.get("offload_optimizer"):
        size = parameters * BYTES["16 bits" if low else "fp32"][2] / processes / MIB
        steps.append(
            f"zero_optimization: {{stage: {most}, offload_optimizer: {{device: cpu}}}} ({size:,.0f} MiB to the host)"
        )
    return "; then ".join(steps) or "a smaller net or data.image_size"


def _held(parameters: int, processes: int, stage: int, low: bool) -> float:
    """Bytes a process holds of weights, gradients and Adam's state: https://arxiv.org/abs/1910.02054, figure 1."""
    weights, gradients, state = BYTES["16 bits" if low else "fp32"]
    shared = [
        each / processes if stage >= least else each for each, least in ((weights, 3), (gradients, 2), (state, 1))
    ]
    return parameters * sum(shared)
