"""Figures of how a network classifies: the confusion matrix, the hardest mistakes, and curves of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepspeed_trial.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_label(name: str) -> str:
    """A name as matplotlib has to be given it to show it as it is: ``$`` would begin a formula."""
    return printable(name).replace("$", r"\$")


def confusion_figure(confusion: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draws a confusion matrix, (C, C) counts with true classes as rows; of many classes without counts."""
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
    """Draws wrongly classified images, each under what it was taken for and, in brackets, what it is.

    Args:
        mistakes: with ``predicted`` and ``label``, as ``ClassificationMetrics`` gives them.
        images: uint8 (H, W, 3) each.
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
        predicted, label = (as_label(classes[mistake[key]]) for key in ("predicted", "label"))
        axis.set_title(f"{predicted} ({label})\nloss {mistake['loss']:.1f}", fontsize=8)
    if not mistakes:
        axes[0, 0].set_title("no mistakes", fontsize=8)
    return figure
