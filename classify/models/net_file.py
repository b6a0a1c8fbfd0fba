"""A trained network as a file that plain PyTorch loads, with a JSON file beside it that describes it.

``net.pt`` is a ``state_dict`` of fp32 tensors: ``Net().load_state_dict(torch.load("net.pt",
weights_only=True))``. ``net.json`` has the network's arguments, the class names, how an image becomes an
input, and where it all came from.
"""

from __future__ import annotations

import json
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from classify.models import registry, state_dicts
from harness.errors import InvalidInput, one_line
from harness.input_files import regular_file

NAMES = ("net.pt", "net.json")  # in a run's folder


def beside(path: pathlib.Path) -> pathlib.Path:
    """The JSON file of a network's file."""
    return path.with_suffix(".json")


def write(
    path: pathlib.Path, state: Mapping[str, Tensor], description: Mapping[str, Any], form: str = "pt"
) -> None:
    """Writes a network's file and the JSON file beside it, each whole or not at all.

    Args:
        path: where to.
        state: the weights in fp32.
        description: what the JSON file says; see ``read_description`` for what it must.
        form: ``pt``, ``safetensors`` or ``onnx``.

    Raises:
        InvalidInput: if the network cannot be written in this format.
        OSError: if the disk does not take it.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        if form == "pt":
            with open(
                partial, "wb"
            ) as file:  # or torch raises a RuntimeError of its own where it cannot be made
                torch.save(dict(state), file)
        elif form == "safetensors":
            from safetensors.torch import save_file

            tensors = {name: weight.contiguous() for name, weight in state.items()}
            save_file(tensors, partial, _as_text(description))
        else:
            _write_onnx(partial, state, description)
        text = partial.with_suffix(".json")
        text.write_text(json.dumps(description, indent=2) + "\n")
        os.replace(partial, path)
        os.replace(text, beside(path))
    finally:
        partial.unlink(missing_ok=True)
        partial.with_suffix(".json").unlink(missing_ok=True)


def _as_text(description: Mapping[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()}


def _write_onnx(path: pathlib.Path, state: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Writes the network with its weights, for any number of images; inputs are normalised already."""
    if description["net"]["name"] == registry.MOE:
        raise InvalidInput("--format: onnx: has no operators for a mixture of experts; use pt or safetensors")
    import onnx

    example = torch.zeros(2, 3, description["input"]["height"], description["input"]["width"])
    batch = torch.export.Dim("batch", min=1)
    torch.onnx.export(
        build(description, state),
        (example,),
        path,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: batch},),
        external_data=False,
        verbose=False,
    )
    model = onnx.load(path)
    onnx.helper.set_model_props(model, _as_text(description))
    onnx.save(model, path)


def read(path: pathlib.Path) -> tuple[nn.Module, dict[str, Any]]:
    """Builds the network of a file, ready to classify, and gives it with its description.

    Raises:
        InvalidInput: if the file or the JSON file beside it is missing, damaged or of another network.
    """
    if path.suffix == ".onnx":
        mend = "an ONNX file is for other programs; give a net.pt or a safetensors file"
        raise InvalidInput(f"{path}: {mend}")
    state, description = state_dicts.read(str(path)), read_description(path)
    return build(description, state, str(path)), description


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """What the JSON file beside a network's file says.

    Raises:
        InvalidInput: if it is missing or not such a file.
    """
    file = beside(path)
    try:
        description = json.loads(regular_file(file).read_text())
        assert len(description["classes"]) == description["net"]["num_classes"]
        assert {"height", "width", "resize", "mean", "std"} <= description["input"].keys()
        getattr(torch, description["dtype"])
    except FileNotFoundError:
        mend = f"is missing, it belongs beside {path.name}; export the network anew"
        raise InvalidInput(f"{file}: {mend}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        mend = f"does not describe a network ({one_line(error)}); export it anew"
        raise InvalidInput(f"{file}: {mend}") from error
    return description


def build(description: Mapping[str, Any], state: Mapping[str, Tensor], path: str = "net") -> nn.Module:
    """Makes the described network with these weights, in evaluation mode, on the CPU and in fp32."""
    arguments = dict(description["net"])
    name = arguments.pop("name")
    if name == registry.MOE:
        from classify.models.net_moe import NetMoE
        from harness.processes import start_process_group

        start_process_group()  # without which DeepSpeed makes no layer of experts
        net: nn.Module = NetMoE(**arguments)
    else:
        size = description["input"]["height"], description["input"]["width"]
        spec = registry.NetSpec(name, arguments["num_classes"], size, arguments.get("net_args"))
        net = registry.build(spec)
    state_dicts.load_strict(net, state, path)
    return net.eval()
