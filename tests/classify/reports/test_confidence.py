"""The temperature and the threshold of the answer "unknown"."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from classify.reports import confidence
from classify.reports.metrics import ClassificationMetrics

RANDOM = torch.Generator().manual_seed(0)
LOGITS = 6 * torch.randn(3000, 7, generator=RANDOM)
LABELS = torch.multinomial((LOGITS / 2.5).softmax(1), 1, generator=RANDOM).squeeze(1)  # true at 2.5


def counted(ranks: int, micro_batch: int) -> dict:
    """Count by ranks that take turns."""
    parts = torch.arange(3000).split(micro_batch)
    reducers = [ClassificationMetrics("abcdefg", fitted=3000) for _ in range(ranks)]
    for rank, metrics in enumerate(reducers):
        metrics.order = torch.cat(parts[rank::ranks])
        for part in parts[rank::ranks]:
            metrics.update(LOGITS[part], LABELS[part])
    return reducers[0].cross_slot_reduce([metrics.per_slot_reduce() for metrics in reducers])


def test_the_temperature_is_that_of_the_least_cross_entropy():
    found = confidence.fit(LOGITS.numpy(), LABELS.numpy())
    assert found is not None
    temperature, threshold = found
    assert temperature == pytest.approx(2.5, rel=0.05)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [scale], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure():
        search.zero_grad()
        loss = F.cross_entropy(LOGITS.double() / scale, LABELS)
        loss.backward()
        return loss

    search.step(closure)
    assert temperature == pytest.approx(scale.item(), rel=1e-4)
    scores = confidence.score(LOGITS, temperature)
    assert (scores < threshold).sum() == 30  # 1 % of 3,000


def test_without_a_mistake_the_temperature_stays_1():
    found = confidence.fit(LOGITS[:6].numpy(), LOGITS[:6].argmax(1).numpy())
    assert found is not None and found[0] == 1


def test_the_calibration_error_falls_and_is_that_of_evaluate():
    found = counted(1, 3000)
    assert found["calibration_error_scaled"] < 0.3 * found["calibration_error"]
    again = ClassificationMetrics("abcdefg", temperature=found["temperature"])
    again.update(LOGITS, LABELS)
    error = again.cross_slot_reduce([again.per_slot_reduce()])["calibration_error_scaled"]
    assert error == pytest.approx(found["calibration_error_scaled"], abs=1e-6)


def test_the_bits_are_the_same_for_any_number_of_ranks():
    whole = counted(1, 3000)
    for ranks, micro_batch in ((1, 7), (2, 50), (3, 13)):
        parts = counted(ranks, micro_batch)
        assert all(parts[name] == whole[name] for name in ("temperature", "confidence_threshold"))


def test_a_large_validation_is_fitted_to_evenly_spaced_images(monkeypatch):
    monkeypatch.setattr(confidence, "MOST", 7 * 1000)
    wanted = confidence.fit(LOGITS[::3].numpy(), LABELS[::3].numpy())
    for ranks in (1, 3):
        found = counted(ranks, 13)
        assert (found["temperature"], found["confidence_threshold"]) == wanted


def test_nothing_is_fitted_to_no_images_or_to_infinite_logits():
    assert confidence.fit(np.zeros((0, 3), np.float32), np.zeros(0, np.int64)) is None
    assert confidence.fit(np.full((2, 3), np.inf, np.float32), np.zeros(2, np.int64)) is None
    tested = ClassificationMetrics("abcdefg", fitted=3000)  # a test: no order
    tested.update(LOGITS, LABELS)
    assert "temperature" not in tested.cross_slot_reduce([tested.per_slot_reduce()])


def test_a_network_without_mistakes_gets_a_bounded_temperature():
    found = confidence.fit(100 * np.eye(3, dtype=np.float32), np.arange(3))
    assert found is not None
    temperature, threshold = found
    assert confidence.COLDEST <= temperature <= confidence.HOTTEST and 0 <= threshold <= 1
