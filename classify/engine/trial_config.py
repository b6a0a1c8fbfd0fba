"""Resolves and checks a trial's configuration: data, network, engine and length.

The trial, ``train.py --check`` and the search resolve it here, so that all report the same errors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from classify.config.hyperparameters import Hyperparameters
from classify.config.metric_table import MAP_METRIC, SPEED_METRIC, TOP5_METRIC, TTA_METRIC, metrics_for
from classify.engine import deepspeed_config
from classify.engine.combinations import DTYPES, dtype_name, enabled, network_errors, offloads, zero_stage
from classify.engine.deepspeed_keys import ACCUMULATION, MICRO_BATCH, TOTAL_BATCH
from classify.engine.learning_rate import schedule_notes
from classify.engine.optimizer_rules import is_muon
from classify.engine.parameter_groups import Group, are_plain, assign
from classify.images import views
from classify.images.order import step_sizes
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.models import dry_run, flops, losses, pretrained, recompute, registry, state_dicts
from classify.models.registry import NetSpec
from classify.models.stages import layers_of
from classify.models.teacher import Teacher
from deepspeed_trial import machine
from deepspeed_trial.errors import ErrorList, InvalidInput, nearest
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.patches.process import prepare_process
from deepspeed_trial.plan import Plan

SMALL_NETWORK = 1_000_000  # parameters
VALIDATION_PIXELS = 512 * 32**2  # pixels in a validation's micro-batch: a forward pass needs little memory


class Sections:
    """The sections of an experiment, each parsed and checked independently.

    Attributes:
        errors: the errors of all sections; if there are none, every other attribute is set.
        weights: the pretrained weights; None if the hyperparameters name none.
    """

    data: DataSettings | None = None
    source: DataPlan | None = None
    hyper: Hyperparameters | None = None
    merged: deepspeed_config.Merged | None = None
    weights: dict[str, Tensor] | None = None

    def __init__(
        self, hparams: Mapping[str, Any], experiment: Mapping[str, Any], source: DataPlan | None
    ) -> None:
        self.errors = ErrorList()
        size = None
        with self.errors.collecting():
            size = registry.input_size(hparams.get("net"), hparams.get("weights"))
        with self.errors.collecting():
            self.data = DataSettings.parse(experiment.get("data"), size)
            self.source = source or DataPlan.resolve(self.data)
        with self.errors.collecting():
            self.hyper = Hyperparameters.parse(hparams, registry.check_name)
        if form := self.hyper or Hyperparameters.parse_form(hparams):
            with self.errors.collecting():
                self.merged = deepspeed_config.merge(form)
        if self.hyper and self.hyper.weights:
            with self.errors.collecting():
                size = self.data.image_size if self.data else size or DataSettings().image_size
                classes = self.source.classes if self.source else ()
                spec = NetSpec(self.hyper.net, len(classes) or 2, size, self.hyper.net_args)
                self.weights = pretrained.read(spec, self.hyper.weights, classes)


def section_errors(hparams: Mapping[str, Any], experiment: Mapping[str, Any]) -> list[str]:
    """Return the errors of the sections of an experiment that already has other errors."""
    prepare_process()
    return list(dict.fromkeys(Sections(hparams, experiment, None).errors.lines))


@dataclass(frozen=True)
class TrialConfig:
    """The resolved configuration of a trial.

    Attributes:
        hyper: the hyperparameters.
        data: the ``data`` section.
        source: the dataset, opened but not decoded.
        deepspeed: the argument ``config`` of ``deepspeed.initialize``.
        seed: the experiment's seed.
        processes: the number of processes.
        device: ``cpu``, ``cuda`` or ``mps``.
        tries: whether benchmarks choose the micro-batch; until then, it is the largest possible one.
        plan: the plan of the steps; for a length in minutes the trainer's plan.
    """

    hyper: Hyperparameters
    data: DataSettings
    source: DataPlan
    deepspeed: dict[str, Any]
    seed: int
    processes: int
    device: str
    tries: bool = False
    plan: Plan = dataclasses.field(default_factory=Plan)

    @classmethod
    def resolve(
        cls,
        hparams: Mapping[str, Any],
        experiment: Mapping[str, Any],
        processes: int,
        device: str,
        source: DataPlan | None = None,
        plan: Plan | None = None,
    ) -> TrialConfig:
        """Resolve and check a configuration, without decoding an image or building an engine.

        Args:
            hparams: the hyperparameters.
            experiment: the experiment configuration; the method reads ``data``, ``searcher``,
                ``reproducibility`` and the checkpoint settings.
            processes: the number of processes.
            device: ``cpu``, ``cuda`` or ``mps``.
            source: the dataset; opened if None.
            plan: the trainer's plan, if there is one.

        Raises:
            InvalidInput: with a line for each invalid value and for missing data; without those, with a line
                for each conflict.
        """
        prepare_process()
        sections = Sections(hparams, experiment, source)
        sections.errors.raise_any()
        data, source, hyper, merged = sections.data, sections.source, sections.hyper, sections.merged
        assert data and source and hyper and merged
        if source.has_several_labels and "loss" not in hyper.given:
            hyper = dataclasses.replace(hyper, loss="bce")
        errors = ErrorList()
        errors.lines += network_errors(hyper, processes)
        if not errors.lines:
            length = None if hyper.minutes else hyper.max_length
            steps = None if length is None else functools.partial(_total_steps, length, source)
            with errors.collecting():
                deepspeed = deepspeed_config.resolve(merged, hyper, processes, device, steps)
        errors.lines += _conflicts(hyper, data, source, experiment)
        errors.raise_any()
        if data.normalize == "weights":
            mean, std = pretrained.normalization(hyper.net, hyper.weights)
            data = dataclasses.replace(data, normalize={"mean": mean, "std": std})
            source = dataclasses.replace(source, settings=data)
        seed = int((experiment.get("reproducibility") or {}).get("experiment_seed") or 0)
        config = cls(hyper, data, source, deepspeed, seed, processes, device, merged.tries, plan or Plan())
        config.plan.fix(config.steps)
        _check_evaluation(source, config.evaluation_batches[1])
        _check_network(config.net, hyper, config.least_micro_batch, sections.weights)
        _ = config.groups, config.teacher  # they raise InvalidInput
        return config

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return self.hyper.pipe_parallel_size

    @property
    def replicas(self) -> int:
        """Data-parallel size: processes / pipeline stages."""
        return self.processes // self.stages

    @property
    def batch(self) -> int:
        """The number of images in an optimizer step."""
        return self.deepspeed[TOTAL_BATCH]

    @property
    def micro_batch(self) -> int:
        """The number of images in a micro-batch of one process."""
        return self.deepspeed[MICRO_BATCH]

    @property
    def least_micro_batch(self) -> int:
        """The number of images in the smallest micro-batch of an epoch, usually one of the last step."""
        parts = self.replicas * self.deepspeed[ACCUMULATION]
        return min(step_sizes(self.source.count("train"), self.deepspeed[TOTAL_BATCH], parts)) // parts

    @property
    def epoch_steps(self) -> int:
        """The number of optimizer steps in an epoch."""
        parts = self.replicas * self.deepspeed[ACCUMULATION]
        return len(step_sizes(self.source.count("train"), self.deepspeed[TOTAL_BATCH], parts))

    @property
    def steps(self) -> int | None:
        """The number of optimizer steps of the training, by the current plan; None if it is not known."""
        if self.hyper.minutes:
            return self.plan.total
        length, parts = self.hyper.max_length, self.replicas * self.deepspeed[ACCUMULATION]
        if length is None:
            return None
        return _total_steps(length, self.source, self.deepspeed[TOTAL_BATCH], parts)

    @property
    def notes(self) -> list[str]:
        """Notes about settings that are valid but probably not intended."""
        lines = schedule_notes(self.deepspeed, self.steps)
        if self.autocasts and self.device == "cpu" and not machine.has_bf16_instructions():
            note = "this processor has no bf16 instructions, and may compute faster in fp32; set it to false"
            lines.append(f"torch_autocast.enabled: True: {note}")
        if self._partitions_nothing:
            note = (
                "one process has nothing to partition; stage 0 trains a small network about 1.5 times as fast"
            )
            lines.append(f"zero_optimization.stage: {self.zero_stage}: {note}")
        return lines

    @property
    def _partitions_nothing(self) -> bool:
        """Whether ZeRO is useless: one process, a small network, no offload."""
        if self.processes > 1 or not self.zero_stage or self.hyper.has_experts:
            return False
        if any(offloads(self.deepspeed, key) for key in ("offload_optimizer", "offload_param")):
            return False
        outline = registry.on_meta_device(self.net)
        return sum(parameter.numel() for parameter in outline.parameters()) <= SMALL_NETWORK

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """Parameter groups of the optimizer; raises ``InvalidInput`` like ``assign``."""
        optimizer, net = self.deepspeed["optimizer"]["params"], self.net
        muon = optimizer if is_muon(self.deepspeed) else None
        if self.hyper.has_experts:
            from classify.models.net_moe import NetMoE  # takes a second to import

            experts = {**self.hyper.experts, "ep_world_size": 1}
            with torch.device("meta"):
                outline: torch.nn.Module = NetMoE(net.num_classes, **experts)
        else:
            outline = registry.on_meta_device(net)
        return assign(outline, self.hyper, net.num_classes, muon, self._head_steps)

    @functools.cached_property
    def teacher(self) -> Teacher | None:
        """The teacher of a distillation, or None; raises ``InvalidInput`` like ``Teacher``."""
        return Teacher(self.hyper.teacher, self.source.classes) if self.hyper.teacher else None

    @functools.cached_property
    def forward_flops(self) -> int | None:
        """Floating-point operations of a forward pass over one image; None if they are not known."""
        if self.hyper.has_experts:
            return None  # the gates choose the experts
        return flops.forward(registry.on_meta_device(self.net), self.data.image_size)

    @functools.cached_property
    def training_flops(self) -> int | None:
        """Floating-point operations of a forward and a backward pass over one image; None if not known."""
        if self.hyper.has_experts or self.hyper.progressive_resizing:
            return None
        frozen = {name for group in self.groups if group.frozen for name in group.parameters}
        return flops.training(registry.on_meta_device(self.net), self.data.image_size, frozen)

    @property
    def _head_steps(self) -> int:
        """Number of optimizer steps at the start of the training that train only the head."""
        length = self.hyper.head_only
        if not isinstance(length, Mapping):
            return 0
        steps = length["batches"] if "batches" in length else length["epochs"] * self.epoch_steps
        if self.steps is not None and steps >= self.steps:
            reason = f"the whole training has only {self.steps:,} steps; use fewer, or head_only: true"
            raise InvalidInput(f"hyperparameters.head_only: {dict(length)!r}: {reason}")
        return steps

    @property
    def described_groups(self) -> list[str]:
        """A line for each parameter group; empty if one group has all parameters and no setting."""
        optimizer = self.deepspeed["optimizer"]["params"]
        return [] if are_plain(self.groups) else [group.describe(optimizer) for group in self.groups]

    @property
    def net(self) -> NetSpec:
        """The name and the arguments of the network."""
        return NetSpec(self.hyper.net, len(self.source.classes), self.data.image_size, self.hyper.net_args)

    def input_size(self, step: int | None) -> tuple[int, int]:
        """Return height and width of the network's input at a training step; None means a validation."""
        full, resizing = self.data.image_size, self.hyper.progressive_resizing
        if resizing is None or step is None or self.hyper.max_length is None:
            return full
        return full if self.plan.has_passed(resizing.until, step) else resizing.size(full)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of weights and inputs."""
        return DTYPES[dtype_name(self.deepspeed)]

    @property
    def autocasts(self) -> bool:
        """Whether autocast is on: torch computes suitable operations in 16 bits."""
        return enabled(self.deepspeed, "torch_autocast")

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage."""
        return zero_stage(self.deepspeed)

    @property
    def channels_last(self) -> bool:
        """Whether training images have the memory format ``channels_last``."""
        if self.hyper.channels_last is not None:
            return self.hyper.channels_last
        is_plain = not self.hyper.has_experts and self.stages == 1
        return is_plain and registry.trains_faster_channels_last(self.hyper.net, self.device)

    @property
    def validates_channels_last(self) -> bool:
        """Whether validation images have the memory format ``channels_last``."""
        return self.channels_last or (self.stages == 1 and registry.prefers_channels_last(self.hyper.net))

    @property
    def validation_micro_batch(self) -> int:
        """Images in a validation's micro-batch: at least 2, and more than in training for small images.

        Pipelines and experts use the training's micro-batch: their buffers and gates are built for its size.
        """
        if self.stages > 1 or self.hyper.has_experts:
            return max(2, self.micro_batch)
        height, width = self.data.image_size
        return max(2, self.micro_batch, VALIDATION_PIXELS // (height * width))

    @property
    def evaluation_batches(self) -> tuple[int, int]:
        """Images in a validation's micro-batch, and micro-batches that all ranks together take at once."""
        of_a_replica = self.deepspeed[ACCUMULATION] if self.stages > 1 else 1
        return self.validation_micro_batch, self.replicas * of_a_replica

    @property
    def stage_layers(self) -> list[str] | None:
        """Names of a pipeline's layers, in the order of the forward pass; None without a pipeline."""
        if self.stages == 1:
            return None
        layers = layers_of(registry.on_meta_device(self.net))
        assert layers  # combinations.py refuses other networks
        return [name for name, _ in layers]


def _total_steps(length: Mapping[str, int], source: DataPlan, batch_size: int, parts: int) -> int:
    """Convert a length to optimizer steps; ``parts`` is the number of micro-batches in a step."""
    if "batches" in length:
        return length["batches"]
    return length["epochs"] * len(step_sizes(source.count("train"), batch_size, parts))


# ------------------------------------------------------------------------------------------------- conflicts


def _conflicts(
    hyper: Hyperparameters, data: DataSettings, source: DataPlan, experiment: Mapping[str, Any]
) -> list[str]:
    """Return an error line for each conflict between hyperparameters, data and experiment."""
    errors = ErrorList()
    if hyper.test_time_augmentation:
        with errors.collecting():
            shift = hyper.test_time_augmentation
            views.check_shift("hyperparameters.test_time_augmentation", shift, data.image_size)
    several = source.has_several_labels
    if several:
        errors.lines += _several_labels_errors(hyper)
    known = metrics_for(source.classes, hyper.test_time_augmentation is not None, several)
    errors.lines += _metric_errors(hyper, experiment.get("searcher") or {}, known)
    errors.lines += _best_weights_errors(hyper, Experiment(experiment, {}), source)
    with errors.collecting():
        losses.check(hyper.loss, hyper.class_weights, source.classes, several)
    if data.sampling == hyper.class_weights == losses.BALANCED:
        reason = "data.sampling: balanced already has this effect; remove one of them"
        errors.lines.append(f"hyperparameters.class_weights: 'balanced': {reason}")
    return errors.lines


def _several_labels_errors(hyper: Hyperparameters) -> list[str]:
    """Return an error line for each hyperparameter that needs one label an image."""
    given = {"teacher": hyper.teacher, "test_time_augmentation": hyper.test_time_augmentation}
    reason = "does not work with data.several_labels; remove it"
    return [f"hyperparameters.{name}: {value}: {reason}" for name, value in given.items() if value]


def _metric_errors(hyper: Hyperparameters, searcher: Mapping[str, Any], known: list[str]) -> list[str]:
    """Return an error line for each metric that no validation reports, or if two metrics differ."""
    hints = {
        TTA_METRIC: "set hyperparameters.test_time_augmentation: {mirror: true}",
        TOP5_METRIC: "it needs more than five classes, and one label an image; use accuracy",
        MAP_METRIC: "it needs data.several_labels; use accuracy",
    }
    chosen = {
        "searcher.metric": (searcher.get("metric"), [*known, SPEED_METRIC]),
        "hyperparameters.early_stopping.metric": ((hyper.early_stopping or {}).get("metric"), known),
    }
    errors = [
        f"{key}: {metric!r}: no validation reports it; {hints.get(metric) or nearest(metric, names)}"
        for key, (metric, names) in chosen.items()
        if metric is not None and metric not in names
    ]
    if not errors and len({metric for metric, _ in chosen.values()} - {None}) == 2:
        (wanted, _), (stopping, _) = chosen.values()
        reason = f"searcher.metric {wanted!r} chooses the best weights and stops training; remove this key"
        errors.append(f"hyperparameters.early_stopping.metric: {stopping!r}: {reason}")
    return errors


def _best_weights_errors(hyper: Hyperparameters, experiment: Experiment, source: DataPlan) -> list[str]:
    """Return an error line for each missing requirement of ``best_weights``."""
    if not hyper.best_weights:
        return []
    is_there = {
        "held-out images; set data.validation, e.g. auto": source.validation == "val",
        "the best checkpoint; set checkpoint_storage.save_trial_best to at least 1": (
            experiment.checkpoints_to_keep("save_trial_best") > 0
        ),
        "the best checkpoint; set checkpoint_policy: best": (
            experiment.config.get("checkpoint_policy") != "none"
        ),
    }
    return [f"hyperparameters.best_weights: True: needs {need}" for need in is_there if not is_there[need]]


def _check_evaluation(source: DataPlan, parts: int) -> None:
    """Refuse too few validation or test images: every process needs an image."""
    errors = [
        f"data.root: {source.count(split)} images in {split}, fewer than the {parts} micro-batches that all"
        " processes take at a time; use fewer processes, or hold out more"
        for split in source.names[1:]
        if source.count(split) < parts
    ]
    if errors:
        raise InvalidInput(errors)


def _check_network(
    spec: NetSpec, hyper: Hyperparameters, micro_batch: int, weights: dict[str, Tensor] | None
) -> None:
    """Refuse a network that fails on the smallest micro-batch, or weights of another network."""
    dry_run.check(spec, micro_batch, bool(hyper.channels_last))
    if resizing := hyper.progressive_resizing:
        dry_run.check(spec, micro_batch, smaller=resizing.size(spec.image_size))
    if hyper.has_experts:
        return
    outline = registry.on_meta_device(spec)
    if weights is not None:
        state_dicts.load_pretrained(outline, weights, f"hyperparameters.weights: {hyper.weights}")
    if hyper.checkpoint_activations:
        recompute.enable(outline)
