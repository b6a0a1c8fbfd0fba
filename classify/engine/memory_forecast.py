"""A forecast of the most memory that a process of a training needs, before anything is allocated.

The network's step runs on fake tensors, beside blocks for what DeepSpeed's engine holds in the mode at hand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from classify.engine.memory_step import outline, record
from classify.engine.memory_tape import Event, between, peak
from classify.engine.trial_config import TrialConfig
from harness.errors import one_line

MIB = 2**20
TRACED = 2, 4  # micro-batches; batch normalization does not train on one image
BASE, GPU_BASE = 810, 500  # MiB of a process that has imported everything; of a GPU's context
PARTS = ("weights", "gradients", "optimizer", "average", "buckets", "activations", "images")
LARGE = {True: 32 * MIB, False: MIB}  # whether freed memory is kept: the blocks that it is not of


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
        base = (GPU_BASE if self.on_gpu else BASE) * MIB
        try:
            events = self._events(micro_batch)
        except Exception as error:  # as many kinds as there are networks
            states = {"base": base, **model_states(self.config)}
            return Forecast(states, note=f"activations are not known ({one_line(error)})")
        config = self.config
        if self.on_gpu:
            found = peak(events, None, on_host=False)
            held = sum(peak(events, None, on_host=True).parts.values())
            decoded = {"decoded images": self._decoded}
        else:
            keeps = config.zero_stage < 3 and not config.hyper.checkpoint_activations
            found, held, decoded = peak(events, LARGE[keeps]), 0, {"freed, kept": 0}
            decoded["freed, kept"] = round(found.kept)
        parts = {name: round(size) for name, size in found.parts.items()}
        ordered = {name: parts.pop(name) for name in PARTS if parts.get(name)}
        return Forecast({"base": base, **ordered, **parts, **{k: v for k, v in decoded.items() if v}}, held)

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

    Args:
        config: the trial's.
        stage: another ZeRO stage than the configuration's.
    """
    stage = config.zero_stage if stage is None else stage
    parameters = sum(each.numel() for each in outline(config).parameters() if each.requires_grad)
    share = -(-parameters // config.replicas)
    width, masters = config.dtype.itemsize, stage > 0 or config.dtype.itemsize < 4
    return {
        "weights": width * (share if stage == 3 else parameters),
        "gradients": width * (share if stage >= 2 else parameters),
        "optimizer": (8 + 4 * masters) * (share if stage else parameters),
    }
