"""Images that are decoded when they are asked for, and not before."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from classify.images.decode import decode
from classify.images.growing_cache import GrowingCache
from classify.images.sources.encoded import EncodedImages, ShardFile
from deepspeed_trial.errors import InvalidInput, UnreadableData

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
        if self._kept is not None and self.prepare(index):
            return torch.from_numpy(self._kept.read(index.numpy()))
        return default_collate(self._decode(index.numpy()))  # into memory that a worker shares

    def prepare(self, index: Tensor) -> bool:
        """Decodes and keeps what is not there of some images (B,); gives whether all are there now.

        Raises:
            UnreadableData: as ``index_select`` does.
        """
        if self._kept is None:
            return False
        indices = index.numpy()
        missing = indices[~self._kept.has(indices)]
        for part in np.array_split(missing, -(-len(missing) // READ) or 1):
            if self._kept.has_room:
                self._kept.write(part, [image.numpy() for image in self._decode(part)])
        return bool(self._kept.has(indices).all())

    def _decode(self, indices: np.ndarray) -> list[Tensor]:
        # Neighbours in a shard one after the other: they may lie in one block
        places = indices if self._images.places is None else self._images.places.numpy()[indices]
        order = places.argsort()
        parts = np.array_split(order, -(-len(indices) // READ) or 1)
        threads = min(torch.get_num_threads(), len(parts))
        try:
            if threads < 2:
                decoded = [self._decode_some(indices[part]) for part in parts]
            else:
                with ThreadPoolExecutor(threads) as pool:
                    decoded = list(pool.map(self._decode_some, (indices[part] for part in parts)))
        except InvalidInput as error:
            raise UnreadableData(error.errors) from error
        images = [image for part in decoded for image in part]
        return [images[place] for place in order.argsort()]

    def _decode_some(self, indices: np.ndarray) -> list[Tensor]:
        contents = self._images.read(indices.tolist(), self._shard_file)
        return [
            torch.from_numpy(decode(content, self._size, functools.partial(self._images.name, index)))
            for index, content in zip(indices.tolist(), contents, strict=True)
        ]
