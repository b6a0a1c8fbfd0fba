"""Torchvision's pretrained weights, and how they want their images normalised.

Source: https://docs.pytorch.org/vision/stable/models.html
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import pickle
import posixpath
import re
import sys
from typing import Any

import torch
import torchvision
from torch import Tensor

import net as own
from classify.models import state_dicts
from classify.models.registry import MOE
from harness.errors import InvalidInput, one_line
from harness.host_lock import host_lock

_OLD_DENSE_LAYER = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.(\d)")


def is_name(net: str, weights: str) -> bool:
    """Whether ``weights`` is the name of weights that torchvision has for a network, such as ``DEFAULT``."""
    if is_own(net):
        return False
    known = torchvision.models.get_model_weights(net).__members__
    return weights == "DEFAULT" or weights in known


def is_own(net: str) -> bool:
    """Whether a network is none of torchvision's."""
    return net in own.NETS or net == MOE


def read(net: str, weights: str) -> dict[str, Tensor]:
    """The weights that ``hyperparameters.weights`` names: torchvision's, or those of a file.

    Raises:
        InvalidInput: if they cannot be had.
    """
    if is_name(net, weights):
        return fetch(net, weights)
    if weights == "DEFAULT":
        mend = "give the path of a state_dict"
        raise InvalidInput(f"hyperparameters.weights: 'DEFAULT': {net} has no pretrained weights; {mend}")
    return state_dicts.read(weights, f"hyperparameters.weights: {weights}")


def fetch(net: str, weights: str) -> dict[str, Tensor]:
    """Torchvision's weights of that name, downloaded once a host.

    Raises:
        InvalidInput: if they cannot be had.
    """
    chosen = _weights(net, weights)
    folder = pathlib.Path(torch.hub.get_dir())
    downloads = not os.path.isfile(folder / "checkpoints" / posixpath.basename(chosen.url))
    with host_lock(folder, "weights", "TORCH_HOME") if downloads else contextlib.nullcontext():
        try:
            with contextlib.redirect_stdout(sys.stderr):  # where torch says that it downloads
                progress = sys.stderr.isatty()
                found = chosen.get_state_dict(progress=progress, check_hash=True, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, http.client.HTTPException) as error:
            what = f"{chosen.url} cannot be downloaded ({one_line(error)})"
            mend = f"put it into {folder / 'checkpoints'}, or give the path of a state_dict"
            raise InvalidInput(f"hyperparameters.weights: {weights}: {what}; {mend}") from error
    if net.startswith("densenet"):  # whose file has names of before torchvision 0.2
        found = {_OLD_DENSE_LAYER.sub(r"\1\2", key): value for key, value in found.items()}
    return {key: value for key, value in found.items() if not key.lower().startswith("aux")}


def normalization(net: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that torchvision's pretrained weights of a network want.

    Raises:
        InvalidInput: if it has none.
    """
    if is_own(net):
        mend = "use half, dataset or imagenet"
        raise InvalidInput(f"data.normalize: 'weights': {net} has no pretrained weights that say; {mend}")
    if net in ("googlenet", "inception_v3"):  # what their transform_input, left out here, makes of ImageNet's
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    transforms: Any = _weights(net, "DEFAULT").transforms()
    return tuple(transforms.mean), tuple(transforms.std)


def _weights(net: str, weights: str) -> Any:
    known: Any = torchvision.models.get_model_weights(net)
    return known.DEFAULT if weights == "DEFAULT" else known[weights]
