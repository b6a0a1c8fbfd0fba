"""The losses of this module and of ``net.py``, and the weighted loss of a micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import sigmoid_focal_loss

import net as own
from classify.config.hyperparameters import Hyperparameters
from classify.config.rules import is_number
from classify.config.sections import nearest_or, unknown_keys
from deepspeed_trial.errors import ErrorList, InvalidInput, nearest, one_line

CROSS_ENTROPY, BALANCED = "cross_entropy", "balanced"
OF_ONE_LABEL = (CROSS_ENTROPY,)  # losses of a softmax, which ``data.several_labels`` refuses
KEY, WEIGHTS = "hyperparameters.loss", "hyperparameters.class_weights"

LossFunction = Callable[..., Tensor]


def bce(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each image's binary cross-entropy, averaged over classes (https://arxiv.org/abs/2110.00476)."""
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)


def focal(logits: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2) -> Tensor:
    """Return each image's sigmoid focal loss, summed over classes (https://arxiv.org/abs/1708.02002)."""
    return sigmoid_focal_loss(logits, targets, alpha, gamma).sum(1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of a softmax for each image, (B,)."""
    return F.cross_entropy(logits, targets, reduction="none")


def distillation(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Return the KL divergence from a teacher's probabilities, times the squared temperature: a scalar.

    The factor keeps the scale of the gradients (https://arxiv.org/abs/1503.02531).

    Args:
        logits: the network's logits, (B, C) float32.
        taught: the teacher's logits, (B, C) float32.
        temperature: T of softmax(logits / T).
    """
    ours, theirs = ((each / temperature).log_softmax(1) for each in (logits, taught))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


def losses() -> dict[str, LossFunction]:
    """Return the losses that ``hyperparameters.loss`` may name."""
    return {CROSS_ENTROPY: cross_entropy, "bce": bce, "focal": focal, **own.LOSSES}


def check(choice: Any, class_weights: Any, classes: Sequence[str], several_labels: bool = False) -> None:
    """Try a loss on two images, and check that the weighted classes exist.

    Args:
        choice: ``hyperparameters.loss``: a name, or a mapping of the name to the loss's arguments.
        class_weights: ``hyperparameters.class_weights``.
        classes: the names of the classes.
        several_labels: whether an image may have any number of labels.

    Raises:
        InvalidInput: with a line for each error.
    """
    errors = ErrorList()
    with errors.collecting():
        name = _check_loss(choice, len(classes))
        if several_labels and name in OF_ONE_LABEL:
            reason = "is for one label an image, but data.several_labels is set"
            errors.lines.append(f"{KEY}: {name!r}: {reason}; use bce or focal")
        elif several_labels and class_weights and name != "bce":
            reason = (
                "with data.several_labels, only the loss bce takes class weights; use bce, or remove this key"
            )
            errors.lines.append(f"{WEIGHTS}: {class_weights!r}: {reason}")
    for name, weight in class_weights.items() if isinstance(class_weights, Mapping) else ():
        if str(name) not in classes:
            errors.lines.append(f"{WEIGHTS}.{name}: {weight!r}: no such class; {nearest(name, classes)}")
        elif not (is_number(weight, below=1e6) and weight > 0):
            errors.lines.append(f"{WEIGHTS}.{name}: {weight!r}: must be a number above 0, e.g. 2")
    if class_weights is not None and class_weights != BALANCED and not isinstance(class_weights, Mapping):
        must = "must be balanced, or a mapping of classes to their weights, e.g. {cat: 2}"
        errors.lines.append(f"{WEIGHTS}: {class_weights!r}: {must}")
    errors.raise_any()


def _named(choice: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of ``hyperparameters.loss``; raise ``InvalidInput``."""
    entry = {choice: None} if isinstance(choice, str) else choice
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise InvalidInput(
            f"{KEY}: {choice!r}: must be a name, or a name with arguments, e.g. {{focal: {{gamma: 1}}}}"
        )
    ((name, given),) = entry.items()
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(f"{KEY}.{name}: {given!r}: must be a mapping of its arguments, or nothing")
    return name, given or {}


def _check_loss(choice: Any, classes: int) -> str:
    """Try the loss, and return its name; raise ``InvalidInput``."""
    name, arguments = _named(choice)
    if name not in losses():
        remedy = nearest_or(name, losses(), "register the loss in net.py")
        raise InvalidInput(f"{KEY}: {name!r}: no such loss; {remedy}")
    known = list(inspect.signature(losses()[name]).parameters)[2:]
    errors = unknown_keys(
        f"{KEY}.{name}.", arguments, known, "no such argument", no_keys="the loss takes none"
    )
    if errors:
        raise InvalidInput(errors)
    logits, targets = torch.zeros(2, classes, requires_grad=True), torch.eye(classes)[[0, -1]]
    try:
        with torch.enable_grad():
            values = losses()[name](logits, targets, **arguments)
            if not (isinstance(values, Tensor) and values.shape == (2,) and values.isfinite().all()):
                raise ValueError("the loss must return a finite number for each image, a tensor (B,)")
            values.sum().backward()
    except Exception as error:  # losses raise different types
        shown = f"{KEY}.{name}: {dict(arguments)!r}" if arguments else f"{KEY}: {name!r}"
        raise InvalidInput(f"{shown}: fails on two images ({one_line(error)}); change it") from error
    return name


class Loss:
    """The loss of a micro-batch: the mean over its images, each weighted by its class.

    If images have several labels, a label's weight multiplies its loss on the images with this label.

    Args:
        hyper: checked hyperparameters, with ``loss``, ``class_weights``, ``label_smoothing``, ``teacher_*``.
        classes: the names of the classes.
        labels: a function that returns the labels of all training images, (N,) int64, or (N, C) uint8 for
            several labels.
        several_labels: whether an image may have any number of labels.
    """

    def __init__(
        self,
        hyper: Hyperparameters,
        classes: Sequence[str],
        labels: Callable[[], Tensor],
        several_labels: bool = False,
    ) -> None:
        self.hyper, self.classes, self.labels, self.several_labels = hyper, classes, labels, several_labels
        self.name, self.arguments = _named(hyper.loss)
        self.function = losses()[self.name]
        self._weights: Tensor | None = None

    def __call__(self, logits: Tensor, labels: Tensor, taught: Tensor | None = None) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            logits: (B, C) float32.
            labels: (B,) int64, or (B, C) for mixed images and for several labels an image.
            taught: logits of a teacher, (B, C) float32; None without a teacher.
        """
        loss = self._of_labels(logits, labels)
        if taught is None:
            return loss
        learned = distillation(logits, taught, self.hyper.teacher_temperature)
        return self.hyper.teacher_weight * learned + (1 - self.hyper.teacher_weight) * loss

    def _of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.name == CROSS_ENTROPY and not self.hyper.class_weights:
            return F.cross_entropy(logits, labels, label_smoothing=self.hyper.label_smoothing)
        targets = F.one_hot(labels, logits.shape[1]).float() if labels.dim() == 1 else labels.float()
        chance = 1 / 2 if self.several_labels else 1 / logits.shape[1]
        smoothed = torch.lerp(targets, torch.full_like(targets, chance), self.hyper.label_smoothing)
        if self.hyper.class_weights and self._weights is None:
            self._weights = self._class_weights().to(logits.device)
        if self.hyper.class_weights and self.several_labels:
            return F.binary_cross_entropy_with_logits(logits, smoothed, pos_weight=self._weights)
        values = self.function(logits, smoothed, **self.arguments)
        if self._weights is not None:
            values = values * (targets @ self._weights)
        return values.mean()

    def _class_weights(self) -> Tensor:
        """Return the weight of each class, (C,); balanced weights have a mean of 1 over the training images.

        With several labels an image, a label's balanced weight is the number of images without the label,
        divided by the number of images with it.
        Source: https://scikit-learn.org/stable/modules/generated/sklearn.utils.class_weight.compute_class_weight.html
        """
        if isinstance(self.hyper.class_weights, Mapping):
            given = {str(name): float(weight) for name, weight in self.hyper.class_weights.items()}
            return torch.tensor([given.get(name, 1.0) for name in self.classes])
        labels = self.labels().cpu()
        if self.several_labels:
            counts = labels.sum(0)
            return (len(labels) - counts) / counts.clamp(min=1)
        counts = torch.bincount(labels, minlength=len(self.classes))
        return counts.sum() / (counts.clamp(min=1) * (counts > 0).sum())
