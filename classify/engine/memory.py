"""Memory of a training: an estimate before any allocation, advice, and settings of the C library.

The sizes of weights, gradients, optimizer state and DeepSpeed's copies are computed from the configuration.
torch's ``MemTracker`` measures the activations of two small micro-batches on fake tensors. Activations are
linear in the size of the micro-batch.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from classify.engine.combinations import dtype_name, offloads
from classify.engine.deepspeed_keys import ACCUMULATION, MICRO_BATCH
from classify.engine.optimizer_rules import ADAM_SWITCHES, is_muon, optimizer_class, section_at
from classify.engine.parameter_groups import freeze
from classify.engine.trial_config import TrialConfig
from classify.models import recompute, registry
from deepspeed_trial.errors import one_line

MIB = 2**20
FP32, ADAM = 4, 8  # bytes of a number; bytes of Adam's state for each number
TRACED = 2, 4  # images in the measured micro-batches; batch normalization does not train on one image
# MiB of a process after its imports, of its process group, and of a GPU's context
BASE, JOINED, GPU_BASE = 820, 40, 500
HOLES = 1.35  # memory that glibc holds for a step, divided by the size of the step's blocks: docs/memory.md
TEMPORARIES = 2  # temporary tensors of torch's Adam, each of a parameter's size; see partition_copies
BUCKET = 500_000_000  # DeepSpeed's default reduce_bucket_size, in numbers
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # parameters of mallopt
MMAPS = 65536  # glibc's default limit of blocks allocated by mmap


# ----------------------------------------------------------------------------------------------- the forecast


@dataclass(frozen=True)
class Forecast:
    """Estimated peak memory of a training process in bytes, without checkpoints and validations.

    Attributes:
        parts: bytes on the computing device, by purpose.
        host: bytes of host memory for the optimizer that a GPU run offloads.
        note: the reason why the activations are unknown; None if they are known.
    """

    parts: dict[str, int]
    host: int = 0
    note: str | None = None

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


class Forecaster:
    """Estimates memory for micro-batches of any size: ``Forecaster(config)(micro_batch)``.

    Args:
        config: the trial's configuration.
    """

    def __init__(self, config: TrialConfig) -> None:
        self.config = config
        self.on_gpu = config.device == "cuda"

    def __call__(self, micro_batch: int) -> Forecast:
        """Return the forecast for micro-batches of ``micro_batch`` images."""
        config = self.config
        on_cpu = BASE + (JOINED if config.processes > 1 else 0)
        parts = {"base": MIB * (GPU_BASE if self.on_gpu else on_cpu), **model_states(config)}
        if config.zero_stage:
            parts["copies"] = partition_copies(config)
        if config.teacher:
            parts["teacher"] = sum(t.numel() for t in config.teacher.net.parameters()) * config.dtype.itemsize
        host = 0
        if self.on_gpu and offloads(config.deepspeed, "offload_optimizer"):
            host = parts.pop("optimizer") + parts.pop("copies") + parts["gradients"]
        if config.hyper.has_experts or config.stages > 1:
            return Forecast(parts, host, "the activations of experts and pipelines are not known")
        try:
            first, second = self._activations
        except Exception as error:  # a network may raise anything
            return Forecast(parts, host, f"the activations are not known ({one_line(error)})")
        if config.zero_stage == 3 and config.replicas > 1:
            parts["weights"] += config.dtype.itemsize * _trained(config)  # a pass gathers all weights
        if config.hyper.weight_average:
            parts["average"] = FP32 * (_share(config) if config.zero_stage else _trained(config))
        growth = (second - first) / (TRACED[1] - TRACED[0])
        holes = HOLES if not self.on_gpu and keeps_freed_memory(config) else 1
        parts["activations"] = round(holes * (first + growth * (micro_batch - TRACED[0])))
        height, width = config.data.image_size
        parts["images"] = self._decoded + 3 * height * width * micro_batch
        return Forecast(parts, host)

    def largest(self, limit: int) -> int:
        """Return the largest number of images whose micro-batch fits into ``limit`` bytes, or 0."""
        sizes = range(1, self.config.source.count("train") // self.config.replicas + 1)
        return bisect.bisect_right(sizes, limit, key=lambda size: self(size).total)

    @functools.cached_property
    def _activations(self) -> tuple[int, int]:
        first, second = (measure_activations(self.config, size) for size in TRACED)
        if self.config.teacher:  # the teacher classifies the images before the network does
            taught = [measure_teacher(self.config, size) for size in TRACED]
            first, second = max(first, taught[0]), max(second, taught[1])
        return first, second

    @property
    def _decoded(self) -> int:
        """Bytes of the decoded images in a GPU's memory."""
        data, source = self.config.data, self.config.source
        if not self.on_gpu or data.device == "cpu":
            return 0
        height, width = data.stored_size
        return sum(source.count(split) for split in ("train", source.validation)) * 3 * height * width


