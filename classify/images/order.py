"""The order of images: micro-batches as a function of the seed and the epoch, for any number of ranks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_trial.errors import InvalidInput


class MicroBatch(NamedTuple):
    """The images of one micro-batch.

    Attributes:
        epoch: the epoch, from 0.
        indices: int64 (B,), the images' indices.
        draws: int64 (B,), the index of each image's random draw in the epoch: the image's index, or its
            position in the epoch if images repeat.
        ahead: if a window of shards begins here, the indices of the shards to fetch next; else empty.
    """

    epoch: int
    indices: Tensor
    draws: Tensor
    ahead: tuple[int, ...] = ()


class Window(NamedTuple):
    """Shards whose images are shuffled together.

    Attributes:
        start: the position in the order at which the window begins.
        shards: the indices of the shards.
    """

    start: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """Shards in random order, cut into windows of ``size`` shards whose images are shuffled together.

    Training then needs few shards at a time.

    Attributes:
        places: int64 (N,), the position of each image among the images of all shards.
        shards: int32 (N,), the index of each image's shard.
        size: the number of shards in a window.
        are_remote: whether any shard is remote.
    """

    places: np.ndarray
    shards: np.ndarray
    size: int
    are_remote: bool = False

    def order(self, random: np.random.Generator | None) -> tuple[np.ndarray, list[Window]]:
        """Return the indices of all images, int64 (N,), and the windows; ``random`` shuffles both."""
        turns = np.arange(int(self.shards.max()) + 1, dtype=np.int32)
        if random is not None:
            turns = random.permutation(turns)
        keys = self.places if random is None else random.permutation(len(self.shards)).astype(np.int32)
        window = turns[self.shards] // self.size
        order = np.lexsort((keys, window))
        starts = np.flatnonzero(np.diff(window[order], prepend=-1)).tolist()
        shards = self.shards[order]
        return order, [
            Window(start, tuple(np.unique(shards[start:stop]).tolist()))
            for start, stop in itertools.pairwise([*starts, len(order)])
        ]

    def first(self) -> np.ndarray:
        """Return the indices of the images in the first window, in the shards' order."""
        order, windows = self.order(None)
        return order[: windows[1].start] if len(windows) > 1 else order


