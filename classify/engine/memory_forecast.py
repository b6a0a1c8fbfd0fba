"""Forecast of the memory that a process of a training needs, before anything is allocated.

Weights, gradients and optimizer state follow from the configuration. torch's ``MemTracker`` measures the
activations of two small micro-batches on fake tensors; they are linear in the micro-batch. DeepSpeed's
temporary copies are left out.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from classify.engine.combinations import offloads
from classify.engine.optimizer_rules import ADAM_SWITCHES, is_muon, optimizer_class
from classify.engine.parameter_groups import freeze
from classify.engine.trial_config import TrialConfig
from classify.models import recompute, registry
from deepspeed_trial.errors import one_line

MIB = 2**20
FP32, ADAM = 4, 8  # bytes of a number; of Adam's state for a number
TRACED = 2, 4  # micro-batches; batch normalization does not train on one image
# MiB of a process that has imported everything, more with several processes; MiB of a GPU's context
BASE, JOINED, GPU_BASE = 820, 40, 500
HOLES = 1.35  # memory that glibc keeps for a step, over the size of its blocks: docs/memory.md


@dataclass(frozen=True)
class Forecast:
    """Bytes that a process of a training needs at most.

    Attributes:
        parts: bytes by purpose on the device that computes.
        host: bytes of host memory that a GPU run needs.
        note: the reason why the activations are not known; None if they are.
    """

    parts: dict[str, int]
    host: int = 0
    note: str | None = None

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


def forecast(config: TrialConfig, micro_batch: int | None = None) -> Forecast:
    """Forecasts the peak of a process in training, without checkpoints and validations.

    Args:
        config: the trial's.
        micro_batch: images, by default the configuration's.
    """
    return Forecaster(config)(micro_batch or config.micro_batch)


class Forecaster:
    """Forecasts several micro-batches of one configuration from two runs of its step.

    Args:
        config: the trial's.
    """

    def __init__(self, config: TrialConfig) -> None:
        self.config = config
        self.on_gpu = config.device == "cuda"

    def __call__(self, micro_batch: int) -> Forecast:
        """The forecast for a micro-batch of this many images."""
        config, states = self.config, model_states(self.config)
        on_cpu = BASE + (JOINED if config.processes > 1 else 0)
        parts = {"base": MIB * (GPU_BASE if self.on_gpu else on_cpu), **states}
        host = 0
        if self.on_gpu and offloads(config.deepspeed, "offload_optimizer"):
            host = parts.pop("optimizer") + parts["gradients"]
        if config.hyper.has_experts or config.stages > 1:
            return Forecast(parts, host, "the activations of experts and pipelines are not known")
        try:
            first, second = self._activations
        except Exception as error:  # a network may raise anything
            return Forecast(parts, host, f"the activations are not known ({one_line(error)})")
        if config.zero_stage == 3 and config.replicas > 1:
            parts["weights"] += config.dtype.itemsize * _trained(config)  # gathered for a pass
        if config.hyper.weight_average:
            parts["average"] = FP32 * -(-_trained(config) // (config.replicas if config.zero_stage else 1))
        growth = (second - first) / (TRACED[1] - TRACED[0])
        holes = HOLES if not self.on_gpu and keeps_freed_memory(config) else 1
        parts["activations"] = round(holes * (first + growth * (micro_batch - TRACED[0])))
        height, width = config.data.image_size
        parts["images"] = self._decoded + 3 * height * width * micro_batch
        return Forecast(parts, host)

    def largest(self, limit: int) -> int:
        """The largest micro-batch of the training images that fits into ``limit`` bytes; 0 if none does."""
        fits, too_large = 0, self.config.source.count("train") // self.config.replicas + 1
        while too_large - fits > 1:
            tried = min(2 * fits or 1, (fits + too_large) // 2)
            if self(tried).total <= limit:
                fits = tried
            else:
                too_large = tried
        return fits

    @functools.cached_property
    def _activations(self) -> tuple[int, int]:
        first, second = (measure_activations(self.config, size) for size in TRACED)
        return first, second

    @property
    def _decoded(self) -> int:
        """Bytes of the decoded images in a GPU's memory."""
        data, source = self.config.data, self.config.source
        if not self.on_gpu or data.device == "cpu":
            return 0
        height, width = data.stored_size
        return sum(source.count(split) for split in ("train", source.validation)) * 3 * height * width


