"""A trained network as a file of weights that plain PyTorch loads, and the JSON file that describes it.

``net.pt`` is a ``state_dict`` of fp32 tensors: ``Net().load_state_dict(torch.load("net.pt",
weights_only=True))``. ``net.json`` has the network's arguments, the class names, how an image becomes an
input, and where it all came from. A file of another kind (``workbench/publish/forms.py``) has its own,
``net.onnx.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from classify.config.rules import (
    MOST_PIXELS,
    TEXT,
    Rule,
    errors_in,
    is_count,
    is_finite,
    list_of,
    one_of,
    optional,
    whole,
)
from classify.models import dry_run, registry, state_dicts
from classify.models.registry import NetSpec
from deepspeed_trial import redaction
from deepspeed_trial.checkpoints.files import sha256
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import regular_file

NAMES = ("net.pt", "net.json")  # in a run's folder
IN_A_FOLDER = ("model.safetensors", "config.json")  # as Hugging Face's libraries have them
DIGEST = "file_sha256"  # in the provenance of a file that is no state_dict

WIDEST = 2**16  # of a network's arguments
LONGEST = 64 * 2**20  # bytes of a description


def _is_of_a_network(value: Any, depth: int = 0) -> bool:
    """Return whether a value is a mapping of arguments with the numbers of real networks."""
    if isinstance(value, Mapping):
        return depth < 4 and all(_is_of_a_network(each, depth + 1) for each in value.values())
    if isinstance(value, list):
        return 0 < depth < 4 and all(_is_of_a_network(each, depth + 1) for each in value)
    return depth > 0 and (not isinstance(value, (int, float)) or abs(value) <= WIDEST)


SIDE = Rule(
    lambda value: is_count(value, 1) and value <= MOST_PIXELS,
    f"must be a whole number of pixels of at most {MOST_PIXELS:,}",
)
DESCRIPTION = {
    "net.name": Rule(registry.is_name, "is no network of net.py, torchvision or timm"),
    "net.num_classes": whole(2),
    "net.num_experts": optional(
        list_of(Rule(lambda value: is_count(value, 1) and value <= 1024, "must be 1 to 1,024"))
    ),
    "net.net_args": optional(Rule(_is_of_a_network, f"must be a mapping with numbers of at most {WIDEST:,}")),
    "classes": list_of(TEXT),
    "input.height": SIDE,
    "input.width": SIDE,
    "input.resize": list_of(SIDE, 2),
    "input.mean": list_of(Rule(is_finite, "must be a number"), 3),
    "input.std": list_of(Rule(lambda value: is_finite(value) and value > 0, "must be a number above 0"), 3),
    "dtype": one_of("float32", "bfloat16", "float16"),
    "provenance.steps": whole(0),
}


def beside(path: pathlib.Path) -> pathlib.Path:
    """The JSON file that describes a network's file, or the one within its folder.

    ``net.json`` of ``net.pt``, ``net.onnx.json`` of ``net.onnx``, ``config.json`` of a folder.
    """
    if os.path.isdir(path):
        return path / IN_A_FOLDER[1]
    return path.with_suffix(".json") if path.suffix == ".pt" else path.with_name(f"{path.name}.json")


def write(path: pathlib.Path, weights: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Writes a ``state_dict`` in fp32 and the JSON file beside it, each whole or not at all.

    Raises:
        OSError: if the disk does not take it.
    """
    write_described(path, description, lambda partial: save(partial, weights))


def save(path: pathlib.Path, weights: Mapping[str, Tensor]) -> None:
    """Writes a ``state_dict``; raises ``OSError`` if the disk does not take it."""
    with open(path, "wb") as file:  # or torch raises a RuntimeError of its own where it cannot be made
        torch.save(dict(weights), file)


def write_described(
    path: pathlib.Path,
    description: Mapping[str, Any],
    save_as: Callable[[pathlib.Path], None],
    with_digest: bool = False,
) -> None:
    """Writes a network's file and the JSON file beside it, each whole or not at all.

    Args:
        path: where to.
        description: what the JSON file says; see ``read_description`` for what it must.
        save_as: writes the network's file under the name that it is given, in the same folder.
        with_digest: whether the description is to have the file's SHA-256, too.

    Raises:
        OSError: if the disk does not take it.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    text = partial.with_name(f"{partial.name}.json")
    described = redacted(description)
    try:
        save_as(partial)
        if with_digest:
            described["provenance"][DIGEST] = sha256(partial)
        text.write_text(json.dumps(described, indent=2) + "\n")
        os.replace(partial, path)
        os.replace(text, beside(path))
    finally:
        partial.unlink(missing_ok=True)
        text.unlink(missing_ok=True)


def redacted(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description that others may read."""
    provenance = redaction.values(description["provenance"])
    if "data" in provenance:
        provenance["data"] = redaction.field("data", description["provenance"]["data"])
    return {**description, "net": redaction.values(description["net"]), "provenance": provenance}


