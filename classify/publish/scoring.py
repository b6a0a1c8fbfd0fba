"""Images classified by a network out of a file of any form, and the network judged by them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

import data
from classify.config import experiment_file
from classify.config.options import TestTimeAugmentation
from classify.images import views
from classify.images.decode import decode_image
from classify.images.image_set import ImageSet
from classify.images.settings import DataSettings
from classify.publish.network import Classifier
from classify.reports.metrics import ClassificationMetrics
from classify.reports.summary import metrics_summary
from deepspeed_trial.errors import ErrorList, InvalidInput

BATCH, PIXELS = 500, 2**25  # images classified at a time, and the pixels that they may have together
FOR_INT8 = 512  # training images by which int8 is scaled


def probabilities(
    classifier: Classifier, files: Sequence[pathlib.Path], how: TestTimeAugmentation | None = None
) -> tuple[list[pathlib.Path], Tensor, ErrorList]:
    """Classify image files with one batch of them in memory at a time.

    Returns:
        The files that could be read, the probability of every class for each of them, (N, C) float32, and the
        errors of the other files.
    """
    size = tuple(classifier.description["input"]["resize"])
    batch = _batch_of(classifier.description)
    readable: list[pathlib.Path] = []
    found, errors = [torch.empty(0, len(classifier.description["classes"]))], ErrorList()
    for first in range(0, len(files), batch):
        decoded = []
        for file in files[first : first + batch]:
            with errors.collecting():
                decoded.append(torch.from_numpy(decode_image(file, size)))
                readable.append(file)
        if decoded:
            found.append(classify(classifier, torch.stack(decoded), how))
    return readable, torch.cat(found), errors


def classify(classifier: Classifier, images: Tensor, how: TestTimeAugmentation | None = None) -> Tensor:
    """Classify a batch of images (N, 3, h, w) uint8: the probability of every class, (N, C) float32."""
    (inputs,) = inputs_of(classifier.description, images, len(images))
    return views.view_scores(classifier.classify, inputs, how)[1].softmax(1)


def validation(
    classifier: Classifier, images: ImageSet, how: TestTimeAugmentation | None = None
) -> dict[str, Any]:
    """The metrics of a split of images, as ``summary.json`` has them."""
    metrics = ClassificationMetrics(images.classes, how=how)
    for chosen in torch.arange(len(images)).split(_batch_of(classifier.description)):
        (inputs,) = inputs_of(classifier.description, images.select(chosen), len(chosen))
        metrics.classify(classifier.classify, inputs, images.labels[chosen])
    counted = metrics.cross_slot_reduce([metrics.per_slot_reduce()])
    return metrics_summary(counted, images.classes)


def calibration(description: Mapping[str, Any], images: ImageSet) -> Iterator[Tensor]:
    """Inputs (B, 3, H, W) float32 of 512 training images, evenly spaced, or of all where there are fewer."""
    chosen = torch.linspace(0, len(images) - 1, min(FOR_INT8, len(images))).long()
    return inputs_of(description, images.select(chosen), 64)


def open_images(
    config: str,
    overrides: Iterable[str],
    split: str | None,
    description: Mapping[str, Any],
    net: pathlib.Path,
) -> ImageSet:
    """The images of an experiment, in the size that a network wants.

    Args:
        config: the experiment file.
        overrides: ``PATH=VALUE`` each.
        split: ``train``, ``val`` or ``test``; None for the last that the data has.
        description: of the network.
        net: the network's file, for an error line.

    Raises:
        InvalidInput: if the data is missing, damaged, of other classes, or without such a split.
    """
    settings = DataSettings.parse(experiment_file.read(config, overrides).get("data"))
    stored = tuple(description["input"]["resize"])  # whatever size the experiment file names now
    settings = dataclasses.replace(settings, image_size=stored, resize=None)
    splits = settings.open_source()
    split = split or splits.names[-1]
    if split not in splits.names:
        raise InvalidInput(
            f"--split: {split}: the data has {', '.join(splits.names)} alone; use one of these"
        )
    source = data.load(settings, split, splits)
    if list(source.classes) != description["classes"]:
        differ = f"its classes ({', '.join(source.classes[:12])}) are not those of {net}"
        raise InvalidInput(f"data: {config}: {differ}; give its own data")
    return source


def views_of(text: str | None, description: Mapping[str, Any]) -> TestTimeAugmentation | None:
    """What ``--tta`` asks for, of images of the described size; raises ``InvalidInput``."""
    if text is None:
        return None
    how = views.parse(text, "--tta")
    views.check_shift("--tta", how, (description["input"]["height"], description["input"]["width"]))
    return how


def _batch_of(description: Mapping[str, Any]) -> int:
    """Return how many images are classified at a time."""
    height, width = description["input"]["resize"]
    return max(1, min(BATCH, PIXELS // (height * width)))


def inputs_of(description: Mapping[str, Any], images: Tensor, batch: int) -> Iterator[Tensor]:
    """Gives inputs (B, 3, H, W) float32 of images (N, 3, h, w) uint8."""
    seen = description["input"]
    size = [seen["height"], seen["width"]]
    for part in images.split(batch):
        yield data.as_inputs(functional.center_crop(part, size), seen["mean"], seen["std"])
