"""``CIFARTrial``: image classification with DeepSpeed as a Determined trial.

The trial takes a stock ``DeepSpeedTrialContext`` and nothing else; ``train.py`` runs it on a cluster, on GPUs or on CPU
cores. Source of the form: https://docs.determined.ai/latest/model-dev-guide/api-guides/apis-howto/deepspeed/deepspeed.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
from attrdict import AttrDict
from determined import pytorch
from determined.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from torch import Tensor
from torch.nn import functional as F

import data
import engine_config
from metrics import ClassificationMetrics
from net import Net


class CIFARTrial(DeepSpeedTrial):
    """Trains ``Net`` on the images that the experiment's ``data`` section names.

    Args:
        context: Determined's context, of which the hyperparameters, the data section and the seed are read.

    Raises:
        errors.InvalidInput: if the configuration or the data cannot work.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(context.get_hparams())
        config = experiment_config(context)
        self.seed = int(config.get("reproducibility", {}).get("experiment_seed") or 0)
        ds_config = engine_config.resolve(context.get_hparams(), context.distributed.size, context.device.type)

        data_config = data.DataConfig.parse(config.get("data"))
        self.train_set = data.load(data_config, "train")
        self.test_set = data.load(data_config, "test")

        model = Net(len(self.train_set.classes))
        parameters = filter(lambda p: p.requires_grad, model.parameters())
        model_engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=ds_config)
        self.model_engine = context.wrap_model_engine(model_engine)
        self.dtype = engine_config.engine_dtype(self.model_engine)
        self.train_sampler = self._sampler(
            self.train_set,
            self.model_engine.train_batch_size(),
            self.model_engine.gradient_accumulation_steps(),
            self.seed,
        )
        self.metrics = context.wrap_reducer(ClassificationMetrics(self.train_set.classes), for_training=False)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        """Micro-batches of the training images, shuffled by (seed, epoch)."""
        return data.data_loader(self.train_set, self.train_sampler)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        """Micro-batches of the test images, in order, every image once."""
        micro_batch = max(2, self.model_engine.train_micro_batch_size_per_gpu())  # two can always be shared out
        return data.data_loader(
            self.test_set, self._sampler(self.test_set, micro_batch * self.model_engine.dp_world_size)
        )

    def train_batch(
        self, dataloader_iter: Iterator[pytorch.TorchData] | None, epoch_idx: int, batch_idx: int
    ) -> dict[str, Tensor]:
        """Trains on one micro-batch; the engine steps the optimizer when enough of them have come.

        Returns:
            ``loss``: the mean cross-entropy of the micro-batch, a scalar on the device.
        """
        inputs, labels = self._next(dataloader_iter)
        loss = F.cross_entropy(self.model_engine(inputs).float(), labels)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss.detach()}

    def evaluate_batch(self, dataloader_iter: Iterator[pytorch.TorchData] | None, batch_idx: int) -> dict[str, Any]:
        """Counts one micro-batch; the reducer gives the metrics over all of them."""
        inputs, labels = self._next(dataloader_iter)
        self.metrics.update(self.model_engine(inputs).float(), labels)
        return {}

    def _sampler(
        self, source: data.ImageSet, batch_size: int, accumulation: int = 1, seed: int | None = None
    ) -> data.MicroBatchSampler:
        parts = self.model_engine.dp_world_size * accumulation
        return data.MicroBatchSampler(len(source), batch_size, parts, seed)

    def _next(self, dataloader_iter: Iterator[pytorch.TorchData] | None) -> tuple[Tensor, Tensor]:
        assert dataloader_iter is not None, "every rank of a data-parallel trial has a loader"
        inputs, labels = self.context.to_device(next(dataloader_iter))
        return inputs.to(self.dtype), labels


def experiment_config(context: DeepSpeedTrialContext) -> dict[str, Any]:
    """The experiment's configuration, or nothing where a context was made without one."""
    try:
        return dict(context.get_experiment_config())
    except ValueError:
        return {}
