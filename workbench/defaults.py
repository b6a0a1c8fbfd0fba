"""Chooses the settings of ``classify FOLDER`` by the images, the minutes and the machine.

The settings change ``experiments/photos-scratch.yaml``, which has the recipe of airbench94_muon
(https://github.com/KellerJordan/cifar10-airbench). The rule (a pass is an epoch):

| setting | value |
|---|---|
| side of the images | the largest of ``SIDES`` up to the photos' size that leaves time for enough passes |
| enough passes | at least 10 over the training images, and at least 60,000 images in all |
| minutes | the given minutes, but at most the time of 100 passes, or up to 300 over fewer than 1,200 images |
| batch | a 24th of the training images, from 48 to 2,000 |
| smaller images at first | 0.75 of the side; 0.625 if full-size images leave time for fewer than 8 passes |
| validations | about 20, at least 3 passes apart |
| metric | ``accuracy_tta``; ``macro_recall`` if the largest class has 4 times the images of the smallest |
| bfloat16 | on processors with instructions for it, and on GPUs |
"""

from __future__ import annotations

import io
import math
import pathlib
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import joblib
import torch
from torch.utils import benchmark

from classify.images.decode import content_of, open_image
from classify.images.listing import FileListing
from classify.images.plan import DataPlan
from classify.images.settings import AUTO, DataSettings
from deepspeed_trial.machine import has_bf16_instructions

FILE = "experiments/photos-scratch.yaml"
FILE_OF_OTHER_NETS = "experiments/photos.yaml"
NET = "airbench"
MINUTES = 15.0
SIDES = (32, 48, 64, 96, 128, 160, 224)  # pixels
ENOUGH_PASSES, ENOUGH_IMAGES = 10, 60_000
MOST_PASSES, MOST_IMAGES = (100, 300), 120_000  # of 1,800 CIFAR-10 images, 245 passes were no better than 71
SMALLER_UNTIL = 0.7  # the share of the steps with smaller images
BATCHES = (48, 2_000)  # with fewer images, Muon takes longer than the forward and backward passes
SKEWED = 4  # the ratio of the largest class to the smallest one
SPEED_OF_A_GPU = 8_000  # images of 32x32 pixels a second, by a cautious estimate
OPERATIONS = 708e6  # for a 32x32 image in a training step of airbench with width 64
STEP = 80  # an optimizer step of airbench takes as long as the training on this many 32x32 images
EFFICIENCY = 0.7  # on a CPU, the FLOP/s of the training divided by the FLOP/s of a matrix product
LOOKED_AT = 50  # the number of images whose size is read


@dataclass(frozen=True)
class Images:
    """The images of a folder.

    Attributes:
        counts: the number of images of each class.
        splits: the number of images in ``train``, ``val`` and ``test``.
        size: the median width and height, in pixels.
    """

    counts: Mapping[str, int]
    splits: Mapping[str, int]
    size: tuple[int, int]

    @classmethod
    def of(cls, folder: pathlib.Path) -> Images:
        """Count the images of a folder in the form of ``data.dataset: imagefolder``.

        Raises:
            InvalidInput: if the folder has no classes, or too few images.
        """
        plan = DataPlan.resolve(DataSettings(dataset="imagefolder", root=str(folder), validation=AUTO))
        counts = [
            sum(of_parts) for of_parts in zip(*map(plan.source.class_counts, plan.source.parts), strict=True)
        ]
        splits = {name: plan.count(name) for name in plan.names}
        return cls(dict(zip(plan.classes, counts, strict=True)), splits, _median_size(plan))

    @property
    def is_skewed(self) -> bool:
        """Whether the largest class has at least ``SKEWED`` times the images of the smallest class."""
        return max(self.counts.values()) >= SKEWED * min(self.counts.values())


@dataclass(frozen=True)
class Settings:
    """Chosen settings.

    Attributes:
        file: the experiment file that the settings change.
        overrides: the changes, as ``PATH=VALUE``.
        net: the network.
        side: height and width of the network's images, in pixels.
        batch: the number of images of an optimizer step.
        minutes: the length of the training.
        passes: the estimated number of epochs on this machine.
        metric: the metric that chooses the best weights.
    """

    file: str
    overrides: list[str]
    net: str
    side: int
    batch: int
    minutes: float
    passes: float
    metric: str


