"""Loaders of whole micro-batches, as Determined takes them."""

from __future__ import annotations

import atexit
import collections
import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from determined import pytorch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, get_worker_info
from typing_extensions import override

from classify.images.augment import Augmenter
from classify.images.image_set import ImageSet
from classify.images.sampler import MicroBatchSampler
from harness.errors import InvalidInput

PREFETCHED = 2  # micro-batches that wait for a GPU
_Item = TypeVar("_Item")


def _errors_of_workers_as_items(fetch: Callable[[Any, Any], _Item]) -> Callable[[Any, Any], Any]:
    """Has a worker give an ``InvalidInput`` in the place of a micro-batch: raised, it would lose its form."""

    @functools.wraps(fetch)
    def fetched(self: Any, asked: Any) -> Any:
        try:
            return fetch(self, asked)
        except InvalidInput as error:
            if get_worker_info() is None:
                raise
            return error

    return fetched


class MicroBatchDataset(Dataset):
    """Images fetched a whole micro-batch at a time, from wherever they are kept.

    Args:
        source: the images.
    """

    def __init__(self, source: ImageSet) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    @_errors_of_workers_as_items
    def __getitems__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gives images (B, 3, H, W) uint8 and labels (B,) int64 for indices (B,) int64."""
        images, labels, _ = _fetch(self.source, indices)
        return self.source.center_crop(images), labels

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__(torch.tensor([index]))
        return images[0], labels[0]


class AugmentedDataset(Dataset):
    """Training images, fetched and augmented a whole micro-batch at a time.

    Args:
        source: the images.
        augmenter: what changes them.
    """

    def __init__(self, source: ImageSet, augmenter: Augmenter) -> None:
        self.source, self.augmenter = source, augmenter

    def __len__(self) -> int:
        return len(self.source)

    @_errors_of_workers_as_items
    def __getitems__(self, place: tuple[int, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Gives images (B, 3, H, W) uint8 and labels (B,) int64.

        Args:
            place: the epoch, the images' indices (B,) int64, and which random draws are theirs (B,) int64.
        """
        epoch, indices, draws = place
        images, labels, indices = _fetch(self.source, indices)
        return self.augmenter(images, draws.to(indices.device, non_blocking=True), epoch), labels


def _fetch(source: ImageSet, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 3, h, w) as they are kept, their labels, and the indices on their device."""
    indices = indices.to(source.device, non_blocking=True)
    return source.select(indices), source.labels.index_select(0, indices), indices


class WithEpoch(BatchSampler):
    """The micro-batches of a sampler, each with its epoch and draws, which a worker could not know."""

    def __init__(self, sampler: MicroBatchSampler) -> None:
        self.micro_batches = sampler

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Any]:
        start = 0
        for indices in self.micro_batches:
            yield self.micro_batches.epoch, indices, self.micro_batches.draws(start, indices)
            start += len(indices)


def whole_micro_batch(batch: Any) -> Any:
    """Collates nothing: ``MicroBatchDataset`` gives whole micro-batches."""
    return batch


class MicroBatchLoader(pytorch.DataLoader):
    """The loader that Determined shards, repeats and skips in.

    Where a GPU trains on images in the host's memory, a thread prefetches and pins them. Worker processes are
    forked, so that they share the images, and decode streamed ones, or transform images, ahead of the step.

    Args:
        source: the images.
        sampler: which images make a micro-batch.
        augmenter: of training images.
        workers: how many processes fetch and augment; with none the one that trains does.
    """

    def __init__(
        self,
        source: ImageSet,
        sampler: MicroBatchSampler,
        augmenter: Augmenter | None = None,
        workers: int = 0,
    ) -> None:
        on_host = torch.cuda.is_available() and source.device.type == "cpu"
        self.micro_batches = sampler
        # Transforms draw from torch's generator, which a thread would share with the training.
        self.prefetches = on_host and not (augmenter and augmenter.transform)
        super().__init__(
            AugmentedDataset(source, augmenter) if augmenter else MicroBatchDataset(source),
            batch_sampler=WithEpoch(sampler) if augmenter else sampler,
            collate_fn=whole_micro_batch,
            pin_memory=on_host,
            num_workers=workers,
            worker_init_fn=_leave_signals,
            multiprocessing_context="fork" if workers else None,
        )
        if workers:
            atexit.register(_end_workers)

    def seen_by(self, rank: int, ranks: int) -> Tensor:
        """The indices of the images that a rank gets in an epoch, in their order."""
        return torch.cat(list(self.micro_batches)[rank::ranks])

    @override
    def get_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().get_data_loader(*args, **kwargs)
        checked = WorkerErrors(loader) if self.num_workers else loader
        return Prefetcher(checked) if self.prefetches else checked


def _leave_signals(worker: int) -> None:
    """Has a worker outlive a signal, which launchers send to all processes: the trainer ends it in time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """Ends workers that a loader has left; ``multiprocessing`` would wait for what ignores its signal."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class WorkerErrors:
    """A loader that raises what its workers could not do.

    Args:
        loader: of micro-batches, or of ``InvalidInput``.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return map(_raised, iter(self.loader))  # whose workers begin at once


def _raised(batch: Any) -> Any:
    if isinstance(batch, InvalidInput):
        raise batch
    return batch


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
