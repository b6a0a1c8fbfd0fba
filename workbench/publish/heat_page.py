"""The page of ``checkpoint.py predict --heat``: images, classes, and the parts that raise a score."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import torch
from torch import Tensor

from classify.images.decode import decode_image
from classify.reports.classification_log import picture
from deepspeed_trial.errors import InvalidInput
from workbench.publish import heat_maps
from workbench.publish.network import Classifier
from workbench.reports import page

TEMPLATE = pathlib.Path(__file__).with_name("heat.html.jinja")
MOST = 500  # images on a page


def write(
    classifier: Classifier, files: Sequence[pathlib.Path], scores: Tensor, target: pathlib.Path
) -> None:
    """Write the page.

    Args:
        classifier: a classifier from a file of weights.
        files: the files of the images; all are readable.
        scores: (N, C) float32, the probability of every class.
        target: the page's file.

    Raises:
        InvalidInput: if there are more than 500 images, or in the same cases as ``heat_maps.heat_maps``.
    """
    if len(files) > MOST:
        raise InvalidInput(f"--heat: {len(files):,} images: a page shows at most {MOST}; give fewer")
    size = tuple(classifier.description["input"]["resize"])
    classes, shown = classifier.description["classes"], []
    for file, row in zip(files, scores, strict=True):
        pixels = torch.from_numpy(decode_image(file, size))[None]
        ((image, heat),) = heat_maps.drawn(classifier, pixels, row.argmax()[None])
        heading = f"{classes[int(row.argmax())]} {row.max():.1%}"
        shown.append(([picture(image), picture(heat)], heading, [str(file)]))
    page.write(page.render(TEMPLATE, {"title": "Heat maps", "images": shown}), target)
