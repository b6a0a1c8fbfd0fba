"""What a step allocates and frees, recorded without allocating: torch runs it on fake tensors.

Two records of one step, with micro-batches of different sizes, give that of any other: each block is of a
size that is linear in the micro-batch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Block(NamedTuple):
    """One that is allocated.

    Attributes:
        part: what for.
        size: bytes.
        on_host: whether it is in the host's memory even where a GPU computes.
    """

    part: str
    size: float
    on_host: bool = False


class Event(NamedTuple):
    """A block is allocated, freed, or found to be for something else."""

    what: str  # new, gone or is
    key: int
    block: Block | None = None


class Tape(TorchDispatchMode):
    """Records every storage that operators make while it is on; ``FakeTensorMode`` is to be on around it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.part, self.on_host = "activations", False
        self._blocks: dict[int, Block] = {}
        self._storages: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._count = 0

    @contextlib.contextmanager
    def of(self, part: str, on_host: bool = False) -> Iterator[None]:
        """What is allocated inside is for that."""
        before = self.part, self.on_host
        self.part, self.on_host = part, on_host
        yield
        self.part, self.on_host = before

    def allocate(self, part: str, size: float, on_host: bool = False) -> int:
        """A block that no tensor here stands for, of so many bytes; gives what frees it."""
        self._count += 1
        self._add(Event("new", self._count, Block(part, size, on_host)))
        return self._count

    def free(self, key: int) -> None:
        """Frees such a block."""
        self._add(Event("gone", key))

    def relabel(self, tensor: Tensor, part: str) -> None:
        """Says what a tensor turned out to be for."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        if found and self._blocks[found[0]].part != part:
            key = found[0]
            self._add(Event("is", key, self._blocks[key]._replace(part=part)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._see(each.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._storages:
            return
        key = self.allocate(self.part, storage.nbytes(), self.on_host)

        def gone(_: object) -> None:
            del self._storages[address]
            self.free(key)

        self._storages[address] = key, weakref.ref(storage, gone)

    def _add(self, event: Event) -> None:
        if event.block:
            self._blocks[event.key] = event.block
        self.events.append(event)


def between(one: list[Event], other: list[Event], sizes: tuple[int, int], wanted: int) -> list[Event] | None:
    """The record for another micro-batch; None if the two are not of the same step.

    Args:
        one: with micro-batches of ``sizes[0]``.
        other: with those of ``sizes[1]``.
        sizes: in images.
        wanted: the size asked for.
    """
    if [(a.what, a.key) for a in one] != [(b.what, b.key) for b in other]:
        return None
    share = (wanted - sizes[0]) / (sizes[1] - sizes[0])
    return [
        a._replace(block=a.block._replace(size=a.block.size + share * (b.block.size - a.block.size)))
        if a.block and b.block
        else a
        for a, b in zip(one, other, strict=True)
    ]


class Peak(NamedTuple):
    """The most bytes that a record holds at a time.

    Attributes:
        parts: by what for, at that moment.
        kept: what the C library keeps beside it, of blocks that have been freed.
    """

    parts: Counter[str]
    kept: float


def peak(events: list[Event], large: float | None, on_host: bool | None = None) -> Peak:
    """Replays a record.

    Args:
        events: the record.
        large: from which size on the C library returns a block to the system, which keeps the others for
            the process once they were needed; None where all are returned, as to torch's allocator of GPUs.
        on_host: only blocks that are in the host's memory, or only others; None for all.
    """
    blocks: dict[int, Block] = {}
    live: Counter[str] = Counter()
    most: Counter[str] = Counter()
    small = small_most = big = big_most = total_most = 0.0
    for what, key, block in events:
        old = blocks.pop(key, None)
        if old:
            live[old.part] -= old.size  # type: ignore[assignment]
            if large is None or old.size >= large:
                big -= old.size
            else:
                small -= old.size
        if what != "gone" and block and on_host in (None, block.on_host):
            blocks[key] = block
            live[block.part] += block.size  # type: ignore[assignment]
            if large is None or block.size >= large:
                big += block.size
            else:
                small += block.size
        small_most, big_most = max(small_most, small), max(big_most, big)
        if small + big > total_most:
            total_most, most = small + big, live.copy()
    return Peak(most, small_most + big_most - total_most if large is not None else 0.0)
