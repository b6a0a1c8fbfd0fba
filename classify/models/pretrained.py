"""Pretrained weights of torchvision and timm, and the normalization of their images.

Source: https://docs.pytorch.org/vision/stable/models.html
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import pickle
import posixpath
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torchvision
from torch import Tensor

import net as own
from classify.models import net_file, state_dicts, timm_nets
from classify.models.heads import head_layers
from classify.models.registry import MOE, NetSpec, on_meta_device
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.host_lock import host_lock
from deepspeed_trial.input_files import regular_file

PATIENCE = 20.0  # seconds without a byte until a download fails
_OLD_DENSE_LAYER = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.(\d)")


def is_name(net: str, weights: str) -> bool:
    """Return whether torchvision or timm has weights with this name, such as ``DEFAULT``, for a network."""
    if is_own(net):
        return False
    is_timm = timm_nets.is_timm(net)
    known = timm_nets.tags(net) if is_timm else torchvision.models.get_model_weights(net).__members__
    return weights == "DEFAULT" or weights in known


def is_own(net: str) -> bool:
    """Return whether a network is this project's, not torchvision's or timm's."""
    return net in own.NETS or net == MOE


def read(spec: NetSpec, weights: str, classes: Sequence[str]) -> dict[str, Tensor]:
    """Read the weights that ``hyperparameters.weights`` names, from a library or a file.

    If the weights' JSON file lists other classes, the result has no weights of the head.

    Args:
        spec: the network; timm resamples position embeddings to its image size.
        weights: the name or the path of the weights.
        classes: the names of the classes to train for.

    Raises:
        InvalidInput: if the weights cannot be read or downloaded.
    """
    state = _read(spec, weights)
    if spec.name == MOE or not _is_of_others(weights, classes):
        return state
    heads = tuple(f"{layer}." for layer in head_layers(on_meta_device(spec)))
    return {name: weight for name, weight in state.items() if not name.startswith(heads)}


def _is_of_others(weights: str, classes: Sequence[str]) -> bool:
    """Return whether the weights' JSON file lists other classes, or another order of classes."""
    try:
        described = json.loads(regular_file(net_file.beside(pathlib.Path(weights))).read_text())
        return list(described["classes"]) != list(classes)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # no description
        return False


def _read(spec: NetSpec, weights: str) -> dict[str, Tensor]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)  # torch sets none
    try:
        if timm_nets.is_timm(spec.name):
            outline = on_meta_device(spec)
            if is_name(spec.name, weights):
                return timm_nets.fetch(spec, weights)
            return timm_nets.read(spec, weights, outline)
        if is_name(spec.name, weights):
            return fetch(spec.name, weights)
    finally:
        socket.setdefaulttimeout(before)
    if weights == "DEFAULT":
        what = f"{spec.name} has no pretrained weights; give the path of a state_dict"
        raise InvalidInput(f"hyperparameters.weights: 'DEFAULT': {what}")
    return state_dicts.read(weights, f"hyperparameters.weights: {weights}")


def fetch(net: str, weights: str) -> dict[str, Tensor]:
    """Return torchvision's weights for a network; the first call on a host downloads them.

    Raises:
        InvalidInput: if the download fails.
    """
    chosen: Any = torchvision.models.get_model_weights(net)[weights]
    folder = pathlib.Path(torch.hub.get_dir())
    downloads = not os.path.isfile(folder / "checkpoints" / posixpath.basename(chosen.url))
    with host_lock(folder, "weights", "TORCH_HOME") if downloads else contextlib.nullcontext():
        try:
            with contextlib.redirect_stdout(sys.stderr):  # torch announces its downloads
                progress = sys.stderr.isatty()
                state = chosen.get_state_dict(progress=progress, check_hash=True, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, http.client.HTTPException) as error:
            what = f"{chosen.url} cannot be downloaded ({one_line(error)})"
            remedy = (
                f"put the file into {folder / 'checkpoints'}, or set the path of a state_dict,"
                " or null for random weights"
            )
            raise InvalidInput(f"hyperparameters.weights: {weights}: {what}; {remedy}") from error
    if net.startswith("densenet"):  # its file has names from before torchvision 0.2
        state = {_OLD_DENSE_LAYER.sub(r"\1\2", key): value for key, value in state.items()}
    return {key: value for key, value in state.items() if not key.lower().startswith("aux")}


def normalization(net: str, weights: str | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation that normalise images for a network's pretrained weights.

    Args:
        net: the name of the network.
        weights: the name of timm's weights; None for the default weights.

    Raises:
        InvalidInput: if the network has no pretrained weights.
    """
    if is_own(net):
        remedy = "use half, dataset or imagenet"
        raise InvalidInput(f"data.normalize: 'weights': {net} has no pretrained weights; {remedy}")
    if net in ("googlenet", "inception_v3"):  # the result of their transform_input, which is off here
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    is_timm = timm_nets.is_timm(net)
    library: Any = torchvision.models
    seen = timm_nets.config(net, weights) if is_timm else library.get_model_weights(net).DEFAULT.transforms()
    return tuple(seen.mean), tuple(seen.std)
