"""``CIFARTrial``: image classification with DeepSpeed as a Determined trial.

The trial takes a stock ``DeepSpeedTrialContext`` and nothing else; ``train.py`` runs it on a cluster, on GPUs or on CPU
cores. Source of the form: https://docs.determined.ai/latest/model-dev-guide/api-guides/apis-howto/deepspeed/deepspeed.html
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import local_test

import deepspeed
import torch
from attrdict import AttrDict
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from determined import pytorch
from determined.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from torch import Tensor, nn
from torch.nn import functional as F

import checkpointing
import data
import engine_config
import engines
import loaders
import memory
import mixing
import nets
import weights
from augment import Augmentation, Augmenter
from callbacks import EarlyStopping
from engine_rules import dtype_name, zero_stage
from errors import InvalidInput, nearest
from hyperparameters import is_moe
from metrics import ClassificationMetrics, Throughput
from net import NetMoE

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOE_KEYS = ("num_experts", "ep_world_size", "mlp_type", "top_k", "min_capacity", "noisy_gate_policy")
VALIDATION_PIXELS = 512 * 32**2  # a forward pass needs little memory, and small batches waste time
MOE_LOSS_COEFFICIENT = 0.01  # as in https://arxiv.org/abs/2101.03961, section 2.2


class CIFARTrial(DeepSpeedTrial):
    """Trains the network that ``hyperparameters.net`` names on the images that the ``data`` section names.

    Args:
        context: Determined's context, of which the hyperparameters, the data section and the seed are read.

    Raises:
        errors.InvalidInput: if the configuration or the data cannot work.
    """

    trial_context_class: Any = staticmethod(local_test.test_context)
    trial_controller_class: Any = local_test.TestController
    layer_names: list[str] | None = None  # of a pipeline
    mean: Sequence[float]
    std: Sequence[float]

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(context.get_hparams())
        self.config = experiment_config(context)
        self.seed = int(self.config.get("reproducibility", {}).get("experiment_seed") or 0)
        self.data_config = data_config = data.DataConfig.parse(self.config.get("data"))
        hparams, slots = context.get_hparams(), context.distributed.size
        steps = steps_of(self.args.get("max_length"), data_config)
        self.ds_config = ds_config = engine_config.resolve(hparams, slots, context.device.type, steps)
        self.image_size, self.canvas = data_config.image_size, data_config.canvas
        self.name, self.moe = self.args.get("net", "net"), is_moe(hparams)
        plain = not self.moe and self.args.get("pipe_parallel_size", 1) == 1
        faster = plain and nets.trains_faster_channels_last(self.name, context.device.type)
        self.channels_last = self.args.get("channels_last", faster)
        check_metrics(self.config.get("searcher") or {}, hparams, data_config)
        self._check_net(data_config)
        self.train_set = data.placed(data.load(data_config, "train"), data_config, context.device)
        self.test_set = data.placed(data.load(data_config, "test"), data_config, context.device)
        self.augmenter = None
        if data_config.augment != Augmentation() or self.canvas != self.image_size:
            sizes = self.canvas, self.image_size
            self.augmenter = Augmenter(data_config.augment, len(self.train_set), *sizes, self.seed)
        if data_config.normalize == "weights":
            self.mean, self.std = nets.normalization(self.name)
        else:
            self.mean, self.std = data.normalization(data_config, self.train_set)
        self.mixer = mixing.mixer(self.args.get("mixup"), self.args.get("cutmix"), len(self.train_set.classes))
        self.throughput = context.wrap_reducer(Throughput(), for_validation=False)
        metrics = ClassificationMetrics(self.train_set.classes, self.throughput)
        self.metrics = context.wrap_reducer(metrics, for_training=False)
        self.step, self.micro_batch = -1, 0  # which of a step's

        before = memory.explained(self, lambda: "before the first step")
        quietly = contextlib.redirect_stdout(io.StringIO())  # DeepSpeed prints its groups and layers
        with quietly, before, engines.refusals():
            model = self._build()
            parameters: Any = filter(lambda p: p.requires_grad, model.parameters())
            if self.moe and self.args.get("moe_param_group", True):
                grouped = {"params": list(parameters), "name": "parameters"}
                parameters = split_params_into_different_moe_groups_for_optimizer(grouped)
            engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=ds_config)
        engines.keep_gradient_norm(engine)
        engines.leave_out_reductions_to_oneself(engine)
        self.model_engine = context.wrap_model_engine(engine)
        self.dtype = engines.engine_dtype(engine)
        self.train_sampler = self._sampler(self.train_set, engine.train_batch_size(), self._accumulation, self.seed)

    def plain_net(self) -> nn.Module:
        """The network as plain PyTorch, with random weights."""
        return nets.build(self.name, len(self.train_set.classes), self.image_size, self.args.get("net_args"))

    def outline(self) -> nn.Module:
        """The same on torch's meta device, without weights."""
        return nets.outline(self.name, len(self.train_set.classes), self.image_size, self.args.get("net_args"))

    def _build(self) -> nn.Module:
        """The network in the form that the hyperparameters ask for: plain, of experts, or cut into stages."""
        args, micro_batch = self.args, self.ds_config["train_micro_batch_size_per_gpu"]
        shared = zero_stage(self.ds_config) == 3
        memory.keep_what_is_freed(not (shared or args.get("checkpoint_activations")))
        if self.moe:
            chosen = {key: args[key] for key in MOE_KEYS if args.get(key) is not None}
            return self._start_from(NetMoE(len(self.train_set.classes), micro_batch=max(2, micro_batch), **chosen))
        plain = self._start_from(self.plain_net())
        if args.get("sync_batchnorm"):
            plain = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
        if args.get("checkpoint_activations"):
            checkpointing.enable(plain)
        if shared:
            # Made whole in the host's memory, for as its context zero.Init skips what a network itself initialises;
            # before the engine, which would move all of it to the device first. Neither casts what it finds cut up.
            for parameter in plain.parameters():
                parameter.data = parameter.data.to(DTYPES[dtype_name(self.ds_config)])
            deepspeed.zero.Init(module=plain, config_dict_or_path=self.ds_config)
        if args.get("pipe_parallel_size", 1) == 1:
            return plain
        if "dynamic_shape" not in inspect.signature(PipelineModule.__init__).parameters:
            stages, version = args.pipe_parallel_size, deepspeed.__version__
            raise InvalidInput(
                f"hyperparameters.pipe_parallel_size: {stages}: DeepSpeed {version} cannot take an epoch's smaller last"
                " step; use the image of the Dockerfile, or 1"
            )
        named = nets.layers(plain)
        assert named  # or hyperparameters.py has refused it
        self.layer_names = [name for name, _ in named]
        stage = PipelineModule(
            layers=[layer for _, layer in named],
            num_stages=args.pipe_parallel_size,
            loss_fn=self._pipeline_loss,
            partition_method=args.get("partition_method", "parameters"),
            dynamic_shape=True,  # an epoch's last step may be smaller
        )
        for parameter in stage.parameters():  # or DeepSpeed clips by the norm of the first stage's gradients alone
            parameter.model_parallel = True
        return stage

    def _start_from(self, net: nn.Module) -> nn.Module:
        chosen = self.args.get("weights")
        if chosen:
            label, ready = f"hyperparameters.weights: {chosen}", nets.is_pretrained(self.name, chosen)
            state = nets.pretrained(self.name, chosen) if ready else weights.read(chosen, label)
            replaced = weights.start_from(net, state, label)
            if replaced and self.context.distributed.rank == 0:
                print(weights.said(replaced, label), file=sys.stderr)
        return net

    def _check_net(self, data_config: data.DataConfig) -> None:
        """Refuses a network that cannot be, before any image is decoded."""
        config, slots = self.ds_config, self.context.distributed.size // self.args.get("pipe_parallel_size", 1)
        parts = slots * config["gradient_accumulation_steps"]
        least = min(loaders.step_sizes(data.count(data_config, "train"), config["train_batch_size"], parts)) // parts
        check_net(self.context.get_hparams(), data_config, least)

    @property
    def _accumulation(self) -> int:
        return self.model_engine.gradient_accumulation_steps()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        """Micro-batches of the training images, shuffled by (seed, epoch)."""
        return loaders.data_loader(self.train_set, self.train_sampler, self.augmenter)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        """Batches of the test images, in order, every image once; larger than the micro-batch where that may be."""
        micro_batch = max(2, self.model_engine.train_micro_batch_size_per_gpu())  # two can always be shared out
        if not (self.context.use_pipeline_parallel or self.moe):  # whose buffers and gates are made for it
            micro_batch = max(micro_batch, VALIDATION_PIXELS // (self.image_size[0] * self.image_size[1]))
        accumulation = self._accumulation if self.context.use_pipeline_parallel else 1
        batch_size = micro_batch * accumulation * self.model_engine.dp_world_size
        sampler = self._sampler(self.test_set, batch_size, accumulation)
        mine = list(sampler)[engines.data_rank(self.model_engine) :: self.model_engine.dp_world_size]
        self.metrics.order = torch.cat(mine)
        return loaders.data_loader(self.test_set, sampler)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        """Early stopping, where it is asked for."""
        chosen = self.args.get("early_stopping")
        if not chosen:
            return {}
        return {"early_stopping": EarlyStopping(self.context, **{"metric": "loss", **chosen})}

    def train_batch(
        self, dataloader_iter: Iterator[pytorch.TorchData] | None, epoch_idx: int, batch_idx: int
    ) -> dict[str, Any]:
        """Trains on one micro-batch, or in a pipeline on all those of a step.

        Returns:
            ``loss``: the mean cross-entropy of the images, a scalar on the device; ``learning_rate``: that of the step;
            with experts also ``load_balancing_loss``.
        """
        self.micro_batch = 0 if batch_idx != self.step else self.micro_batch + 1
        self.step = batch_idx
        batches = self._prepared(dataloader_iter)
        self.step_size = self.train_sampler.step_sizes[batch_idx % len(self.train_sampler.step_sizes)]
        metrics: dict[str, Any] = {"learning_rate": self.model_engine.get_lr()[0]}
        if self.context.use_pipeline_parallel:
            self.throughput.update(self.step_size)
            return {"loss": self.model_engine.train_batch(batches).detach(), **metrics}
        self.throughput.update(self.step_size / self._accumulation)
        inputs, labels = next(batches)
        loss = self._loss(nets.logits(self.model_engine(inputs)), labels)
        metrics["loss"] = loss.detach()
        if self.moe:
            balance = self.model_engine.module.load_balancing_loss
            metrics["load_balancing_loss"] = balance.detach()
            loss = loss + self.args.get("moe_loss_coefficient", MOE_LOSS_COEFFICIENT) * balance
        self.model_engine.backward(engines.scale_loss(self.model_engine, loss))
        self.model_engine.step()  # steps the optimizer when enough micro-batches have come
        return metrics

    def evaluate_batch(self, dataloader_iter: Iterator[pytorch.TorchData] | None, batch_idx: int) -> dict[str, Any]:
        """Counts one micro-batch, or in a pipeline several; the reducer gives the metrics over all of them."""
        batches = self._prepared(dataloader_iter)
        if self.context.use_pipeline_parallel:
            self.model_engine.eval_batch(batches)
        else:
            inputs, labels = next(batches)
            self.metrics.update(nets.logits(self.model_engine(inputs)).float(), labels)
        return {}

    def _pipeline_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss on the last stage, which alone sees what the network gives and so counts it in validation."""
        if not torch.is_grad_enabled():
            self.metrics.update(outputs.float(), labels)
            return F.cross_entropy(outputs.float(), labels)
        return self._loss(outputs, labels)

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The training loss of a micro-batch, so weighted that the mean over a step's is the mean over its images.

        Args:
            outputs: logits (B, C).
            labels: (B,) int64, or (B, C) float32 where images are mixed.
        """
        smoothing = float(self.args.get("label_smoothing", 0))
        loss = F.cross_entropy(outputs.float(), labels, label_smoothing=smoothing)
        share = len(labels) * self.train_sampler.parts / self.step_size
        return loss if share == 1 else loss * share

    def _prepared(self, dataloader_iter: Iterator[pytorch.TorchData] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches on the device, in the engine's dtype; none on a pipeline's middle stages."""
        device = self.context.device
        for images, labels in dataloader_iter or ():
            inputs = data.as_inputs(images.to(device, non_blocking=True), self.mean, self.std)
            validating = not (torch.is_grad_enabled() or self.context.use_pipeline_parallel)
            if self.channels_last or (validating and nets.prefers_channels_last(self.name)):
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            if self.mixer and torch.is_grad_enabled():
                rank = engines.data_rank(self.model_engine)
                inputs, labels = mixing.mixed(
                    self.mixer, inputs, labels, (self.seed, self.step, self.micro_batch, rank)
                )
                self.micro_batch += self.context.use_pipeline_parallel  # which takes all those of a step in one call
            yield inputs.to(self.dtype), labels

    def _sampler(
        self, source: data.ImageSet, batch_size: int, accumulation: int = 1, seed: int | None = None
    ) -> loaders.MicroBatchSampler:
        parts = self.model_engine.dp_world_size * accumulation
        return loaders.MicroBatchSampler(len(source), batch_size, parts, seed)


def check_net(hparams: Mapping[str, Any], data_config: data.DataConfig, micro_batch: int) -> None:
    """Refuses a network that does not go with the data.

    Args:
        hparams: the trial's hyperparameters.
        data_config: the data.
        micro_batch: the fewest images that the network gets at a time in training.

    Raises:
        InvalidInput: if it does not.
    """
    name, size, net_args = hparams.get("net", "net"), data_config.image_size, hparams.get("net_args")
    if data_config.normalize == "weights":
        nets.normalization(name)
    classes = len(data.classes(data_config))
    nets.check(name, classes, size, net_args, micro_batch, bool(hparams.get("channels_last")))
    if is_moe(hparams):
        return
    outline, chosen = nets.outline(name, classes, size, net_args), hparams.get("weights")
    if chosen and not nets.is_pretrained(name, chosen):
        label = f"hyperparameters.weights: {chosen}"
        weights.start_from(outline, weights.read(chosen, label), label)
    if hparams.get("checkpoint_activations"):
        checkpointing.enable(outline)


def check_metrics(searcher: Mapping[str, Any], hparams: Mapping[str, Any], data_config: data.DataConfig) -> None:
    """Refuses a metric that no validation will report.

    Args:
        searcher: the experiment's searcher, whose metric the checkpoints and trials are compared by.
        hparams: the trial's hyperparameters.
        data_config: the data.

    Raises:
        InvalidInput: with the nearest one that there is.
    """
    known = ["loss", "accuracy", *(f"accuracy/{name}" for name in data.classes(data_config))]
    chosen = {
        "searcher.metric": (searcher.get("metric"), [*known, "images_per_second"]),
        "hyperparameters.early_stopping.metric": ((hparams.get("early_stopping") or {}).get("metric"), known),
    }
    faults = [
        f"{key}: {metric!r}: no validation reports it; {nearest(metric, names)}"
        for key, (metric, names) in chosen.items()
        if metric is not None and metric not in names
    ]
    if faults:
        raise InvalidInput(faults)


def steps_of(max_length: Mapping[str, int] | None, data_config: data.DataConfig) -> Callable[[int, int], int] | None:
    """Gives the function from ``train_batch_size`` and its micro-batches to the optimizer steps of the training."""
    if max_length is None:
        return None
    images = data.count(data_config, "train")

    def steps(batch_size: int, parts: int) -> int:
        epoch = len(loaders.step_sizes(images, batch_size, parts))
        return max_length["batches"] if "batches" in max_length else max_length["epochs"] * epoch

    return steps


def experiment_config(context: DeepSpeedTrialContext) -> dict[str, Any]:
    """The experiment's configuration, or nothing where a context was made without one."""
    try:
        return dict(context.get_experiment_config())
    except ValueError:
        return {}
