"""Networks by name: those of ``net.py``, and every classifier of torchvision and of timm.

Source: https://docs.pytorch.org/vision/stable/models.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torchvision
from torch import nn

import net as own
from classify.models import (
    net_airbench,  # noqa: F401 - which registers itself
    timm_nets,
)
from deepspeed_trial.errors import InvalidInput, nearest, one_line
from deepspeed_trial.out_of_memory import is_out_of_memory

MOE = "net-moe"  # the name of Net with experts, which classify/models/net_moe.py makes
# Vision transformers, whose sizes torchvision's own functions fix and so do not take as arguments.
VIT_KEYS = ("patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim")
VIT = {
    "vit_b_16": (16, 12, 12, 768, 3072),
    "vit_b_32": (32, 12, 12, 768, 3072),
    "vit_l_16": (16, 24, 16, 1024, 4096),
    "vit_l_32": (32, 24, 16, 1024, 4096),
    "vit_h_14": (14, 32, 16, 1280, 5120),
}


class NetSpec(NamedTuple):
    """What has to be said to make a network.

    Attributes:
        name: one of ``names``, or timm's behind ``timm/``.
        num_classes: the width of its last layer.
        image_size: height and width of its images in pixels, for the networks that have to know.
        args: further arguments of its function.
    """

    name: str
    num_classes: int
    image_size: tuple[int, int]
    args: Mapping[str, Any] | None = None


def names() -> list[str]:
    """Every name that ``hyperparameters.net`` may have, but timm's, which begin with ``timm/``."""
    return [*own.NETS, MOE, *torchvision.models.list_models(module=torchvision.models)]


def check_name(name: object) -> None:
    """Refuses a name that ``hyperparameters.net`` cannot have.

    Raises:
        InvalidInput: with the nearest one.
    """
    known = names()
    if isinstance(name, str) and timm_nets.is_timm(name):
        timm_nets.check_name(name)
    elif name not in known:
        hint = nearest(name, known) if isinstance(name, str) and name else "give one of torchvision's names"
        mend = f"{hint} Or" if hint.endswith("?") else f"{hint}, or"
        mend += " use timm/NAME for one of timm's, or register it in net.py"
        raise InvalidInput(f"hyperparameters.net: {name!r}: no such network; {mend}")


def is_name(name: object) -> bool:
    """Whether a network may have that name, as far as is known without importing timm."""
    return timm_nets.is_timm(name) or name in names()


def input_size(name: object, weights: object = None) -> tuple[int, int] | None:
    """Height and width of the images that a network was made for with these weights; None if not timm's.

    Raises:
        InvalidInput: if timm has no such network.
    """
    return timm_nets.input_size(str(name), weights) if timm_nets.is_timm(name) else None


def build(spec: NetSpec) -> nn.Module:
    """Makes a network with random weights.

    Raises:
        InvalidInput: if it does not take these arguments.
        NotImplementedError: on torch's meta device, where its constructor computes; see ``on_meta_device``.
    """
    given, name = dict(spec.args or {}), spec.name
    try:
        if name in own.NETS:
            made = own.NETS[name](spec.num_classes, **given)
            if not isinstance(made, nn.Module):
                raise TypeError(f"its function in net.py gives a {type(made).__name__}, no nn.Module")
            return made
        if timm_nets.is_timm(name):
            return timm_nets.build(name, spec.num_classes, spec.image_size, spec.args)
        function, arguments = torchvision_call(spec)
        return getattr(torchvision.models, function)(**arguments)
    except (InvalidInput, NotImplementedError):
        raise
    except Exception as error:  # each network refuses in its own way
        if is_out_of_memory(error):
            raise
        key = (
            f"hyperparameters.net_args: {given!r}: {name}" if spec.args else f"hyperparameters.net: {name!r}:"
        )
        shown = f"image_size {spec.image_size[0]}x{spec.image_size[1]}"
        raise InvalidInput(f"{key} cannot be made with {shown} ({one_line(error)}); change that") from error


def torchvision_call(spec: NetSpec) -> tuple[str, dict[str, Any]]:
    """By which function or class of ``torchvision.models`` a network of its is made, and with what."""
    name, given = spec.name, dict(spec.args or {})
    if name in VIT:
        sizes = dict(zip(VIT_KEYS, VIT[name], strict=True))
        given = {"image_size": spec.image_size[0], **sizes, **given}
        return "VisionTransformer", dict(num_classes=spec.num_classes, **given)  # raises where one is twice
    if name.startswith("maxvit"):
        given.setdefault("input_size", spec.image_size)
    if name in ("googlenet", "inception_v3"):
        given = {"aux_logits": False, "init_weights": True, **given}
    return name, dict(weights=None, num_classes=spec.num_classes, **given)


def on_meta_device(spec: NetSpec) -> nn.Module:
    """The network on torch's meta device: its layers and shapes, without weights or random numbers drawn.

    Takes and raises what ``build`` does.
    """
    try:
        with torch.device("meta"):
            return build(spec)
    except (InvalidInput, NotImplementedError):  # such as RegNet, which computes its widths by tensors
        with torch.random.fork_rng(devices=[]):
            return build(spec).to("meta")


def prefers_channels_last(name: str) -> bool:
    """Whether a forward pass is faster in that memory format, and sure to work: ``view`` may refuse it."""
    return name in ("net", "airbench") or name not in own.NETS


def trains_faster_channels_last(name: str, device: str) -> bool:
    """Whether training is faster in that memory format; for torchvision's it depends on the batch."""
    return name in ("net", "airbench") and device == "cpu"


def with_sync_batchnorm(name: str, net: nn.Module) -> nn.Module:
    """Has a network's batch normalization be over all processes."""
    if timm_nets.is_timm(name):
        return timm_nets.with_sync_batchnorm(net)
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)


def logits(outputs: Any) -> Any:
    """The class scores among what a network gives; some of torchvision's give others in training."""
    return getattr(outputs, "logits", outputs)
