"""Fits a linear head to the features of a trained network, without a training loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classify.models import registry, state_dicts
from classify.models.registry import NetSpec
from workbench.audit import head
from workbench.audit.dataset import Dataset
from workbench.audit.features import HeadInput


@dataclass(frozen=True)
class Linear:
    """A network with a new head.

    Attributes:
        weights: the weights of the whole network, by name, in fp32.
        description: the network's description; see ``net_file.read_description``.
        accuracy: the accuracy on ``split``.
        split: the data's last split, which tests the head.
        seconds: the time to fit the head, without the time to compute the features.
    """

    weights: dict[str, Tensor]
    description: dict[str, Any]
    accuracy: float
    split: str
    seconds: float


def fit(source: HeadInput, dataset: Dataset, features: np.ndarray) -> Linear:
    """Fit a head for the classes of a dataset on its training images.

    Cross-validation on these images chooses the penalty. No choice depends on validation or test images.

    Args:
        source: the network, whose other layers stay unchanged.
        dataset: the images, in the network's size.
        features: the features of all images, float32 (N, D).
    """
    start = time.monotonic()
    vectors, has_bias = features.astype(np.float64), source.head.bias is not None
    train, split = dataset.rows("train"), dataset.plan.names[-1]
    labels = dataset.labels[train]
    _, inverse_penalty = head.held_out(vectors[train], labels, has_bias)
    weights, biases = head.fit(vectors[train], labels, inverse_penalty, has_bias)
    seconds = time.monotonic() - start
    rest = dataset.rows(split)
    guesses = head.probabilities(vectors[rest], weights, biases).argmax(1)
    accuracy = float((guesses == dataset.labels[rest]).mean())
    state = dict(source.net.state_dict())
    state[f"{source.layer}.weight"] = torch.from_numpy(weights / source.scale).float()
    if has_bias:
        state[f"{source.layer}.bias"] = torch.from_numpy(biases / source.scale).float()
    description = _described(source, dataset, state, inverse_penalty)
    return Linear(state, description, accuracy, split, seconds)


def _described(
    source: HeadInput, dataset: Dataset, state: dict[str, Tensor], inverse_penalty: float
) -> dict[str, Any]:
    before = source.description
    image, net = before["input"], {**before["net"], "num_classes": len(dataset.classes)}
    spec = NetSpec(net["name"], net["num_classes"], (image["height"], image["width"]), net.get("net_args"))
    state_dicts.fitting(registry.on_meta_device(spec), state, net["name"])
    provenance = {
        "steps": 0,
        "data": {"dataset": dataset.plan.settings.dataset, "root": dataset.plan.settings.root},
        "head": {"inverse_penalty": inverse_penalty, "training_images": len(dataset.rows("train"))},
        "body": before["provenance"],
        "weights_sha256": state_dicts.sha256(dict(sorted(state.items()))),
    }
    return {
        **before,
        "net": net,
        "classes": list(dataset.classes),
        "dtype": "float32",
        "provenance": provenance,
    }
