"""``net.pt2``: the network as a program of ``torch.export``, which needs torch and none of its own code.

Source: https://docs.pytorch.org/docs/stable/export.html
"""

from __future__ import annotations

import pathlib

import torch
from torch import Tensor

from classify.models import registry
from classify.publish.network import Classifier, Trained, read_described, without_warnings
from harness.errors import InvalidInput, one_line


def save(path: pathlib.Path, trained: Trained) -> None:
    """Writes a network for any number of inputs (B, 3, H, W), normalised already."""
    program = trained.program()
    with open(path, "wb") as file:
        torch.export.save(program, file)


def read(path: pathlib.Path) -> Classifier:
    """Reads what ``save`` has written; torch may run code of a file of others.

    Raises:
        InvalidInput: if the file or its description is missing, damaged or of another network.
    """
    description = read_described(path)
    try:
        with without_warnings():
            net = torch.export.load(path).module()
            seen = description["input"]
            outputs = registry.logits(net(torch.zeros(1, 3, seen["height"], seen["width"])))
            if outputs.shape != (1, len(description["classes"])):
                raise ValueError(f"it gives {tuple(outputs.shape)} for an image")
    except Exception as error:  # zip's, JSON's, torch's
        what = f"is no program of torch.export ({one_line(error)[:300]})"
        raise InvalidInput(f"{path}: {what}; export the network anew") from error

    @torch.no_grad()
    def classify(inputs: Tensor) -> Tensor:
        return registry.logits(net(inputs))

    return Classifier(description, classify)
