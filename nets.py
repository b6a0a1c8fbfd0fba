"""Networks by name: those of ``net.py``, and every classifier of torchvision.

Source: https://docs.pytorch.org/vision/stable/models.html
"""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

import net as own
from errors import InvalidInput, one_line
from host_lock import host_lock

# Vision transformers, whose sizes torchvision's own functions fix and so do not take as arguments.
VIT_KEYS = ("patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim")
VIT = {
    "vit_b_16": (16, 12, 12, 768, 3072),
    "vit_b_32": (32, 12, 12, 768, 3072),
    "vit_l_16": (16, 24, 16, 1024, 4096),
    "vit_l_32": (32, 24, 16, 1024, 4096),
    "vit_h_14": (14, 32, 16, 1280, 5120),
}


_OLD_DENSE_LAYER = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.(\d)")


def names() -> list[str]:
    """Every name that ``hyperparameters.net`` may have."""
    return [*own.NETS, "net-moe", *torchvision.models.list_models(module=torchvision.models)]


def build(name: str, num_classes: int, image_size: tuple[int, int], net_args: Mapping[str, Any] | None) -> nn.Module:
    """Makes a network with random weights.

    Args:
        name: one of ``names``.
        num_classes: the width of its last layer.
        image_size: height and width of its images in pixels, for the networks that have to know.
        net_args: further arguments of its function.

    Raises:
        InvalidInput: if it does not take these arguments.
        NotImplementedError: on torch's meta device, where its constructor computes; see ``outline``.
    """
    given = dict(net_args or {})
    try:
        if name in own.NETS:
            made = own.NETS[name](num_classes, **given)
            if not isinstance(made, nn.Module):
                raise TypeError(f"its function in net.py gives a {type(made).__name__}, no nn.Module")
            return made
        if name in VIT:
            sizes = dict(zip(VIT_KEYS, VIT[name], strict=True))
            given = {"image_size": image_size[0], **sizes, **given}
            return torchvision.models.VisionTransformer(num_classes=num_classes, **given)
        builder = torchvision.models.get_model_builder(name)
        if name.startswith("maxvit"):
            given.setdefault("input_size", image_size)
        if name in ("googlenet", "inception_v3"):
            given = {"aux_logits": False, "init_weights": True, **given}
        return builder(weights=None, num_classes=num_classes, **given)
    except (InvalidInput, NotImplementedError):
        raise
    except Exception as error:  # each network refuses in its own way
        key = f"hyperparameters.net_args: {given!r}: {name}" if net_args else f"hyperparameters.net: {name!r}:"
        shown = f"image_size {image_size[0]}x{image_size[1]}"
        raise InvalidInput(f"{key} cannot be made with {shown} ({one_line(error)}); change that") from error


def outline(name: str, num_classes: int, image_size: tuple[int, int], net_args: Mapping[str, Any] | None) -> nn.Module:
    """The network on torch's meta device: its layers and shapes, without weights, and no random number drawn.

    Takes and raises what ``build`` does.
    """
    try:
        with torch.device("meta"):
            return build(name, num_classes, image_size, net_args)
    except (InvalidInput, NotImplementedError):  # such as RegNet, which computes its widths by tensors
        with torch.random.fork_rng(devices=[]):
            return build(name, num_classes, image_size, net_args).to("meta")


def prefers_channels_last(name: str) -> bool:
    """Whether a forward pass is faster on a CPU, and sure to work, in that memory format, which ``view`` may refuse."""
    return name == "net" or name not in own.NETS


def trains_faster_channels_last(name: str, device: str) -> bool:
    """Whether training is faster in that memory format; for torchvision's networks it depends on the batch."""
    return name == "net" and device == "cpu"


def is_name(name: Any) -> bool:
    """Whether a network has this name."""
    return isinstance(name, str) and name in names()


def check(
    name: str,
    num_classes: int,
    image_size: tuple[int, int],
    net_args: Mapping[str, Any] | None,
    micro_batch: int,
    channels_last: bool = False,
) -> None:
    """Runs a network without computing, on torch's meta device, as training and validation will run it.

    Args:
        name: of the network.
        num_classes: of the data.
        image_size: height and width in pixels.
        net_args: further arguments.
        micro_batch: the least images that it will be given in training.
        channels_last: whether in that memory format.

    Raises:
        InvalidInput: if it does not take such images, or gives no scores for the classes.
    """
    if name == "net-moe":
        name, net_args = "net", None
    made = outline(name, num_classes, image_size, net_args)
    if any(isinstance(each, UninitializedParameter) for each in made.parameters()):
        raise InvalidInput(f"hyperparameters.net: {name!r}: has layers without a size, which no engine takes; give it")
    if not any(parameter.requires_grad for parameter in made.parameters()):
        raise InvalidInput(f"hyperparameters.net: {name!r}: has no parameter to train; give it one, or another net")
    try:
        _try(name, made, torch.device("meta"), num_classes, image_size, micro_batch, channels_last)
    except InvalidInput:  # by a fault of its own, or because it needs the values, as by item() or bool()
        with torch.random.fork_rng(devices=[]):
            made = build(name, num_classes, image_size, net_args)
            _try(name, made, torch.device("cpu"), num_classes, image_size, micro_batch, channels_last)