def choose(images: Images, minutes: float = MINUTES, net: str | None = None) -> Settings:
    """Choose the settings by the rule.

    Args:
        images: the images of the folder.
        minutes: the time limit of the training.
        net: a network in place of ``NET``; the estimate still uses the speed of ``NET``.
    """
    train, speed, net = images.splits["train"], images_a_second(), NET if net is None else net
    batch = min(max(train // 24, BATCHES[0]), BATCHES[1], train)

    def passes_in(side: int, scale: float = 1.0) -> float:
        """Return the number of passes that the minutes are enough for."""
        smaller = 1 - SMALLER_UNTIL * (1 - scale**2)
        return 60 * minutes * speed / (train * (_cost(side) * smaller + STEP / batch))

    enough = max(ENOUGH_PASSES, ENOUGH_IMAGES / train)
    fitting = [side for side in SIDES if side <= min(images.size) and passes_in(side) >= enough]
    side = max(fitting, default=SIDES[0])
    scale = 1.0 if net != NET else 0.625 if passes_in(side) < 8 else 0.75
    possible = passes_in(side, scale)
    passes = min(possible, MOST_PASSES[1], max(MOST_PASSES[0], MOST_IMAGES / train))
    length = float(f"{minutes * passes / possible:.3g}")
    metric = "macro_recall" if images.is_skewed else "accuracy_tta" if net == NET else "accuracy"
    deepspeed = "hyperparameters.overwrite_deepspeed_args"
    period = min(max(3, round(passes / 20)), max(1, round(passes)))
    changes: dict[str, object] = {
        "data.image_size": side,
        f"{deepspeed}.train_batch_size": batch,
        "hyperparameters.max_length": f"{{minutes: {length:g}}}",
        "min_validation_period": f"{{epochs: {period}}}",
        "searcher.metric": metric,
    }
    if net == NET:
        changes["hyperparameters.progressive_resizing"] = f"{{scale: {scale}, until: {SMALLER_UNTIL}}}"
        changes["data.augment.crop"] = max(2, side // 16)
        if not _has_bf16():
            changes[f"{deepspeed}.torch_autocast"] = "null"
    else:
        changes |= {"hyperparameters.net": net, "hyperparameters.weights": "null"}
        changes |= {"data.resize": "null", "data.normalize": "dataset"}
    overrides = [f"{path}={value}" for path, value in changes.items()]
    file = FILE if net == NET else FILE_OF_OTHER_NETS
    return Settings(file, overrides, net, side, batch, length, passes, metric)


def _has_bf16() -> bool:
    """Return whether the GPU, or without a GPU the processor, computes bf16 products in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)
    return has_bf16_instructions()


def images_a_second() -> float:
    """Estimate how many 32x32 images ``NET`` trains on in a second, from the speed of a matrix product."""
    if torch.cuda.is_available():
        return SPEED_OF_A_GPU
    # OpenMP's threads belong to the thread that computes; a fork of this thread would wait for them forever
    with ThreadPoolExecutor(1) as pool:
        return EFFICIENCY * pool.submit(_flops).result() / OPERATIONS


def _flops() -> float:
    """Return the FLOP/s of a matrix product on all cores."""
    matrix = torch.ones(2048, 2048, dtype=torch.bfloat16 if has_bf16_instructions() else torch.float32)
    multiply = benchmark.Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=joblib.cpu_count())
    return 2 * len(matrix) ** 3 / multiply.blocked_autorange(min_run_time=0.3).median


def _cost(side: int) -> float:
    """Return the operations for an image divided by the operations for an image of 32x32 pixels."""
    return (side / 32) ** 2


def _median_size(plan: DataPlan) -> tuple[int, int]:
    """Return the median width and height of at most ``LOOKED_AT`` readable images, evenly spaced."""
    listings = [plan.listing(split) for split in plan.names]
    paths = [path for each in listings if isinstance(each, FileListing) for path in each.paths]
    sizes = []
    for path in paths[:: math.ceil(len(paths) / LOOKED_AT)]:
        try:
            with open_image(io.BytesIO(content_of(path))) as image:
                sizes.append(image.size)
        except Exception:  # an unreadable image: the training names it
            continue
    widths, heights = zip(*sizes, strict=True) if sizes else ((SIDES[0],), (SIDES[0],))
    return round(statistics.median(widths)), round(statistics.median(heights))
