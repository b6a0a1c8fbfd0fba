"""The names of a validation's metrics, by which searches, early stopping and best checkpoints may go."""

from __future__ import annotations

from collections.abc import Sequence

TTA_METRIC = "accuracy_tta"  # by test-time augmentation
TOP5_METRIC = "top5_accuracy"  # where there are more than five classes
MACRO_METRICS = ("macro_f1", "macro_recall", "macro_precision")
CALIBRATION_METRIC = "calibration_error"
# The metrics of all classes together; there is also one of each class by these prefixes.
METRICS = ("accuracy", TTA_METRIC, TOP5_METRIC, *MACRO_METRICS, CALIBRATION_METRIC, "loss")
PREFIXES = ("accuracy/", "precision/")
SMALLER_IS_BETTER = ("loss", CALIBRATION_METRIC)
SPEED_METRIC = "images_per_second"  # of the training since the last validation


def is_metric(value: object) -> bool:
    """Whether a validation may report a metric of that name, for some classes."""
    return isinstance(value, str) and (value in METRICS or value.startswith(PREFIXES))


def metrics_for(classes: Sequence[str], has_views: bool) -> list[str]:
    """The metrics that validations of these classes report.

    Args:
        classes: their names.
        has_views: whether there is test-time augmentation.
    """
    lacking = [TTA_METRIC] * (not has_views) + [TOP5_METRIC] * (len(classes) <= 5)
    of_each = [f"{prefix}{name}" for prefix in PREFIXES for name in classes]
    return [*(name for name in METRICS if name not in lacking), *of_each]
