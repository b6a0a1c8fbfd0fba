"""Whole micro-batches of images: which images make one, how they are fetched, and the loader that Determined takes."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from determined import pytorch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset

from augment import Augmenter
from data import ImageSet
from errors import InvalidInput

AHEAD = 2  # micro-batches that wait for a GPU


class Batches(Dataset):
    """Images fetched a whole micro-batch at a time, from wherever they are kept.

    Args:
        source: the images.
        sampler: whose epoch the augmentation is for.
        augmenter: of training images.
    """

    def __init__(
        self, source: ImageSet, sampler: MicroBatchSampler | None = None, augmenter: Augmenter | None = None
    ) -> None:
        self.source, self.sampler, self.augmenter = source, sampler, augmenter

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gives images (B, 3, H, W) uint8 and labels (B,) int64 for indices (B,) int64."""
        indices = indices.to(self.source.images.device, non_blocking=True)
        images, labels = self.source.images.index_select(0, indices), self.source.labels.index_select(0, indices)
        if self.augmenter and self.sampler:
            return self.augmenter(images, indices, self.sampler.begun - 1), labels
        return self.source.cropped(images), labels

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__(torch.tensor([index]))
        return images[0], labels[0]


class MicroBatchSampler(BatchSampler):
    """Cuts every epoch into global batches, and each of those evenly into micro-batches.

    Micro-batch ``(step * gradient_accumulation_steps + a) * ranks + rank`` is the ``a``-th of a step on a rank: so does
    ``determined.pytorch`` deal batches out to ranks. So the images of a step are the same for any number of
    processes and any accumulation (but for an uneven end of the epoch), ranks see disjoint images, and an epoch is a
    whole number of optimizer steps. The last step takes what is left over; if that is too little to give every
    micro-batch an image, it shares with the step before.

    Args:
        size: how many images there are.
        batch_size: images a step, over all ranks and accumulated micro-batches.
        parts: micro-batches a step: ranks times gradient accumulation steps.
        seed: shuffle by (seed, epoch); in order if None.

    Raises:
        InvalidInput: if there are fewer images than micro-batches in one step.
    """

    def __init__(self, size: int, batch_size: int, parts: int, seed: int | None = None) -> None:
        self.size, self.parts, self.seed = size, parts, seed
        self.epoch = self.begun = 0
        self.step_sizes = step_sizes(size, batch_size, parts)

    def __len__(self) -> int:
        return len(self.step_sizes) * self.parts

    def set_epoch(self, epoch: int) -> None:
        """Makes ``epoch`` the next one, as in ``torch.utils.data.DistributedSampler``."""
        self.epoch = epoch

    def order(self, epoch: int) -> Tensor:
        """The order of the images in an epoch, (N,) int64: a function of the seed and the epoch alone."""
        if self.seed is None:
            return torch.arange(self.size)
        return torch.from_numpy(np.random.default_rng((self.seed, epoch)).permutation(self.size))

    def __iter__(self) -> Iterator[Any]:
        order = self.order(self.epoch)[: sum(self.step_sizes)]
        self.epoch += 1
        self.begun = self.epoch
        for step in order.split(self.step_sizes):
            yield from step.tensor_split(self.parts)


def step_sizes(size: int, batch_size: int, parts: int) -> list[int]:
    """The images in each optimizer step of an epoch; see ``MicroBatchSampler``."""
    if size < parts:
        raise InvalidInput(
            f"train_batch_size: {batch_size}: one step is {parts} micro-batches, but there are only {size} images;"
            " use fewer processes or accumulation steps"
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


def as_fetched(batch: Any) -> Any:
    """Collates nothing: ``Batches`` gives whole micro-batches."""
    return batch


def data_loader(source: ImageSet, sampler: MicroBatchSampler, augmenter: Augmenter | None = None) -> pytorch.DataLoader:
    """Makes the loader that Determined shards, repeats and skips in.

    Args:
        source: the images.
        sampler: which images make a micro-batch.
        augmenter: of training images.
    """
    batches = Batches(source, sampler, augmenter)
    pinned = torch.cuda.is_available() and not source.images.is_cuda  # so that copies to the GPU need no waiting
    return pytorch.DataLoader(batches, batch_sampler=sampler, collate_fn=as_fetched, pin_memory=pinned)


class FetchedAhead:
    """A loader whose micro-batches a thread fetches and pins while the GPU computes.

    Args:
        loader: of micro-batches on the host.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        source, end = iter(self.loader), object()
        with ThreadPoolExecutor(1) as thread:
            fetched = collections.deque(thread.submit(next, source, end) for _ in range(AHEAD))
            while (batch := fetched.popleft().result()) is not end:
                fetched.append(thread.submit(next, source, end))
                yield batch
