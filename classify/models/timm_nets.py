"""timm's classifiers by name, ``timm/NAME``, with their image sizes, normalization and weights.

timm is imported only if a configuration has such a name. Source: https://huggingface.co/docs/timm
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
from classify.models.net_spec import NetSpec
from deepspeed_trial.checkpoints.weights import mismatch
from deepspeed_trial.errors import InvalidInput, nearest, one_line

PREFIX = "timm/"
# Arguments of timm that choose weights
OF_WEIGHTS = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")
AVERAGED = ("state_dict_ema", "model_ema")  # timm prefers these keys of its checkpoints
IN_A_FOLDER = ("model.safetensors", "pytorch_model.bin")  # the files that timm's save_for_hf writes
CONFIG = "config.json"


def is_timm(name: object) -> bool:
    """Return whether a name has the form ``timm/NAME``."""
    return isinstance(name, str) and name.startswith(PREFIX)


def check_name(name: str) -> None:
    """Check that timm has a network of the name.

    Raises:
        InvalidInput: with the nearest name, if timm has no such network; or if timm is not installed.
    """
    timm = _timm(name)
    arch, tag = _split(name)
    if arch in timm.list_models() and (not tag or tag in _configs(name)):
        return
    known = [f"{PREFIX}{model}" for model in (*timm.list_models(), *timm.list_pretrained(f"{arch}.*"))]
    raise InvalidInput(f"hyperparameters.net: {name!r}: timm has no such network; {nearest(name, known)}")


def build(spec: NetSpec) -> nn.Module:
    """Build a network with random weights; timm's exceptions pass through."""
    check_name(spec.name)
    for key in OF_WEIGHTS:
        if key in (spec.args or {}):
            what = "takes no weights as an argument; use hyperparameters.weights"
            raise InvalidInput(f"hyperparameters.net_args.{key}: {spec.name} {what}")
    return _create(spec, num_classes=spec.num_classes)


# --------------------------------------------------------------------------------------------------- weights


def fetch(spec: NetSpec, weights: str) -> dict[str, Tensor]:
    """Return timm's weights for a network, adapted to its image size.

    Args:
        spec: the network.
        weights: the tag of the weights, or ``DEFAULT``.

    Raises:
        InvalidInput: if timm has no such weights or cannot fetch them.
    """
    known, (arch, tag) = tags(spec.name), _split(spec.name)
    label = f"hyperparameters.weights: {weights}"
    if not known or (weights == "DEFAULT" and tag not in ("", *known)):
        raise InvalidInput(
            f"{label}: timm has no pretrained weights for {spec.name}; give the path of a file"
        )
    tag = (tag or known[0]) if weights == "DEFAULT" else weights
    full = f"{arch}.{tag}" if tag else arch
    try:
        with torch.random.fork_rng(devices=[]):
            net = _create(spec._replace(name=PREFIX + full), pretrained=True)
    except Exception as error:  # an error of the hub, the connection or torch
        remedy = "without a connection, give the path of a file or folder with the weights"
        raise InvalidInput(f"{label}: timm cannot fetch {full} ({one_line(error)}); {remedy}") from error
    return net.state_dict()


def read(spec: NetSpec, weights: str, outline: nn.Module) -> dict[str, Tensor]:
    """Read weights from a file or a folder of timm, and adapt them to a network and its image size.

    Args:
        spec: the network.
        weights: the path of the file or folder.
        outline: the network on the meta device.

    Raises:
        InvalidInput: if the weights cannot be read.
    """
    label = f"hyperparameters.weights: {weights}"
    path = pathlib.Path(weights)
    if not path.exists():
        known = ["DEFAULT", *tags(spec.name)]
        has = f"timm has {', '.join(known)}" if len(known) > 1 else "timm has none"
        raise InvalidInput(f"{label}: no such file or weights of timm ({has}); {nearest(weights, known)}")
    found = state_dicts.read(str(_file(path, label) if path.is_dir() else path), label, AVERAGED)
    wanted, heads = outline.state_dict(), head_layers(outline)
    found = state_dicts.as_named(found, wanted)
    if not mismatch(_without(heads, found), _without(heads, wanted)):
        return found
    last = [found.get(f"{layer}.weight") for layer in heads]
    classes = next((len(weight) for weight in last if weight is not None and weight.ndim > 1), 0)
    of_file = {"state_dict": found, "num_classes": classes, "label_offset": None, "custom_load": False}
    try:  # timm converts older names, and resamples position embeddings
        with torch.random.fork_rng(devices=[]):
            more = {"num_classes": classes, "pretrained": True, "pretrained_cfg_overlay": of_file}
            return _create(spec, **more).state_dict()
    except Exception:  # weights of another network: a later error lists the differing names and shapes
        return found


