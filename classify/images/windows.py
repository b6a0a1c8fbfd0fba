"""The order of images in shards: shuffled within a window of a few shards at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Window = tuple[int, list[int]]  # the place in the order at which it begins, and the numbers of its shards


@dataclass(frozen=True)
class Windows:
    """Shards in an order that is drawn, and so many of them at a time whose images are shuffled together.

    So few shards have to be at hand at a time, and which images come when is a function of the seed and the
    epoch alone.

    Attributes:
        places: int64 (N,), of each image among those of all shards.
        shards: int32 (N,), the shard of each image, by its number.
        size: shards of a window.
    """

    places: np.ndarray
    shards: np.ndarray
    size: int

    def order(self, random: np.random.Generator | None) -> tuple[np.ndarray, list[Window]]:
        """The indices of all images, int64 (N,): as they lie in the shards, if nothing is drawn."""
        turns = np.arange(int(self.shards.max()) + 1, dtype=np.int32)
        if random is not None:
            turns = random.permutation(turns)
        keys = self.places if random is None else random.permutation(len(self.shards)).astype(np.int32)
        window = turns[self.shards] // self.size
        order = np.lexsort((keys, window))
        begins = np.flatnonzero(np.diff(window[order], prepend=-1))
        shards = self.shards[order]
        ends = [*begins[1:].tolist(), len(order)]
        return order, [
            (begin, np.unique(shards[begin:end]).tolist())
            for begin, end in zip(begins.tolist(), ends, strict=True)
        ]

    def first(self) -> np.ndarray:
        """The indices of the images in the first window, as they lie in its shards."""
        order, windows = self.order(None)
        return order[: windows[1][0]] if len(windows) > 1 else order
