"""Remote shards in local files, each fetched once a host."""

from __future__ import annotations

import hashlib
import os
import pathlib

from classify.images.sources.encoded import Fetch, Shard
from harness.host_lock import host_lock


class ShardCache:
    """A folder of fetched shards.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def file(self, shard: Shard, fetch: Fetch) -> pathlib.Path:
        """The local file of a shard, fetched if it is not there; raises as ``fetch`` does."""
        name = hashlib.sha256(repr((shard.url, shard.size, shard.sha256)).encode()).hexdigest()[:24]
        with host_lock(self.folder, name, "data.cache.folder") as folder:
            target, partial = folder / name, folder / f"{name}.partial"
            if not target.exists():
                fetch(shard, partial)
                os.replace(partial, target)
        return target
