"""A trained network as a file of weights that plain PyTorch loads, and a JSON file that describes it.

``net.pt`` is a ``state_dict`` of fp32 tensors: ``Net().load_state_dict(torch.load("net.pt",
weights_only=True))``. ``net.json`` has the network's arguments, the class names, the preprocessing of an
image, and the provenance. For other formats (``workbench/publish/forms.py``) the JSON file has another name:
``net.onnx.json`` describes ``net.onnx``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from classify.config.metric_table import TEMPERATURE, THRESHOLD
from classify.config.rules import (
    FITS,
    MOST_PIXELS,
    TEXT,
    Rule,
    errors_in,
    is_count,
    is_finite,
    is_number,
    list_of,
    mapping_of,
    one_of,
    optional,
    whole,
)
from classify.models import dry_run, registry, state_dicts
from classify.models.registry import NetSpec
from deepspeed_trial import redaction
from deepspeed_trial.checkpoints import shards
from deepspeed_trial.checkpoints.files import sha256
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import regular_file
from deepspeed_trial.output_files import replacing

NAMES = ("net.pt", "net.json")  # in a run's folder
IN_A_FOLDER = ("model.safetensors", "config.json")  # the names of Hugging Face's libraries
DIGEST = "file_sha256"  # the key of an ONNX file's checksum in the provenance

EXPORT = "export the network again"  # the remedy for every damaged file
WIDEST = 2**16  # the largest number among a network's arguments
LONGEST = 64 * 2**20  # the largest description, in bytes


def _is_of_a_network(value: Any, depth: int = 0) -> bool:
    """Return whether a value is a mapping of arguments without a number above ``WIDEST``."""
    if isinstance(value, Mapping):
        return depth < 4 and all(_is_of_a_network(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return 0 < depth < 4 and all(_is_of_a_network(inner, depth + 1) for inner in value)
    return depth > 0 and (not isinstance(value, (int, float)) or abs(value) <= WIDEST)


def _is_confidence(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    temperature, threshold = value.get(TEMPERATURE), value.get(THRESHOLD)
    return is_number(temperature, 1e-6, 1e6) and is_number(threshold, 0, 1.000001)


SIDE = Rule(
    lambda value: is_count(value, 1) and value <= MOST_PIXELS,
    f"must be a whole number of pixels of at most {MOST_PIXELS:,}",
)
DESCRIPTION = {
    "net.name": Rule(registry.is_name, "is not a network of net.py, torchvision or timm"),
    "net.num_classes": whole(2),
    "net.num_experts": optional(
        list_of(Rule(lambda value: is_count(value, 1) and value <= 1024, "must be 1 to 1,024"))
    ),
    "net.net_args": optional(Rule(_is_of_a_network, f"must be a mapping with numbers of at most {WIDEST:,}")),
    "classes": list_of(TEXT),
    "input.height": SIDE,
    "input.width": SIDE,
    "input.resize": list_of(SIDE, 2),
    "input.fit": optional(one_of(*FITS)),  # a file without this key crops: an earlier version wrote it
    "input.mean": list_of(Rule(is_finite, "must be a number"), 3),
    "input.std": list_of(Rule(lambda value: is_finite(value) and value > 0, "must be a number above 0"), 3),
    "dtype": one_of("float32", "bfloat16", "float16"),
    "confidence": optional(
        Rule(_is_confidence, "must be a mapping with a temperature above 0 and a confidence_threshold")
    ),
    "thresholds": optional(mapping_of(Rule(lambda value: is_number(value, 0, 1.000001), "must be 0 to 1"))),
    "provenance.steps": whole(0),
}


def beside(path: pathlib.Path) -> pathlib.Path:
    """Return the path of the JSON file that describes a network.

    It is ``net.json`` for ``net.pt``, ``net.onnx.json`` for ``net.onnx``, and ``config.json`` in a folder.
    """
    if os.path.isdir(path):
        return path / IN_A_FOLDER[1]
    return path.with_suffix(".json") if path.suffix == ".pt" else path.with_name(f"{path.name}.json")


def write(path: pathlib.Path, weights: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write weights as a ``state_dict``, and their JSON file, each atomically.

    Raises:
        OSError: if a file cannot be written.
    """
    write_described(path, description, lambda partial: save(partial, weights))


def save(path: pathlib.Path, weights: Mapping[str, Tensor]) -> None:
    """Write a ``state_dict``; raise ``OSError`` if that fails."""
    with open(path, "wb") as file:  # for a path, torch.save would raise RuntimeError
        torch.save(dict(weights), file)


def write_described(
    path: pathlib.Path,
    description: Mapping[str, Any],
    save_as: Callable[[pathlib.Path], None],
    with_digest: bool = False,
) -> None:
    """Write a network's file and its JSON file, each atomically.

    Args:
        path: the path of the network's file.
        description: the content of the JSON file; ``DESCRIPTION`` has the required keys.
        save_as: a function that writes the network to a path in the same folder.
        with_digest: whether the description gets the file's SHA-256 checksum.

    Raises:
        OSError: if a file cannot be written.
    """
    described = redacted(description)
    with replacing(beside(path), shared=True) as text, replacing(path, shared=True) as partial:
        save_as(partial)
        if with_digest:
            described["provenance"][DIGEST] = sha256(partial)
        text.write_text(json.dumps(described, indent=2) + "\n")


def write_description(path: pathlib.Path, description: Mapping[str, Any]) -> None:
    """Write only the JSON file of the network ``path``: the checkpoint's weights are in shards."""
    beside(path).write_text(json.dumps(redacted(description), indent=2) + "\n")


