"""``CIFARTrial``: a Determined trial for image classification with DeepSpeed.

Works with Determined's unmodified context; ``train.py`` runs the trial on a cluster, on GPUs or on CPU cores.
Guide: https://github.com/determined-ai/determined/blob/v0.38.1/docs/model-dev-guide/api-guides/apis-howto/deepspeed/deepspeed.rst
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed_trial  # noqa: F401 - before deepspeed, which learns from it whether a GPU exists

# isort: split
import deepspeed
import torch
from attrdict import AttrDict
from determined import pytorch
from determined.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from torch import Tensor

import data
from classify.config.experiment_fields import check, experiment_of
from classify.config.metric_table import METRICS
from classify.engine.build import build_network, building, compile_network, engine_arguments
from classify.engine.hooks import ClassifierHooks
from classify.engine.trial_config import TrialConfig
from classify.images.mixup import apply_mixup, make_mixup
from classify.images.order import Order
from classify.models.losses import Loss
from classify.models.registry import logits
from classify.reports.classification_log import ClassificationLog
from classify.reports.label_metrics import LabelMetrics
from classify.reports.metrics import ClassificationMetrics, LearningRate, Throughput
from classify.reports.tensorboard import TensorBoardLog
from deepspeed_trial.engines import data_parallel_rank
from deepspeed_trial.events import EarlyStopping
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local.local_mode import LocalTestMode
from deepspeed_trial.schedules import learning_rate

Batches = Iterator[pytorch.TorchData] | None  # None on the middle stages of a pipeline


class CIFARTrial(LocalTestMode, DeepSpeedTrial):
    """Trains the network ``hyperparameters.net`` on the images of the ``data`` section.

    Args:
        context: Determined's context, with the hyperparameters and the experiment configuration.

    Raises:
        InvalidInput: with a line for each error in the configuration or the data.
    """

    # Configuration
    args: AttrDict  # the hyperparameters of the file
    config: TrialConfig  # data, network, DeepSpeed configuration and length: resolved and checked
    check_experiment = staticmethod(check)
    # Training
    images: data.Images
    model_engine: deepspeed.DeepSpeedEngine
    train_sampler: Order
    # Metrics, and hooks that add the network to checkpoints
    throughput: Throughput
    rate: LearningRate
    metrics: ClassificationMetrics
    hooks: ClassifierHooks

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        # Configuration: ds_config.json and overwrite_deepspeed_args, resolved for the number of processes
        self.args = AttrDict(context.get_hparams())
        processes, device = context.distributed.size, context.device
        where = {"device": device.type, "plan": getattr(context, "plan", None)}
        self.config = config = TrialConfig.resolve(self.args, experiment_of(context), processes, **where)
        # Images, decoded after all checks, and MixUp or CutMix
        self.images = images = data.Images(config.source, config.seed, device)
        self.mixup = make_mixup(config.hyper.mixup, config.hyper.cutmix, config.net.num_classes)
        several = config.source.has_several_labels
        self.loss = Loss(config.hyper, config.source.classes, lambda: images.train.labels, several)
        # Network, in the form of its parallelism, and engine
        with building(config, images.gpu_bytes):
            sample = None if getattr(context, "resumes", False) else images.sample
            net = build_network(config, self._pipeline_loss, sample)
            engine, *_ = deepspeed.initialize(model=net, **engine_arguments(net, config))
        self.model_engine = context.wrap_model_engine(engine)
        if config.hyper.compile:
            compile_network(engine)
        self.accumulation = engine.gradient_accumulation_steps()
        self.train_sampler = images.training_order(config.batch, config.replicas * self.accumulation)
        if config.teacher:
            config.teacher.prepare(device, config.dtype, *images.normalization)
        # Metrics, reduced over all ranks; the network in checkpoints
        self.throughput = context.wrap_reducer(Throughput(), for_validation=False)
        self.rate = context.wrap_reducer(LearningRate(), for_validation=False)
        fitted = config.source.count(config.source.validation)
        views = config.hyper.test_time_augmentation
        metrics = ClassificationMetrics(config.source.classes, self.throughput, views, fitted=fitted)
        metrics = LabelMetrics(config.source.classes, self.throughput) if several else metrics
        self.metrics = context.wrap_reducer(metrics, for_training=False)
        self.hooks = ClassifierHooks(context, config, engine, metrics, images.normalization, images.gpu_bytes)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        """Return micro-batches of the training images, shuffled by (seed, epoch)."""
        return self.images.training_loader(self.train_sampler)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        """Return micro-batches of the validation images, in order, every image once."""
        loader = self.images.validation_loader(*self.config.evaluation_batches)
        self.metrics.order = loader.seen_by(data_parallel_rank(self.model_engine), self.config.replicas)
        return loader

    def build_test_data_loader(self) -> pytorch.DataLoader | None:
        """Return micro-batches of the test images for the final test; None if validations use them."""
        loader = self.images.test_loader(*self.config.evaluation_batches)
        if loader:
            rank = data_parallel_rank(self.model_engine)
            self.metrics.order_of_test = loader.seen_by(rank, self.config.replicas)
        return loader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        """Return the callbacks: the network in checkpoints, reports, and optional early stopping."""
        context, config, metrics, images = self.context, self.config, self.metrics, self.images
        experiment = Experiment(experiment_of(context), {})
        callbacks: dict[str, pytorch.PyTorchCallback] = {
            "network": self.hooks,
            "classification": ClassificationLog(context, metrics, images, config, experiment),
            "tensorboard": TensorBoardLog(context, self.model_engine, metrics, images, config),
        }
        if stopping := config.hyper.early_stopping:
            metric = experiment.metric or stopping.get("metric", "loss")
            by_default = metric in METRICS and METRICS[metric].smaller_is_better
            smaller = experiment.smaller_is_better if experiment.metric else by_default
            how = {**stopping, "metric": metric, "smaller_is_better": smaller}
            callbacks["early_stopping"] = EarlyStopping(context, **how)
        return callbacks

    def train_batch(self, dataloader_iter: Batches, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train on one micro-batch, or in a pipeline on all micro-batches of a step.

        Returns:
            ``loss``, a scalar on the device; ``learning_rate``; with experts also
            ``load_balancing_loss``, which ``loss`` does not include.
        """
        micro_batches = self._inputs(dataloader_iter, batch_idx)
        step_size = self.train_sampler.step_size(batch_idx)
        self.rate.now = learning_rate(self.model_engine)
        metrics: dict[str, Any] = {"learning_rate": self.rate.now}
        if self.context.use_pipeline_parallel:
            self.throughput.update(step_size)
            return {"loss": self.model_engine.train_batch(micro_batches).detach(), **metrics}
        self.throughput.update(step_size / self.accumulation)
        inputs, labels = next(micro_batches)
        taught = self.config.teacher(inputs) if self.config.teacher else None
        loss = self._loss(logits(self.model_engine(inputs)), labels, taught)
        metrics["loss"] = loss.detach()
        if self.config.hyper.has_experts:
            balance = self.model_engine.module.load_balancing_loss
            metrics["load_balancing_loss"] = balance.detach()
            loss = loss + self.config.hyper.moe_loss_coefficient * balance
        self.model_engine.backward(loss)
        self.model_engine.step()  # steps the optimizer after the last micro-batch of a step
        return metrics

    def evaluate_batch(self, dataloader_iter: Batches, batch_idx: int) -> dict[str, Any]:
        """Classify one micro-batch, or several in a pipeline; the reducer computes the metrics."""
        micro_batches = self._inputs(dataloader_iter)
        if self.context.use_pipeline_parallel:
            self.model_engine.eval_batch(micro_batches)
        else:
            inputs, labels = next(micro_batches)
            self.metrics.classify(lambda images: logits(self.model_engine(images)).float(), inputs, labels)
        return {}

    def _loss(self, outputs: Tensor, labels: Tensor, taught: Tensor | None = None) -> Tensor:
        """Return the weighted loss, a scalar; the weight makes a step's mean loss the mean over its images.

        Args:
            outputs: logits (B, C).
            labels: (B,) int64, or (B, C) float32.
            taught: the teacher's logits (B, C); None without a teacher.
        """
        loss = self.loss(outputs.float(), labels, taught)
        weight = self.train_sampler.weight(len(labels), self.context.current_train_batch())
        return loss if weight == 1 else loss * weight

    def _pipeline_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss on a pipeline's last stage; in validation also update the metrics."""
        if torch.is_grad_enabled():
            return self._loss(outputs, labels)
        self.metrics.update(outputs.float(), labels)
        return outputs.float().mean()  # the engine needs a scalar, and nothing reads it

    def _inputs(self, dataloader_iter: Batches, step: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield micro-batches on the device, in the engine's dtype; ``step`` is None in validation."""
        config, first = self.config, self.model_engine.micro_steps % self.accumulation
        channels_last = config.validates_channels_last if step is None else config.channels_last
        for number, (images, labels) in enumerate(dataloader_iter or (), first):
            inputs = self.images.inputs(images, channels_last, config.input_size(step))
            labels = self.images.on_device(labels)
            if self.mixup and step is not None:
                place = config.seed, step, number, data_parallel_rank(self.model_engine)
                inputs, labels = apply_mixup(self.mixup, inputs, labels, place)
            yield inputs.to(config.dtype), labels