def _without(layers: Sequence[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name.rpartition(".")[0] not in layers}


def _file(folder: pathlib.Path, label: str) -> pathlib.Path:
    """Return the file of weights in a folder."""
    for name in IN_A_FOLDER:
        if (folder / name).is_file():
            return folder / name
    some = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".pth", ".pt", ".bin"))
    if len(some) == 1:
        return some[0]
    files = f"{len(some)} files of weights" if some else "no file of weights"
    raise InvalidInput(f"{label}: has {files} and no {IN_A_FOLDER[0]}; give the path of the file")


# ------------------------------------------------------------------------------------------------ timm itself


def _timm(name: str) -> Any:
    try:
        import timm
    except Exception as error:  # missing, or too new for this torch
        what = f"needs timm, which cannot be imported ({one_line(error)})"
        remedy = "install the version in requirements.txt, or use an image with timm (Dockerfile)"
        raise InvalidInput(f"hyperparameters.net: {name!r}: {what}; {remedy}") from error
    return timm


def _split(name: str) -> tuple[str, str]:
    """Return timm's name of a network, and the tag of its weights (may be empty)."""
    arch, _, tag = name.removeprefix(PREFIX).partition(".")
    return arch, tag


def _configs(name: str) -> dict[str, Any]:
    """Return timm's configurations of a network by the tags of its weights, the default first."""
    models, (arch, _) = _timm(name).models, _split(name)
    known = models.get_arch_pretrained_cfgs(arch).values()
    default = models.get_pretrained_cfg(arch)
    return {each.tag or "": each for each in (*([default] if default else []), *known)}


def tags(name: str) -> list[str]:
    """Return the tags of timm's weights for a network, the default first."""
    return [tag for tag, each in _configs(name).items() if each.has_weights]


def config(name: str, weights: object = None) -> Any:
    """Return timm's configuration of a network: ``input_size`` (3, H, W) in pixels, ``mean`` and ``std``.

    The function takes the first that exists: the configuration in the folder ``weights``, of the tag
    ``weights``, of the tag in ``name``, or timm's default.

    Raises:
        InvalidInput: if timm has no such network, or a folder's configuration is not timm's.
    """
    check_name(name)
    configs = _configs(name)
    if isinstance(weights, str) and (pathlib.Path(weights) / CONFIG).is_file():
        return _config_of_folder(name, pathlib.Path(weights))
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
        found = PretrainedCfg(**{key: given[key] for key in ("input_size", "mean", "std") if key in given})
        sizes, mean, std = found.input_size, found.mean, found.std
        is_whole = len(sizes) == len(mean) == len(std) == 3 and all(is_count(size, 1) for size in sizes)
        if not is_whole or not all(map(is_finite, [*mean, *std])) or not all(std):
            raise ValueError(f"input_size {sizes}, mean {mean}, std {std}")
    except Exception as error:  # no JSON, or other keys
        remedy = "give the path of the file of weights"
        raise InvalidInput(f"{label}: {CONFIG} is not timm's ({one_line(error)}); {remedy}") from error
    if arch != _split(name)[0]:
        raise InvalidInput(f"{label}: {CONFIG} is for {arch}; set hyperparameters.net: {PREFIX}{arch}")
    return found


def _create(spec: NetSpec, **more: Any) -> nn.Module:
    """Build a network with timm; if its image size is fixed, fix ``spec.image_size``."""
    fixed = {"img_size": spec.image_size} if config(spec.name).fixed_input_size else {}
    arguments = {**fixed, **(spec.args or {})}
    return _timm(spec.name).create_model(spec.name.removeprefix(PREFIX), **arguments, **more)
