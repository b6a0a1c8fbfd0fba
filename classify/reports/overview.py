"""A run's first lines: images, network, engine, batch, length, folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from determined import core
from torch import nn

from classify.engine.deepspeed_keys import ACCUMULATION, MICRO_BATCH, TOTAL_BATCH
from classify.engine.trial_config import TrialConfig
from classify.images.pixel_files import in_bytes
from deepspeed_trial.context import TrialContext
from deepspeed_trial.errors import printable
from deepspeed_trial.local.folder import shown

KINDS = 8  # maximum extensions in the line about ignored files


def describe_images(config: TrialConfig) -> str:
    """Describe the images: number per split, classes, size, shards and streaming."""
    data, source = config.data, config.source
    height, width = data.image_size
    tested = f" {source.count('test'):,} to test at the end," if source.has_test else ""
    left_out = f" {len(source.left_out):,} unreadable and left out," if source.left_out else ""
    groups = source.cut.groups if source.cut.group else None
    grouped = "" if groups is None else f", in {_count(int(groups.max()) + 1, 'group')}, each in one split"
    labels = ", several labels an image" if source.has_several_labels else ""
    shards, window = source.shards, source.window
    size = in_bytes(sum(shard.size for shard in shards))
    in_shards = f", in {_count(len(shards), 'shard')} of {size}" if shards else ""
    streamed = ", decoded when they are needed" if source.streams else ""
    kept = ", then stored" if source.keeps else ""
    shuffled = f", shuffled {_count(window, 'shard')} at a time" if window else ""
    return (
        f"{data.dataset}: {source.count('train'):,} to train,"
        f" {source.count(source.validation):,} to validate,{tested}{left_out}"
        f" {_count(len(source.classes), 'class')}{labels}, {height}x{width} pixels"
        f"{grouped}{in_shards}{streamed}{kept}{shuffled}"
    )


def describe_passed_over(files: Mapping[str, int]) -> str:
    """Describe ignored files, counted by extension, the most frequent first; empty if there are none."""
    counts = sorted(files.items(), key=lambda each: (-each[1], each[0]))
    rest = sum(count for _, count in counts[KINDS:])
    kinds = [f"{count:,} {extension or 'without an extension'}" for extension, count in counts[:KINDS]]
    shown = ", ".join([*kinds, *([f"{rest:,} others"] if rest else [])])
    return printable(f"passed over: {shown}") if shown else ""


def describe(
    config: TrialConfig, net: nn.Module, context: TrialContext, checkpoint: str | None, is_test: bool
) -> list[str]:
    """Return the first lines of a run. Every rank calls it: each may have only a part of the network.

    Args:
        config: the trial's configuration.
        net: the engine's network.
        context: the trial's context.
        checkpoint: the UUID of the checkpoint that the run resumes.
        is_test: whether the run is a test of a single step.
    """
    data, engine = config.data, config.deepspeed
    total, trainable = count_parameters(net, config, context.distributed)
    processes = _count(config.processes, "process")
    threads = _count(torch.get_num_threads(), "thread") + (" each" if config.processes > 1 else "")
    if torch.get_num_threads() > 1 and os.environ.get("OMP_WAIT_POLICY"):
        threads += f" (OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']})"
    stages = f" in {config.stages} pipeline stages" if config.stages > 1 else ""
    replicas = processes if config.stages == 1 else _count(config.replicas, "replica")
    dtype = str(config.dtype).removeprefix("torch.") + " with autocast" * config.autocasts
    lines = {
        "images": describe_images(config),
        "network": f"{config.hyper.net}: {_count(total, 'parameter')}, {trainable:,} trainable"
        f"{_operations(config.forward_flops)}",
        "engine": f"{processes}{stages} on {config.device}, {threads},"
        f" {dtype}, ZeRO stage {config.zero_stage}",
        "batch": f"{engine[TOTAL_BATCH]:,} images = micro-batch {engine[MICRO_BATCH]:,}"
        f" x accumulation {engine[ACCUMULATION]:,} x {replicas}",
        "length": "1 step: a test" if is_test else describe_length(config),
    }
    if passed_over := describe_passed_over(config.source.passed_over):
        lines["files"] = passed_over
    if how := config.hyper.weight_average:
        kind = "lookahead, " if how.lookahead else ""
        period = "every step" if how.every == 1 else f"every {how.every:,} steps"
        decay = f"decay {'up to ' * how.rising}{how.decay:g}"
        lines["average"] = f"of the weights, for validations and exports: {kind}{decay}, {period}"
    if smaller := config.hyper.progressive_resizing:
        height, width = smaller.size(data.image_size)
        lines["images"] += f", at first {height}x{width}"
    if checkpoint:
        lines["length"] += f"; resumes checkpoint {checkpoint}"
    if context.output:
        lines["folder"] = shown(context.output)
    return [
        *(f"{name:<8} {text}" for name, text in lines.items()),
        *(f"{'group':<8} {printable(text)}" for text in config.described_groups),
    ]


def describe_length(config: TrialConfig) -> str:
    """Describe the length in steps and epochs, or as a time."""
    if config.hyper.minutes:
        planned = f"in a planned number of steps, epochs of {config.epoch_steps:,}"
        return f"{config.hyper.minutes:g} minute{'s' * (config.hyper.minutes != 1)}, {planned}"
    steps = config.steps or 0
    return f"{_count(steps, 'step')}: {steps / config.epoch_steps:.4g} epochs of {config.epoch_steps:,}"


def _operations(forward: int | None) -> str:
    """Describe the operations of a forward pass over an image."""
    for unit, size in {"G": 1e9, "M": 1e6, "k": 1e3}.items():
        if forward and forward >= size:
            return f", {forward / size:.3g} {unit}FLOP an image"
    return ""


def count_parameters(net: nn.Module, config: TrialConfig, dist: core.DistributedContext) -> tuple[int, int]:
    """Count all parameters of the network, and the trainable ones; every rank calls it.

    A rank has only its stage of a pipeline and its share of the experts. ``ds_numel`` is the full size of a
    parameter that ZeRO 3 partitions.
    """
    sizes = [0, 0]
    for parameter in net.parameters():
        is_expert = not getattr(parameter, "allreduce", True)
        size = getattr(parameter, "ds_numel", parameter.numel())
        size *= config.hyper.ep_world_size if is_expert else config.stages
        sizes = [sizes[0] + size, sizes[1] + size * parameter.requires_grad]
    everywhere: list[Any] = dist.allgather(sizes)
    total, trainable = (sum(each) // config.processes for each in zip(*everywhere, strict=True))
    return total, trainable


def _count(number: int, what: str) -> str:
    """Return a count with its noun: ``1 process``, ``1,200 processes``."""
    plural = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{plural}"
