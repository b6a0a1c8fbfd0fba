"""Classify images with an exported network, and validate the network."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

import data
from classify.config import experiment_file
from classify.config.metric_table import THRESHOLD
from classify.config.options import TestTimeAugmentation
from classify.config.rules import CROP
from classify.images import views
from classify.images.decode import decode_image
from classify.images.pixels import ImageSet
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.reports import confidence
from classify.reports.label_metrics import LabelMetrics
from classify.reports.metrics import ClassificationMetrics
from classify.reports.summary import metrics_summary
from deepspeed_trial.errors import ErrorList, InvalidInput
from workbench.publish.network import Classifier

BATCH, PIXELS = 500, 2**25  # the maximum images, and the maximum pixels, classified at a time
FOR_INT8 = 512  # the number of training images that scale int8 values


class Answers(NamedTuple):
    """The answers of a network.

    Attributes:
        probabilities: (N, C), the probability of every class at the network's temperature, float32; or the
            probability of every label, float64.
        unknown: whether the network is unsure about an image, (N,) bool; see ``threshold_of``.
    """

    probabilities: Tensor
    unknown: Tensor


def answers(
    classifier: Classifier,
    files: Sequence[pathlib.Path],
    how: TestTimeAugmentation | None = None,
    threshold: float = 0.0,
) -> tuple[list[pathlib.Path], Answers, ErrorList]:
    """Classify image files, with one batch in memory at a time.

    Args:
        classifier: the network.
        files: the images.
        how: the views of test-time augmentation; None for none.
        threshold: the threshold of the answer "unknown"; see ``threshold_of``.

    Returns:
        The files that could be read, their answers, and the errors of the other files.
    """
    size, fit = fitting(classifier.description)
    batch = _batch_of(classifier.description)
    readable: list[pathlib.Path] = []
    nothing = torch.empty(0, len(classifier.description["classes"])), torch.empty(0, dtype=torch.bool)
    found, errors = [Answers(*nothing)], ErrorList()
    for first in range(0, len(files), batch):
        decoded = []
        for file in files[first : first + batch]:
            with errors.collecting():
                decoded.append(torch.from_numpy(decode_image(file, size, fit)))
                readable.append(file)
        if decoded:
            found.append(classify(classifier, torch.stack(decoded), how, threshold))
    return readable, Answers(*map(torch.cat, zip(*found, strict=True))), errors


def fitting(description: Mapping[str, Any]) -> tuple[tuple[int, int], str]:
    """Return the height and width to decode images to, in pixels, and the value of ``data.fit``."""
    height, width = description["input"]["resize"]
    return (height, width), description["input"].get("fit") or CROP


def classify(
    classifier: Classifier, images: Tensor, how: TestTimeAugmentation | None = None, threshold: float = 0.0
) -> Answers:
    """Classify a batch of images (N, 3, h, w) uint8."""
    (inputs,) = inputs_of(classifier.description, images, len(images))
    logits, temperature = views.view_scores(classifier.classify, inputs, how)[1], classifier.temperature
    if classifier.thresholds is not None:
        return Answers(logits.double().sigmoid(), torch.zeros(len(logits), dtype=torch.bool))
    return Answers((logits / temperature).softmax(1), confidence.score(logits, temperature) < threshold)


def threshold_of(classifier: Classifier, given: str, net: pathlib.Path) -> float:
    """Return the threshold of ``--unknown``.

    Args:
        classifier: the network.
        given: the option's value; empty for the network's own threshold.
        net: the network's file.

    Raises:
        InvalidInput: if the value is not a probability, or the network has no threshold.
    """
    stored = classifier.description.get("confidence") or {}
    if classifier.thresholds is not None:
        raise InvalidInput(
            f"--unknown: {net} already gives an image any number of labels, or none; remove the option"
        )
    if not given and not stored:
        why = "its weights were saved before they were validated, or by an earlier version of this program"
        raise InvalidInput(f"--unknown: {net} has no threshold: {why}; give a threshold, e.g. --unknown=0.5")
    try:
        threshold = float(given) if given else float(stored[THRESHOLD])
    except ValueError:
        threshold = -1.0
    if not 0 <= threshold <= 1:
        remedy = "must be a probability from 0 to 1; write --unknown=0.5, or --unknown after the images"
        raise InvalidInput(f"--unknown: {given}: {remedy}")
    return threshold


def validation(
    classifier: Classifier, images: ImageSet, how: TestTimeAugmentation | None = None
) -> dict[str, Any]:
    """Return the metrics of a split of images, in the form of ``summary.json``."""
    metrics = ClassificationMetrics(images.classes, how=how, temperature=classifier.temperature)
    if classifier.thresholds is not None:
        metrics = LabelMetrics(images.classes, thresholds=classifier.thresholds)
    for chosen in torch.arange(len(images)).split(_batch_of(classifier.description)):
        (inputs,) = inputs_of(classifier.description, images.select(chosen), len(chosen))
        metrics.classify(classifier.classify, inputs, images.labels[chosen])
    counted = metrics.cross_slot_reduce([metrics.per_slot_reduce()])
    return metrics_summary(counted, images.classes)


def calibration(description: Mapping[str, Any], images: ImageSet) -> Iterator[Tensor]:
    """Yield inputs (B, 3, H, W) float32 of at most 512 evenly spaced training images."""
    chosen = torch.linspace(0, len(images) - 1, min(FOR_INT8, len(images))).long()
    return inputs_of(description, images.select(chosen), 64)


def open_images(
    config: str,
    overrides: Iterable[str],
    split: str | None,
    description: Mapping[str, Any],
    net: pathlib.Path,
) -> ImageSet:
    """Open the images of an experiment in a network's size.

    Args:
        config: the experiment file.
        overrides: ``PATH=VALUE`` texts.
        split: ``train``, ``val`` or ``test``; None for the data's last split.
        description: the network's description.
        net: the network's file.

    Raises:
        InvalidInput: if the data is missing or damaged, or has other classes or no such split.
    """
    settings = DataSettings.parse(experiment_file.read(config, overrides).get("data"))
    stored, fit = fitting(description)  # in place of the experiment file's values
    settings = dataclasses.replace(settings, image_size=stored, resize=None, fit=fit)
    splits = DataPlan.resolve(settings)
    if splits.has_several_labels != ("thresholds" in description):
        has = "several labels" if splits.has_several_labels else "one label"
        raise InvalidInput(
            f"data: {config}: gives an image {has}, unlike {net}; give the data of the network"
        )
    split = split or splits.names[-1]
    if split not in splits.names:
        raise InvalidInput(f"--split: {split}: the data has only {', '.join(splits.names)}; use one of these")
    source = splits.load(split)
    if list(source.classes) != description["classes"]:
        differ = f"its classes ({', '.join(source.classes[:12])}) differ from the classes of {net}"
        raise InvalidInput(f"data: {config}: {differ}; give the data of the network")
    return source


def views_of(text: str | None, description: Mapping[str, Any]) -> TestTimeAugmentation | None:
    """Parse ``--tta`` for images of the described size; raise ``InvalidInput``."""
    if text is None:
        return None
    how = views.parse(text, "--tta")
    views.check_shift("--tta", how, (description["input"]["height"], description["input"]["width"]))
    return how


def _batch_of(description: Mapping[str, Any]) -> int:
    """Return the number of images to classify at a time."""
    height, width = fitting(description)[0]
    return max(1, min(BATCH, PIXELS // (height * width)))


def inputs_of(description: Mapping[str, Any], images: Tensor, batch: int) -> Iterator[Tensor]:
    """Yield inputs (B, 3, H, W) float32 of images (N, 3, h, w) uint8."""
    seen = description["input"]
    size = [seen["height"], seen["width"]]
    for part in images.split(batch):
        yield data.as_inputs(functional.center_crop(part, size), seen["mean"], seen["std"])
