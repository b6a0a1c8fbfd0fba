"""``NetSpec``, the description of a network before it is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class NetSpec(NamedTuple):
    """The name and the arguments of a network.

    Attributes:
        name: one of ``registry.names()``, or ``timm/NAME``.
        num_classes: the number of classes.
        image_size: height and width of the images in pixels.
        args: further arguments of the network's function.
    """

    name: str
    num_classes: int
    image_size: tuple[int, int]
    args: Mapping[str, Any] | None = None
