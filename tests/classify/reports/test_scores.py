"""Scores counted by ranks equal scikit-learn's."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_recall_fscore_support, top_k_accuracy_score

from classify.config.metric_table import is_metric, metrics_for
from classify.reports.metrics import ClassificationMetrics

CLASSES = tuple("abcdefg")
RANDOM = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(300, 7, generator=RANDOM)
LABELS = torch.randint(0, 6, (300,), generator=RANDOM)  # none of the last class


def counted(ranks=1, micro_batch=300):
    """Count by ranks that take turns."""
    metrics = [ClassificationMetrics(CLASSES) for _ in range(ranks)]
    for turn, (logits, labels) in enumerate(
        zip(LOGITS.split(micro_batch), LABELS.split(micro_batch), strict=True)
    ):
        metrics[turn % ranks].update(logits, labels)
    return metrics[0].cross_slot_reduce([each.per_slot_reduce() for each in metrics])


def test_scores_are_scikit_learns():
    found = counted()
    predicted = LOGITS.argmax(1)
    of_each = precision_recall_fscore_support(LABELS, predicted, labels=range(7), zero_division=0)
    for name, wanted in zip(("precision", "recall", "f1"), of_each, strict=False):
        assert found[f"macro_{name}"] == pytest.approx(wanted[:6].mean(), abs=1e-12)  # of those with images
    for name, precision, recall in zip(CLASSES, of_each[0], of_each[1], strict=True):
        assert found[f"precision/{name}"] == pytest.approx(precision, abs=1e-12)
        assert found[f"accuracy/{name}"] == pytest.approx(recall, abs=1e-12)
    wanted = top_k_accuracy_score(LABELS, LOGITS, k=5, labels=range(7))
    assert found["top5_accuracy"] == pytest.approx(wanted, abs=1e-12)
    chances = LOGITS.softmax(1).max(1).values.double().numpy()
    right, edges = (predicted == LABELS).numpy(), np.linspace(0, 1, 16)
    error = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (chances >= low) & (chances < high)
        error += abs(chances[inside].sum() - right[inside].sum()) / 300
    assert found["calibration_error"] == pytest.approx(error, abs=1e-6)


def test_scores_are_the_same_however_the_images_are_split():
    whole = counted()
    for ranks, micro_batch in ((1, 7), (2, 50), (3, 13)):
        parts = counted(ranks, micro_batch)
        loss = pytest.approx(whole["loss"], rel=1e-6)  # of fp32 sums
        assert parts == {
            name: loss if name == "loss" else pytest.approx(each, abs=1e-12) for name, each in whole.items()
        }


def test_nothing_counted_and_few_classes():
    nothing = ClassificationMetrics(CLASSES)
    assert nothing.cross_slot_reduce([nothing.per_slot_reduce()])["macro_f1"] == 0
    few = ClassificationMetrics(CLASSES[:5])
    few.update(LOGITS[:, :5], LABELS.clamp(max=4))
    found = few.cross_slot_reduce([few.per_slot_reduce()])
    assert "top5_accuracy" not in found
    assert set(metrics_for(CLASSES[:5], has_views=False)) == found.keys() - {"images"}
    assert set(metrics_for(CLASSES, has_views=False)) == counted().keys() - {"images"}
    assert all(is_metric(name) for name in metrics_for(CLASSES, has_views=True))
    assert not is_metric("images") and not is_metric(None)
