"""How much memory a process has used, and what to change when it is not enough."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

import checkpointing
from engine_rules import dtype_name, zero_stage
from errors import TrainingStopped, one_line

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


@contextlib.contextmanager
def explained(trial: Any, when: Callable[[], str]) -> Iterator[None]:
    """Ends what runs in it, where there is no memory left, with what to change.

    Args:
        trial: a ``CIFARTrial``.
        when: says in which step, or before which.

    Raises:
        TrainingStopped: if memory runs out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, TrainingStopped) or not is_exhausted(error):
            raise
        traceback.clear_frames(error.__traceback__)  # what they hold may be all that the explanation needs
        reason = re.sub(r"^\[enforce fail[^]]*\] [^.]*\. ", "", one_line(error)).split(". ")[0]
        said = f"no memory left {when()} ({reason}), after {peak():,.0f} MiB"
        raise TrainingStopped(f"{said}; {advice(trial)}") from error


def advice(trial: Any) -> str:
    """What would need less memory, the cheapest first, in one line.

    Args:
        trial: a ``CIFARTrial``, perhaps without an engine yet; then the weights alone have been too much.
    """
    config, stages = trial.ds_config, trial.args.get("pipe_parallel_size", 1)
    training, pipeline, processes = hasattr(trial, "model_engine"), stages > 1, trial.context.distributed.size // stages
    net = trial.model_engine.module if training else trial.outline()
    parameters = sum(getattr(each, "ds_numel", each.numel()) for each in net.parameters())
    checkpointed, device = trial.args.get("checkpoint_activations"), trial.context.device.type
    micro, accumulate = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    zero, stage, low = config.get("zero_optimization") or {}, zero_stage(config), dtype_name(config) != "fp32"
    most = 1 if pipeline else 2 if trial.moe else 3  # the stage
    steps = []
    if trial.train_set.images.is_cuda:
        size = (trial.train_set.images.nbytes + trial.test_set.images.nbytes) / MIB
        steps.append(f"data.device: cpu (the {size:,.0f} MiB of images to the host)")
    if micro > 1 and training:
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
    if training and not (checkpointed or pipeline or trial.moe) and any(True for _ in checkpointing.blocks(net)):
        steps.append("hyperparameters.checkpoint_activations: true (a block's activations are computed twice)")
    if not low:
        steps.append(f"bf16.enabled: true ({'activations' if training else 'weights and gradients'} of half the size)")
    if device == "cuda" and not pipeline and not zero.get("offload_optimizer"):
        size = parameters * BYTES["16 bits" if low else "fp32"][2] / processes / MIB
        steps.append(
            f"zero_optimization: {{stage: {most}, offload_optimizer: {{device: cpu}}}} ({size:,.0f} MiB to the host)"
        )
    return "; then ".join([*steps, "a smaller net or data.image_size" if training else "a smaller net"])


def _held(parameters: int, processes: int, stage: int, low: bool) -> float:
    """Bytes a process holds of weights, gradients and Adam's state: https://arxiv.org/abs/1910.02054, figure 1."""
    weights, gradients, state = BYTES["16 bits" if low else "fp32"]
    shared = [
        each / processes if stage >= least else each for each, least in ((weights, 3), (gradients, 2), (state, 1))
    ]
    return parameters * sum(shared)
