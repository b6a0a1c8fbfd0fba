"""Loaders of whole micro-batches, as Determined takes them."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from determined import pytorch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from classify.images.augment import Augmenter
from classify.images.image_set import ImageSet
from classify.images.sampler import MicroBatchSampler

PREFETCHED = 2  # micro-batches that wait for a GPU


class MicroBatchDataset(Dataset):
    """Images fetched a whole micro-batch at a time, from wherever they are kept.

    Args:
        source: the images.
        sampler: whose epoch the augmentation is for.
        augmenter: of training images.
    """

    def __init__(
        self,
        source: ImageSet,
        sampler: MicroBatchSampler | None = None,
        augmenter: Augmenter | None = None,
    ) -> None:
        self.source, self.sampler, self.augmenter = source, sampler, augmenter

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gives images (B, 3, H, W) uint8 and labels (B,) int64 for indices (B,) int64."""
        indices = indices.to(self.source.images.device, non_blocking=True)
        images = self.source.images.index_select(0, indices)
        labels = self.source.labels.index_select(0, indices)
        if self.augmenter and self.sampler:
            return self.augmenter(images, indices, self.sampler.epoch), labels
        return self.source.center_crop(images), labels

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__(torch.tensor([index]))
        return images[0], labels[0]


def whole_micro_batch(batch: Any) -> Any:
    """Collates nothing: ``MicroBatchDataset`` gives whole micro-batches."""
    return batch


class MicroBatchLoader(pytorch.DataLoader):
    """The loader that Determined shards, repeats and skips in.

    Where a GPU trains on images in the host's memory, a thread prefetches and pins them.

    Args:
        source: the images.
        sampler: which images make a micro-batch.
        augmenter: of training images.
    """

    def __init__(
        self, source: ImageSet, sampler: MicroBatchSampler, augmenter: Augmenter | None = None
    ) -> None:
        self.prefetches = torch.cuda.is_available() and not source.images.is_cuda
        super().__init__(
            MicroBatchDataset(source, sampler, augmenter),
            batch_sampler=sampler,
            collate_fn=whole_micro_batch,
            pin_memory=self.prefetches,
        )

    @override
    def get_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().get_data_loader(*args, **kwargs)
        return Prefetcher(loader) if self.prefetches else loader


class Prefetcher:
    """A loader whose micro-batches a thread fetches while the GPU computes.

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
            fetched = collections.deque(thread.submit(next, source, end) for _ in range(PREFETCHED))
            while (batch := fetched.popleft().result()) is not end:
                fetched.append(thread.submit(next, source, end))
                yield batch
