"""A character-level transformer that learns Python's own documentation: a ``DeepSpeedTrial`` without images.

    one process:    python3 -m examples.text
    two processes:  torchrun --nproc-per-node 2 -m examples.text
    after Ctrl-C:   python3 -m examples.text --resume
    a cluster:      det experiment create examples/text.yaml .
    Determined's local test mode:
        det experiment create examples/text.yaml . --local --test --config entrypoint=examples.text:TextTrial

The lines with ``deepspeed_trial`` and ``LocalTestMode`` differ from Determined's guide.
"""

import pathlib
import pydoc_data.topics
import sys
from collections.abc import Iterator
from typing import Any

import deepspeed_trial  # noqa: F401 - before deepspeed, which learns from it whether a GPU exists

# isort: split
import deepspeed
import torch
from determined import pytorch
from determined.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from ruamel.yaml import YAML
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_trial.local.local_mode import LocalTestMode
from deepspeed_trial.trainer import Trainer, find_checkpoint, init

TEXT = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
LENGTH = 64  # characters in an input


class Transformer(nn.Module):
    """Predicts the next character of ASCII text from the previous characters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (B, LENGTH, 128) of characters (B, LENGTH) int64."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, text.device, self.head.weight.dtype)
        hidden = self.characters(text) + self.places.weight
        return self.head(self.layers(hidden, mask, is_causal=True))


class TextTrial(LocalTestMode, DeepSpeedTrial):
    """Trains ``Transformer`` with the methods of Determined's guide."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context, hparams = context, context.get_hparams()
        net = Transformer(hparams["width"], hparams["layers"])
        engine, *_ = deepspeed.initialize(
            model=net, model_parameters=net.parameters(), config=hparams["deepspeed_config"]
        )
        self.engine = context.wrap_model_engine(engine)
        text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
        whole = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        self.train_set, self.test_set = whole[: -len(whole) // 10], whole[-len(whole) // 10 :]

    def build_training_data_loader(self) -> pytorch.DataLoader:
        """Return micro-batches of text (B, LENGTH + 1), shuffled by the seed."""
        batch_size = self.context.get_train_micro_batch_size_per_gpu()
        return pytorch.DataLoader(self.train_set, batch_size=batch_size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        """Return micro-batches of the last tenth of the text, (B, LENGTH + 1)."""
        return pytorch.DataLoader(self.test_set, batch_size=64, drop_last=True)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Tensor:
        """Train on one micro-batch and return its loss in nats per character."""
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """Return the loss of one batch of the validation text."""
        return {"validation_loss": self._loss(dataloader_iter)}

    def _loss(self, dataloader_iter: Iterator[Any] | None) -> Tensor:
        assert dataloader_iter is not None
        text = self.context.to_device(next(dataloader_iter))
        assert isinstance(text, Tensor)
        return F.cross_entropy(self.engine(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


if __name__ == "__main__":
    config = YAML(typ="safe").load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
    resumes, hparams = "--resume" in sys.argv, config["hyperparameters"]
    with init(hparams, config, output=pathlib.Path("runs/text"), resumes=resumes) as context:
        trainer = Trainer(TextTrial(context), context)
        checkpoint = find_checkpoint(context, "latest" if resumes else None)
        trainer.fit(
            max_length=pytorch.Batch(context.get_hparams()["steps"]),
            validation_period=pytorch.Batch(100),
            reporting_period=pytorch.Batch(20),
            latest_checkpoint=checkpoint,
        )
