"""The network in the form that its mode needs, and what surrounds the making of its engine."""

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
from deepspeed_trial.engines import partition_for_zero3
from deepspeed_trial.errors import InvalidInput, one_line, printable
from deepspeed_trial.full_weights import name_in_stage
from deepspeed_trial.out_of_memory import explain_out_of_memory
from deepspeed_trial.patches.pipeline import clip_stages_together
from deepspeed_trial.schedules import GroupSchedule, PlannedSchedule

PipelineLoss = Callable[[Tensor, Tensor], Tensor]  # of logits (B, C) and labels


def build_network(
    config: TrialConfig, pipeline_loss: PipelineLoss, sample: Callable[[], Tensor] | None
) -> nn.Module:
    """Makes the network in the form that the configuration asks for: plain, of experts, or cut into stages.

    Args:
        config: the trial's.
        pipeline_loss: what the last stage of a pipeline computes.
        sample: gives inputs (N, 3, H, W), for a network with a method ``initialize_from_images``; None where
            a checkpoint's weights will replace the first ones.

    Raises:
        InvalidInput: if its weights cannot be had, or are of another network.
    """
    hyper = config.hyper
    if hyper.has_experts:
        # Micro-batches of one image are filled up, for DeepSpeed's experts need two.
        padded = max(2, config.micro_batch)
        net: nn.Module = NetMoE(config.net.num_classes, micro_batch=padded, **hyper.experts)
        if hyper.weights:
            _load_weights(net, config)
        freeze(net.named_parameters(), config.groups)
        return net
    net = registry.build(config.net)
    if hyper.weights:
        _load_weights(net, config)
    elif sample and (initialize := getattr(net, "initialize_from_images", None)):
        initialize(sample())
    freeze(net.named_parameters(), config.groups)
    if hyper.sync_batchnorm:
        net = registry.with_sync_batchnorm(hyper.net, net)
    if hyper.checkpoint_activations:
        recompute.enable(net)
    if config.zero_stage == 3:
        partition_for_zero3(net, config.dtype, config.deepspeed)
    return net if config.stages == 1 else _cut_into_stages(net, config, pipeline_loss)


def _load_weights(net: nn.Module, config: TrialConfig) -> None:
    """Starts from ``hyperparameters.weights``, where given, and says what stays at random."""
    chosen = config.hyper.weights
    assert chosen
    label = f"hyperparameters.weights: {chosen}"
    spec = config.net
    found = pretrained.read(spec.name, chosen, spec.image_size, spec.args, config.source.classes)
    skipped = state_dicts.load_pretrained(net, found, label)
    if skipped and torch.distributed.get_rank() == 0:
        print(printable(state_dicts.describe_skipped_weights(skipped, label)), file=sys.stderr)


def _cut_into_stages(net: nn.Module, config: TrialConfig, pipeline_loss: PipelineLoss) -> PipelineModule:
    if "dynamic_shape" not in inspect.signature(PipelineModule.__init__).parameters:
        raise InvalidInput(
            f"hyperparameters.pipe_parallel_size: {config.stages}: DeepSpeed {deepspeed.__version__} cannot"
            " take an epoch's smaller last step; use the image of the Dockerfile, or 1"
        )
    layers = layers_of(net)
    assert layers  # or combinations.py has refused it
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
    """What ``deepspeed.initialize`` takes beside the network: parameters, schedule and configuration."""
    # DeepSpeed makes a configured schedule itself, for ZeRO's optimizer, which torch's do not take.
    lr = config.deepspeed["optimizer"]["params"]["lr"]
    schedule: Callable[..., GroupSchedule]
    if config.hyper.minutes and not counts_steps(config.deepspeed):
        schedule = functools.partial(PlannedSchedule, make_for=_schedule_for(config), plan=config.plan)
    else:
        schedule = functools.partial(GroupSchedule, make=schedule_maker(config.deepspeed))
    return {
        "model_parameters": _trainable_parameters(net, config),
        "lr_scheduler": functools.partial(schedule, lr=lr),
        "config": {key: value for key, value in config.deepspeed.items() if key != "scheduler"},
    }


def _schedule_for(config: TrialConfig) -> Callable[[int | None], Any]:
    """Gives what makes the schedule for a plan of so many steps."""
    return lambda total: schedule_maker(planned(config.deepspeed, total))


def _trainable_parameters(net: nn.Module, config: TrialConfig) -> Any:
    """What the optimizer gets: the parameters, in groups, those of experts in groups of their own."""
    named = net.named_parameters()
    if layers := config.stage_layers:
        named = ((name_in_stage(name, layers), parameter) for name, parameter in named)
    groups = optimizer_groups(named, config.groups, config.deepspeed["optimizer"]["params"])
    if config.hyper.has_experts and config.hyper.moe_param_group:
        split = split_params_into_different_moe_groups_for_optimizer(groups)
        return [group for group in split if group["params"]]
    return groups[0]["params"] if are_plain(config.groups) else groups


@contextlib.contextmanager
def building(config: TrialConfig, images_on_gpu: int) -> Iterator[None]:
    """Surrounds the making of network and engine: quiet, and with errors that say what to change.

    Args:
        config: the trial's.
        images_on_gpu: the bytes of images in a GPU's memory.

    Raises:
        InvalidInput: for what DeepSpeed refuses beyond the rules here.
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
    """Turns what DeepSpeed refuses while it builds an engine into ``InvalidInput``."""
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        # A RuntimeError, but for one, is an error of the machine: a rank that is lost, or no memory.
        if isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, NotImplementedError):
            raise
        reason = one_line(error)
        if not str(error) or isinstance(error, KeyError):
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason += f" in {place.name}, {place.filename}"
        raise InvalidInput(
            f"deepspeed_config: DeepSpeed cannot build an engine from it ({reason}); change what it names"
        ) from error
