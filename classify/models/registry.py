"""The registry of networks: the networks of ``net.py``, and every classifier of torchvision and timm.

Source: https://docs.pytorch.org/vision/stable/models.html
"""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import nn

import net as registered
from classify.config.sections import nearest_or
from classify.models import (
    net_airbench,  # noqa: F401 - it registers its network
    own_net,
    timm_nets,
)
from classify.models.net_spec import NetSpec
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.out_of_memory import is_out_of_memory

own_net.load()

MOE = "net-moe"  # Net with experts; classify/models/net_moe.py defines it
# The sizes of vision transformers, which torchvision's functions do not take as arguments
VIT_KEYS = ("patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim")
VIT = {
    "vit_b_16": (16, 12, 12, 768, 3072),
    "vit_b_32": (32, 12, 12, 768, 3072),
    "vit_l_16": (16, 24, 16, 1024, 4096),
    "vit_l_32": (32, 24, 16, 1024, 4096),
    "vit_h_14": (14, 32, 16, 1280, 5120),
}


def names() -> list[str]:
    """Return every name that ``hyperparameters.net`` may have, except timm's."""
    return [*registered.NETS, MOE, *torchvision.models.list_models(module=torchvision.models)]


def check_name(name: object) -> None:
    """Check a value of ``hyperparameters.net``.

    Raises:
        InvalidInput: with the nearest name, if there is no such network.
    """
    known = names()
    if isinstance(name, str) and timm_nets.is_timm(name):
        timm_nets.check_name(name)
    elif name not in known:
        other = "use timm/NAME, or register the network in net.py"
        is_text = isinstance(name, str) and name
        remedy = nearest_or(name, known, other) if is_text else f"give one of torchvision's names, or {other}"
        raise InvalidInput(f"hyperparameters.net: {name!r}: no such network; {remedy}")


def is_name(name: object) -> bool:
    """Return whether a network name is valid; every ``timm/NAME`` is, as the function imports no timm."""
    return timm_nets.is_timm(name) or name in names()


def input_size(name: object, weights: object = None) -> tuple[int, int] | None:
    """Return height and width of a timm network's images with these weights; None for other networks.

    Raises:
        InvalidInput: if timm has no such network.
    """
    return tuple(timm_nets.config(str(name), weights).input_size[1:]) if timm_nets.is_timm(name) else None


def build(spec: NetSpec) -> nn.Module:
    """Make a network with random weights.

    Raises:
        InvalidInput: if the network does not accept these arguments.
        NotImplementedError: on torch's meta device, if the constructor uses values; see ``on_meta_device``.
    """
    given, name = dict(spec.args or {}), spec.name
    try:
        if name in registered.NETS:
            net = registered.NETS[name](spec.num_classes, **given)
            if not isinstance(net, nn.Module):
                raise TypeError(f"its function in net.py returns a {type(net).__name__}, not an nn.Module")
            return net
        if timm_nets.is_timm(name):
            return timm_nets.build(spec)
        function, arguments = torchvision_call(spec)
        return getattr(torchvision.models, function)(**arguments)
    except (InvalidInput, NotImplementedError):
        raise
    except Exception as error:  # networks raise different types
        if is_out_of_memory(error):
            raise
        key = (
            f"hyperparameters.net_args: {given!r}: {name}" if spec.args else f"hyperparameters.net: {name!r}:"
        )
        shown = f"image_size {spec.image_size[0]}x{spec.image_size[1]}"
        raise InvalidInput(
            f"{key} cannot be built with {shown} ({one_line(error)}); change one of them"
        ) from error


def torchvision_call(spec: NetSpec) -> tuple[str, dict[str, Any]]:
    """Return the function or class of ``torchvision.models`` that builds a network, and its arguments."""
    name, given = spec.name, dict(spec.args or {})
    if name in VIT:
        sizes = dict(zip(VIT_KEYS, VIT[name], strict=True))
        given = {"image_size": spec.image_size[0], **sizes, **given}
        # dict() raises if net_args has num_classes, too
        return "VisionTransformer", dict(num_classes=spec.num_classes, **given)
    if name.startswith("maxvit"):
        given.setdefault("input_size", spec.image_size)
    if name in ("googlenet", "inception_v3"):
        given = {"aux_logits": False, "init_weights": True, **given}
    return name, dict(weights=None, num_classes=spec.num_classes, **given)


def on_meta_device(spec: NetSpec) -> nn.Module:
    """Make a network on torch's meta device: layers and shapes, without values or random numbers.

    Raises:
        InvalidInput: if the network does not accept these arguments.
    """
    try:
        with torch.device("meta"):
            return build(spec)
    except (InvalidInput, NotImplementedError):  # e.g. RegNet computes its widths with tensors
        with torch.random.fork_rng(devices=[]):
            return build(spec).to("meta")


def prefers_channels_last(name: str) -> bool:
    """Return whether channels_last is faster in a forward pass, and safe: ``view`` may raise with it."""
    return name in ("net", "airbench") or name not in registered.NETS


def trains_faster_channels_last(name: str, device: str) -> bool:
    """Return whether channels_last is faster in training; False if that depends on the batch."""
    return name in ("net", "airbench") and device == "cpu"


def with_sync_batchnorm(name: str, net: nn.Module) -> nn.Module:
    """Return the network with batch normalization over all processes, including timm's fused layers."""
    if timm_nets.is_timm(name):
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(net)
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)


def logits(outputs: Any) -> Any:
    """Return the class scores from a network's outputs; some torchvision networks return more in training."""
    return getattr(outputs, "logits", outputs)
