"""Findings of an audit: near-duplicates, probably wrong labels, outliers, and classes that are too small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn import functional as F

from classify.images.listing import PARTS
from workbench.audit.dataset import Dataset

THUMBNAIL = 12  # the side of thumbnails, in pixels
ALIKE = 0.95  # the minimum correlation of the thumbnails of near-duplicates
COMPARED = 32  # the side of the images whose edges are compared, in pixels
SAME_EDGES = 0.85  # the minimum correlation of the edges of near-duplicates
CROPS = (1.0, 0.97, 0.95, 0.9375, 0.92, 0.9)  # the sides of the compared crops, as shares of the image's side
MOST = 20  # for each image, the maximum number of other images whose edges are compared
FEW = 30  # with fewer images of a class in a split, the class's metrics mean little
NEIGHBOURS = 10  # the number of neighbours whose mean similarity to an image is compared
FARTHEST = 0.01  # the share of images that are listed as outliers

LEAK, COPY, LABEL, OUTLIER = "leak", "copy", "label", "outlier"  # kinds of findings


@dataclass(frozen=True)
class Finding:
    """A finding about one image, or about two images.

    Attributes:
        kind: ``leak`` (near-duplicates in two splits), ``copy`` (near-duplicates in one split), ``label`` (a
            label to check) or ``outlier``.
        score: the correlation of near-duplicates, the probability that a label is right, or the mean cosine
            similarity of an outlier to its neighbours.
        images: the indices of the images; the first is the image to leave out.
        note: a description of the finding.
    """

    kind: str
    score: float
    images: tuple[int, ...]
    note: str


def near_duplicates(dataset: Dataset) -> list[Finding]:
    """Return the pairs of near-duplicates, the most similar first.

    The images of a pair may be mirrored, may differ in file format, size and brightness, and may be cropped
    by a few percent.
    """
    size = (COMPARED, COMPARED)
    small = torch.cat([_scaled(images, size).round().to(torch.uint8) for images in dataset.batches()])
    findings = []
    for score, one, other in sorted(_pairs(small), reverse=True):
        splits = [str(dataset.splits[index]) for index in (one, other)]
        first, second = (one, other) if PARTS.index(splits[0]) < PARTS.index(splits[1]) else (other, one)
        labels = [dataset.classes[dataset.labels[index]] for index in (first, second)]
        labelled = "" if labels[0] == labels[1] else f", labelled {labels[0]} and {labels[1]}"
        kind = COPY if splits[0] == splits[1] else LEAK
        where = " and ".join(dict.fromkeys(str(dataset.splits[index]) for index in (first, second)))
        findings.append(Finding(kind, score, (first, second), f"in {where}{labelled}"))
    return findings


def _pairs(small: Tensor) -> Iterator[tuple[float, int, int]]:
    """Yield the similarity and the two indices of each near-duplicate pair of images (N, 3, 32, 32) uint8.

    Two images are near-duplicates if their thumbnails correlate, and if the edges of one image correlate with
    the edges of a crop of the other image.
    """
    straight, mirrored = (
        torch.cat([_thumbnails(part.flip(3) if flip else part) for part in small.split(1000)])
        for flip in (False, True)
    )
    for first in range(0, len(small), 1000):
        rows = straight[first : first + 1000]
        as_is, as_mirrored = rows @ straight.T, rows @ mirrored.T
        likeness, others = torch.maximum(as_is, as_mirrored).triu(first + 1).topk(min(MOST, len(small)))
        for row, column in (likeness >= ALIKE).nonzero().tolist():
            one, other = first + row, int(others[row, column])
            is_mirrored = bool(as_mirrored[row, other] > as_is[row, other])
            score = _edge_likeness(small[one], small[other].flip(2) if is_mirrored else small[other])
            if score >= SAME_EDGES:
                yield min(score, 1.0), one, other


def _scaled(images: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(images.float(), size, mode="bilinear", align_corners=False, antialias=True)


def _thumbnails(images: Tensor) -> Tensor:
    """Return vectors (B, 432) float32 of images (B, 3, h, w) uint8, of length 1 (less for low contrast)."""
    small = _scaled(images, (THUMBNAIL, THUMBNAIL))
    small = (small - small.mean((2, 3), keepdim=True)).flatten(1)
    return small / small.norm(dim=1, keepdim=True).clamp(min=100)


def _edge_likeness(one: Tensor, other: Tensor) -> float:
    """Return the correlation of the edges of two images (3, h, w): the maximum over crops of either image."""
    pair = torch.stack([one, other]).float().mean(1, keepdim=True)
    whole, best = _edges(pair), -1.0
    for share in CROPS:
        grid = F.affine_grid(torch.tensor([[[share, 0, 0], [0, share, 0]]] * 2), list(pair.shape), False)
        cropped = _edges(F.grid_sample(pair, grid, align_corners=False))
        best = max(best, float((cropped * whole.flip(0)).sum(1).max()))
    return best


def _edges(grey: Tensor) -> Tensor:
    """Return the differences of neighbouring pixels in images (B, 1, h, w), as vectors of length 1."""
    inner = grey[..., 1:, 1:]
    edges = torch.cat([inner - grey[..., :-1, 1:], inner - grey[..., 1:, :-1]], 1).flatten(1)
    return edges / edges.norm(dim=1, keepdim=True).clamp(min=50)


def wrong_labels(dataset: Dataset, probabilities: np.ndarray) -> list[Finding]:
    """Return the images whose label differs from the prediction, the least probable labels first.

    Args:
        dataset: the images.
        probabilities: float64 (N, C), each image's probabilities from a head that was fitted without the
            image.
    """
    guesses, scores = probabilities.argmax(1), probabilities[np.arange(len(dataset)), dataset.labels]
    contradicted = np.flatnonzero(guesses != dataset.labels)
    findings = []
    for index in contradicted[np.argsort(scores[contradicted], kind="stable")].tolist():
        guess = int(guesses[index])
        label, other = dataset.classes[dataset.labels[index]], dataset.classes[guess]
        note = f"labelled {label}, looks like {other} ({probabilities[index, guess]:.0%})"
        findings.append(Finding(LABEL, float(scores[index]), (index,), note))
    return findings


def estimated_wrong(labels: np.ndarray, probabilities: np.ndarray) -> int:
    """Return an estimate of the number of wrong labels.

    A class is confident for an image if its probability for the image is at least its mean probability for
    the images with this label. A label counts as wrong if the most probable confident class is another class.
    Source: C. Northcutt, L. Jiang, I. Chuang, "Confident Learning", https://arxiv.org/abs/1911.00068

    Args:
        labels: int64 (N,); each class has an image.
        probabilities: float64 (N, C), each image's probabilities from a head that was fitted without the
            image.
    """
    means = np.array(
        [probabilities[labels == label, label].mean() for label in range(probabilities.shape[1])]
    )
    sure = np.where(probabilities >= means, probabilities, 0)
    return int((sure.any(1) & (sure.argmax(1) != labels)).sum())


def outliers(dataset: Dataset, features: np.ndarray) -> list[Finding]:
    """Return the 1 % of the images that are least similar to their ten nearest neighbours.

    Args:
        dataset: the images.
        features: float32 (N, D).
    """
    count = min(NEIGHBOURS + 1, len(dataset))  # an image is its own nearest neighbour
    centred = features - features.mean(0)
    distances, _ = NearestNeighbors(n_neighbors=count, metric="cosine").fit(centred).kneighbors(centred)
    likeness = 1 - distances[:, 1:].mean(1)
    farthest = np.argsort(likeness, kind="stable")[: max(1, round(FARTHEST * len(dataset)))].tolist()
    labels = [dataset.classes[label] for label in dataset.labels[farthest]]
    return [
        Finding(OUTLIER, float(likeness[index]), (index,), f"labelled {label}")
        for index, label in zip(farthest, labels, strict=True)
    ]


@dataclass(frozen=True)
class ClassRow:
    """Counts and accuracy of a class.

    Attributes:
        name: the class name.
        counts: the number of the class's images in each split.
        accuracy: the share of the class's images that a head, fitted without the image, classifies correctly.
        confused: the other class that the heads predict most often for these images, and its share of them.
        is_small: whether a split has fewer than 30 of the class's images.
    """

    name: str
    counts: Sequence[int]
    accuracy: float
    confused: tuple[str, float]
    is_small: bool


def classes(dataset: Dataset, probabilities: np.ndarray) -> list[ClassRow]:
    """Return the counts and the accuracy of every class; see ``wrong_labels`` for the probabilities."""
    guesses = probabilities.argmax(1)
    rows = []
    for label, name in enumerate(dataset.classes):
        of_class = dataset.labels == label
        counts = [int((of_class & (dataset.splits == split)).sum()) for split in dataset.sets]
        shares = np.bincount(guesses[of_class], minlength=len(dataset.classes)) / of_class.sum()
        accuracy, shares[label] = float(shares[label]), 0
        other = int(shares.argmax())
        confused = dataset.classes[other], float(shares[other])
        rows.append(ClassRow(name, counts, accuracy, confused, min(counts) < FEW))
    return rows
