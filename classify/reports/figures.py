"""Figures: the confusion matrix and the images with the largest losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepspeed_trial.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_label(name: str) -> str:
    """Escape a name for matplotlib, where ``$`` begins a formula."""
    return printable(name).replace("$", r"\$")


def in_words(labels: int | Sequence[int], classes: Sequence[str]) -> str:
    """Return the names of an image's labels."""
    if isinstance(labels, int):
        return classes[labels]
    return " + ".join(classes[label] for label in labels) or "no label"


def confusion_figure(confusion: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draw a confusion matrix (C, C), whose rows are true classes; above 20 classes it has no numbers."""
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    few = len(classes) <= 20
    side = 2.5 + 0.4 * min(len(classes), 40)
    figure = Figure(figsize=(side, side), layout="constrained")
    labels = [as_label(name) for name in classes] if few else None
    display = ConfusionMatrixDisplay(np.asarray(confusion), display_labels=labels)
    display.plot(
        ax=figure.subplots(), include_values=few, colorbar=False, cmap="Blues", xticks_rotation="vertical"
    )
    return figure


def mistakes_figure(
    mistakes: Sequence[Mapping[str, Any]], images: Sequence[np.ndarray], classes: Sequence[str]
) -> Figure:
    """Draw wrongly classified images under their predicted class and, in brackets, their true class.

    Args:
        mistakes: mappings with ``predicted``, ``label`` and ``loss``; see ``ClassificationMetrics``.
        images: the mistakes' images, uint8 (H, W, 3).
        classes: the class names.
    """
    from matplotlib.figure import Figure

    columns = 4
    rows = max(1, -(-len(mistakes) // columns))
    figure = Figure(figsize=(1.8 * columns, 2.0 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, mistake, image in zip(axes.flat, mistakes, images, strict=False):
        axis.imshow(image)
        predicted, label = (as_label(in_words(mistake[key], classes)) for key in ("predicted", "label"))
        axis.set_title(f"{predicted} ({label})\nloss {mistake['loss']:.1f}", fontsize=8)
    if not mistakes:
        axes[0, 0].set_title("no mistakes", fontsize=8)
    return figure
