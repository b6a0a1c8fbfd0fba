"""The image classifier's hooks: networks in checkpoints, settings to compare on resume, advice on memory."""

from __future__ import annotations

import contextlib
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor
from typing_extensions import override

from classify.config.experiment_fields import experiment_of
from classify.config.metric_table import LABEL_THRESHOLD, TEMPERATURE, THRESHOLD, UNFITTED
from classify.config.project import PROJECT
from classify.config.rules import CROP
from classify.engine import memory
from classify.engine.parameter_groups import summarise
from classify.engine.trial_config import TrialConfig
from classify.engine.weight_average import WeightAverage
from classify.models import net_file
from classify.models.registry import MOE
from deepspeed_trial import machine
from deepspeed_trial.checkpoints import shards
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.events import Code, TrialHooks, steps_done
from deepspeed_trial.full_weights import gather_full_state_dict

NOT_EXPORTED = ("ep_world_size", "noisy_gate_policy")  # settings that only a training uses


class ClassifierHooks(TrialHooks):
    """Describes the network in every checkpoint, and names the settings that must match on resume.

    With ``weight_average``, a checkpoint also has the average; validations and exports use it.

    Args:
        context: the trial's context.
        config: the trial's configuration.
        engine: the trial's engine.
        metrics: the reducer of the trial's evaluations; a test uses the ``thresholds`` of the validation.
        normalization: mean and standard deviation of each channel of the input.
        images_on_gpu: bytes of images in a GPU's memory.

    Attributes:
        started: ``time.perf_counter()`` at the start of the training.
        average: the average of the weights; None without ``weight_average``.
        confidence: the temperature and the threshold of the current weights; empty before their validation.
        thresholds: the threshold of each label, with several labels an image; empty before the validation of
            the current weights.
    """

    started = 0.0
    average: WeightAverage | None = None

    def __init__(
        self,
        context: Any,
        config: TrialConfig,
        engine: deepspeed.DeepSpeedEngine,
        metrics: Any,
        normalization: tuple[Any, Any],
        images_on_gpu: int,
    ) -> None:
        self.context = context
        self.config, self.engine, self.metrics = config, engine, metrics
        self.mean, self.std = map(list, normalization)
        self.images_on_gpu = images_on_gpu
        if config.hyper.minutes and config.plan is not getattr(context, "plan", None):
            reason = "only deepspeed_trial.trainer supports minutes; use {epochs: N} or {batches: N}"
            raise InvalidInput(f"hyperparameters.max_length: {config.hyper.max_length}: {reason}")
        self._validation = contextlib.ExitStack()
        self.confidence: Mapping[str, float] = {}
        self.thresholds: Mapping[str, float] = {}
        if options := config.hyper.weight_average:
            self.average = WeightAverage(engine, options, config.plan, config.stage_layers)

    @override
    def on_training_start(self) -> None:
        self.started = time.perf_counter()

    @override
    def on_optimizer_step(self) -> None:
        self.confidence = self.thresholds = {}
        if self.average:
            self.average.update()

    @override
    def on_validation_start(self) -> None:
        if self.average:
            self._validation.enter_context(self.average.in_place())

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._validation.close()
        self.confidence = {name: metrics[name] for name in (TEMPERATURE, THRESHOLD) if name in metrics}
        if self.config.source.has_several_labels:
            classes = self.config.source.classes
            self.thresholds = {name: metrics[f"{LABEL_THRESHOLD}{name}"] for name in classes}

    @override
    def on_test_start(self) -> None:
        self.on_validation_start()
        self.metrics.thresholds = self._thresholds

    @override
    def on_test_end(self, metrics: dict[str, Any]) -> None:
        self._validation.close()
        self.metrics.thresholds = None

    @property
    def _thresholds(self) -> Mapping[str, float]:
        """The threshold of each label; ``UNFITTED`` before the validation of the current weights."""
        return self.thresholds or dict.fromkeys(self.config.source.classes, UNFITTED)

    @override
    def on_checkpoint_load_end(self, checkpoint_dir: pathlib.Path) -> None:
        """Load temperature and thresholds, and a weight average that the trainer cannot load."""
        if net_file.beside(path := checkpoint_dir / net_file.NAMES[0]).exists():
            description = net_file.read_description(path)
            self.confidence = description.get("confidence") or {}
            self.thresholds = description.get("thresholds") or {}
        if not self.average:
            return
        if not shards.are_in(checkpoint_dir):  # the trainer loads the average from shards only
            self.average.load_state_dict(net_file.of_checkpoint(checkpoint_dir))
        self.average.on_loaded()

    @override
    def averages(self) -> Mapping[Tensor, Tensor]:
        return self.average.by_weight() if self.average else {}

    @override
    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        path = pathlib.Path(checkpoint_dir, net_file.NAMES[0])
        rank = self.context.distributed.rank
        if not shards.has_written(path.parent, rank):
            self.write_network(path)
        elif rank == 0:
            net_file.write_description(path, self.describe_network())

    def write_network(self, path: pathlib.Path) -> dict[str, Tensor]:
        """Write the network and its description on the chief; return the fp32 weights by name.

        Every rank must call this method, because all ranks exchange their weights.

        Args:
            path: the file of the weights; ``net_file`` names the file of the description.
        """
        if self.average:
            weights = self.average.state_dict()
        else:
            weights = gather_full_state_dict(self.engine, self.config.stage_layers)
        if self.context.distributed.rank == 0:
            net_file.write(path, weights, self.describe_network())
        return weights

    def describe_network(self) -> dict[str, Any]:
        """Return the content of ``net.json``."""
        config, hyper = self.config, self.config.hyper
        height, width = config.data.image_size
        net: dict[str, Any] = {"name": MOE if hyper.has_experts else hyper.net}
        net["num_classes"] = config.net.num_classes
        if hyper.net_args:
            net["net_args"] = dict(hyper.net_args)
        if hyper.has_experts:
            net.update({key: value for key, value in hyper.experts.items() if key not in NOT_EXPORTED})
        experiment, average = experiment_of(self.context), hyper.weight_average
        return {
            "net": net,
            "classes": list(config.source.classes),
            "input": {
                "height": height,
                "width": width,
                "resize": list(config.data.stored_size),
                "fit": config.data.fit,
                "mean": self.mean,
                "std": self.std,
            },
            "dtype": str(config.dtype).removeprefix("torch."),
            **({"confidence": self.confidence} if self.confidence else {}),
            **({"thresholds": self._thresholds} if config.source.has_several_labels else {}),
            "provenance": {
                "experiment": experiment.get("name"),
                "data": experiment.get("data"),
                "seed": config.seed,
                "steps": steps_done(self.context),
                "processes": torch.distributed.get_world_size(),
                "zero_stage": int(self.engine.zero_optimization_stage()),
                "train_batch_size": self.engine.train_batch_size(),
                **({"weight_average": vars(average)} if average else {}),
                **({"teacher": self._teacher} if self._teacher else {}),
                **machine.versions(),
            },
        }

    @property
    def _teacher(self) -> dict[str, Any] | None:
        """Return the settings of a distillation; None without one."""
        if not (teacher := self.config.teacher):
            return None
        weight, temperature = self.config.hyper.teacher_weight, self.config.hyper.teacher_temperature
        return {"weights_sha256": teacher.digest, "weight": weight, "temperature": temperature}

    @override
    def identity(self) -> Mapping[str, Mapping[str, Any]]:
        hyper, data = self.config.hyper, self.config.data
        net = {
            "hyperparameters.net": "net" if hyper.has_experts else hyper.net,
            "hyperparameters.net_args": dict(hyper.net_args or {}),
            "hyperparameters.moe": hyper.has_experts,
            "hyperparameters.num_experts": list(hyper.num_experts),
            "hyperparameters.mlp_type": hyper.mlp_type,
            "hyperparameters.parameter_groups and weight_decay_on": summarise(self.config.groups),
            "data: classes": list(self.config.source.classes),
            "data.image_size": list(data.image_size),
        }
        mode = {
            "hyperparameters.ep_world_size": hyper.ep_world_size,
            "hyperparameters.pipe_parallel_size": hyper.pipe_parallel_size,
            "hyperparameters.partition_method": hyper.partition_method,
        }
        position = {
            "data: training images": self.config.source.count("train"),
            # A checkpoint may be older than a key below; the missing value then equals None
            "data.sampling": None if data.sampling == "shuffle" else data.sampling,
            "data.validation": data.validation,
            "data.test": data.test,
            "data.split_seed": data.split_seed or None,
            "data.group": data.group,
            "data.several_labels": data.several_labels is not None or None,
            "data.fold": list(data.fold) if data.fold else None,
            "data.unreadable": self.config.source.left_out_identity,
            "data.exclude": self.config.source.excluded_identity,
            "data.augment": data.augment.identity(),
            "data.resize": list(data.stored_size),
            "data.fit": None if data.fit == CROP else data.fit,
            "data.normalize": [self.mean, self.std],
            "hyperparameters.label_smoothing": hyper.label_smoothing,
            "hyperparameters.mixup": hyper.mixup,
            "hyperparameters.cutmix": hyper.cutmix,
            **{f"hyperparameters.{name}": value for name, value in hyper.repeated().items()},
            "hyperparameters.teacher": self._teacher,
        }
        return {"net": net, "mode": mode, "position": position}

    @override
    def layer_names(self) -> Sequence[str] | None:
        return self.config.stage_layers

    @override
    def stages(self) -> Sequence[tuple[float, float]]:
        """Return the stages of progressive resizing; a step's time is assumed proportional to its pixels."""
        resizing, (height, width) = self.config.hyper.progressive_resizing, self.config.data.image_size
        if resizing is None:
            return super().stages()
        return (resizing.until, math.prod(resizing.size((height, width))) / (height * width)), (1.0, 1.0)

    @override
    def advise_on_memory(self) -> str:
        return memory.advise(self.config, self.engine, self.images_on_gpu)

    @override
    def code(self) -> Code:
        """Return the project's folder without the folder of the images."""
        return Code(PROJECT, [pathlib.Path(self.config.data.root)])
