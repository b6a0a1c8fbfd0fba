"""Whether images are decoded before the first step or when a step needs them, and what is kept of them."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass

from torch import Tensor

from classify.images.cache import in_bytes
from classify.images.settings import BALANCED, ONCE, STREAM, DataSettings
from classify.images.sources import Source
from classify.images.sources.decode_once import AHEAD
from classify.images.sources.encoded_source import EncodedSource
from classify.images.sources.remote import is_remote
from classify.images.splits import Splits
from classify.images.streamed import StreamedImages
from deepspeed_trial.errors import ErrorList

LARGE = 2**33  # bytes of decoded images, from which on they are streamed where nothing is said
WINDOW = 16  # shards that are shuffled together, where streamed ones are remote and nothing is said


@dataclass(frozen=True)
class Streaming:
    """How the images of a dataset are decoded.

    Attributes:
        streams: whether they are decoded when a step needs them.
        keeps: whether those are kept decoded, for later epochs and runs.
        window: how many shards are shuffled together; None for all.
    """

    streams: bool = False
    keeps: bool = False
    window: int | None = None

    @classmethod
    def resolve(cls, settings: DataSettings, splits: Splits) -> Streaming:
        """What the ``data`` section says of a dataset, or where it says nothing what goes with its size.

        Raises:
            InvalidInput: for each setting that does not go with the dataset.
        """
        source, errors, limit = splits.source, ErrorList(), settings.cache_limit
        is_encoded = isinstance(source, EncodedSource)
        pixels = 3 * math.prod(settings.stored_size) * sum(source.count(part) for part in source.parts)
        is_large = pixels > (LARGE if limit is None else min(LARGE, limit))
        streams = is_encoded and (settings.decode == STREAM or (settings.decode is None and is_large))
        shards = [each for split in splits.names for each in splits.shards(split)]
        remote = [shard.size for shard in dict.fromkeys(shards) if is_remote(shard.url)]
        window = settings.window
        if window is None and streams and remote:
            window = WINDOW
        window = window if isinstance(window, int) and splits.windows("train", window) else None
        if settings.decode == STREAM and not is_encoded:
            errors.lines.append(f"data.decode: 'stream': {settings.dataset} has no image files; use once")
        if isinstance(settings.window, int) and not shards:
            errors.lines.append(f"data.window: {settings.window}: the dataset has no shards; remove it")
        if window and settings.sampling == BALANCED:
            what = "takes images of all shards at any time; set data.window to all"
            errors.lines.append(f"data.sampling: {BALANCED!r}: {what}")
        if streams and settings.device == "cuda":
            errors.lines.append("data.device: 'cuda': images that are streamed are on the host; use auto")
        needed = sum(remote)
        if window or not streams:  # those of a window, and of the next one, which is fetched meanwhile
            needed = sum(sorted(remote)[-2 * max(window or 0, AHEAD) :])
        shown = f"data.cache.limit: {settings.cache.limit!r}"
        if limit is not None and needed > limit:
            kept = f"{in_bytes(needed)} of shards have to be there at a time; raise it"
            errors.lines.append(f"{shown}: {kept}, or set a smaller data.window")
        elif limit is not None and settings.decode == ONCE and pixels > limit:
            what = f"the decoded images need {in_bytes(pixels)}; raise it, or set data.decode to stream"
            errors.lines.append(f"{shown}: {what}")
        errors.raise_any()
        return cls(streams, streams and _has_room(source, settings, pixels, needed), window)

    def decode(
        self, source: Source, part: str, size: tuple[int, int]
    ) -> tuple[Tensor | StreamedImages, Tensor]:
        """Images (N, 3, H, W) uint8 of a part, or what decodes them when they are asked for, and labels."""
        if self.streams and isinstance(source, EncodedSource):
            return source.stream(part, size, self.keeps)
        return source.load(part, size)


def _has_room(source: Source, settings: DataSettings, pixels: int, shards: int) -> bool:
    """Whether decoded images may be kept beside the shards."""
    if not isinstance(source, EncodedSource):
        return False
    if settings.cache_limit is not None:
        return pixels + shards <= settings.cache_limit
    folder = source.location.folder
    height, width = settings.stored_size
    if any(folder.glob(f".images-*-{height}x{width}.growing")):
        return True  # as was found when that was begun
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return pixels + shards <= shutil.disk_usage(folder).free
