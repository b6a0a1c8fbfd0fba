"""Reads weights of plain PyTorch from files, loads them into networks, and computes checksums."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from classify.models.heads import head_layers
from deepspeed_trial.checkpoints.pieces import buffers
from deepspeed_trial.checkpoints.weights import mismatch
from deepspeed_trial.errors import InvalidInput, why_unloadable
from deepspeed_trial.input_files import regular_file

# Keys under which training scripts save a state_dict, and prefixes that wrappers add to the names in it
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")
AVERAGED = "n_averaged"  # a count of torch's AveragedModel
COUNT = "num_batches_tracked"  # of batch normalization; files from before torch 0.4.1 lack it


def of_module(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a network on the CPU in fp32, in the order of their names."""
    return {name: weight.detach().float().cpu() for name, weight in sorted(module.state_dict().items())}


def sha256(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 checksum of weights: names, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------- into a network


def load_pretrained(module: nn.Module, found: Mapping[str, Tensor], label: str) -> list[str]:
    """Load weights into a network before training, except for a head without matching weights.

    The head's weights do not match if they are for another number of classes, or if ``found`` lacks the child
    module with the last layer.

    Args:
        module: the network.
        found: the weights by name.
        label: the weights' name in an error line.

    Returns:
        The names of the network's weights that were not loaded.

    Raises:
        InvalidInput: if the weights belong to another network.
    """
    mine = {**dict(module.named_parameters(remove_duplicate=False)), **dict(buffers(module))}
    found = as_named(found, mine)
    found = {name: value for name, value in found.items() if name in mine or not name.endswith(COUNT)}
    wanted = {name: weight for name, weight in mine.items() if name in found or not name.endswith(COUNT)}
    skipped = _heads_without_weights(found, wanted, head_layers(module))
    wanted = {name: weight for name, weight in wanted.items() if name not in skipped}
    found = {name: weight for name, weight in found.items() if name not in skipped}
    _check(found, wanted, label)
    with torch.no_grad():
        for name, weight in wanted.items():
            weight.copy_(found[name])
    return skipped


def describe_skipped_weights(skipped: list[str], label: str) -> str:
    """Return the line about a reinitialised head, given the names from ``load_pretrained``."""
    return f"{label}: no weights for these classes, so {', '.join(skipped)} start at random"


def fitting(module: nn.Module, found: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return the weights under a network's names for them; the network may be on the meta device.

    Raises:
        InvalidInput: if the weights belong to another network.
    """
    wanted = module.state_dict()
    found = as_named(found, wanted)
    _check(found, wanted, label)
    return found


def _check(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], label: str) -> None:
    if wrong := mismatch(found, wanted):
        raise InvalidInput(f"{label}: {wrong}; give weights of this network")


def as_named(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove prefixes of wrappers (``module.``) from weights' names, unless the network has such names."""
    found = {name: value for name, value in found.items() if name != AVERAGED or name in wanted}
    while found and not found.keys() & wanted.keys():
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in found)), None)
        if prefix is None:
            break
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def _heads_without_weights(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], heads: Sequence[str]
) -> list[str]:
    """Return the names of last layers' weights that are missing or have another number of classes."""
    skipped: dict[str, None] = {}
    for layer in heads:
        here, there = found.get(f"{layer}.weight"), wanted.get(f"{layer}.weight")
        if here is not None and there is not None:
            is_other = here.shape[1:] == there.shape[1:] and here.shape[:1] != there.shape[:1]
            skipped |= dict.fromkeys(n for n in wanted if is_other and n.rpartition(".")[0] == layer)
        elif not found.keys() - wanted.keys():  # else an unknown name may be the head
            for head in (f"{layer.partition('.')[0]}.", f"{layer}."):
                missing = [name for name in wanted if name.startswith(head)]
                if len(missing) < len(wanted) and not any(name.startswith(head) for name in found):
                    skipped |= dict.fromkeys(missing)
                    break
    return list(skipped)


# ----------------------------------------------------------------------------------------------- from a file


def read(path: str, label: str = "", first: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read a ``state_dict``, alone or within a training checkpoint.

    Args:
        path: a file of ``torch.save`` or safetensors.
        label: the file's name in an error line; empty for its path.
        first: keys of a checkpoint to try before the usual keys.

    Raises:
        InvalidInput: if the file cannot be read or has no ``state_dict``.
    """
    label = label or path
    try:
        found = _load(path)
    except Exception as error:  # torch, zipfile and pickle raise different types
        reason = f"not a readable state_dict ({why_unloadable(error)}); give a net.pt"
        raise InvalidInput(f"{label}: {reason}") from error
    keys = (*first, *WRAPPERS)
    for _ in keys:  # checkpoints may be nested
        if isinstance(found, Mapping):
            found = next((found[key] for key in keys if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping) or not found or not all(_is_plain(*item) for item in found.items()):
        raise InvalidInput(f"{label}: holds no state_dict; give a net.pt")
    return dict(found)


def _load(path: str) -> Any:
    if not path.endswith(".safetensors"):
        _refuse_packed(regular_file(path))
        with _namespaces_allowed():
            return torch.load(regular_file(path), map_location="cpu", weights_only=True)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(regular_file(path))
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _refuse_packed(path: pathlib.Path) -> None:
    """Raise ``ValueError`` for a compressed archive; torch never writes one."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                raise ValueError("its archive is compressed")


def _namespaces_allowed() -> contextlib.AbstractContextManager[Any]:
    """Allow ``argparse.Namespace``: training scripts save their arguments with the weights."""
    if not hasattr(torch.serialization, "safe_globals"):  # before torch 2.5
        return contextlib.nullcontext()
    return torch.serialization.safe_globals([argparse.Namespace])


def _is_plain(name: object, value: object) -> bool:
    if not (isinstance(name, str) and isinstance(value, Tensor)):
        return False
    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_complex():
        return False
    return value.nbytes <= value.untyped_storage().nbytes()  # a stride of 0 could expand a few bytes
