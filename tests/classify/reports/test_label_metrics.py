"""Metrics of several labels an image equal scikit-learn's, whatever the ranks."""

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    multilabel_confusion_matrix,
    precision_recall_fscore_support,
)
from torch.nn import functional as F

from classify.config.metric_table import is_metric, metrics_for
from classify.reports import label_metrics
from classify.reports.label_metrics import LabelMetrics

CLASSES = tuple("abcde")
RANDOM = torch.Generator().manual_seed(0)
LABELS = (torch.rand(300, 5, generator=RANDOM) < torch.tensor([0.5, 0.3, 0.1, 0.02, 0.0])).to(torch.uint8)
LOGITS = torch.randn(300, 5, generator=RANDOM) + 1.5 * LABELS - 1
LOGITS[:40] = LOGITS[0]  # equal scores


def counted(ranks=1, micro_batch=300, **how):
    """Count by ranks that take turns."""
    parts = torch.arange(300).split(micro_batch)
    reducers = [LabelMetrics(CLASSES, **how) for _ in range(ranks)]
    for rank, metrics in enumerate(reducers):
        metrics.order = torch.cat(parts[rank::ranks])
        for part in parts[rank::ranks]:
            metrics.update(LOGITS[part], LABELS[part])
    return reducers[0].cross_slot_reduce([each.per_slot_reduce() for each in reducers]), reducers[0]


def test_metrics_are_scikit_learns():
    found, metrics = counted()
    wanted = average_precision_score(LABELS[:, :4], LOGITS[:, :4].sigmoid(), average=None)
    assert [found[f"average_precision/{name}"] for name in CLASSES[:4]] == pytest.approx(wanted, abs=1e-6)
    assert found["mean_average_precision"] == pytest.approx(wanted.mean(), abs=1e-6)  # no image has the last
    thresholds = np.array([found[f"threshold/{name}"] for name in CLASSES])
    given = LOGITS.double().sigmoid().numpy() >= thresholds
    assert (metrics.confusion == multilabel_confusion_matrix(LABELS, given)).all()
    of_each = precision_recall_fscore_support(LABELS, given, zero_division=0)
    for name, wanted in zip(("precision", "recall", "f1"), of_each, strict=False):
        assert found[f"macro_{name}"] == pytest.approx(wanted[:4].mean(), abs=1e-12)
    assert found["accuracy"] == pytest.approx(accuracy_score(LABELS, given), abs=1e-12)
    assert found["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(LOGITS, LABELS.float()).item())
    for kind, is_right in ((metrics.mistakes, False), (metrics.unsure, True)):
        assert [each["loss"] for each in kind] == sorted((each["loss"] for each in kind), reverse=True)
        for each in kind:
            assert each["label"] == LABELS[each["image"]].nonzero().flatten().tolist()
            assert each["predicted"] == np.flatnonzero(given[each["image"]]).tolist()
            assert (each["predicted"] == each["label"]) == is_right


def test_a_threshold_has_the_best_f1_of_all():
    chances = LOGITS.double().sigmoid().numpy()
    found = label_metrics.fit(chances, LABELS.numpy())
    for label in range(4):
        true, given = (
            LABELS[:, [label]].numpy(),
            chances[:, [label]] >= chances[:, label],
        )  # a column a threshold
        best = (2 * (true & given).sum(0) / (true.sum() + given.sum(0))).max()
        assert f1_score(LABELS[:, label], chances[:, label] >= found[label]) == pytest.approx(best, abs=1e-12)
        assert abs(chances[:, label] - found[label]).min() > 1e-7  # rounding changes no label
    assert found[4] == 0.5
    known = label_metrics.fit(
        np.array([[0.1, 0.9], [0.4, 0.8], [0.6, 0.2]]), np.array([[0, 1], [1, 0], [1, 0]])
    )
    assert known.tolist() == pytest.approx([0.25, 0.85])


def test_metrics_have_the_same_bits_for_any_number_of_ranks():
    whole, of_whole = counted()
    for ranks, micro_batch in ((1, 7), (2, 50), (3, 13)):
        parts, of_parts = counted(ranks, micro_batch)
        assert parts == whole and of_parts.mistakes == of_whole.mistakes


def test_given_thresholds_are_used_and_nothing_is_zero():
    found, _ = counted(thresholds=dict.fromkeys(CLASSES, 0.7))
    assert found["threshold/a"] == 0.7
    wanted = accuracy_score(LABELS, LOGITS.double().sigmoid() >= 0.7)
    assert found["accuracy"] == pytest.approx(wanted, abs=1e-12)
    nothing = LabelMetrics(CLASSES)
    empty = nothing.cross_slot_reduce([nothing.per_slot_reduce()])
    assert (empty["mean_average_precision"], empty["images"], empty["threshold/a"]) == (0, 0, 0.5)
    broken = LabelMetrics(CLASSES)
    broken.update(torch.full((3, 5), float("nan")), LABELS[:3])
    assert np.isnan(broken.cross_slot_reduce([broken.per_slot_reduce()])["loss"])


def test_the_names_of_the_metrics_are_known_before():
    names = metrics_for(CLASSES, has_views=False, several_labels=True)
    found, _ = counted()
    assert set(names) == {name for name in found if not name.startswith("threshold/")} - {"images"}
    assert all(is_metric(name) for name in names) and not is_metric("threshold/a")
