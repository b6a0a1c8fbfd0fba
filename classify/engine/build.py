"""Builds the network, and the arguments of ``deepspeed.initialize``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from classify.engine import memory
from classify.engine.learning_rate import counts_steps, planned
from classify.engine.optimizer_rules import schedule_maker
from classify.engine.parameter_groups import are_plain, freeze, optimizer_groups
from classify.engine.trial_config import TrialConfig
from classify.models import pretrained, recompute, registry, state_dicts
from classify.models.net_moe import NetMoE
from classify.models.stages import layers_of
from deepspeed_trial.checkpoints.pieces import name_in_stage
from deepspeed_trial.engines import partition_for_zero3
from deepspeed_trial.errors import InvalidInput, one_line, printable
from deepspeed_trial.out_of_memory import explain_out_of_memory
from deepspeed_trial.patches.pipeline import clip_stages_together
from deepspeed_trial.schedules import GroupSchedule, PlannedSchedule

SHAPES = 64  # torch compiles the network for at most this number of batch shapes; its default is 8
PipelineLoss = Callable[[Tensor, Tensor], Tensor]  # (logits (B, C), labels) -> the loss, a scalar


def build_network(
    config: TrialConfig, pipeline_loss: PipelineLoss, sample: Callable[[], Tensor] | None
) -> nn.Module:
    """Build the network: plain, with experts, or split into pipeline stages.

    Args:
        config: the trial's configuration.
        pipeline_loss: the loss that a pipeline's last stage computes.
        sample: returns training images (N, 3, H, W), which a network with the method
            ``initialize_from_images`` reads; None if a checkpoint replaces the initial weights.

    Raises:
        InvalidInput: if the pretrained weights cannot be read or belong to another network, or if this
            DeepSpeed cannot train a pipeline here.
    """
    hyper = config.hyper
    if hyper.has_experts:
        # DeepSpeed's experts need at least two images, so NetMoE pads a micro-batch of one
        padded = max(2, config.micro_batch)
        net: nn.Module = NetMoE(config.net.num_classes, micro_batch=padded, **hyper.experts)
    else:
        net = registry.build(config.net)
    if hyper.weights:
        _load_weights(net, config)
    elif sample and (initialize := getattr(net, "initialize_from_images", None)):
        initialize(sample())
    freeze(net.named_parameters(), config.groups)
    if hyper.sync_batchnorm and not hyper.has_experts:
        net = registry.with_sync_batchnorm(hyper.net, net)
    if hyper.checkpoint_activations:
        recompute.enable(net)
    if config.zero_stage == 3:
        partition_for_zero3(net, config.dtype, config.deepspeed)
    return net if config.stages == 1 else _cut_into_stages(net, config, pipeline_loss)


def _load_weights(net: nn.Module, config: TrialConfig) -> None:
    """Load ``hyperparameters.weights``, and print the parameters that stay random."""
    chosen = config.hyper.weights
    assert chosen
    label = f"hyperparameters.weights: {chosen}"
    weights = pretrained.read(config.net, chosen, config.source.classes)
    skipped = state_dicts.load_pretrained(net, weights, label)
    if skipped and torch.distributed.get_rank() == 0:
        print(printable(state_dicts.describe_skipped_weights(skipped, label)), file=sys.stderr)


def _cut_into_stages(net: nn.Module, config: TrialConfig, pipeline_loss: PipelineLoss) -> PipelineModule:
    if "dynamic_shape" not in inspect.signature(PipelineModule.__init__).parameters:
        raise InvalidInput(
            f"hyperparameters.pipe_parallel_size: {config.stages}: DeepSpeed {deepspeed.__version__} cannot"
            " train an epoch's smaller last step in a pipeline; use the Dockerfile's image, or 1 stage"
        )
    layers = layers_of(net)
    assert layers  # combinations.py refuses other networks
    stage = PipelineModule(
        layers=[layer for _, layer in layers],
        num_stages=config.stages,
        loss_fn=pipeline_loss,
        partition_method=config.hyper.partition_method,
        dynamic_shape=True,  # an epoch's last step may be smaller
    )
    clip_stages_together(stage)
    return stage


def engine_arguments(net: nn.Module, config: TrialConfig) -> dict[str, Any]:
    """Return the arguments of ``deepspeed.initialize``: parameters, schedule and configuration."""
    # Leave the schedule out: DeepSpeed would give ZeRO's optimizer to torch's schedule, which refuses it
    deepspeed_config = config.deepspeed
    schedule: Callable[..., GroupSchedule]
    if config.hyper.minutes and not counts_steps(deepspeed_config):
        schedule = functools.partial(
            PlannedSchedule,
            make_for=lambda total: schedule_maker(planned(deepspeed_config, total)),
            plan=config.plan,
        )
    else:
        schedule = functools.partial(GroupSchedule, make=schedule_maker(deepspeed_config))
    return {
        "model_parameters": _trainable_parameters(net, config),
        "lr_scheduler": functools.partial(schedule, lr=deepspeed_config["optimizer"]["params"]["lr"]),
        "config": {key: value for key, value in deepspeed_config.items() if key != "scheduler"},
    }


def _trainable_parameters(net: nn.Module, config: TrialConfig) -> Any:
    """Return the trainable parameters, or parameter groups if they have different settings."""
    named = net.named_parameters()
    if layers := config.stage_layers:
        named = ((name_in_stage(name, layers), parameter) for name, parameter in named)
    groups = optimizer_groups(named, config.groups, config.deepspeed["optimizer"]["params"])
    if config.hyper.has_experts and config.hyper.moe_param_group:
        split = split_params_into_different_moe_groups_for_optimizer(groups)
        return [group for group in split if group["params"]]
    return groups[0]["params"] if are_plain(config.groups) else groups


def compile_network(engine: deepspeed.DeepSpeedEngine) -> None:
    """Compile the engine's network with ``torch.compile``, at the first batch of each shape.

    Each shape has its own code, so the code of a step does not depend on earlier batches: a resumed run
    computes the same bits. Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """
    torch._dynamo.config.recompile_limit = SHAPES
    engine.compile(compile_kwargs={"dynamic": False})


@contextlib.contextmanager
def building(config: TrialConfig, images_on_gpu: int) -> Iterator[None]:
    """Silence DeepSpeed while the block builds network and engine, and explain its errors.

    The function also tells the C library whether to keep freed memory.

    Args:
        config: the trial's configuration.
        images_on_gpu: bytes of images in a GPU's memory.

    Raises:
        InvalidInput: if DeepSpeed refuses the configuration.
        TrainingStopped: if memory runs out.
    """
    memory.keep_freed_memory(memory.keeps_freed_memory(config))
    quiet = contextlib.redirect_stdout(io.StringIO())  # DeepSpeed prints its groups and layers
    explained = explain_out_of_memory(
        lambda: "before the first step", lambda: memory.advise(config, None, images_on_gpu)
    )
    with quiet, explained, deepspeed_errors_as_invalid_input():
        yield


@contextlib.contextmanager
def deepspeed_errors_as_invalid_input() -> Iterator[None]:
    """Turn DeepSpeed's errors about a configuration into ``InvalidInput``; the block builds an engine."""
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        # A RuntimeError is an error of the machine: a lost rank, or no memory
        if isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, NotImplementedError):
            raise
        reason = one_line(error)
        if not str(error) or isinstance(error, KeyError):
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason += f" in {place.name}, {place.filename}"
        problem = f"DeepSpeed cannot build an engine ({reason})"
        raise InvalidInput(f"deepspeed_config: {problem}; change the key that the reason names") from error