def keeps_freed_memory(config: TrialConfig) -> bool:
    """Whether the C library keeps the blocks that a step frees; not where many sizes would add up."""
    return config.zero_stage < 3 and not config.hyper.checkpoint_activations


def measure_activations(config: TrialConfig, micro_batch: int) -> int:
    """Bytes of inputs and activations that the end of a forward pass holds for the backward pass."""
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


def _with_fake_weights(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Moves a network from torch's meta device to the CPU; ``FakeTensorMode`` must be on."""
    return net._apply(lambda t: torch.empty(t.shape, dtype=dtype if t.is_floating_point() else t.dtype))


def _autocast(config: TrialConfig) -> contextlib.AbstractContextManager[Any]:
    if not config.autocasts:
        return contextlib.nullcontext()
    name = config.deepspeed["torch_autocast"].get("dtype", "bfloat16").removeprefix("torch.")
    return torch.autocast("cpu", torch.float16 if name in ("fp16", "float16") else torch.bfloat16)


def model_states(config: TrialConfig, stage: int | None = None) -> dict[str, int]:
    """Bytes that a process holds of weights, gradients and optimizer state (arxiv.org/abs/1910.02054).

    The optimizer state includes fp32 weights where an engine partitions it or weights have 16 bits.

    Args:
        config: the trial's.
        stage: another ZeRO stage than the configuration's.
    """
    stage = config.zero_stage if stage is None else stage
    parameters, width = _trained(config), config.dtype.itemsize
    share, masters = -(-parameters // config.replicas), stage > 0 or width < FP32
    return {
        "weights": width * (share if stage == 3 else parameters),
        "gradients": width * (share if stage >= 2 else parameters),
        "optimizer": (state_width(config) + FP32 * masters) * (share if stage else parameters),
    }


def _trained(config: TrialConfig) -> int:
    """Numbers in the parameters that a pipeline stage trains."""
    return -(-sum(group.weights for group in config.groups if not group.frozen) // config.stages)


def state_width(config: TrialConfig) -> int:
    """Bytes of optimizer state for each number that it trains."""
    section = config.deepspeed["optimizer"]
    if is_muon(config.deepspeed):
        return FP32 if all(group.muon or group.frozen for group in config.groups) else ADAM
    cls: Any = optimizer_class(section["type"])
    if cls is None:  # DeepSpeed's optimizers of GPUs hold Adam's state or less
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
    """The forecast as one or two lines of text.

    Args:
        config: the trial's.
        limit: the bytes that a process may have; None if that is not known.
    """
    forecaster, micro_batch = Forecaster(config), config.micro_batch
    result = forecaster(micro_batch)
    parts = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in result.parts.items() if size >= MIB / 2)
    beside = f", and {result.host / MIB:,.0f} MiB of the host" if result.host else ""
    ranks = f"each of {config.processes} processes" if config.processes > 1 else "the process"
    size = f"{result.total / MIB:,.0f} MiB for {ranks} with micro-batches of {micro_batch}{beside}"
    if result.note:
        return [f"{size}, or more: {result.note} ({parts})"]
    lines = [f"{size}: {parts}"]
    if limit is not None:
        fits = "fits into" if result.total <= limit else "does not fit into"
        largest = forecaster.largest(limit)
        can = f"micro-batches of up to {largest:,} images do" if largest else "nor does a micro-batch of 1"
        lines.append(f"{fits} the {limit / MIB:,.0f} MiB that it may have here; {can}")
    return lines
