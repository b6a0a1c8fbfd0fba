"""Counts and pictures of a run's classified images, for its report."""

from __future__ import annotations

import base64
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F
from typing_extensions import override

from classify.config.metric_table import SPEED_METRIC
from classify.engine.trial_config import TrialConfig
from classify.images.listing import is_remote
from classify.images.mixup import apply_mixup, make_mixup
from classify.images.pixels import ImageSet
from classify.reports.metrics import SHOWN, ClassificationMetrics
from classify.reports.summary import CLASSIFICATION
from deepspeed_trial import redaction
from deepspeed_trial.events import Callback
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.output_files import replacing

AS_PNG = 64  # maximum pixels of the longer side; larger images are JPEG files
MOST_PIXELS = 2**20  # maximum pixels of all training images in the report together
OF_LAST = ("order", "confusion", "mistakes", "unsure", "bins")  # metrics' attributes that a test changes


class ClassificationLog(Callback):
    """Write ``OUTPUT/classification.json`` after every validation, and after the test.

    The file has a validation's confusion matrix, its bins of confidence, and the mistakes and the correct
    images with the largest losses. The validation is the last one, or with ``best_weights`` the best one;
    ``score`` is its ``searcher.metric``. ``test`` has the same entries for the test. ``images`` is the number
    of images by split and class, and ``augmented`` has training images as the network sees them.

    Args:
        context: the trial's context; the log writes only on the chief, and only into a run's folder.
        metrics: the reducer of the validations.
        images: the trial's images, ``data.Images``.
        config: the trial's configuration.
        experiment: the experiment, which names the searcher's metric.
    """

    def __init__(
        self,
        context: Any,
        metrics: ClassificationMetrics,
        images: Any,
        config: TrialConfig,
        experiment: Experiment,
    ) -> None:
        is_chief = context.distributed.rank == 0
        # Determined's context has no folder
        self.output: pathlib.Path | None = getattr(context, "output", None) if is_chief else None
        self.metrics, self.images, self.config, self.experiment = metrics, images, config, experiment
        self._log: dict[str, Any] = {}

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if self.output is None:
            return
        plan, score = self.images.plan, metrics.get(self.experiment.metric)
        if self.config.hyper.best_weights and not self._is_best(score, self.output):
            return
        if not self._log:
            counts = {split: plan.class_counts(split) for split in plan.names}
            self._log = {"classes": self.metrics.classes, "images": counts, "augmented": self._augmented()}
        self._log.update(self._classified(self.images.validation, plan.validation), score=score)
        self._write(self.output)

    def _is_best(self, score: Any, output: pathlib.Path) -> bool:
        """Return whether a validation is better than the best one before, whose score the run's file has."""
        self._read(output)
        best = self._log.get("score")
        return best is None or (score < best if self.experiment.smaller_is_better else score > best)

    @override
    def on_test_start(self) -> None:
        self._of_validation = {name: getattr(self.metrics, name) for name in OF_LAST}
        self.metrics.order = self.metrics.order_of_test

    @override
    def on_test_end(self, metrics: dict[str, Any]) -> None:
        if self.output is not None:
            self._read(self.output)  # when a finished run is tested again
            self._log["test"] = self._classified(self.images.test, "test")
            self._write(self.output)
        for name, value in self._of_validation.items():
            setattr(self.metrics, name, value)
        metrics.pop(SPEED_METRIC, None)  # a test has no training speed

    def _read(self, output: pathlib.Path) -> None:
        """Read the log of an earlier process, to continue it."""
        if not self._log and (output / CLASSIFICATION).exists():
            self._log = json.loads((output / CLASSIFICATION).read_text())

    def _write(self, output: pathlib.Path) -> None:
        with replacing(output / CLASSIFICATION) as partial:  # a report may read it meanwhile
            partial.write_text(json.dumps(self._log))

    def _classified(self, images: ImageSet, split: str) -> dict[str, Any]:
        """Return the log's entries about the images that the metrics have just counted."""
        return {
            "confusion": self.metrics.confusion.tolist(),
            "bins": self.metrics.bins.tolist(),
            "mistakes": self._shown(images, split, self.metrics.mistakes),
            "unsure": self._shown(images, split, self.metrics.unsure),
        }

    def _shown(
        self, images: ImageSet, split: str, chosen: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the chosen images, each with its picture and its file."""
        files = self.images.plan.file_names(split, [each["image"] for each in chosen])
        return [
            {**each, "picture": picture(images.image(each["image"])), "file": file and _whole(file)}
            for each, file in zip(chosen, files, strict=True)
        ]

    def _augmented(self) -> list[dict[str, Any]]:
        """Return augmented training images with their labels; none if a server has the shards."""
        if any(is_remote(shard.url) for shard in self.images.plan.shards):
            return []
        height, width = self.config.data.stored_size
        images, labels = self.images.augmented(min(SHOWN, max(4, MOST_PIXELS // (height * width))))
        inputs, hyper = images.float(), self.config.hyper
        shares = labels if labels.dim() == 2 else F.one_hot(labels)
        if mixup := make_mixup(hyper.mixup, hyper.cutmix, self.config.net.num_classes):
            inputs, shares = apply_mixup(mixup, inputs, labels, (self.config.seed, 0, 0, 0))
        pixels = inputs.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        return [
            {"picture": picture(image), "labels": of_image.nonzero().flatten().tolist()}
            for image, of_image in zip(pixels, shares, strict=True)
        ]


def picture(image: Any) -> str:
    """Encode an image, uint8 (H, W, 3), as a PNG or JPEG file in base64."""
    out = io.BytesIO()
    if max(image.shape[:2]) > AS_PNG:
        Image.fromarray(image).save(out, "jpeg", quality=88)
    else:
        Image.fromarray(image).save(out, "png")
    return base64.b64encode(out.getvalue()).decode()


def _whole(name: str) -> str:
    """Return an image's absolute path if it is a file; otherwise its name without credentials."""
    path = pathlib.Path(name)
    return str(path.absolute()) if not is_remote(name) and path.is_file() else redaction.text(name)
