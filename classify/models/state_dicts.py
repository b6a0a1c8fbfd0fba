"""Weights of plain PyTorch: read from files, put into networks, and their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import InvalidInput, why_unloadable
from harness.input_files import regular_file

COUNT = "num_batches_tracked"  # of batch normalization, which files of before torch 0.4.1 lack


def of_module(module: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a network on the CPU in fp32, in the order of their names."""
    return {name: weight.detach().float().cpu() for name, weight in sorted(module.state_dict().items())}


def kept_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a ``state_dict`` holds, by name."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def sha256(weights: Mapping[str, Tensor]) -> str:
    """The digest of the names, shapes and bytes of weights, in their order."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------- into a network


def load_pretrained(module: nn.Module, found: Mapping[str, Tensor], label: str) -> list[str]:
    """Puts weights into a network that is to be trained, all but those of a last layer for other classes.

    Args:
        module: the network.
        found: the weights by name.
        label: what to call them in an error line.

    Returns:
        The names of the weights that stay as they are, for they are of another size.

    Raises:
        InvalidInput: if they are of another network.
    """
    mine = {**dict(module.named_parameters(remove_duplicate=False)), **dict(kept_buffers(module))}
    found = {name: value for name, value in found.items() if name in mine or not name.endswith(COUNT)}
    wanted = {name: each.shape for name, each in mine.items() if name in found or not name.endswith(COUNT)}
    last = next((name.rpartition(".")[0] for name in reversed(list(dict(module.named_parameters())))), "")
    other = _is_other_head(found, wanted, last)
    skipped = [name for name in wanted if other and name.rpartition(".")[0] == last]
    for name in sorted(wanted.keys() | found.keys()):
        if name not in skipped:
            _compare(name, found.get(name), wanted.get(name), label)
    with torch.no_grad():
        for name in wanted:
            if name not in skipped:
                mine[name].copy_(found[name])
    return skipped


def describe_skipped_weights(skipped: list[str], label: str) -> str:
    """What ``load_pretrained`` left at random, as a line."""
    return f"{label}: {', '.join(skipped)} start at random, for other classes"


def load_strict(module: nn.Module, found: Mapping[str, Tensor], label: str) -> None:
    """Puts weights into a network.

    Args:
        module: the network.
        found: the weights by name.
        label: what to call them in an error line.

    Raises:
        InvalidInput: if they are of another network.
    """
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        _compare(name, found.get(name), wanted[name].shape if name in wanted else None, label)
    module.load_state_dict(found)


def _compare(name: str, found: Tensor | None, wanted: torch.Size | None, label: str) -> None:
    here, there = _shape(found), _shape(wanted)
    if here != there:
        raise InvalidInput(f"{label}: {name} is {here}, but {there} in this network; give its own weights")


def _shape(of: Tensor | torch.Size | None) -> str:
    if of is None:
        return "none"
    return str(tuple(of.shape if isinstance(of, Tensor) else of))


def _is_other_head(found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size], last: str) -> bool:
    """Whether the weights of the last layer are there, but for another number of classes."""
    name = f"{last}.weight"
    if name not in found or name not in wanted:
        return False
    here, there = found[name].shape, wanted[name]
    return here[1:] == there[1:] and here[0] != there[0]


# ----------------------------------------------------------------------------------------------- from a file


def read(path: str, label: str = "") -> dict[str, Tensor]:
    """Reads a ``state_dict``, also within a training checkpoint or of ``DistributedDataParallel``.

    Args:
        path: the file, of ``torch.save`` or safetensors.
        label: what to call it in an error line; its path if empty.

    Raises:
        InvalidInput: if the file cannot be read or holds none.
    """
    label = label or path
    try:
        found = _load(path)
    except Exception as error:  # torch, zipfile and pickle raise each their own
        reason = f"not a readable state_dict ({why_unloadable(error)}); give a net.pt"
        raise InvalidInput(f"{label}: {reason}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if isinstance(found, Mapping) and found and all(str(name).startswith("module.") for name in found):
        found = {name.removeprefix("module."): value for name, value in found.items()}
    if not isinstance(found, Mapping) or not all(_is_plain(*each) for each in found.items()):
        raise InvalidInput(f"{label}: holds no state_dict; give a net.pt")
    return dict(found)


def _load(path: str) -> Any:
    if not path.endswith(".safetensors"):
        return torch.load(regular_file(path), map_location="cpu", weights_only=True)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(regular_file(path))
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _is_plain(name: object, value: object) -> bool:
    if not (isinstance(name, str) and isinstance(value, Tensor)):
        return False
    return value.layout == torch.strided and not (value.is_quantized or value.is_meta or value.is_complex())
