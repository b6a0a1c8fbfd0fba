"""A trained network before its export, a network from a file, and the files of weights: .pt, .safetensors."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from classify.config.metric_table import TEMPERATURE
from classify.models import net_file, registry
from deepspeed_trial.checkpoints.files import sha256
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import refused, regular_file


@dataclass(frozen=True)
class Trained:
    """A trained network before its export.

    Attributes:
        weights: the weights by name, in fp32.
        description: the network's description; see ``net_file.read_description``.
        calibration: training images as inputs (B, 3, H, W) float32, to scale int8 values; None for fp32.
        run: the folder of the network's run, if known.
    """

    weights: Mapping[str, Tensor]
    description: Mapping[str, Any]
    calibration: Iterable[Tensor] | None = None
    run: pathlib.Path | None = None

    def module(self) -> nn.Module:
        """Build the network, in evaluation mode, on the CPU and in fp32."""
        return net_file.build(self.description, self.weights)

    def program(self) -> torch.export.ExportedProgram:
        """Trace the network with ``torch.export``, with a dynamic batch size.

        Raises:
            InvalidInput: if the network cannot be traced.
        """
        seen, name = self.description["input"], self.description["net"]["name"]
        if name == registry.MOE:
            raise InvalidInput("--format: a mixture of experts cannot be traced; use pt or safetensors")
        example = torch.zeros(2, 3, seen["height"], seen["width"])
        batch = torch.export.Dim("batch", min=1)
        net = self.module()
        try:
            return torch.export.export(net, (example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # torch and the network's code raise any class
            what = f"torch.export cannot trace {name} ({one_line(error)[:300]})"
            raise InvalidInput(f"--format: {what}; use pt, safetensors or hf") from error


@dataclass(frozen=True)
class Classifier:
    """A network from a file of any form.

    Attributes:
        description: the network's description; see ``net_file.read_description``.
        classify: the function from inputs (B, 3, H, W) float32 to logits (B, C) float32, on the CPU.
        net: the torch module that computes the logits; None for ONNX.
    """

    description: dict[str, Any]
    classify: Callable[[Tensor], Tensor]
    net: nn.Module | None = None

    @property
    def temperature(self) -> float:
        """The temperature of the probabilities; 1 for a network without a fitted temperature."""
        return float((self.description.get("confidence") or {TEMPERATURE: 1.0})[TEMPERATURE])

    @property
    def thresholds(self) -> Mapping[str, float] | None:
        """The threshold of each label's probability; None for a network that gives an image one label."""
        return self.description.get("thresholds")

    def labels(self, probabilities: Tensor) -> list[str]:
        """Return an image's labels, the most probable first, given its probabilities (C,)."""
        classes, thresholds = self.description["classes"], self.thresholds
        if thresholds is None:
            return [classes[int(probabilities.argmax())]]
        rows = sorted(zip(probabilities.tolist(), classes, strict=True), reverse=True)
        return [name for probability, name in rows if probability >= thresholds[name]]


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Hide log messages up to the level of warnings, inside the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def read_described(path: pathlib.Path) -> dict[str, Any]:
    """Check the digest of a file that is not a ``state_dict``, and read its description.

    Without this check a library might run a damaged file, or a file of another export, as a program.

    Raises:
        InvalidInput: if a file is missing or damaged, or the two files come from different exports.
    """
    with refused(str(path), "give a file of checkpoint.py export, with its JSON file"):
        digest = sha256(regular_file(path))
    description = net_file.read_description(path)
    if description["provenance"].get(net_file.DIGEST) != digest:
        what = f"is not the file that its JSON file describes (provenance.{net_file.DIGEST})"
        raise InvalidInput(f"{path}: {what}; export the network again")
    return description


def save_pt(path: pathlib.Path, trained: Trained) -> None:
    """Write weights by ``torch.save``; raise ``OSError`` if the disk is full."""
    net_file.save(path, trained.weights)


def save_safetensors(path: pathlib.Path, trained: Trained) -> None:
    """Write weights and their description as safetensors; raise ``OSError`` if the disk is full."""
    from safetensors.torch import save

    tensors = {name: weight.contiguous() for name, weight in trained.weights.items()}
    # Not save_file, whose files only their owner may read
    path.write_bytes(save(tensors, as_text(trained.description)))


def as_text(description: Mapping[str, Any]) -> dict[str, str]:
    """Return a description as UTF-8 texts; values that are not texts become JSON."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()
    }
    return {_utf8(key): _utf8(value) for key, value in texts.items()}


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def read_weights(path: pathlib.Path) -> Classifier:
    """Read a file or folder of weights; the classifier computes in the network's dtype, as in validation.

    Raises:
        InvalidInput: if the file or its description is missing or damaged, or describes another network.
    """
    net, description = net_file.read(path)
    dtype = getattr(torch, description["dtype"])
    channels_last = registry.prefers_channels_last(description["net"]["name"])
    form = torch.channels_last if channels_last else torch.contiguous_format
    net = net.to(dtype)

    @torch.no_grad()
    def classify(inputs: Tensor) -> Tensor:
        return registry.logits(net(inputs.to(dtype, memory_format=form))).float()

    return Classifier(description, classify, net)
