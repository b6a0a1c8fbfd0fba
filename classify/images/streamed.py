"""Images that are decoded when they are asked for, and not before."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from classify.images.decode import decode
from classify.images.growing_cache import GrowingCache
from classify.images.sources.encoded import EncodedImages, ShardFile
from harness.errors import InvalidInput, UnreadableData

READ = 64  # encoded images in memory at a time


class StreamedImages:
    """Takes the place of a tensor of images (N, 3, H, W) uint8 of which some are selected at a time.

    In a worker of a loader it decodes with one thread, elsewhere with as many as torch computes with.

    Args:
        images: the encoded ones.
        shard_file: gives the local file of a shard.
        size: height and width to scale to, in pixels.
        kept: those that are decoded already, and take in those that are decoded here; None to keep none.

    Attributes:
        device: where they are.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        images: EncodedImages,
        shard_file: ShardFile,
        size: tuple[int, int],
        kept: GrowingCache | None = None,
    ) -> None:
        self._images, self._shard_file, self._size, self._kept = images, shard_file, size, kept

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Images (B, 3, H, W) uint8, as ``torch.Tensor.index_select`` gives them of dimension 0.

        Raises:
            UnreadableData: that names the first image, or its shard, that cannot be read.
        """
        indices = index.numpy()
        try:
            return torch.from_numpy(self._select(indices))
        except InvalidInput as error:
            raise UnreadableData(error.errors) from error

    def _select(self, indices: np.ndarray) -> np.ndarray:
        if self._kept is None:
            return self._decode(indices)
        there = self._kept.has(indices)
        if there.all():
            return self._kept.read(indices)
        found = np.empty((len(indices), 3, *self._size), np.uint8)
        found[there] = self._kept.read(indices[there])
        found[~there] = decoded = self._decode(indices[~there])
        self._kept.write(indices[~there], decoded)
        return found

    def _decode(self, indices: np.ndarray) -> np.ndarray:
        found = np.empty((len(indices), 3, *self._size), np.uint8)
        # Neighbours in a shard one after the other: they may lie in one block
        places = indices if self._images.places is None else self._images.places.numpy()[indices]
        parts = [part for part in np.array_split(places.argsort(), -(-len(indices) // READ)) if len(part)]
        work = functools.partial(self._decode_some, indices, found)
        threads = min(torch.get_num_threads(), len(parts))
        if threads < 2:
            for part in parts:
                work(part)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, parts))
        return found

    def _decode_some(self, indices: np.ndarray, found: np.ndarray, part: np.ndarray) -> None:
        contents = self._images.read(indices[part].tolist(), self._shard_file)
        for place, content in zip(part, contents, strict=True):
            name = functools.partial(self._images.name, int(indices[place]))
            found[place] = decode(content, self._size, name)
