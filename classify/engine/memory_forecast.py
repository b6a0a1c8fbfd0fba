"""A forecast of the most memory that a process of a training needs, before anything is allocated.

The network's step runs on fake tensors, beside blocks for what DeepSpeed's engine holds in the mode at hand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from classify.engine.fake_optimizer import state_width
from classify.engine.memory_step import FP32, keeps_freed_memory, record
from classify.engine.memory_tape import HOLES, LASTING, Event, Library, between, peak
from classify.engine.trial_config import TrialConfig
from deepspeed_trial.errors import one_line

MIB = 2**20
TRACED = 2, 4  # micro-batches; batch normalization does not train on one image
# MiB of a process that has computed a step of nothing, more where there are several; of a GPU's context
BASE, JOINED, GPU_BASE = 820, 40, 500
PARTS = ("base", *LASTING[:-1], "gradients", "step", "buckets", "activations", "scratch", "images", HOLES)
# By whether freed memory is kept: see ``keep_freed_memory``.
LIBRARY = {True: Library(32 * MIB, 1.35), False: Library(MIB, 1)}  # the first measured: docs/memory.md


@dataclass(frozen=True)
class Forecast:
    """What a process of a training needs at most, in bytes.

    Attributes:
        parts: of the device that computes, at its peak, by what for.
        host: of the host beside a GPU.
        note: why a part of it is not known; None if all is.
    """

    parts: dict[str, int]
    host: int = 0
    note: str | None = None

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())


def forecast(config: TrialConfig, micro_batch: int | None = None) -> Forecast:
    """Forecasts the peak of a process in training; checkpoints and validations are not in it.

    Args:
        config: the trial's.
        micro_batch: images, by default the configuration's.
    """
    return Forecaster(config)(micro_batch or config.micro_batch)


class Forecaster:
    """Forecasts of one configuration for several micro-batches, by two runs of its step.

    Args:
        config: the trial's.
    """

    def __init__(self, config: TrialConfig) -> None:
        self.config = config
        self.on_gpu = config.device == "cuda"

    def __call__(self, micro_batch: int) -> Forecast:
        """The forecast for a micro-batch of so many images."""
        config = self.config
        on_cpu = BASE + (JOINED if config.processes > 1 else 0)
        base = MIB * (GPU_BASE if self.on_gpu else on_cpu)
        states = {"base": base, **model_states(config)}
        if config.hyper.has_experts or config.stages > 1:
            return Forecast(states, note="of experts and pipelines the activations are not known")
        try:
            events = self._events(micro_batch)
        except Exception as error:  # as many kinds as there are networks
            return Forecast(states, note=f"the activations are not known ({one_line(error)})")
        if self.on_gpu:
            found = peak(events, None, on_host=False)
            held = round(sum(peak(events, None, on_host=True).parts.values()))
        else:
            found, held = peak(events, LIBRARY[keeps_freed_memory(config)]), 0
        sizes: dict[str, float] = {**found.parts, "base": base}
        sizes["images"] = sizes.get("images", 0) + (self._decoded if self.on_gpu else 0)
        sizes[HOLES] = sizes.get(HOLES, 0.0) + found.kept
        return Forecast({name: round(sizes[name]) for name in PARTS if sizes.get(name)}, held)

    def largest(self, limit: int) -> int:
        """The largest micro-batch of the training images that fits into so many bytes; 0 if none does."""
        fits, too_large = 0, self.config.source.count("train") // self.config.replicas + 1
        while too_large - fits > 1:
            tried = min(2 * fits or 1, (fits + too_large) // 2)
            if self(tried).total <= limit:
                fits = tried
            else:
                too_large = tried
        return fits

    def _events(self, micro_batch: int) -> list[Event]:
        known = between(*self._records, TRACED, micro_batch)
        return known if known is not None else record(self.config, micro_batch)

    @functools.cached_property
    def _records(self) -> tuple[list[Event], list[Event]]:
        one, other = (record(self.config, size) for size in TRACED)
        return one, other

    @property
    def _decoded(self) -> int:
        """Bytes of the images that a GPU holds decoded."""
        data, source = self.config.data, self.config.source
        if data.device == "cpu":
            return 0
        height, width = data.stored_size
        return sum(source.count(split) for split in ("train", source.validation)) * 3 * height * width


def model_states(config: TrialConfig, stage: int | None = None) -> dict[str, int]:
    """Bytes that a process holds of weights, gradients and optimizer state (arxiv.org/abs/1910.02054).

    Where an engine partitions the state, or weights are of 16 bits, fp32 weights belong to it.

    Args:
        config: the trial's.
        stage: another ZeRO stage than the configuration's.
    """
    stage = config.zero_stage if stage is None else stage
    parameters = -(-sum(group.weights for group in config.groups if not group.frozen) // config.stages)
    share = -(-parameters // config.replicas)
    width, masters = config.dtype.itemsize, stage > 0 or config.dtype.itemsize < FP32
    return {
        "weights": width * (share if stage == 3 else parameters),
        "gradients": width * (share if stage >= 2 else parameters),
        "optimizer": (state_width(config) + FP32 * masters) * (share if stage else parameters),
    }


def describe(config: TrialConfig, limit: int | None) -> list[str]:
    """The forecast as text, a line or two.

    Args:
        config: the trial's.
        limit: the bytes that a process may have; None if that is not known.
    """
    forecaster, micro_batch = Forecaster(config), config.micro_batch
    found = forecaster(micro_batch)
    parts = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in found.parts.items() if size >= MIB / 2)
    beside = f", and {found.host / MIB:,.0f} MiB of the host" if found.host else ""
    ranks = f"each of {config.processes} processes" if config.processes > 1 else "the process"
    size = f"{found.total / MIB:,.0f} MiB for {ranks} with micro-batches of {micro_batch}{beside}"
    if found.note:
        return [f"{size}, or more: {found.note} ({parts})"]
    lines = [f"{size}: {parts}"]
    if limit is not None:
        fits = "fits into" if found.total <= limit else "does not fit into"
        largest = forecaster.largest(limit)
        can = f"micro-batches of up to {largest:,} images do" if largest else "nor does a micro-batch of 1"
        lines.append(f"{fits} the {limit / MIB:,.0f} MiB that it may have here; {can}")
    return lines
