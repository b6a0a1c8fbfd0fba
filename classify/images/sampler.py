"""Which images make a micro-batch: a function of seed and epoch, the same for any number of processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from classify.images.windows import Window, Windows
from deepspeed_trial.errors import InvalidInput


class MicroBatchSampler(BatchSampler):
    """Cuts every epoch into global batches, and each of those evenly into micro-batches.

    Micro-batch ``(step * gradient_accumulation_steps + a) * ranks + rank`` is the ``a``-th of a step on a
    rank: so ``determined.pytorch`` deals batches out to ranks. Thus the images of a step are the same for
    any number of processes and any accumulation (but for an uneven end of the epoch), ranks see disjoint
    images (but by ``labels``), and an epoch is a whole number of optimizer steps. The last step takes what
    is left over; if that is too little to give every micro-batch an image, it shares with the step before.

    Args:
        size: how many images there are.
        batch_size: images a step, over all ranks and accumulated micro-batches.
        micro_batches_per_step: ranks times gradient accumulation steps.
        seed: shuffle by (seed, epoch); in order if None.
        labels: int64 (N,), to have as many images of each class in an epoch of as many images: of large
            classes a part, anew in every epoch, and those of small ones several times.
        windows: of images in shards, of which few are at hand at a time.
        ahead: called at the begin of a window with the numbers of its shards and of those of the next one.

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
        ahead: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.size, self.micro_batches_per_step, self.seed = size, micro_batches_per_step, seed
        self.labels, self.windows, self.ahead = labels, windows, ahead
        self.next_epoch = 0
        self.step_sizes = step_sizes(size, batch_size, micro_batches_per_step)

    def __len__(self) -> int:
        return len(self.step_sizes) * self.micro_batches_per_step

    @property
    def epoch(self) -> int:
        """The epoch that was begun last."""
        return self.next_epoch - 1

    def set_epoch(self, epoch: int) -> None:
        """Makes ``epoch`` the next one, as in ``torch.utils.data.DistributedSampler``."""
        self.next_epoch = epoch

    def order(self, epoch: int) -> Tensor:
        """The order of the images in an epoch, (N,) int64: a function of the seed and the epoch alone."""
        if self.windows:
            return torch.from_numpy(self.windows.order(self._random(epoch))[0])
        random = self._random(epoch)
        if random is None:
            return torch.arange(self.size)
        if self.labels is None:
            return torch.from_numpy(random.permutation(self.size))
        return torch.from_numpy(random.permutation(_balanced(self.labels.numpy(), random)))

    def _random(self, epoch: int) -> np.random.Generator | None:
        return None if self.seed is None else np.random.default_rng((self.seed, epoch))

    def step_size(self, step: int) -> int:
        """The images in an optimizer step, counted from the start of training."""
        return self.step_sizes[step % len(self.step_sizes)]

    def weight(self, images: int, step: int) -> float:
        """The factor of a micro-batch's loss with which a step's mean is that over its images.

        Args:
            images: in the micro-batch.
            step: the optimizer step.
        """
        return images * self.micro_batches_per_step / self.step_size(step)

    def draws(self, start: int, indices: Tensor) -> Tensor:
        """Which of an epoch's random draws are for images: their own, or where one comes often, its place's.

        Args:
            start: how many images of the epoch came before.
            indices: of the images, (B,) int64.
        """
        return indices if self.labels is None else torch.arange(start, start + len(indices))

    def micro_batches(self, epoch: int) -> Iterator[Tensor]:
        """Yield the indices of an epoch's images, int64 (B,) for each micro-batch of all ranks in turn."""
        for step in self.order(epoch)[: sum(self.step_sizes)].split(self.step_sizes):
            yield from step.tensor_split(self.micro_batches_per_step)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.next_epoch, 0
        windows = self._windows_of(epoch)
        self.next_epoch += 1
        for micro_batch in self.micro_batches(epoch):
            while self.ahead and windows and windows[0][0] < start + len(micro_batch):
                shards = windows.popleft()[1]
                self.ahead(shards + (windows or self._windows_of(epoch + 1))[0][1])
            yield micro_batch
            start += len(micro_batch)

    def _windows_of(self, epoch: int) -> deque[Window]:
        """The windows of an epoch in their order; none where no shards are fetched ahead."""
        return deque(self.windows.order(self._random(epoch))[1] if self.windows and self.ahead else ())


def _balanced(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """As many indices as there are labels: as many of each class, or one more, and all of it as often."""
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
    """The images in each optimizer step of an epoch; see ``MicroBatchSampler``."""
    parts = micro_batches_per_step
    if size < parts:
        raise InvalidInput(
            f"train_batch_size: {batch_size}: one step is {parts} micro-batches, but there are only {size}"
            " images; use fewer processes or accumulation steps"
        )
    steps, left = divmod(size, batch_size)
    sizes = [batch_size] * steps
    if left >= parts:
        sizes.append(left)
    elif left and sizes and batch_size + left >= 2 * parts:
        both = sizes.pop() + left
        sizes += [both - both // 2, both // 2]
    # else: micro-batches of one image and fewer left than ranks: these few rest for one epoch
    return sizes
