"""Pretrained weights of torchvision and timm, and how they want their images normalised.

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
from collections.abc import Iterator, Mapping, Sequence
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

PATIENCE = 20.0  # seconds without a byte, after which a download has failed
_OLD_DENSE_LAYER = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.(\d)")


def is_name(net: str, weights: str) -> bool:
    """Whether ``weights`` is the name of weights that a library has for a network, such as ``DEFAULT``."""
    if is_own(net):
        return False
    if timm_nets.is_timm(net):
        return timm_nets.is_tag(net, weights)
    known = torchvision.models.get_model_weights(net).__members__
    return weights == "DEFAULT" or weights in known


def is_own(net: str) -> bool:
    """Whether a network is none of torchvision's or timm's."""
    return net in own.NETS or net == MOE


def read(
    net: str,
    weights: str,
    image_size: tuple[int, int],
    args: Mapping[str, Any] | None,
    classes: Sequence[str],
) -> dict[str, Tensor]:
    """The weights that ``hyperparameters.weights`` names: a library's, or those of a file.

    A file that is described as of other classes comes without its head, also where these are as many.

    Args:
        net: the name of the network.
        weights: their name or path.
        image_size: height and width of the images, to which timm fits what is for each place in them.
        args: further arguments of the network.
        classes: the names of those that it is to be trained for.

    Raises:
        InvalidInput: if they cannot be had.
    """
    found = _read(net, weights, image_size, args)
    if net == MOE or not _is_of_others(weights, classes):
        return found
    heads = tuple(f"{layer}." for layer in head_layers(on_meta_device(NetSpec(net, 2, image_size, args))))
    return {name: each for name, each in found.items() if not name.startswith(heads)}


def _is_of_others(weights: str, classes: Sequence[str]) -> bool:
    """Whether a JSON file beside a file of weights names other classes, or these in another order."""
    try:
        described = json.loads(regular_file(net_file.beside(pathlib.Path(weights))).read_text())
        return list(described["classes"]) != list(classes)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # it says nothing
        return False


def _read(
    net: str, weights: str, image_size: tuple[int, int], args: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    with _patience():
        if timm_nets.is_timm(net):
            outline = on_meta_device(NetSpec(net, 2, image_size, args))
            if is_name(net, weights):
                return timm_nets.fetch(net, weights, image_size, args)
            return timm_nets.read(net, weights, image_size, args, outline)
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
            mend = f"put it into {folder / 'checkpoints'}, or give the path of a state_dict, or null"
            raise InvalidInput(f"hyperparameters.weights: {weights}: {what}; {mend}") from error
    if net.startswith("densenet"):  # whose file has names of before torchvision 0.2
        found = {_OLD_DENSE_LAYER.sub(r"\1\2", key): value for key, value in found.items()}
    return {key: value for key, value in found.items() if not key.lower().startswith("aux")}


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Has a server that does not answer be given up, which torch waits for without end."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def normalization(net: str, weights: str | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that a network's pretrained weights want.

    Args:
        net: the name of the network.
        weights: those that it starts from, for timm's differ; its default ones if None.

    Raises:
        InvalidInput: if it has none.
    """
    if is_own(net):
        mend = "use half, dataset or imagenet"
        raise InvalidInput(f"data.normalize: 'weights': {net} has no pretrained weights that say; {mend}")
    if timm_nets.is_timm(net):
        return timm_nets.normalization(net, weights)
    if net in ("googlenet", "inception_v3"):  # what their transform_input, left out here, makes of ImageNet's
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    transforms: Any = _weights(net, "DEFAULT").transforms()
    return tuple(transforms.mean), tuple(transforms.std)


def _weights(net: str, weights: str) -> Any:
    known: Any = torchvision.models.get_model_weights(net)
    return known.DEFAULT if weights == "DEFAULT" else known[weights]
