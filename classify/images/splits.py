"""Splits a part of a dataset, such as ``train``, into random shares of each class; groups stay together."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from classify.images.listing import ALL, Listing, Rows, counts_of
from classify.images.settings import PARENT, DataSettings
from deepspeed_trial.errors import InvalidInput

_DRAW = 17  # separates these draws from others with the same seed


@dataclass(frozen=True, eq=False)
class Cut:
    """The splits of a part of a dataset. Each class has at least one image in each split.

    Attributes:
        shares: each held-out split's share of the images that the previous splits leave; ``train`` gets the
            rest.
        labels: the labels of all images, int64 (N,), or uint8 (N, C) of 0 and 1.
        seed: the seed of the draw.
        fold: the number of a fold, from 1, and the number of folds; the fold is the first split.
        groups: int64 (N,), the group of each image; all images of a group are in one split. None without
            groups. With several labels an image, each image is a group unless ``data.group`` names the
            groups.
        group: ``data.group``, for error lines.
    """

    shares: Mapping[str, float]
    labels: np.ndarray
    seed: int = 0
    fold: tuple[int, int] | None = None
    groups: np.ndarray | None = None
    group: str | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits, the training images last."""
        return (*self.shares, "train")

    def rows(self, split: str) -> Rows:
        """Return the indices of a split's images."""
        return np.flatnonzero(self._assigned == self.splits.index(split)) if self.shares else ALL

    def check(self, classes: Sequence[str]) -> None:
        """Check that every class has enough images or groups.

        Raises:
            InvalidInput: with a line for each class that has too few.
        """
        splits, folds = len(self.splits), self.fold[1] if self.fold else 0
        sizes, errors = counts_of(torch.from_numpy(self.labels), len(classes)), list[str]()
        for name, size in zip(classes, sizes, strict=True) if self.shares and self.group is None else ():
            has = f"the class {name!r} has {size} image{'s' * (size != 1)}, too few for"
            if not folds and size < splits:
                remedy = "add some, or set data.validation to null"
                errors.append(f"data.root: {has} {splits} splits; {remedy}")
            elif folds and (size < folds or size - -(-size // folds) < splits - 1):
                errors.append(f"data.fold: {has} {folds} folds; add some, or use fewer folds")
        if errors:
            raise InvalidInput(errors)
        if self.groups is not None and self.shares:
            self._check_groups(classes)

    @functools.cached_property
    def _folds(self) -> np.ndarray:
        """The fold of each image, int64 (N,), from 0."""
        assert self.fold and self.groups is not None
        return _assign(self.labels, self.groups, [1 / self.fold[1]] * self.fold[1], self.seed)

    @functools.cached_property
    def _assigned(self) -> np.ndarray:
        """The index of each image's split in ``splits``, int64 (N,)."""
        if self.groups is None:
            return self._drawn()
        if self.fold is None:
            return _assign(self.labels, self.groups, _parts_of_all(list(self.shares.values())), self.seed)
        assigned = np.zeros_like(self.groups)
        rest = self._folds != self.fold[0] - 1
        shares = _parts_of_all(list(self.shares.values())[1:])
        assigned[rest] = 1 + _assign(self.labels[rest], self.groups[rest], shares, self.seed)
        return assigned

    def _drawn(self) -> np.ndarray:
        """Draw each class's images, and assign them to the splits."""
        random, assigned = np.random.default_rng((self.seed, _DRAW)), np.empty_like(self.labels)
        shares = list(self.shares.values())
        for label in np.unique(self.labels).tolist():
            places, first = random.permutation(np.flatnonzero(self.labels == label)), 0
            if self.fold:  # its first index grows by one from class to class
                number, folds = self.fold
                is_held = np.arange(len(places)) % folds == (number - 1 + label) % folds
                assigned[places[is_held]] = 0
                places, first = places[~is_held], 1
            for split, size in enumerate(_divided(len(places), shares[first:]), first):
                assigned[places[:size]] = split
                places = places[size:]
        return assigned

    def _check_groups(self, classes: Sequence[str]) -> None:
        assert self.groups is not None
        parts = [(self._assigned, len(self.splits), "splits")]
        if self.fold:
            parts.insert(0, (self._folds, self.fold[1], "folds"))
        errors = dict[str, str]()
        for assigned, number, what in parts:
            for label, name in enumerate(classes):
                is_of_class = self.labels == label if self.labels.ndim == 1 else self.labels[:, label] > 0
                if len(np.unique(assigned[is_of_class])) == number or name in errors:
                    continue
                groups = len(np.unique(self.groups[is_of_class]))
                what_of_class = "group" if self.group else "image"
                has = f"the class {name!r} has {groups} {what_of_class}{'s' * (groups != 1)}"
                reason = f"too few for {number} {what}; add some, or use fewer {what}"
                if groups >= number:
                    reason = f"but not in each of {number} {what}; set another data.split_seed, or use"
                    reason += f" fewer {what}"
                key = f"data.group: {self.group!r}" if self.group else "data.root"
                errors[name] = f"{key}: {has}, {reason}"
        if errors:
            raise InvalidInput(errors.values())


def groups_of(listing: Listing | None, kept: Rows, settings: DataSettings) -> np.ndarray:
    """Return the group of each of the kept images by ``data.group``, int64 (N,).

    Raises:
        InvalidInput: if the images have no paths or no such column, or a path does not match the pattern.
    """
    group, key = settings.group or "", f"data.group: {settings.group!r}"
    if listing is None or listing.shards:
        raise InvalidInput(
            f"{key}: {settings.dataset} has no file for each image; split the dataset beforehand"
        )
    rows = np.arange(len(listing.labels))[kept].tolist()
    paths = [listing.name(row) for row in rows]
    paths = [path.removeprefix(settings.root).lstrip(os.sep) for path in paths]
    if listing.column is not None:
        names: Sequence[str | None] = [listing.column[row] for row in rows]
    elif group == PARENT:
        names = [os.path.basename(os.path.dirname(path)) for path in paths]
    elif not (pattern := re.compile(group)).groups:
        needs = f"give {PARENT}, or a regular expression with one group, e.g. '/(.+)-[0-9]'"
        raise InvalidInput(f"{key}: {settings.dataset} has no columns; {needs}")
    else:
        names = [found[1] if (found := pattern.search(path)) else None for path in paths]
    without = [path for path, name in zip(paths, names, strict=True) if not name]
    if without:
        more = f" and {len(without) - 1:,} others" if len(without) > 1 else ""
        reason = f"does not match the path {without[0]!r}{more}"
        raise InvalidInput(f"{key}: {reason}; correct the expression, or rename the files")
    return np.unique(np.array(names, object), return_inverse=True)[1]


def _divided(rest: int, shares: Sequence[float]) -> list[int]:
    """Return the number of a class's images in each split, at least one; the last split gets the rest."""
    counts = list[int]()
    for share in shares:
        later = len(shares) - len(counts)  # the splits after this one need an image each
        counts.append(max(1, min(round(rest * share), rest - later)))
        rest -= counts[-1]
    return [*counts, rest]


def _parts_of_all(shares: Sequence[float]) -> list[float]:
    """Convert shares of the remaining images to shares of all images, with sum 1."""
    parts, rest = list[float](), 1.0
    for share in shares:
        parts.append(rest * share)
        rest -= parts[-1]
    return [*parts, rest]


def _assign(labels: np.ndarray, groups: np.ndarray, shares: Sequence[float], seed: int) -> np.ndarray:
    """Assign whole groups to splits so that each split has approximately its share of each class.

    The groups with the largest shares of their classes are first. A group goes to the split where the squared
    deviations from the shares, over all classes, grow least. scikit-learn's StratifiedGroupKFold works
    similarly, for folds of equal size. The last groups of a class fill the splits that lack the class. An
    image of several labels counts in each of its classes, and in one more class that has all images.

    Args:
        labels: int64 (N,), or uint8 (N, C) of 0 and 1.
        groups: int64 (N,), the group of each image.
        shares: the share of each split, with sum 1.
        seed: the seed of the order of groups with about the same shares.

    Returns:
        The index of each image's split, int64 (N,).
    """
    if labels.ndim == 2 and len(np.unique(groups)) == len(groups):
        return _deal(labels, shares, seed)
    if labels.ndim == 2:
        images, classes_of_each = np.nonzero(np.column_stack([labels, np.ones(len(labels))]))
        first = np.flatnonzero(np.diff(images, prepend=-1))
        return _assign(classes_of_each, groups[images], shares, seed)[first]
    totals = np.bincount(labels)
    wanted, counts = np.outer(shares, totals), np.zeros((len(shares), len(totals)))
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    classes = [np.unique(labels[rows], return_counts=True) for rows in members]
    left = np.bincount(np.concatenate([each for each, _ in classes]), minlength=len(totals))
    turns = np.random.default_rng((seed, _DRAW)).permutation(len(members))
    weights = np.array([((more / totals[those]) ** 2).sum() for those, more in classes])[turns]
    weights = np.floor(np.log2(weights.round(9)))  # groups within a factor of 2 are in random order
    assigned = np.empty_like(labels)
    for turn in turns[np.argsort(-weights, kind="stable")].tolist():
        those, more = classes[turn]
        left[those] -= 1
        before = counts[:, those] - wanted[:, those]
        growth = (((before + more) ** 2 - before**2) / totals[those] ** 2).sum(1).round(9)
        is_empty = counts[:, those] == 0
        lacking = np.maximum(0, is_empty.sum(0) - is_empty - left[those]).sum(1)
        split = np.lexsort((growth, lacking))[0]
        counts[split, those] += more
        assigned[members[turn]] = split
    return assigned


def _deal(labels: np.ndarray, shares: Sequence[float], seed: int) -> np.ndarray:
    """Deal images of several labels to splits: each split has its share of each combination of labels.

    The images are in the order of their combinations, the rarest label first. Each image goes to the split
    that lacks the most images so far. Splits that have no image yet with one of its labels take precedence.

    Args:
        labels: uint8 (N, C) of 0 and 1.
        shares: the share of each split, with sum 1.
        seed: the seed of the order of images with the same labels.

    Returns:
        The index of each image's split, int64 (N,).
    """
    order = np.random.default_rng((seed, _DRAW)).permutation(len(labels))
    rarest_last = np.argsort(-labels.sum(0, dtype=np.int64), kind="stable")
    order = order[np.lexsort(labels[order][:, rarest_last].T)]
    packed = np.packbits(labels, axis=1)
    assigned, lacking, seen = np.empty(len(labels), np.int64), [0.0] * len(shares), [0] * len(shares)
    for image in order.tolist():
        of_image = int.from_bytes(packed[image].tobytes(), "big")
        lacking = [lack + share for lack, share in zip(lacking, shares, strict=True)]
        without = [split for split, there in enumerate(seen) if of_image & ~there] or range(len(shares))
        assigned[image] = split = max(without, key=lacking.__getitem__)
        lacking[split] -= 1
        seen[split] |= of_image
    return assigned
