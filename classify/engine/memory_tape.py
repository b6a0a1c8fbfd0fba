"""What a step allocates and frees, recorded without allocating: torch runs it on fake tensors.

Two records of one step, with micro-batches of different sizes, give that of any other: each block is of a
size that is linear in the micro-batch.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
HOLES = "kept free"  # the part of what the C library keeps
LASTING = ("weights", "optimizer", "average", HOLES)  # longer than a step
IMAGES = 4  # dimensions of a batch


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
    """Records every storage that operators make while it is on; ``FakeTensorMode`` is to be on around it.

    Args:
        reorders: whether convolutions copy what is not in their order, as oneDNN's on CPUs do.
    """

    def __init__(self, reorders: bool) -> None:
        super().__init__()
        self.reorders = reorders
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
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        for each in outputs:
            self._see(each.untyped_storage())
        if self.reorders and func in (aten.convolution.default, aten.convolution_backward.default):
            images = [each for each in (*tree_leaves(args), *outputs) if isinstance(each, Tensor)]
            self._reorder([each for each in images if each.dim() == IMAGES])
        return result

    def _reorder(self, tensors: list[Tensor]) -> None:
        """The copies that oneDNN makes for a convolution of tensors that are not in its own order."""
        order = torch.channels_last
        copied = [each for each in tensors if not each.is_contiguous(memory_format=order)]
        keys = [self.allocate("scratch", each.numel() * each.element_size()) for each in copied]
        for key in keys:
            self.free(key)

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
    """The most memory that a record needs at a time, in bytes.

    Attributes:
        parts: by what for, at the moment at which the blocks together are the largest.
        kept: what the C library keeps beside it, of blocks that were freed.
    """

    parts: Counter[str]
    kept: float


def peak(events: list[Event], library: Library | None, on_host: bool | None = None) -> Peak:
    """Replays a record.

    Args:
        events: the record.
        library: how the C library keeps blocks; None where none are kept, as by torch's allocator of GPUs.
        on_host: only blocks that are in the host's memory, or only others; None for all.
    """
    blocks: dict[int, Block] = {}
    live: Counter[str] = Counter()
    most: Counter[str] = Counter()
    held: Counter[Kept] = Counter()
    held_most: Counter[Kept] = Counter()
    total = 0.0
    for what, key, block in events:
        old = blocks.pop(key, None)
        if old:
            live[old.part] -= old.size  # type: ignore[assignment]
            held[kept(old, library)] -= old.size  # type: ignore[assignment]
        if what != "gone" and block and on_host in (None, block.on_host):
            blocks[key] = block
            live[block.part] += block.size  # type: ignore[assignment]
            held[kept(block, library)] += block.size  # type: ignore[assignment]
        held_most |= held
        if sum(held.values()) >= total:
            total, most = sum(held.values()), live.copy()
    if library is None:
        return Peak(most, 0)
    held_most[Kept.WITH_HOLES] *= library.holes  # type: ignore[assignment]
    return Peak(most, sum(held_most.values()) - total)


class Kept(enum.Enum):
    """What becomes of the place of a block that is freed."""

    RETURNED, PACKED, WITH_HOLES = range(3)


def kept(block: Block, library: Library | None) -> Kept:
    """The same, by what the block is for and its size."""
    if library is None or block.size >= library.large:
        return Kept.RETURNED
    return Kept.PACKED if block.part in LASTING else Kept.WITH_HOLES


class Library(NamedTuple):
    """How a C library keeps blocks.

    Attributes:
        large: from which size on, in bytes, it returns a block to the system, and keeps what is smaller.
        holes: what those of a step take with the holes between them, over their own size.
    """

    large: float
    holes: float