def of_checkpoint(checkpoint: pathlib.Path) -> dict[str, Tensor]:
    """Return the network's weights from a checkpoint, by name.

    Raises:
        InvalidInput: if a file is missing or damaged.
    """
    if shards.are_in(checkpoint):
        return shards.Shards(shards.folder_of(checkpoint)).weights()
    # An earlier version, or a mode without shards, wrote this file
    return state_dicts.read(str(checkpoint / NAMES[0]))


def redacted(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description without possible credentials."""
    provenance = redaction.values(description["provenance"])
    if "data" in provenance:
        provenance["data"] = redaction.field("data", description["provenance"]["data"])
    return {**description, "net": redaction.values(description["net"]), "provenance": provenance}


def read(path: pathlib.Path) -> tuple[nn.Module, dict[str, Any]]:
    """Build the network of a file or folder of weights, in evaluation mode.

    Returns:
        The network and its description.

    Raises:
        InvalidInput: if the file or its description is missing or damaged, or they do not match.
    """
    file = path / IN_A_FOLDER[0] if os.path.isdir(path) else path
    state, description = state_dicts.read(str(file)), read_description(path)
    written = description["provenance"].get("weights_sha256")
    if written not in (None, state_dicts.sha256(dict(sorted(state.items())))):
        what = "the weights differ from the weights that the JSON file describes (provenance.weights_sha256)"
        raise InvalidInput(f"{file}: {what}; {EXPORT}")
    return build(description, state, str(file)), description


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """Read the JSON file of a network, which an earlier version may have written.

    Raises:
        InvalidInput: if the file is missing or damaged, with a line for each invalid value.
    """
    file = beside(path)
    if not file.exists() and path.name and path.with_suffix(".json").exists():
        file = path.with_suffix(".json")
    try:
        if regular_file(file).stat().st_size > LONGEST:
            raise ValueError(f"more than {LONGEST // 2**20} MiB")
        description = json.loads(file.read_text())
    except FileNotFoundError:
        raise InvalidInput(f"{file}: is missing; {path.name} needs it; {EXPORT}") from None
    except (OSError, ValueError, RecursionError) as error:
        what = f"does not describe a network ({one_line(error)})"
        raise InvalidInput(f"{file}: {what}; {EXPORT}") from error
    errors = errors_in(description, DESCRIPTION) or _contradictions(description)
    if errors:
        raise InvalidInput(f"{file}: {line}; {EXPORT}" for line in errors)
    return redacted(description)


def _contradictions(description: Mapping[str, Any]) -> list[str]:
    """Return a line for each conflict between valid values."""
    errors, image, classes = [], description["input"], description["classes"]
    if not len(set(classes)) == len(classes) == description["net"]["num_classes"]:
        errors.append(
            f"classes: {len(set(classes))} different names: must be as many as net.num_classes, each once"
        )
    if (thresholds := description.get("thresholds")) is not None and thresholds.keys() != set(classes):
        errors.append(f"thresholds: {len(thresholds)} names: must be the names of all classes")
    if image["resize"][0] < image["height"] or image["resize"][1] < image["width"]:
        errors.append(f"input.resize: {image['resize']}: must be at least input.height and input.width")
    return errors


def build(description: Mapping[str, Any], state: Mapping[str, Tensor], path: str = "net") -> nn.Module:
    """Build the described network with these weights, in evaluation mode, on the CPU and in fp32.

    Raises:
        InvalidInput: if the network does not exist or fails on its image size, or the weights do not fit.
    """
    image, net = description["input"], description["net"]
    size = image["height"], image["width"]
    with torch.random.fork_rng(devices=[]), _bounded(len(state)):
        outline = _make(net, size, path, registry.on_meta_device).eval()
    found = state_dicts.fitting(outline, state, path)  # before the described network takes memory
    reason = dry_run.why_unfit(outline, size, net["num_classes"], "meta")
    network = _make(net, size, path, registry.build).eval()
    network.load_state_dict(found)
    if reason and (reason := dry_run.why_unfit(network, size, net["num_classes"], "cpu")):  # with values
        what = f"input: {size[0]}x{size[1]}: {net['name']} fails on such images ({reason})"
        raise InvalidInput(f"{path}: its {what}; {EXPORT}")
    return network


@contextlib.contextmanager
def _bounded(weights: int) -> Iterator[None]:
    """Raise ``InvalidInput`` if a network built in this block gets far more parameters than its file."""
    left = iter(range(1000 + 10 * weights))  # constructors may replace layers

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if next(left, None) is None:
            what = f"net.net_args: a network with far more weights than the {weights:,} in its file"
            raise InvalidInput(f"{what}; {EXPORT}")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _make(
    net: Mapping[str, Any], size: tuple[int, int], path: str, make: Callable[[NetSpec], nn.Module]
) -> nn.Module:
    """Build the described network with ``make``, a function of ``registry``."""
    arguments = dict(net)
    name = arguments.pop("name")
    if name != registry.MOE:
        try:
            return make(NetSpec(name, net["num_classes"], size, arguments.get("net_args")))
        except InvalidInput as error:
            raise InvalidInput(f"{path}: its {line}" for line in error.errors) from error
    from classify.models.net_moe import NetMoE
    from deepspeed_trial.processes import start_process_group

    start_process_group()  # DeepSpeed's MoE layers need a process group
    try:
        return NetMoE(**arguments)
    except Exception as error:  # DeepSpeed raises several types
        what = f"net: {arguments}: cannot be built ({one_line(error)})"
        raise InvalidInput(f"{path}: {what}; {EXPORT}") from error
