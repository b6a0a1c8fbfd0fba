"""A folder in the layout of the Hugging Face Hub: weights, configuration, preprocessing, and a model card.

timm can load the folder of a timm network. The module uploads nothing.
Source: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pathlib
import shutil
import uuid
from typing import Any

from torch import nn

import net as own
from classify.config.rules import CROP, PAD, STRETCH
from classify.models import net_file, pretrained, registry, timm_nets
from classify.models.registry import NetSpec
from deepspeed_trial.errors import InvalidInput
from workbench.publish import model_card
from workbench.publish.network import Trained, save_safetensors
from workbench.publish.scoring import fitting

TIMMS = {CROP: "center", PAD: "border", STRETCH: "squash"}  # timm's crop modes
CARD, PREPROCESSING = "README.md", "preprocessor_config.json"


def write(path: pathlib.Path, trained: Trained) -> None:
    """Write the folder, atomically.

    Raises:
        InvalidInput: if the network needs DeepSpeed, or the folder is not empty.
        OSError: if the disk is full.
    """
    name = trained.description["net"]["name"]
    if name == registry.MOE:
        raise InvalidInput("--format: hf: a mixture of experts needs DeepSpeed; use pt or safetensors")
    if not path.name:
        raise InvalidInput(f"{path}: must be the name of a new folder, e.g. published")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidInput(f"{path}: is not an empty folder; give another, or remove it")
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.mkdir()
        description = _without_places(trained.description)
        named = dataclasses.replace(trained, description={"format": "pt", **description})
        save_safetensors(partial / net_file.IN_A_FOLDER[0], named)
        made = trained.module()
        modules = _sources(partial, name)
        _write_config(partial / net_file.IN_A_FOLDER[1], made, description)
        _write_json(partial / PREPROCESSING, _preprocessing(description["input"]))
        count = sum(each.numel() for each in made.parameters())
        call = _call(name, description, modules)
        (partial / CARD).write_text(model_card.write(description, count, call, trained.run))
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _without_places(description: Any) -> dict[str, Any]:
    """Return a description without local paths; only the last component of the data's ``root`` stays."""
    provenance = description["provenance"]
    given = provenance.get("data")
    if not isinstance(given, dict) or not isinstance(given.get("root"), str):
        return dict(description)
    data = {key: value for key, value in given.items() if key not in ("cache", "storage")}
    data["root"] = pathlib.PurePath(given["root"]).name
    return {**description, "provenance": {**provenance, "data": data}}


def _sources(folder: pathlib.Path, name: str) -> list[str]:
    """Copy the code of a network of ``net.py``; return the modules to import.

    The project's ``net.py`` keeps its name; the working directory's ``net.py`` becomes ``own_net.py``.
    """
    if not pretrained.is_own(name):
        return []
    files = {each.__module__.rpartition(".")[2]: each for each in (own.register, own.NETS[name])}
    for module, each in files.items():
        shutil.copyfile(str(inspect.getsourcefile(each)), folder / f"{module}.py")  # without the file's mode
    return list(files)


def _write_config(path: pathlib.Path, made: nn.Module, description: dict[str, Any]) -> None:
    name, seen = description["net"]["name"], description["input"]
    if timm_nets.is_timm(name):
        from timm.models._hub import save_config_for_hf

        sizes = {"input_size": (3, seen["height"], seen["width"])}
        share = min(seen["height"] / seen["resize"][0], seen["width"] / seen["resize"][1])
        how = {"interpolation": "bilinear", "crop_pct": share, "crop_mode": TIMMS[fitting(description)[1]]}
        normalized = {"mean": tuple(seen["mean"]), "std": tuple(seen["std"])}
        more = {"label_names": description["classes"], **description}
        save_config_for_hf(made, str(path), more, data_config={**sizes, **how, **normalized})
        return
    net = description["net"]
    arguments = net.get("net_args") or {}
    if not pretrained.is_own(name):
        size = seen["height"], seen["width"]
        spec = NetSpec(name, net["num_classes"], size, arguments)
        arguments = registry.torchvision_call(spec)[1]
    _write_json(path, {**description, "arguments": arguments})


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _preprocessing(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the preprocessing, with the keys that Hugging Face's image processors have."""
    return {
        "do_resize": True,
        "size": {"height": seen["resize"][0], "width": seen["resize"][1]},
        "resample": 2,  # bilinear, in Pillow's numbering
        "do_center_crop": True,
        "crop_size": {"height": seen["height"], "width": seen["width"]},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": seen["mean"],
        "image_std": seen["std"],
    }


def _call(name: str, description: dict[str, Any], modules: list[str]) -> dict[str, Any]:
    """Return how the card builds the network: the library and, except for timm, imports and an expression."""
    if timm_nets.is_timm(name):
        return {"library": "timm"}
    if modules:
        made = f"net.NETS[{name!r}]({description['net']['num_classes']}, **config['arguments'])"
        return {"library": "own", "imports": modules, "made": made}
    size = description["input"]["height"], description["input"]["width"]
    spec = NetSpec(name, description["net"]["num_classes"], size, description["net"].get("net_args"))
    made = f"torchvision.models.{registry.torchvision_call(spec)[0]}(**config['arguments'])"
    return {"library": "torchvision", "imports": ["torchvision"], "made": made}
