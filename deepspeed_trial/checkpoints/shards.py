"""An engine's state in a folder: a safetensors file per rank, and ``state.json``, which rank 0 writes last.

A file has flat parts of tensors in the format of ``torch.distributed.checkpoint``. The header gives the index
of each part's first element in the flattened tensor. torch's ``HuggingFaceStorageReader`` reads the files.
A tensor's key is a kind and a name: ``weights/conv1.weight``, ``exp_avg/conv1.weight``.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepspeed_trial import messages
from deepspeed_trial.errors import ErrorList, InvalidInput
from deepspeed_trial.input_files import parsed, regular_file

NAME = "shard-{:05}-model-00001-of-00001.safetensors"  # torch's name of a rank's file; ranks count from 1
RECORD = "state.json"
OFFSETS = "DCP_SHARDING_INFO"  # in a header
# Kinds of tensors: AVERAGE is the average of a weight or buffer; any other kind is a state of the optimizer
WEIGHTS, BUFFERS, AVERAGE = "weights", "buffers", "average"
REMEDY = "resume from another checkpoint"


class Part(NamedTuple):
    """The part of a tensor that one rank writes.

    Attributes:
        values: the values, of any shape.
        start: index of the part's first element in the flattened tensor.
        shape: the tensor's shape.
    """

    values: Tensor
    start: int
    shape: tuple[int, ...]


def folder_of(checkpoint: pathlib.Path, index: int = 0) -> pathlib.Path:
    """Return the folder of an engine's state in a checkpoint."""
    return checkpoint / f"model{index}"


def are_in(checkpoint: pathlib.Path) -> bool:
    """Return whether a checkpoint has this format; otherwise it has DeepSpeed's."""
    return (folder_of(checkpoint) / RECORD).exists()


def has_written(checkpoint: pathlib.Path, rank: int) -> bool:
    """Return whether a rank has written its parts into a checkpoint; other ranks may still be writing."""
    return (folder_of(checkpoint) / NAME.format(rank + 1)).exists()


def write(folder: pathlib.Path, rank: int, parts: Mapping[str, Part]) -> None:
    """Write this rank's parts, given by the tensors' keys. Every rank calls it.

    Raises:
        OSError: if the disk is full or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / NAME.format(rank + 1), parts)
    ranks = messages.all_gather({key: part.shape for key, part in parts.items()})
    if rank == 0:
        tensors = {key: shape for shapes in ranks for key, shape in shapes.items()}
        (folder / RECORD).write_text(json.dumps({"ranks": len(ranks), "tensors": tensors}))


def write_file(file: pathlib.Path, parts: Mapping[str, Part]) -> None:
    """Write parts into one file; raise ``OSError`` if the disk is full or fails."""
    flat: dict[str, Tensor] = {}
    places = set()
    for key, part in parts.items():
        values = part.values.detach().reshape(-1)
        is_again = values.data_ptr() in places  # safetensors refuses to write the same memory twice
        flat[key] = values.clone() if is_again else values
        places.add(values.data_ptr())
    offsets = json.dumps({key: {"saved_offsets": [part.start]} for key, part in parts.items()})
    try:
        save_file(flat, file, {OFFSETS: offsets, "DCP_VERSION": "1.0", "format": "pt"})
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
        raise
    file.chmod(0o644)  # safetensors makes it readable only for its owner


class Shards:
    """The files of all ranks; each value is read when it is needed.

    Args:
        folder: the folder with the files.

    Attributes:
        shapes: the shape of each tensor, by the tensor's key.
        network: the key of each weight and buffer, or of its average if there is one, by name.
        kinds: the kinds of each parameter's optimizer states, e.g. ``exp_avg``, by the parameter's name.

    Raises:
        InvalidInput: with a line for each missing or damaged file, or for each tensor with missing or
            repeated elements.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        errors = ErrorList()
        with parsed(f"{folder / RECORD}: cannot be read", REMEDY):
            record = json.loads(regular_file(folder / RECORD).read_text())
            self.shapes = {str(key): _shape(shape) for key, shape in record["tensors"].items()}
            ranks = _shape([record["ranks"]])[0]
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}  # first element, end, file
        for rank in range(ranks):
            file = folder / NAME.format(rank + 1)
            with errors.collecting(), parsed(f"{file}: cannot be read", REMEDY):
                self._open(safe_open(regular_file(file), framework="pt"))
            if errors.lines:
                break
        errors.raise_any()
        flaws = {key: self._flaw(key, math.prod(shape)) for key, shape in self.shapes.items()}
        flaws |= dict.fromkeys(self._parts.keys() - flaws.keys(), f"is not in {RECORD}")
        if any(flaws.values()):
            raise InvalidInput(f"{folder}: {key}: {flaw}; {REMEDY}" for key, flaw in flaws.items() if flaw)
        self.network: dict[str, str] = {}
        self.kinds: dict[str, list[str]] = {}
        for key in self.shapes:
            kind, _, name = key.partition("/")
            if kind not in (WEIGHTS, BUFFERS, AVERAGE):
                self.kinds.setdefault(name, []).append(kind)
            elif kind == AVERAGE or name not in self.network:
                self.network[name] = key

    def _open(self, file: Any) -> None:
        offsets = json.loads(file.metadata()[OFFSETS])
        for key in file.keys():  # noqa: SIM118 - a file is no mapping
            (start,), (count,) = _shape(offsets[key]["saved_offsets"]), file.get_slice(key).get_shape()
            self._parts.setdefault(key, []).append((start, start + count, file))

    def _flaw(self, key: str, numel: int) -> str | None:
        end, dtypes = 0, set()
        for first, last, file in sorted(self._parts.get(key, []), key=lambda part: part[:2]):
            if first != end:
                there = "are missing" if first > end else "are there twice"
                return f"elements {min(first, end):,} to {max(first, end):,} {there}"
            end = last
            dtypes.add(file.get_slice(key).get_dtype())
        if not dtypes and not numel:
            return "is in no file"
        if end != numel:
            return f"has {end:,} elements of {numel:,}"
        return "its parts differ in type" if len(dtypes) > 1 else None

    def read(self, key: str, start: int = 0, count: int | None = None) -> Tensor:
        """Return ``count`` elements of a flattened tensor from ``start`` on; None means the rest."""
        end = math.prod(self.shapes[key]) if count is None else start + count
        ranges = [
            file.get_slice(key)[max(start, first) - first : min(end, last) - first]
            for first, last, file in sorted(self._parts[key], key=lambda part: part[:2])
            if first < end and start < last
        ]
        if not ranges:
            return self._parts[key][0][2].get_slice(key)[0:0]
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges)

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor."""
        return self.read(key, 0, 1).dtype

    def copy(self, key: str, target: Tensor, start: int = 0) -> None:
        """Fill a tensor with a saved tensor's elements, from the given element on."""
        target.copy_(self.read(key, start, target.numel()).view(target.shape))

    def outlines(self) -> dict[str, Tensor]:
        """Return shapes and types of the weights and buffers by name, as tensors without values."""
        return {
            name: torch.empty(self.shapes[key], dtype=self.dtype(key), device="meta")
            for name, key in self.network.items()
        }

    def weights(self) -> dict[str, Tensor]:
        """Return all weights and buffers, or their averages, in fp32 by name, in the order of the names."""
        found = {name: self.read(key).view(self.shapes[key]).float() for name, key in self.network.items()}
        return dict(sorted(found.items()))


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
        raise ValueError(f"{value!r}: must be whole numbers")
    return tuple(value)