def _try(
    name: str,
    made: nn.Module,
    device: torch.device,
    num_classes: int,
    image_size: tuple[int, int],
    micro_batch: int,
    channels_last: bool,
) -> None:
    """Runs a network on a device; arguments and errors as those of ``check``."""
    with device:
        images = torch.randn(micro_batch, 3, *image_size)
        turned = images.contiguous(memory_format=torch.channels_last)
        shown = f"{image_size[0]}x{image_size[1]}"
        try:
            outputs = logits(made(images))
            with torch.no_grad():
                made.eval()(turned if prefers_channels_last(name) else images)
        except NotImplementedError:  # an operator of one's own, which only a real device has
            return
        except Exception as error:
            reason = one_line(error)
            if "Expected more than 1 value per channel" in reason:
                raise InvalidInput(
                    f"train_micro_batch_size_per_gpu: {micro_batch}: the smallest micro-batch is too small for {name}'s"
                    " batch normalization; use one that leaves 2 images or more in an epoch's last step"
                ) from error
            if name in own.NETS and name != "net":
                fault = f"hyperparameters.net: {name!r}: fails on images of {shown} ({reason}); mend it"
                raise InvalidInput(f"{fault}, or change data.image_size") from error
            raise InvalidInput(f"data.image_size: {shown}: {name} does not take it ({reason}); use another") from error
        try:
            if channels_last:
                made.train()(turned)
        except Exception as error:
            raise InvalidInput(
                f"hyperparameters.channels_last: True: {name} does not take it ({one_line(error)}); set it to false,"
                " or use reshape instead of view"
            ) from error
    if not isinstance(outputs, Tensor) or tuple(outputs.shape) != (micro_batch, num_classes):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InvalidInput(
            f"hyperparameters.net: {name!r}: gives {found} for {micro_batch} images and {num_classes} classes;"
            f" it must give ({micro_batch}, {num_classes})"
        )


def logits(outputs: Any) -> Any:
    """The class scores among what a network gives: some of torchvision's give auxiliary ones, too, while training."""
    return getattr(outputs, "logits", outputs)


def layers(made: nn.Module) -> list[tuple[str, Callable[[Tensor], Tensor]]] | None:
    """The network as a sequence of named layers, for a pipeline to cut into stages; None if it is no sequence.

    Those are ``Net``, any ``nn.Sequential`` that does not use weights twice, and torchvision's AlexNet and VGG. Source:
    https://www.deepspeed.ai/tutorials/pipeline/
    """
    if isinstance(made, own.Net) and not isinstance(made, own.NetMoE):
        return own.layers(made)
    if type(made) is nn.Sequential:
        shared = len(list(made.parameters())) < len(list(made.named_parameters(remove_duplicate=False)))
        return None if shared else list(_children(made))
    if isinstance(made, (torchvision.models.AlexNet, torchvision.models.VGG)):
        parts: dict[str, Any] = {"features": made.features, "classifier": made.classifier}
        named = {name: [(f"{name}.{index}", layer) for index, layer in _children(part)] for name, part in parts.items()}
        return [*named["features"], ("avgpool", made.avgpool), ("flatten", own.flatten), *named["classifier"]]
    return None


def _children(sequence: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All of a sequence's layers by name, one that stands in it twice, too."""
    return ((name, layer) for name, layer in sequence._modules.items() if layer is not None)


def is_pretrained(name: str, weights: str) -> bool:
    """Whether ``weights`` is the name of weights that torchvision has for a network, such as ``DEFAULT``."""
    if name in own.NETS or name == "net-moe":
        return False
    known = torchvision.models.get_model_weights(name).__members__
    return weights == "DEFAULT" or weights in known


def pretrained(name: str, weights: str) -> dict[str, Tensor]:
    """Torchvision's weights of that name, downloaded once a host.

    Raises:
        InvalidInput: if they cannot be had.
    """
    chosen: Any = _weights(name, weights)
    folder = pathlib.Path(torch.hub.get_dir())
    with host_lock(folder, "weights", "TORCH_HOME"):
        try:
            with contextlib.redirect_stdout(sys.stderr):  # where torch says that it downloads
                found = chosen.get_state_dict(progress=sys.stderr.isatty(), check_hash=True, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, http.client.HTTPException) as error:
            raise InvalidInput(
                f"hyperparameters.weights: {weights}: {chosen.url} cannot be downloaded ({one_line(error)}); put it"
                f" into {folder / 'checkpoints'}, or give the path of a state_dict"
            ) from error
    if name.startswith("densenet"):  # whose file has names of before torchvision 0.2
        found = {_OLD_DENSE_LAYER.sub(r"\1\2", key): value for key, value in found.items()}
    return {key: value for key, value in found.items() if not key.lower().startswith("aux")}


def normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that torchvision's pretrained weights of a network want.

    Raises:
        InvalidInput: if it has none.
    """
    if name in own.NETS or name == "net-moe":
        mend = "use half, dataset or imagenet"
        raise InvalidInput(f"data.normalize: 'weights': {name} has no pretrained weights that say; {mend}")
    if name in ("googlenet", "inception_v3"):  # what torchvision's transform_input, left out here, makes of ImageNet's
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    transforms: Any = _weights(name, "DEFAULT").transforms()
    return tuple(transforms.mean), tuple(transforms.std)


def _weights(name: str, weights: str) -> Any:
    known: Any = torchvision.models.get_model_weights(name)
    return known.DEFAULT if weights == "DEFAULT" else known[weights]