class Order:
    """Cuts every epoch into optimizer steps, and each step evenly into micro-batches.

    Micro-batch ``(step * accumulation + a) * ranks + rank`` is the ``a``-th of a step on a rank, as in
    ``determined.pytorch``. The images of a step are therefore the same for any number of ranks and any
    accumulation, except at an uneven end of the epoch. Ranks see disjoint images unless ``labels`` are given.
    An epoch is a whole number of steps. The last step has the remaining images. If they are fewer than
    a step's micro-batches, the last two steps share their images evenly; with micro-batches of one image, the
    epoch leaves them out.

    Args:
        size: the number of images.
        batch_size: the number of images in a step, over all ranks and accumulated micro-batches.
        micro_batches_per_step: the number of ranks times the gradient accumulation steps.
        seed: determines the shuffle, together with the epoch; None for the order of the dataset.
        labels: int64 (N,), to balance the classes: an epoch has N images, the same number of each class.
            Every epoch draws a new sample of a large class, and repeats the images of a small class.
        windows: windows of shards, which limit the number of shards in use.

    Raises:
        InvalidInput: if there are fewer images than micro-batches in one step.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        micro_batches_per_step: int,
        seed: int | None = None,
        labels: Tensor | None = None,
        windows: Windows | None = None,
    ) -> None:
        self.size, self.micro_batches_per_step, self.seed = size, micro_batches_per_step, seed
        self.labels, self.windows = labels, windows
        self.step_sizes = step_sizes(size, batch_size, micro_batches_per_step)

    def __len__(self) -> int:
        return len(self.step_sizes) * self.micro_batches_per_step

    def rows(self, epoch: int) -> Tensor:
        """Return the indices of an epoch's images in their order, int64 (N,)."""
        return self._draw(epoch)[0]

    def _draw(self, epoch: int) -> tuple[Tensor, deque[Window]]:
        """Return the indices of an epoch's images, and its windows; none if all shards are local."""
        random = None if self.seed is None else np.random.default_rng((self.seed, epoch))
        if self.windows:
            order, windows = self.windows.order(random)
            return torch.from_numpy(order), deque(windows if self.windows.are_remote else ())
        if random is None:
            return torch.arange(self.size), deque()
        drawn = self.size if self.labels is None else _balanced(self.labels.numpy(), random)
        return torch.from_numpy(random.permutation(drawn)), deque()

    def step_size(self, step: int) -> int:
        """Return the number of images in an optimizer step, counted from the start of training."""
        return self.step_sizes[step % len(self.step_sizes)]

    def weight(self, images: int, step: int) -> float:
        """Return the weight of a micro-batch's loss, so that a step's mean loss is the mean over its images.

        Args:
            images: the number of images in the micro-batch.
            step: the optimizer step.
        """
        return images * self.micro_batches_per_step / self.step_size(step)

    def micro_batches(self, epoch: int) -> Iterator[MicroBatch]:
        """Yield an epoch's micro-batches: the first of each rank, then the second of each, and so on."""
        (rows, windows), start = self._draw(epoch), 0
        for step in rows[: sum(self.step_sizes)].split(self.step_sizes):
            for indices in step.tensor_split(self.micro_batches_per_step):
                stop = start + len(indices)
                draws = indices if self.labels is None else torch.arange(start, stop)
                ahead: tuple[int, ...] = ()
                while windows and windows[0].start < stop:
                    ahead += windows.popleft().shards
                if ahead:
                    ahead += (windows or self._draw(epoch + 1)[1])[0].shards
                yield MicroBatch(epoch, indices, draws, ahead)
                start = stop

    def share(self, rank: int, ranks: int, skip: int = 0, repeats: bool = False) -> Iterator[MicroBatch]:
        """Yield every ``ranks``-th micro-batch, from epoch 0 on.

        Args:
            rank: the rank, from 0.
            ranks: the number of ranks.
            skip: the number of the rank's micro-batches to skip at the start.
            repeats: whether to continue with further epochs endlessly.
        """
        first, ahead = skip * ranks + rank, tuple[int, ...]()
        epochs = itertools.count(first // len(self)) if repeats else range(1)
        for epoch in epochs:
            for number, micro_batch in enumerate(self.micro_batches(epoch), epoch * len(self)):
                ahead = micro_batch.ahead or ahead
                if number >= first and number % ranks == rank:
                    yield micro_batch._replace(ahead=ahead)
                    ahead = ()


def _balanced(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw N indices for N labels: equally many of each class, and equally often each image of a class."""
    classes, counts = np.unique(labels, return_counts=True)
    wanted = np.full(len(classes), len(labels) // len(classes))
    wanted[random.permutation(len(classes))[: len(labels) % len(classes)]] += 1
    chosen = []
    for label, count, size in zip(classes, counts, wanted, strict=True):
        places = np.flatnonzero(labels == label)
        rounds = [random.permutation(places) for _ in range(-(-size // count))]
        chosen.append(np.concatenate(rounds)[:size] if rounds else places[:0])
    return np.concatenate(chosen)


def step_sizes(size: int, batch_size: int, micro_batches_per_step: int) -> list[int]:
    """Return the number of images in each optimizer step of an epoch; see ``Order``."""
    parts = micro_batches_per_step
    if size < parts:
        raise InvalidInput(
            f"train_batch_size: {batch_size}: one step is {parts} micro-batches, but there are only {size}"
            " images; use fewer processes or accumulation steps"
        )
    steps, rest = divmod(size, batch_size)
    sizes = [batch_size] * steps
    if rest >= parts:
        sizes.append(rest)
    elif rest and sizes and batch_size + rest >= 2 * parts:
        both = sizes.pop() + rest
        sizes += [both - both // 2, both // 2]
    # else: micro-batches have one image, and too few images remain for one each: an epoch leaves these out
    return sizes
