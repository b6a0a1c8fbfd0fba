"""Loaders of whole micro-batches: an order of images x the images x their augmentation."""

from __future__ import annotations

import atexit
import collections
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from determined import pytorch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset
from torch.utils.data import DataLoader as TorchLoader
from typing_extensions import override

from classify.images.augment import Augmenter
from classify.images.order import MicroBatch, Order
from classify.images.pixels import ImageSet
from classify.images.sources.shard_cache import ShardsAhead
from deepspeed_trial.errors import InvalidInput

PREFETCHED = 2  # micro-batches that wait for a GPU


class MicroBatchDataset(Dataset):
    """Images and labels of a whole micro-batch at a time.

    Args:
        images: of one split.
        augmenter: of training images; without one, images are cropped in the middle.
    """

    def __init__(self, images: ImageSet, augmenter: Augmenter | None = None) -> None:
        self.images, self.augmenter = images, augmenter

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, H, W) uint8 and labels (B,) int64."""
        indices = micro_batch.indices.to(self.images.device, non_blocking=True)
        images, labels = self.images.select(indices), self.images.labels.index_select(0, indices)
        if self.augmenter is None:
            return self.images.center_crop(images), labels
        draws = micro_batch.draws.to(indices.device, non_blocking=True)
        return self.augmenter(images, draws, micro_batch.epoch), labels


class WorkerDataset(Dataset):
    """The part of a worker process: decode streamed images, or transform images.

    Args:
        dataset: of micro-batches.
    """

    def __init__(self, dataset: MicroBatchDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor] | MicroBatch | InvalidInput:
        """Return images and labels, or the micro-batch if its images are in the cache now, or an error.

        An error raised in a worker would lose its class.
        """
        transforms = self.dataset.augmenter and self.dataset.augmenter.transform
        try:
            if not transforms and self.dataset.images.prepare(micro_batch.indices):
                return micro_batch
            return self.dataset.__getitems__(micro_batch)
        except InvalidInput as error:
            return error

    def finish(self, item: Any) -> tuple[Tensor, Tensor]:
        """Return the images and labels of a worker's item, in the process that trains; raise its error."""
        if isinstance(item, InvalidInput):
            raise item
        return self.dataset.__getitems__(item) if isinstance(item, MicroBatch) else item


class RankBatches(BatchSampler):
    """The micro-batches of one rank, in the form of torch's loader.

    Args:
        order: of all ranks' micro-batches.
        shards_ahead: fetches shards; None if none is fetched.
        share: the rank's share; see ``Order.share``.
    """

    def __init__(self, order: Order, shards_ahead: ShardsAhead | None = None, **share: Any) -> None:
        self.order, self.shards_ahead, self.share = order, shards_ahead, share

    def __len__(self) -> int:
        return len(range(self.share["rank"], len(self.order), self.share["ranks"]))

    def __iter__(self) -> Iterator[Any]:
        for micro_batch in self.order.share(**self.share):
            if self.shards_ahead and micro_batch.ahead:
                self.shards_ahead.fetch(micro_batch.ahead)
            yield micro_batch


def whole_micro_batch(batch: Any) -> Any:
    """Collate nothing: ``MicroBatchDataset`` returns whole micro-batches."""
    return batch


class MicroBatchLoader(pytorch.DataLoader):
    """The loader that Determined asks for a rank's micro-batches.

    If a GPU trains on images in host memory, a thread prefetches and pins them. Worker processes, which
    decode streamed images or transform images ahead of the step, are forked and so share the images.

    Args:
        images: of one split.
        order: of the images.
        augmenter: of training images.
        workers: processes that prepare images; with 0 the process that trains does.
        shards_ahead: fetches shards; None if none is fetched.
    """

    def __init__(
        self,
        images: ImageSet,
        order: Order,
        augmenter: Augmenter | None = None,
        workers: int = 0,
        shards_ahead: ShardsAhead | None = None,
    ) -> None:
        on_host = torch.cuda.is_available() and images.device.type == "cpu"
        self.order, self.shards_ahead = order, shards_ahead
        # Transforms draw from torch's generator, which a thread would share with the training
        self.prefetches = on_host and not (augmenter and augmenter.transform)
        dataset = MicroBatchDataset(images, augmenter)
        super().__init__(
            WorkerDataset(dataset) if workers else dataset,
            batch_sampler=RankBatches(order, shards_ahead, rank=0, ranks=1),
            collate_fn=whole_micro_batch,
            pin_memory=on_host,
            num_workers=workers,
            worker_init_fn=_ignore_signals,
            multiprocessing_context="fork" if workers else None,
        )
        if workers:
            atexit.register(_end_workers)

    def seen_by(self, rank: int, ranks: int) -> Tensor:
        """Return the indices of the images that a rank gets in the first epoch, int64, in their order."""
        return torch.cat([micro_batch.indices for micro_batch in self.order.share(rank, ranks)])

    @override
    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> Any:
        share = {"rank": rank, "ranks": num_replicas, "skip": skip, "repeats": repeat}
        loader: Any = TorchLoader(
            self.dataset,
            batch_sampler=RankBatches(self.order, self.shards_ahead, **share),
            collate_fn=whole_micro_batch,
            pin_memory=self.pin_memory,
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
        )
        if isinstance(self.dataset, WorkerDataset):
            loader = Finished(loader, self.dataset.finish)
        return Prefetcher(loader) if self.prefetches else loader


def _ignore_signals(worker: int) -> None:
    """Ignore the signals that launchers send to every process; the trainer stops its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """Kill the workers that a loader has left; ``multiprocessing`` would wait for them."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class Finished:
    """A loader whose items are finished in this process.

    Args:
        loader: of workers' items.
        finish: makes a micro-batch of an item.
    """

    def __init__(self, loader: TorchLoader, finish: Callable[[Any], Any]) -> None:
        self.loader, self.finish = loader, finish

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self.finish, iter(self.loader))  # this starts the workers


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
