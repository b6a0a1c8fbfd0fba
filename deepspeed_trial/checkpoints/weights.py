"""Check that weights fit a network, by their names, shapes and types."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from torch import Tensor


def mismatch(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """Return a text about the first weight that does not fit, with similar names; None if all fit.

    Integer values do not fit a floating-point weight. Floating-point values fit an integer weight, because
    some files store counts as fp32.

    Args:
        found: weights by name, e.g. of a file.
        wanted: the network's weights; their values do not matter.
    """
    names = sorted(wanted.keys() | found.keys())
    wrong = [name for name in names if not _fits(found.get(name), wanted.get(name))]
    if not wrong:
        return None
    here, there = found.get(wrong[0]), wanted.get(wrong[0])
    is_whole = here is not None and there is not None and here.shape == there.shape
    text = f"{wrong[0]} is {_shown(here, is_whole)}, but {_shown(there, is_whole)} in this network"
    if here is None:
        text += _nearest(wrong[0], found.keys() - wanted.keys(), "the file has")
    elif there is None:
        text += _nearest(wrong[0], wanted.keys() - found.keys(), "it has")
    return text if len(wrong) == 1 else f"{text}, and {len(wrong) - 1} more do not fit"


def _fits(here: Tensor | None, there: Tensor | None) -> bool:
    if here is None or there is None or here.shape != there.shape:
        return False
    return here.is_floating_point() or not there.is_floating_point()


def _shown(weight: Tensor | None, with_type: bool) -> str:
    if weight is None:
        return "none"
    return f"{tuple(weight.shape)}" + (f" of {weight.dtype}".replace("torch.", "") if with_type else "")


def _nearest(name: str, names: Iterable[str], who: str) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=2, cutoff=0.5)
    return f" ({who} {' and '.join(close)})" if close else ""
