"""A trained network as a file that plain PyTorch loads, with what is needed to use it in a JSON file beside it.

``net.pt`` is a ``state_dict`` of fp32 tensors: ``Net().load_state_dict(torch.load("net.pt", weights_only=True))``.
``net.json`` has the network's arguments, the class names, how an image becomes an input, and where it all came from.
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

import machine
import nets
import weights
from errors import InvalidInput, one_line
from hyperparameters import is_moe
from net import NetMoE

MOE_KEYS = ("num_experts", "mlp_type", "top_k", "min_capacity")  # what the exported network has to know of experts
FORMATS = ("pt", "safetensors", "onnx")


def describe(trial: Any, steps: int) -> dict[str, Any]:
    """What ``net.json`` says of a trial's network.

    Args:
        trial: a ``CIFARTrial``.
        steps: the optimizer steps that it was trained for.
    """
    args, engine = trial.context.get_hparams(), trial.model_engine
    moe = is_moe(args)
    height, width = trial.image_size
    net: dict[str, Any] = {
        "name": "net-moe" if moe else args.get("net", "net"),
        "num_classes": len(trial.train_set.classes),
    }
    if args.get("net_args"):
        net["net_args"] = dict(args["net_args"])
    if moe:
        net.update({key: args[key] for key in MOE_KEYS if args.get(key) is not None})
    return {
        "net": net,
        "classes": list(trial.train_set.classes),
        "input": {
            "height": height,
            "width": width,
            "resize": list(trial.canvas),
            "mean": list(trial.mean),
            "std": list(trial.std),
        },
        "dtype": str(trial.dtype).removeprefix("torch."),
        "provenance": {
            "experiment": trial.config.get("name"),
            "data": trial.config.get("data"),
            "seed": trial.seed,
            "steps": steps,
            "processes": torch.distributed.get_world_size(),
            "zero_stage": int(engine.zero_optimization_stage()),
            "train_batch_size": engine.train_batch_size(),
            **machine.versions(),
        },
    }


def beside(path: pathlib.Path) -> pathlib.Path:
    """The JSON file of a network's file."""
    return path.with_suffix(".json")


def write(path: pathlib.Path, state: dict[str, Tensor], description: Mapping[str, Any], form: str = "pt") -> None:
    """Writes a network's file and the JSON file beside it, each whole or not at all.

    Args:
        path: where to.
        state: the weights in fp32.
        description: of ``describe``.
        form: one of ``FORMATS``.

    Raises:
        InvalidInput: if the network cannot be written in this format.
        OSError: if the disk does not take it.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        if form == "pt":
            with open(partial, "wb") as file:  # or torch raises a RuntimeError of its own where it cannot be made
                torch.save(dict(state), file)
        elif form == "safetensors":
            from safetensors.torch import save_file

            save_file({name: weight.contiguous() for name, weight in state.items()}, partial, _text(description))
        else:
            _write_onnx(partial, state, description)
        text = partial.with_suffix(".json")
        text.write_text(json.dumps(description, indent=2) + "\n")
        os.replace(partial, path)
        os.replace(text, beside(path))
    finally:
        partial.unlink(missing_ok=True)
        partial.with_suffix(".json").unlink(missing_ok=True)


def _text(description: Mapping[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()}


def _write_onnx(path: pathlib.Path, state: dict[str, Tensor], description: Mapping[str, Any]) -> None:
    """Writes the network with its weights, for any number of images; inputs are normalised already."""
    if description["net"]["name"] == "net-moe":
        raise InvalidInput("--format: onnx: has no operators for a mixture of experts; use pt or safetensors")
    import onnx

    example = torch.zeros(2, 3, description["input"]["height"], description["input"]["width"])
    batch = {"images": {0: torch.export.Dim("batch", min=1)}}
    torch.onnx.export(
        build(description, state),
        (example,),
        path,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: batch["images"][0]},),
        external_data=False,
        verbose=False,
    )
    model = onnx.load(path)
    onnx.helper.set_model_props(model, _text(description))
    onnx.save(model, path)


def read(path: pathlib.Path) -> tuple[nn.Module, dict[str, Any]]:
    """Builds the network of a file, ready to classify, and gives it with its description.

    Raises:
        InvalidInput: if the file or the JSON file beside it is missing, damaged or of another network.
    """
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise InvalidInput(
                f"{path}: not a readable safetensors file ({one_line(error)}); export it anew"
            ) from error
    elif path.suffix == ".onnx":
        raise InvalidInput(f"{path}: an ONNX file is for other programs; give a net.pt or a safetensors file")
    else:
        state = weights.read(str(path))
    return build(read_description(path), state, str(path)), read_description(path)


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """What the JSON file beside a network's file says.

    Raises:
        InvalidInput: if it is missing or not such a file.
    """
    file = beside(path)
    try:
        description = json.loads(file.read_text())
        assert len(description["classes"]) == description["net"]["num_classes"]
        assert {"height", "width", "resize", "mean", "std"} <= description["input"].keys()
        getattr(torch, description["dtype"])
    except FileNotFoundError:
        raise InvalidInput(f"{file}: is missing, it belongs beside {path.name}; export the network anew") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise InvalidInput(f"{file}: does not describe a network ({one_line(error)}); export it anew") from error
    return description


def build(description: Mapping[str, Any], state: dict[str, Tensor], path: str = "net") -> nn.Module:
    """Makes the described network with these weights, in evaluation mode, on the CPU and in fp32."""
    arguments = dict(description["net"])
    name = arguments.pop("name")
    if name != "net-moe":
        size = description["input"]["height"], description["input"]["width"]
        net = nets.build(name, arguments["num_classes"], size, arguments.get("net_args"))
    else:
        import processes

        processes.start_torch_distributed()  # without which DeepSpeed makes no layer of experts
        net = NetMoE(**arguments)
    weights.put_into(net, state, path)
    return net.eval()
