"""The classifiers of timm by name, ``timm/NAME``, with its sizes, its normalisation and its weights.

timm is imported where such a network is named, and nowhere else. Source: https://huggingface.co/docs/timm
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from classify.config.rules import is_count, is_finite
from classify.models import state_dicts
from classify.models.heads import head_layers
from deepspeed_trial.checkpoints.weights import mismatch
from deepspeed_trial.errors import InvalidInput, nearest, one_line

PREFIX = "timm/"
OWN_KEYS = {  # of a network's arguments, what is said elsewhere
    "pretrained": "hyperparameters.weights",
    "checkpoint_path": "hyperparameters.weights",
    "pretrained_cfg": "hyperparameters.weights",
    "pretrained_cfg_overlay": "hyperparameters.weights",
}
AVERAGED = (
    "state_dict_ema",
    "model_ema",
)  # which timm prefers in its checkpoints, as its own evaluation does
IN_A_FOLDER = ("model.safetensors", "pytorch_model.bin")  # as timm's save_for_hf writes
CONFIG = "config.json"


def is_timm(name: object) -> bool:
    """Whether a network is one of timm's, or would be if there were one of this name."""
    return isinstance(name, str) and name.startswith(PREFIX)


def check_name(name: str) -> None:
    """Refuses a name that timm does not have.

    Raises:
        InvalidInput: with the nearest one; or if timm is not installed.
    """
    timm = _timm(name)
    arch, tag = _split(name)
    if arch in timm.list_models() and (not tag or tag in _configs(name)):
        return
    known = [f"{PREFIX}{each}" for each in (*timm.list_models(), *timm.list_pretrained(f"{arch}.*"))]
    raise InvalidInput(f"hyperparameters.net: {name!r}: timm has no such network; {nearest(name, known)}")


def build(
    name: str, num_classes: int, image_size: tuple[int, int], args: Mapping[str, Any] | None
) -> nn.Module:
    """Makes a network with random weights; raises what timm does."""
    check_name(name)
    for key, instead in OWN_KEYS.items():
        if key in (args or {}):
            raise InvalidInput(f"hyperparameters.net_args.{key}: {name} takes weights by {instead}; use that")
    return _create(name, image_size, args, num_classes=num_classes)


def with_sync_batchnorm(net: nn.Module) -> nn.Module:
    """Has batch normalization be over all processes, also that with an activation of its own."""
    from timm.layers import convert_sync_batchnorm

    return convert_sync_batchnorm(net)


def input_size(name: str, weights: object = None) -> tuple[int, int]:
    """Height and width in pixels of the images that a network was made for; raises as ``check_name`` does."""
    return tuple(_config(name, weights).input_size[1:])


