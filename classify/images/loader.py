"""Loaders of whole micro-batches, as Determined takes them."""

from __future__ import annotations

import atexit
import collections
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from determined import pytorch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset
from typing_extensions import override

from classify.images.augment import Augmenter
from classify.images.image_set import ImageSet
from classify.images.sampler import MicroBatchSampler
from deepspeed_trial.errors import InvalidInput

PREFETCHED = 2  # micro-batches that wait for a GPU


class MicroBatchDataset(Dataset):
    """Images fetched a whole micro-batch at a time, from wherever they are kept.

    Args:
        source: the images.
    """

    transforms = False

    def __init__(self, source: ImageSet) -> None:
        self.source = source

    def indices(self, asked: Tensor) -> Tensor:
        """Those of the images that are asked for."""
        return asked

    def __len__(self) -> int:
        return len(self.source)

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
        self.transforms = bool(augmenter.transform)

    def indices(self, asked: tuple[int, Tensor, Tensor]) -> Tensor:
        """Those of the images that are asked for."""
        return asked[1]

    def __len__(self) -> int:
        return len(self.source)

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


@dataclass(frozen=True)
class Ready:
    """A micro-batch whose images are decoded and kept, so that the process that trains reads them by itself.

    Attributes:
        asked: what the dataset is asked for.
    """

    asked: Any


class InWorkers(Dataset):
    """What workers do for a dataset of streamed or transformed images.

    Where an image cannot be read they give the error as an item: raised there, it would lose its form.

    Args:
        dataset: of micro-batches.
    """

    def __init__(self, dataset: MicroBatchDataset | AugmentedDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, asked: Any) -> tuple[Tensor, Tensor] | Ready | InvalidInput:
        """Gives a micro-batch, or says that it is ready, or what is wrong."""
        try:
            is_ready = not self.dataset.transforms and self.dataset.source.prepare(
                self.dataset.indices(asked)
            )
            return Ready(asked) if is_ready else self.dataset.__getitems__(asked)
        except InvalidInput as error:
            return error

    def finish(self, item: Any) -> tuple[Tensor, Tensor]:
        """Gives the micro-batch of a worker's item, in the process that trains; raises its error."""
        if isinstance(item, InvalidInput):
            raise item
        return self.dataset.__getitems__(item.asked) if isinstance(item, Ready) else item


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
        images = AugmentedDataset(source, augmenter) if augmenter else MicroBatchDataset(source)
        super().__init__(
            InWorkers(images) if workers else images,
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
        """Return the indices of the images that a rank gets in the next epoch, in their order."""
        sampler = self.micro_batches
        return torch.cat(list(sampler.micro_batches(sampler.next_epoch))[rank::ranks])

    @override
    def get_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().get_data_loader(*args, **kwargs)
        if isinstance(self.dataset, InWorkers):
            loader = Finished(loader, self.dataset.finish)
        return Prefetcher(loader) if self.prefetches else loader


def _leave_signals(worker: int) -> None:
    """Has a worker outlive a signal, which launchers send to all processes: the trainer ends it in time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """Ends workers that a loader has left; ``multiprocessing`` would wait for what ignores its signal."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class Finished:
    """A loader whose workers' items become micro-batches.

    Args:
        loader: of items.
        finish: makes a micro-batch of one.
    """

    def __init__(self, loader: Iterable[Any], finish: Callable[[Any], Any]) -> None:
        self.loader, self.finish = loader, finish

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return map(self.finish, iter(self.loader))  # whose workers begin at once


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
