"""A trial's configuration, resolved and checked in one place: data, network, engine and length.

The trial, ``train.py --check`` and the search all ask here, so that all find the same errors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from classify.config.hyperparameters import Hyperparameters
from classify.config.options import TestTimeAugmentation
from classify.engine import deepspeed_config
from classify.engine.combinations import DTYPES, dtype_name, enabled, network_errors, zero_stage
from classify.engine.config_parts import Parts
from classify.engine.deepspeed_keys import ACCUMULATION, MICRO_BATCH, TOTAL_BATCH
from classify.engine.learning_rate import schedule_notes
from classify.engine.optimizer_rules import is_muon
from classify.engine.parameter_groups import Group, are_plain, assign
from classify.engine.trial_checks import check_best_weights, check_evaluation, check_metrics, check_network
from classify.images import views
from classify.images.sampler import step_sizes
from classify.images.settings import DataSettings
from classify.images.splits import Splits
from classify.models import flops, losses, pretrained, registry
from classify.models.registry import NetSpec
from classify.models.stages import layers_of
from deepspeed_trial import machine
from deepspeed_trial.errors import ErrorList, InvalidInput
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.patches.process import prepare_process
from deepspeed_trial.plan import Plan

VALIDATION_PIXELS = 512 * 32**2  # of a micro-batch: a forward pass needs little memory


@dataclass(frozen=True)
class TrialConfig:
    """What a trial is made from.

    Attributes:
        hyper: the hyperparameters that are the trial's own.
        data: the ``data`` section.
        source: the dataset, opened but not decoded.
        deepspeed: what ``deepspeed.initialize`` takes.
        seed: of the experiment.
        processes: how many train.
        device: ``cpu`` or ``cuda``.
        plan: of the steps; where the length is a time, the trainer's.
    """

    hyper: Hyperparameters
    data: DataSettings
    source: Splits
    deepspeed: dict[str, Any]
    seed: int
    processes: int
    device: str
    plan: Plan = dataclasses.field(default_factory=Plan)

    @classmethod
    def resolve(
        cls,
        hparams: Mapping[str, Any],
        experiment: Mapping[str, Any],
        processes: int,
        device: str,
        source: Splits | None = None,
        plan: Plan | None = None,
    ) -> TrialConfig:
        """Resolves and checks a configuration, decoding no image and building no engine.

        Args:
            hparams: the hyperparameters.
            experiment: the experiment configuration, of which the sections ``data``, ``searcher`` and
                ``reproducibility`` are read.
            processes: how many train.
            device: ``cpu`` or ``cuda``.
            source: the dataset, if it is open already.
            plan: the trainer's, if it has one.

        Raises:
            InvalidInput: with a line for each thing that is wrong by itself, the data not being there among
                them; if there is none, with a line for each that does not go with another.
        """
        prepare_process()
        parts = Parts(hparams, experiment, source)
        parts.errors.raise_any()
        data, source, hyper, merged = parts.data, parts.source, parts.hyper, parts.merged
        assert data and source and hyper and merged
        errors = ErrorList()
        errors.lines += network_errors(hyper, processes)
        if not errors.lines:
            length = None if hyper.minutes else hyper.max_length
            steps = None if length is None else functools.partial(_total_steps, length, source)
            with errors.collecting():
                deepspeed = deepspeed_config.resolve(merged, hyper, processes, device, steps)
        if how := hyper.test_time_augmentation:
            with errors.collecting():
                views.check_shift("hyperparameters.test_time_augmentation", how, data.image_size)
        with errors.collecting():
            check_metrics(hyper, experiment.get("searcher") or {}, source.classes)
        with errors.collecting():
            check_best_weights(hyper, Experiment(experiment, {}), source)
        with errors.collecting():
            losses.check(hyper.loss, hyper.class_weights, source.classes)
        if data.sampling == hyper.class_weights == losses.BALANCED:
            what = "does what data.sampling: balanced does already; remove one of them"
            errors.lines.append(f"hyperparameters.class_weights: 'balanced': {what}")
        errors.raise_any()
        if data.normalize == "weights":
            mean, std = pretrained.normalization(hyper.net, hyper.weights)
            data = dataclasses.replace(data, normalize={"mean": mean, "std": std})
        seed = int((experiment.get("reproducibility") or {}).get("experiment_seed") or 0)
        config = cls(hyper, data, source, deepspeed, seed, processes, device, plan or Plan())
        config.plan.fix(config.steps)
        check_evaluation(source, config.evaluation_batches[1])
        check_network(config.net, hyper, config.least_micro_batch, parts.weights)
        _ = config.groups
        return config

    @property
    def stages(self) -> int:
        """The stages of the pipeline; 1 if there is none."""
        return self.hyper.pipe_parallel_size

    @property
    def replicas(self) -> int:
        """The data-parallel size: processes / pipeline stages."""
        return self.processes // self.stages

    @property
    def batch(self) -> int:
        """Images in an optimizer step."""
        return self.deepspeed[TOTAL_BATCH]

    @property
    def micro_batch(self) -> int:
        """Images that a process trains on at a time."""
        return self.deepspeed[MICRO_BATCH]

    @property
    def least_micro_batch(self) -> int:
        """The fewest images that a process gets at a time: an epoch's last step may be smaller."""
        parts = self.replicas * self.deepspeed[ACCUMULATION]
        return min(step_sizes(self.source.count("train"), self.deepspeed[TOTAL_BATCH], parts)) // parts

    @property
    def epoch_steps(self) -> int:
        """The optimizer steps of an epoch."""
        parts = self.replicas * self.deepspeed[ACCUMULATION]
        return len(step_sizes(self.source.count("train"), self.deepspeed[TOTAL_BATCH], parts))

    @property
    def steps(self) -> int | None:
        """The optimizer steps of the whole training, by now; None if its length is not known."""
        if self.hyper.minutes:
            return self.plan.total
        length, parts = self.hyper.max_length, self.replicas * self.deepspeed[ACCUMULATION]
        if length is None:
            return None
        return _total_steps(length, self.source, self.deepspeed[TOTAL_BATCH], parts)

    @property
    def notes(self) -> list[str]:
        """What works, but hardly as it was meant, in a line each."""
        lines = schedule_notes(self.deepspeed, self.steps)
        if self.autocasts and self.device == "cpu" and not machine.has_bf16_instructions():
            what = "this processor has no bf16 instructions, and may compute faster in fp32; set it to false"
            lines.append(f"torch_autocast.enabled: True: {what}")
        return lines

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """How the optimizer treats the network's parameters; raises ``InvalidInput`` as ``assign`` does."""
        optimizer, net = self.deepspeed["optimizer"]["params"], self.net
        muon = optimizer if is_muon(self.deepspeed) else None
        if self.hyper.has_experts:
            from classify.models.net_moe import NetMoE  # which takes a second to import

            experts = {**self.hyper.experts, "ep_world_size": 1}
            with torch.device("meta"):
                outline: torch.nn.Module = NetMoE(net.num_classes, **experts)
        else:
            outline = registry.on_meta_device(net)
        return assign(outline, self.hyper, net.num_classes, muon, self._head_steps)

    @functools.cached_property
    def forward_flops(self) -> int | None:
        """Floating-point operations of a forward pass over an image; None where they are not known."""
        if self.hyper.has_experts:
            return None  # as many as the gates say
        return flops.forward(registry.on_meta_device(self.net), self.data.image_size)

    @functools.cached_property
    def training_flops(self) -> int | None:
        """The same of a forward and a backward pass."""
        if self.hyper.has_experts or self.hyper.progressive_resizing:
            return None
        frozen = {name for group in self.groups if group.frozen for name in group.parameters}
        return flops.training(registry.on_meta_device(self.net), self.data.image_size, frozen)

    @property
    def _head_steps(self) -> int:
        """The optimizer steps for which the head alone trains."""
        how = self.hyper.head_only
        if not isinstance(how, Mapping):
            return 0
        steps = how["batches"] if "batches" in how else how["epochs"] * self.epoch_steps
        if self.steps is not None and steps >= self.steps:
            what = f"as long as the training or longer ({self.steps:,} steps); use true, or less"
            raise InvalidInput(f"hyperparameters.head_only: {dict(how)!r}: {what}")
        return steps

    @property
    def described_groups(self) -> list[str]:
        """The groups in a line each; none where there is but one, as the optimizer says."""
        optimizer = self.deepspeed["optimizer"]["params"]
        return [] if are_plain(self.groups) else [group.describe(optimizer) for group in self.groups]

    @property
    def net(self) -> NetSpec:
        """The network."""
        return NetSpec(self.hyper.net, len(self.source.classes), self.data.image_size, self.hyper.net_args)

    @property
    def views(self) -> TestTimeAugmentation | None:
        """The views by which validations classify each image once more; None if that is not asked for."""
        return self.hyper.test_time_augmentation

    def input_size(self, step: int | None) -> tuple[int, int]:
        """Height and width of what the network sees in a step of training, or where None in a validation."""
        full, resizing = self.data.image_size, self.hyper.progressive_resizing
        if resizing is None or step is None or self.hyper.max_length is None:
            return full
        return full if self.plan.has_passed(resizing.until, step) else resizing.size(full)

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of weights and inputs."""
        return DTYPES[dtype_name(self.deepspeed)]

    @property
    def autocasts(self) -> bool:
        """Whether torch chooses which operations are computed in 16 bits."""
        return enabled(self.deepspeed, "torch_autocast")

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage."""
        return zero_stage(self.deepspeed)

    @property
    def channels_last(self) -> bool:
        """Whether training images have that memory format."""
        if self.hyper.channels_last is not None:
            return self.hyper.channels_last
        is_plain = not self.hyper.has_experts and self.stages == 1
        return is_plain and registry.trains_faster_channels_last(self.hyper.net, self.device)

    @property
    def validates_channels_last(self) -> bool:
        """Whether validation images have it."""
        return self.channels_last or (self.stages == 1 and registry.prefers_channels_last(self.hyper.net))

    @property
    def validation_micro_batch(self) -> int:
        """Images that a process validates at a time: more than in training, where they are small.

        Pipelines and experts have buffers and gates of the training micro-batch's size, and keep to it. Never
        one image alone, which some networks cannot take.
        """
        if self.stages > 1 or self.hyper.has_experts:
            return max(2, self.micro_batch)
        height, width = self.data.image_size
        return max(2, self.micro_batch, VALIDATION_PIXELS // (height * width))

    @property
    def evaluation_batches(self) -> tuple[int, int]:
        """Images of a micro-batch in validations, and how many micro-batches all ranks together take."""
        taken = self.deepspeed[ACCUMULATION] if self.stages > 1 else 1
        return self.validation_micro_batch, self.replicas * taken

    @property
    def stage_layers(self) -> list[str] | None:
        """The names of a pipeline's layers, in the order of the forward pass; None if there is none."""
        if self.stages == 1:
            return None
        layers = layers_of(registry.on_meta_device(self.net))
        assert layers  # or combinations.py has refused it
        return [name for name, _ in layers]


def _total_steps(length: Mapping[str, int], source: Splits, batch_size: int, parts: int) -> int:
    """The optimizer steps of the whole training, given the batch size and its number of micro-batches."""
    if "batches" in length:
        return length["batches"]
    return length["epochs"] * len(step_sizes(source.count("train"), batch_size, parts))