def normalization(name: str, weights: object = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel that a network's pretrained weights want."""
    config = _config(name, weights)
    return tuple(config.mean), tuple(config.std)


# --------------------------------------------------------------------------------------------------- weights


def is_tag(name: str, weights: str) -> bool:
    """Whether timm has weights of that name for a network; ``DEFAULT`` is the name of some."""
    return weights == "DEFAULT" or weights in _tags(name)


def fetch(
    name: str, weights: str, image_size: tuple[int, int], args: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    """The weights that timm has for a network, fitted to these images.

    Args:
        name: of the network.
        weights: their tag, or ``DEFAULT``.
        image_size: height and width.
        args: further arguments of the network.

    Raises:
        InvalidInput: if they cannot be had.
    """
    tags = _tags(name)
    label = f"hyperparameters.weights: {weights}"
    if not tags or (weights == "DEFAULT" and _split(name)[1] not in ("", *tags)):
        raise InvalidInput(f"{label}: timm has no pretrained weights for {name}; give the path of a file")
    tag = (_split(name)[1] or next(iter(tags))) if weights == "DEFAULT" else weights
    full = f"{_split(name)[0]}.{tag}" if tag else _split(name)[0]
    try:
        with torch.random.fork_rng(devices=[]):
            net = _create(PREFIX + full, image_size, args, pretrained=True)
    except Exception as error:  # the hub's, the network's, torch's
        mend = "without a way there, give the path of a file or folder that holds them"
        raise InvalidInput(f"{label}: timm cannot fetch {full} ({one_line(error)}); {mend}") from error
    return net.state_dict()


def read(
    name: str,
    weights: str,
    image_size: tuple[int, int],
    args: Mapping[str, Any] | None,
    outline: nn.Module,
) -> dict[str, Tensor]:
    """The weights of a file, or of a folder as timm writes it, fitted to a network and these images.

    Args:
        name: of the network.
        weights: the path.
        image_size: height and width.
        args: further arguments of the network.
        outline: the network on the meta device.

    Raises:
        InvalidInput: if they cannot be read.
    """
    label = f"hyperparameters.weights: {weights}"
    path = pathlib.Path(weights)
    if not path.exists():
        known = ["DEFAULT", *_tags(name)]
        has = f"timm has for {name}: {', '.join(known)}" if len(known) > 1 else "timm has none for it"
        raise InvalidInput(f"{label}: no such file, nor weights of timm ({has}); {nearest(weights, known)}")
    found = state_dicts.read(str(_file(path, label) if path.is_dir() else path), label, AVERAGED)
    wanted, heads = outline.state_dict(), head_layers(outline)
    found = state_dicts.as_named(found, wanted)
    if not mismatch(_without(heads, found), _without(heads, wanted)):
        return found
    last = [found.get(f"{layer}.weight") for layer in heads]
    classes = next((len(each) for each in last if each is not None and each.ndim > 1), 0)
    of_file = {"state_dict": found, "num_classes": classes, "label_offset": None, "custom_load": False}
    try:  # timm converts older names, and what is for each place in an image
        with torch.random.fork_rng(devices=[]):
            more = {"num_classes": classes, "pretrained": True, "pretrained_cfg_overlay": of_file}
            return _create(name, image_size, args, **more).state_dict()
    except Exception:  # it is of another network: the names and shapes that differ say more than timm does
        return found


def _without(layers: Sequence[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name.rpartition(".")[0] not in layers}


def _file(folder: pathlib.Path, label: str) -> pathlib.Path:
    """The file of weights in a folder."""
    for name in IN_A_FOLDER:
        if (folder / name).is_file():
            return folder / name
    some = sorted(each for each in folder.iterdir() if each.suffix in (".safetensors", ".pth", ".pt", ".bin"))
    if len(some) == 1:
        return some[0]
    found = f"{len(some)} files of weights" if some else "no file of weights"
    raise InvalidInput(f"{label}: holds {found} and no {IN_A_FOLDER[0]}; give the path of the file")


# ------------------------------------------------------------------------------------------------ timm itself


def _timm(name: str) -> Any:
    try:
        import timm
    except Exception as error:  # it is missing, or too new for this torch
        mend = "install it as requirements.txt names it, or use an image that has it (Dockerfile)"
        raise InvalidInput(
            f"hyperparameters.net: {name!r}: needs timm, which cannot be imported ({one_line(error)}); {mend}"
        ) from error
    return timm


def _split(name: str) -> tuple[str, str]:
    """A network's name to timm, and the tag of weights in it, or nothing."""
    arch, _, tag = name.removeprefix(PREFIX).partition(".")
    return arch, tag


def _configs(name: str) -> dict[str, Any]:
    """What timm says of a network by the tags of its weights; the default comes first."""
    models, (arch, _) = _timm(name).models, _split(name)
    known = models.get_arch_pretrained_cfgs(arch).values()
    default = models.get_pretrained_cfg(arch)
    configs = {each.tag or "": each for each in known}
    first = {default.tag or "": default} if default else {}
    return {**first, **configs}


def _tags(name: str) -> list[str]:
    """The tags of the weights that timm has for a network; the default comes first."""
    return [tag for tag, config in _configs(name).items() if config.has_weights]


def _config(name: str, weights: object) -> Any:
    """What timm says of a network with these weights: of a tag, of a folder's, else its default."""
    check_name(name)
    configs = _configs(name)
    if (
        isinstance(weights, str)
        and (folder := pathlib.Path(weights)).is_dir()
        and (folder / CONFIG).is_file()
    ):
        return _config_of_folder(name, folder)
    for tag in (weights, _split(name)[1]):
        if tag in configs:
            return configs[tag]
    return next(iter(configs.values())) if configs else _timm(name).models.PretrainedCfg()


def _config_of_folder(name: str, folder: pathlib.Path) -> Any:
    from timm.models import PretrainedCfg
    from timm.models._hub import load_model_config_from_path

    label = f"hyperparameters.weights: {folder}"
    try:
        given, arch, _ = load_model_config_from_path(folder)
        config = PretrainedCfg(**{key: given[key] for key in ("input_size", "mean", "std") if key in given})
        sizes, numbers = config.input_size, [*config.mean, *config.std]
        is_whole = len(sizes) == len(config.mean) == len(config.std) == 3 and all(config.std)
        if not is_whole or not all(is_count(each, 1) for each in sizes) or not all(map(is_finite, numbers)):
            raise ValueError(f"input_size {sizes}, mean {config.mean}, std {config.std}")
    except Exception as error:  # no JSON, or other keys
        mend = "give the path of the file of weights"
        raise InvalidInput(f"{label}: its {CONFIG} is none of timm's ({one_line(error)}); {mend}") from error
    if arch != _split(name)[0]:
        raise InvalidInput(f"{label}: its {CONFIG} is of {arch}; set hyperparameters.net: {PREFIX}{arch}")
    return config


def _create(name: str, image_size: tuple[int, int], args: Mapping[str, Any] | None, **more: Any) -> nn.Module:
    """Has timm make a network; those whose size is fixed are told that of the images."""
    fixed = {"img_size": image_size} if _config(name, None).fixed_input_size else {}
    return _timm(name).create_model(name.removeprefix(PREFIX), **{**fixed, **(args or {})}, **more)
