"""A trained network on its way into a file, and out of one."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from classify.models import net_file, registry
from deepspeed_trial.checkpoints.files import sha256
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import refused, regular_file


@dataclass(frozen=True)
class Trained:
    """A trained network that is to be written.

    Attributes:
        weights: by name, in fp32.
        description: what its JSON file says; see ``net_file.read_description``.
        calibration: inputs (B, 3, H, W) float32 of training images, by which int8 is scaled; None for fp32.
        run: the folder of its run, if it is known, which has what it reached.
    """

    weights: Mapping[str, Tensor]
    description: Mapping[str, Any]
    calibration: Iterable[Tensor] | None = None
    run: pathlib.Path | None = None

    def module(self) -> nn.Module:
        """The network, in evaluation mode, on the CPU and in fp32."""
        return net_file.build(self.description, self.weights)

    def program(self) -> torch.export.ExportedProgram:
        """The network as ``torch.export`` traces it, for any number of inputs.

        Raises:
            InvalidInput: if it cannot be traced.
        """
        seen, name = self.description["input"], self.description["net"]["name"]
        if name == registry.MOE:
            raise InvalidInput("--format: a mixture of experts cannot be traced; use pt or safetensors")
        example = torch.zeros(2, 3, seen["height"], seen["width"])
        batch = torch.export.Dim("batch", min=1)
        net = self.module()
        try:
            return torch.export.export(net, (example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # torch's, or the network's own
            what = f"torch.export cannot trace {name} ({one_line(error)[:300]})"
            raise InvalidInput(f"--format: {what}; use pt, safetensors or hf") from error


@dataclass(frozen=True)
class Classifier:
    """A network out of a file of any form.

    Attributes:
        description: what its JSON file says.
        classify: gives logits (B, C) float32 of inputs (B, 3, H, W) float32, on the CPU.
    """

    description: dict[str, Any]
    classify: Callable[[Tensor], Tensor]


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Has what a library logs within be silent up to warnings; its errors are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def read_described(path: pathlib.Path) -> dict[str, Any]:
    """What the JSON file beside a file says that is no ``state_dict``, if it is of this very file.

    So that a damaged or foreign file does not get to a library that takes it for a program.

    Raises:
        InvalidInput: if either is missing or damaged, or they are not of one export.
    """
    mend = "give a file that export has written, with its JSON file"
    with refused(str(path), mend):
        digest = sha256(regular_file(path))
    description = net_file.read_description(path)
    if description["provenance"].get(net_file.DIGEST) != digest:
        what = f"is not the file that its JSON file describes (provenance.{net_file.DIGEST})"
        raise InvalidInput(f"{path}: {what}; export the network anew")
    return description
