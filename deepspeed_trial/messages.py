"""Messages between ranks: plain values, encoded by msgpack, sent through a store in rank 0's process.

Determined and ``torch.distributed`` send pickles. A pickle runs code, so anyone who reaches a rank's port can
run code there. Messages of this module contain only data.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import torch
from determined import core
from torch.distributed import DistStoreError
from torch.nn import functional as F
from typing_extensions import override

from deepspeed_trial.meeting import meet_in_chief

LOOK = datetime.timedelta(seconds=1)  # how long a wait blocks signals
PIECE = 2**22  # bytes; torch's store refuses values above 8 MiB
LAST_MESSAGE = 5.0  # seconds that rank 0 waits at its end for ranks that have yet to read
TUPLE, SET, PATH, ARRAY, TENSOR = range(5)  # msgpack's extension types
NUMBERS = "biufc"  # kinds of NumPy's dtypes that hold no objects


def pack(value: Any) -> bytes:
    """Return a value as bytes: None, numbers, text, paths, arrays, tensors, and collections of them.

    Raises:
        TypeError: for a value of any other type.
    """
    return msgpack.packb(value, default=_extension, strict_types=True)


def unpack(content: bytes) -> Any:
    """Return the value that ``pack`` encoded, with tensors on the CPU.

    Raises:
        ValueError: if the bytes are not an output of ``pack``.
    """
    return msgpack.unpackb(content, ext_hook=_value, strict_map_key=False)


def _extension(value: Any) -> Any:
    if type(value) is tuple or isinstance(value, torch.Size):
        return msgpack.ExtType(TUPLE, pack(list(value)))
    if isinstance(value, set | frozenset):
        return msgpack.ExtType(SET, pack(list(value)))
    if isinstance(value, pathlib.PurePath):
        return msgpack.ExtType(PATH, pack(os.fspath(value)))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMBERS:
        return msgpack.ExtType(ARRAY, pack([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        kind = str(value.dtype).removeprefix("torch.")
        return msgpack.ExtType(TENSOR, pack([kind, list(value.shape), flat.numpy().tobytes()]))
    kinds = "numbers, text, paths, lists, tuples, sets, dicts, arrays and tensors"
    raise TypeError(f"{value!r}: a {type(value).__name__} cannot be sent to other ranks; send {kinds}")


def _value(kind: int, content: bytes) -> Any:
    plain = unpack(content)
    if kind in (TUPLE, SET):
        return tuple(plain) if kind == TUPLE else set(plain)
    if kind == PATH:
        return pathlib.Path(plain)
    name, shape, numbers = plain
    if kind == ARRAY and np.dtype(name).kind in NUMBERS:
        return np.frombuffer(numbers, np.dtype(name)).reshape(shape).copy()[()]
    dtype = getattr(torch, name, None) if kind == TENSOR else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a numeric type")
    flat = torch.frombuffer(bytearray(numbers), dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


class Ranks(core.DistributedContext):
    """Determined's ranks, with messages through a store of rank 0 instead of sockets and pickles.

    As in Determined, all ranks must call the same methods in the same order, in one thread.
    """

    @override
    def _init_ipc(self, force_tcp: bool) -> None:
        self._unread: dict[str, list[str]] = {}
        if self.size < 2:
            return
        self._store: Any = meet_in_chief("messages", self.rank == 0)
        self._turns = {"all": 0, f"host{self.cross_rank}": 0}

    @override
    def close(self) -> None:
        """Wait, at most ``LAST_MESSAGE`` s, until every rank has read this rank's messages in the store."""
        deadline = time.monotonic() + LAST_MESSAGE
        keys = [key for keys in self._unread.values() for key in keys]
        while any(self._store.check([key]) for key in keys) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._unread = {}

    @override
    def gather(self, stuff: Any) -> list[Any] | None:
        return self._gather("all", self.rank, self.size, stuff)

    @override
    def gather_local(self, stuff: Any) -> list[Any] | None:
        return self._gather(f"host{self.cross_rank}", self.local_rank, self.local_size, stuff)

    @override
    def allgather(self, stuff: Any) -> list[Any]:
        return self.broadcast(self.gather(stuff))

    @override
    def allgather_local(self, stuff: Any) -> list[Any]:
        return self.broadcast_local(self.gather_local(stuff))

    @override
    def broadcast(self, stuff: Any) -> Any:
        return self._broadcast("all", self.rank, self.size, stuff)

    @override
    def broadcast_local(self, stuff: Any = None) -> Any:
        return self._broadcast(f"host{self.cross_rank}", self.local_rank, self.local_size, stuff)

    def _gather(self, group: str, rank: int, size: int, value: Any) -> list[Any] | None:
        if size < 2:
            return [value]
        turn = self._turn(group)
        if rank:
            self._put(f"{turn}/{rank}", pack(value))
            return None
        return [value, *(self._take(f"{turn}/{other}") for other in range(1, size))]

    def _broadcast(self, group: str, rank: int, size: int, value: Any) -> Any:
        if size < 2:
            return value
        turn = self._turn(group)
        if rank:
            return self._take(f"{turn}/{rank}")
        self._unread[group] = [f"{turn}/{other}" for other in range(1, size)]
        content = pack(value)
        for key in self._unread[group]:
            self._put(key, content)
        return value

    def _turn(self, group: str) -> str:
        self._turns[group] += 1
        return f"{group}/{self._turns[group]}"

    def _put(self, key: str, content: bytes) -> None:
        count = -(-len(content) // PIECE)
        for piece in range(1, count):
            self._store.set(f"{key}/{piece}", content[piece * PIECE : (piece + 1) * PIECE])
        self._store.set(key, count.to_bytes(4, "big") + content[:PIECE])

    def _take(self, key: str) -> Any:
        while True:
            try:
                self._store.wait([key], LOOK)
                break
            except DistStoreError:  # the message is not there yet
                continue
        first = self._store.get(key)
        keys = [f"{key}/{piece}" for piece in range(1, int.from_bytes(first[:4], "big"))]
        content = b"".join([first[4:], *map(self._store.get, keys)])
        for each in [*keys, key]:
            self._store.delete_key(each)
        return unpack(content)


def all_gather(value: Any, group: Any = None) -> list[Any]:
    """Return the value of every rank of a process group: ``all_gather_object`` without pickles."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    content = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8).to(device)
    ranks = torch.distributed.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    torch.distributed.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    most = max(int(size) for size in sizes)
    padded = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(ranks)]
    torch.distributed.all_gather(padded, F.pad(content, (0, most - len(content))), group=group)
    contents = [each[: int(size)].cpu() for each, size in zip(padded, sizes, strict=True)]
    return [unpack(each.numpy().tobytes()) for each in contents]