def read(path: pathlib.Path) -> tuple[nn.Module, dict[str, Any]]:
    """Builds the network of a file or folder of weights, ready to classify; gives it with its description.

    Raises:
        InvalidInput: if the file or its description is missing, damaged or of another network.
    """
    file = path / IN_A_FOLDER[0] if os.path.isdir(path) else path
    state, description = state_dicts.read(str(file)), read_description(path)
    written = description["provenance"].get("weights_sha256")
    if written not in (None, state_dicts.sha256(dict(sorted(state.items())))):
        what = "are not those that its JSON file describes (provenance.weights_sha256)"
        raise InvalidInput(f"{file}: its weights {what}; export the network anew")
    return build(description, state, str(file)), description


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """What the JSON file beside a network's file says, or the one that an earlier version wrote.

    Raises:
        InvalidInput: if it is missing or not such a file, with a line for each value that is not valid.
    """
    file = beside(path)
    if not file.exists() and path.name and path.with_suffix(".json").exists():
        file = path.with_suffix(".json")
    try:
        if regular_file(file).stat().st_size > LONGEST:
            raise ValueError(f"more than {LONGEST // 2**20} MiB")
        description = json.loads(file.read_text())
    except FileNotFoundError:
        mend = f"is missing, it belongs beside {path.name}; export the network anew"
        raise InvalidInput(f"{file}: {mend}") from None
    except (OSError, ValueError, RecursionError) as error:
        mend = f"does not describe a network ({one_line(error)}); export it anew"
        raise InvalidInput(f"{file}: {mend}") from error
    errors = errors_in(description, DESCRIPTION) or _contradictions(description)
    if errors:
        raise InvalidInput(f"{file}: {each}; export the network anew" for each in errors)
    return redacted(description)


def _contradictions(description: Mapping[str, Any]) -> list[str]:
    """Of values each of which is valid."""
    errors, seen, classes = [], description["input"], description["classes"]
    if not len(set(classes)) == len(classes) == description["net"]["num_classes"]:
        errors.append(f"classes: {len(set(classes))} names: must be one for each of net.num_classes")
    if seen["resize"][0] < seen["height"] or seen["resize"][1] < seen["width"]:
        errors.append(f"input.resize: {seen['resize']}: must be at least input.height and input.width")
    return errors


def build(description: Mapping[str, Any], state: Mapping[str, Tensor], path: str = "net") -> nn.Module:
    """Makes the described network with these weights, in evaluation mode, on the CPU and in fp32.

    Raises:
        InvalidInput: if there is none such, it does not take such images, or the weights are of another.
    """
    seen, net = description["input"], description["net"]
    size = seen["height"], seen["width"]
    with torch.random.fork_rng(devices=[]), _bounded(len(state)):
        outline = _make(net, size, path, registry.on_meta_device).eval()
    state_dicts.fitting(outline, state, path)  # before the described network takes memory
    reason = dry_run.why_unfit(outline, size, net["num_classes"], "meta")
    made = _make(net, size, path, registry.build).eval()
    state_dicts.load_strict(made, state, path)
    if reason and (reason := dry_run.why_unfit(made, size, net["num_classes"], "cpu")):  # it may need values
        what = f"input: {size[0]}x{size[1]}: {net['name']} does not take such images ({reason})"
        raise InvalidInput(f"{path}: its {what}; export the network again")
    return made


@contextlib.contextmanager
def _bounded(weights: int) -> Iterator[None]:
    """Stop the making of a network that has far more parameters than its file has weights."""
    left = iter(range(1000 + 10 * weights))  # layers may be made and replaced

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if next(left, None) is None:
            what = f"net.net_args: a network of more than {weights:,} weights, which its file has"
            raise InvalidInput(f"{what}; export the network again")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _make(
    net: Mapping[str, Any], size: tuple[int, int], path: str, make: Callable[[NetSpec], nn.Module]
) -> nn.Module:
    """Make the network of a description in one of the ways of ``registry``."""
    arguments = dict(net)
    name = arguments.pop("name")
    if name != registry.MOE:
        try:
            return make(NetSpec(name, net["num_classes"], size, arguments.get("net_args")))
        except InvalidInput as error:
            raise InvalidInput(f"{path}: its {each}" for each in error.errors) from error
    from classify.models.net_moe import NetMoE
    from deepspeed_trial.processes import start_process_group

    start_process_group()  # without which DeepSpeed makes no layer of experts
    try:
        return NetMoE(**arguments)
    except Exception as error:  # DeepSpeed refuses in several ways
        what = f"net: {arguments}: cannot be made ({one_line(error)})"
        raise InvalidInput(f"{path}: {what}; export the network anew") from error