def measure_activations(config: TrialConfig, micro_batch: int) -> int:
    """Return the bytes of inputs and activations at the end of a forward pass."""
    net = registry.on_meta_device(config.net)
    freeze(net.named_parameters(), config.groups)
    if config.hyper.checkpoint_activations:
        recompute.enable(net)
    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        net = _with_fake_weights(net.train(), config.dtype)
        tracker = MemTracker()
        tracker.track_external(net)
        with tracker, _autocast(config):
            inputs = torch.empty(micro_batch, 3, *config.data.image_size, dtype=config.dtype)
            labels = torch.zeros(micro_batch, dtype=torch.int64)
            loss = F.cross_entropy(registry.logits(net(inputs)).float(), labels)
            (snapshot,) = tracker.get_tracker_snapshot("current").values()
            del loss
    sizes = {getattr(kind, "name", kind): size for kind, size in snapshot.items()}
    return sizes["Total"] - sizes["PARAM"] - sizes["BUFFER"]


def measure_teacher(config: TrialConfig, micro_batch: int) -> int:
    """Return the peak bytes of inputs and activations while the teacher classifies a micro-batch."""
    teacher = config.teacher
    assert teacher
    outline = copy.deepcopy(teacher.net).to("meta")
    with FakeTensorMode(), torch.no_grad():
        net = _with_fake_weights(outline.requires_grad_(False), config.dtype)
        tracker = MemTracker()
        tracker.track_external(net)
        with tracker:
            net(
                torch.empty(micro_batch, 3, teacher.seen["height"], teacher.seen["width"], dtype=config.dtype)
            )
            (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return snapshot["Total"] - sum(tensor.nbytes for tensor in net.state_dict().values())


def _with_fake_weights(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Move a network from torch's meta device to the CPU; ``FakeTensorMode`` must be on.

    Frozen weights become buffers, because torch's tracker needs the gradient of every parameter.
    """
    net = net._apply(lambda t: torch.empty(t.shape, dtype=dtype if t.is_floating_point() else t.dtype))
    for module in net.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if not weight.requires_grad:
                delattr(module, name)
                module.register_buffer(name, weight.detach())
    return net


def _autocast(config: TrialConfig) -> contextlib.AbstractContextManager[Any]:
    if not config.autocasts:
        return contextlib.nullcontext()
    name = config.deepspeed["torch_autocast"].get("dtype", "bfloat16").removeprefix("torch.")
    return torch.autocast("cpu", torch.float16 if name in ("fp16", "float16") else torch.bfloat16)


def model_states(config: TrialConfig, stage: int | None = None) -> dict[str, int]:
    """Return a process's bytes of weights, gradients and optimizer state (arxiv.org/abs/1910.02054).

    The optimizer state includes fp32 weights if ZeRO partitions it or the weights have 16 bits.

    Args:
        config: the trial's configuration.
        stage: a ZeRO stage instead of the configuration's stage.
    """
    stage = config.zero_stage if stage is None else stage
    parameters, share, width = _trained(config), _share(config), config.dtype.itemsize
    masters = stage > 0 or width < FP32
    return {
        "weights": width * (share if stage == 3 else parameters),
        "gradients": width * (share if stage >= 2 else parameters),
        "optimizer": (state_width(config) + FP32 * masters) * (share if stage else parameters),
    }


def partition_copies(config: TrialConfig) -> int:
    """Return the bytes of ZeRO's temporary tensors: of its bucket or of its step, whichever needs more.

    The bucket gathers gradients for their reduction. At stage 1 it needs no memory beyond ``model_states``,
    which then includes all gradients. The step flattens the partition's gradients into one fp32 tensor, and
    sums 16-bit gradients in a second one. The optimizer's temporaries have the same size, because the
    partition is its only parameter.
    """
    width, share, zero = config.dtype.itemsize, _share(config), config.deepspeed["zero_optimization"]
    bucket = width * min(_trained(config), int(zero.get("reduce_bucket_size", BUCKET)))
    step = FP32 * share * (1 + TEMPORARIES + (width < FP32))
    return max(bucket if config.zero_stage > 1 else 0, step)


def _trained(config: TrialConfig) -> int:
    """Return the count of numbers in the parameters that a pipeline stage trains."""
    return -(-sum(group.weights for group in config.groups if not group.frozen) // config.stages)


def _share(config: TrialConfig) -> int:
    """Return the count of numbers in a process's partition of the parameters."""
    return -(-_trained(config) // config.replicas)


def state_width(config: TrialConfig) -> int:
    """Return the bytes of optimizer state for each trained number."""
    section = config.deepspeed["optimizer"]
    if is_muon(config.deepspeed):
        return FP32 if all(group.muon or group.frozen for group in config.groups) else ADAM
    cls: Any = optimizer_class(section["type"])
    if cls is None:  # DeepSpeed's optimizers for GPUs hold Adam's state or less
        return ADAM
    params = {key: value for key, value in section.get("params", {}).items() if key not in ADAM_SWITCHES}
    with FakeTensorMode():
        weight = torch.empty(1024, 1024)
        weight.grad = torch.empty_like(weight)
        try:
            optimizer = cls([weight], **params)
            optimizer.step()
        except Exception:  # an optimizer that needs the values of its parameters
            return ADAM
        sizes = [state.nbytes for state in optimizer.state[weight].values() if isinstance(state, Tensor)]
    return round(sum(sizes) / weight.numel())


def describe(config: TrialConfig, limit: int | None) -> list[str]:
    """Return the forecast as one or two lines of text.

    Args:
        config: the trial's configuration.
        limit: memory limit of a process in bytes; None if unknown.
    """
    forecaster, micro_batch = Forecaster(config), config.micro_batch
    forecast = forecaster(micro_batch)
    parts = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in forecast.parts.items() if size >= MIB / 2)
    host = f", and {forecast.host / MIB:,.0f} MiB of host memory" if forecast.host else ""
    ranks = f"each of {config.processes} processes" if config.processes > 1 else "the process"
    size = f"{forecast.total / MIB:,.0f} MiB for {ranks} with micro-batches of {micro_batch}{host}"
    if forecast.note:
        return [f"{size}, or more: {forecast.note} ({parts})"]
    lines = [f"{size}: {parts}"]
    if limit is not None:
        fits = "fits into" if forecast.total <= limit else "does not fit into"
        largest = forecaster.largest(limit)
        most = f"the largest micro-batch that fits has {largest:,} image{'s' * (largest != 1)}"
        can = most if largest else "a micro-batch of 1 image does not fit either"
        lines.append(f"{fits} the {limit / MIB:,.0f} MiB that a process may use here; {can}")
    return lines


# ----------------------------------------------------------------------------------- the C library's settings


def keeps_freed_memory(config: TrialConfig) -> bool:
    """Return whether the C library should keep the memory blocks that a step frees.

    With ZeRO 3 or activation checkpointing the blocks have many sizes, and kept blocks would accumulate.
    """
    return config.zero_stage < 3 and not config.hyper.checkpoint_activations


def keep_freed_memory(keeps: bool) -> None:
    """Tell this process's C library to keep the memory blocks that a step frees, or to return large ones.

    The next step allocates the blocks again, with a page fault for every 4 KiB of returned memory. glibc
    immediately returns a freed block that it allocated by mmap, and by default it uses mmap for all blocks
    over 32 MiB. To keep blocks, this function therefore turns mmap off. docs/speed.md has measurements.
    ``MALLOC_`` variables of the user have precedence.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library has no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0 if keeps else MMAPS)
        library.mallopt(M_MMAP_THRESHOLD, MIB)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if keeps else MIB)


# ----------------------------------------------------------------------------------------------------- advice


def advise(config: TrialConfig, engine: Any | None, images_on_gpu: int) -> str:
    """Return one line of advice: ways to save memory, the cheapest first.

    Args:
        config: the trial's configuration.
        engine: the trial's engine; None if memory ran out before it was built.
        images_on_gpu: bytes of images in a GPU's memory.
    """
    training, pipeline, experts = engine is not None, config.stages > 1, config.hyper.has_experts
    net = registry.on_meta_device(config.net) if engine is None else engine.module
    micro, accumulation = config.deepspeed[MICRO_BATCH], config.deepspeed[ACCUMULATION]
    largest_stage = 1 if pipeline else 2 if experts else 3
    advice = []
    if images_on_gpu:
        advice.append(f"data.device: cpu (the {images_on_gpu / MIB:,.0f} MiB of images move to the host)")
    if micro > 1 and training:
        part = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        advice.append(
            f"{MICRO_BATCH}: {part} with {ACCUMULATION}: {accumulation * micro // part} (instead of {micro}"
            f" with {accumulation}; the same steps, with the activations of {part} images)"
        )
    if config.replicas > 1 and config.zero_stage < largest_stage:
        advice.append(_next_stage(config, largest_stage))
    can_recompute = training and not (config.hyper.checkpoint_activations or pipeline or experts)
    if can_recompute and any(True for _ in recompute.blocks(net)):
        advice.append("hyperparameters.checkpoint_activations: true (computes a block's activations twice)")
    if dtype_name(config.deepspeed) == "fp32":
        halved = "activations" if training else "weights and gradients"
        advice.append(f"bf16.enabled: true ({halved} of half the size)")
    offloaded = section_at(config.deepspeed, "zero_optimization").get("offload_optimizer")
    if config.device == "cuda" and not pipeline and not offloaded:
        size = model_states(config, largest_stage)["optimizer"] / MIB
        offload = f"{{stage: {largest_stage}, offload_optimizer: {{device: cpu}}}}"
        advice.append(f"zero_optimization: {offload} ({size:,.0f} MiB move to the host)")
    return "; then ".join([*advice, "a smaller net or data.image_size" if training else "a smaller net"])


def _next_stage(config: TrialConfig, largest: int) -> str:
    """Return advice about the next ZeRO stage, with the memory at each stage."""
    stage = config.zero_stage
    sizes = [sum(model_states(config, other).values()) / MIB for other in range(4)]
    others = ", ".join(f"{sizes[other]:,.0f} at stage {other}" for other in range(stage + 1, largest + 1))
    return (
        f"zero_optimization.stage: {stage + 1} (weights, gradients and optimizer take {sizes[stage]:,.0f} MiB"
        f" a process at stage {stage}, {others})"
    )
