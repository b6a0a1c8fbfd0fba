"""Loaders that yield whole micro-batches of augmented images, in a given order."""

from __future__ import annotations

import atexit
import collections
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from determined import pytorch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, get_worker_info
from torch.utils.data import DataLoader as TorchLoader
from typing_extensions import override

from classify.images.augment import Augmenter
from classify.images.order import MicroBatch, Order
from classify.images.pixels import ImageSet
from deepspeed_trial.errors import InvalidInput

PREFETCHED = 2  # micro-batches that wait for a GPU


class MicroBatchDataset(Dataset):
    """A dataset whose items are whole micro-batches of images and labels.

    Args:
        images: the images of one split.
        augmenter: augments training images; if None, images are cropped in the middle.
    """

    def __init__(self, images: ImageSet, augmenter: Augmenter | None = None) -> None:
        self.images, self.augmenter = images, augmenter

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, micro_batch: MicroBatch) -> Any:
        """Return images (B, 3, H, W) uint8 and labels (B,) int64; in a worker process an item for ``finish``.

        The item is ``micro_batch`` itself if the file of decoded images has its images, else the images and
        labels. A worker returns its error, because an exception loses its class between processes.
        """
        if get_worker_info() is None:
            return self._selected(micro_batch)
        transforms = self.augmenter and self.augmenter.transform
        try:
            is_prepared = not transforms and self.images.prepare(micro_batch.indices)
            return micro_batch if is_prepared else self._selected(micro_batch)
        except InvalidInput as error:
            return error

    def finish(self, item: Any) -> tuple[Tensor, Tensor]:
        """Return the images and labels of an item, in the process that trains; raise a worker's error."""
        if isinstance(item, InvalidInput):
            raise item
        return self._selected(item) if isinstance(item, MicroBatch) else item

    def _selected(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        indices = micro_batch.indices.to(self.images.device, non_blocking=True)
        images, labels = self.images.select(indices), self.images.labels.index_select(0, indices)
        if self.augmenter is None:
            return self.images.center_crop(images), labels
        draws = micro_batch.draws.to(indices.device, non_blocking=True)
        return self.augmenter(images, draws, micro_batch.epoch), labels


class RankBatches(BatchSampler):
    """The micro-batches of one rank, as a batch sampler for torch's loader.

    Args:
        order: the order of all ranks' micro-batches.
        images: the images, whose shards are fetched when a window begins.
        share: the arguments of ``Order.share``.
    """

    def __init__(self, order: Order, images: ImageSet, **share: Any) -> None:
        self.order, self.images, self.share = order, images, share

    def __len__(self) -> int:
        return len(range(self.share["rank"], len(self.order), self.share["ranks"]))

    def __iter__(self) -> Iterator[Any]:
        for micro_batch in self.order.share(**self.share):
            if micro_batch.ahead:
                self.images.fetch(micro_batch.ahead)
            yield micro_batch


def whole_micro_batch(batch: Any) -> Any:
    """Return a batch unchanged; there is nothing to collate: each item is a whole micro-batch."""
    return batch


class MicroBatchLoader(pytorch.DataLoader):
    """The loader that gives Determined a rank's micro-batches.

    If a GPU trains on images in host memory, a thread prefetches and pins them. Worker processes decode
    streamed images, or transform images, before the step needs them. The workers are forks that share the
    images' memory.

    Args:
        images: the images of one split.
        order: the order of the images.
        augmenter: augments training images; None for other images.
        workers: the number of processes that prepare images; 0 to prepare them in the training process.
    """

    def __init__(
        self, images: ImageSet, order: Order, augmenter: Augmenter | None = None, workers: int = 0
    ) -> None:
        on_host = torch.cuda.is_available() and images.device.type == "cpu"
        self.order = order
        # Transforms draw from torch's generator, which a thread would share with the training
        self.prefetches = on_host and not (augmenter and augmenter.transform)
        self.options: dict[str, Any] = {
            "collate_fn": whole_micro_batch,
            "pin_memory": on_host,
            "num_workers": workers,
            "worker_init_fn": _ignore_signals,
            "multiprocessing_context": "fork" if workers else None,
        }
        batches = RankBatches(order, images, rank=0, ranks=1)
        super().__init__(MicroBatchDataset(images, augmenter), batch_sampler=batches, **self.options)
        if workers:
            atexit.register(_end_workers)

    def seen_by(self, rank: int, ranks: int) -> Tensor:
        """Return the indices of a rank's images in the first epoch, int64, in order."""
        return torch.cat([micro_batch.indices for micro_batch in self.order.share(rank, ranks)])

    @override
    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> Any:
        share = {"rank": rank, "ranks": num_replicas, "skip": skip, "repeats": repeat}
        batches = RankBatches(self.order, self.dataset.images, **share)
        loader = FinishingLoader(self.dataset, batch_sampler=batches, **self.options)
        return Prefetcher(loader) if self.prefetches else loader


def _ignore_signals(worker: int) -> None:
    """Ignore the signals that launchers send to every process; the training process stops its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """Kill the remaining workers when the process exits; ``multiprocessing`` would wait for them."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class FinishingLoader(TorchLoader):
    """A loader that passes the items of its workers to ``MicroBatchDataset.finish``, in this process."""

    dataset: MicroBatchDataset

    @override
    def __iter__(self) -> Any:
        return map(self.dataset.finish, super().__iter__())  # this starts the workers


class Prefetcher:
    """A loader whose micro-batches a thread fetches while the GPU computes.

    Args:
        loader: yields micro-batches on the host.
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
