"""Losses by name, and the weights of classes."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from support import error_line
from torch.nn import functional as F

import net
from classify.config.hyperparameters import RULES, Hyperparameters
from classify.models import losses

CLASSES = ("cat", "dog", "owl")
LABELS = torch.tensor([0] * 50 + [1] * 5 + [2])
LOGITS = torch.randn(56, 3, generator=torch.Generator().manual_seed(0))


def loss(logits=LOGITS, labels=LABELS, **how):
    return losses.Loss(Hyperparameters(**how), CLASSES, lambda: LABELS)(logits, labels)


def test_cross_entropy_is_torchs_to_the_bit_and_the_others_take_the_same_targets():
    for smoothing in (0.0, 0.1):
        wanted = F.cross_entropy(LOGITS, LABELS, label_smoothing=smoothing)
        assert torch.equal(loss(label_smoothing=smoothing), wanted)
        weighted = loss(label_smoothing=smoothing, class_weights={"cat": 1})
        torch.testing.assert_close(weighted, wanted)
    targets = F.one_hot(LABELS, 3) * 0.9 + 0.1 / 3
    wanted = F.binary_cross_entropy_with_logits(LOGITS, targets)
    torch.testing.assert_close(loss(loss="bce", label_smoothing=0.1), wanted)
    torch.testing.assert_close(loss(loss="bce", labels=targets), wanted)
    chance = LOGITS.sigmoid()
    right = torch.where(F.one_hot(LABELS, 3) == 1, chance, 1 - chance)
    alpha = torch.where(F.one_hot(LABELS, 3) == 1, 0.25, 0.75)
    wanted = (-alpha * (1 - right) ** 3 * right.log()).sum(1).mean()
    torch.testing.assert_close(loss(loss={"focal": {"gamma": 3}}), wanted)


def test_the_reference_names_every_loss():
    assert all(name in RULES["loss"].values for name in losses.losses().keys() - net.LOSSES.keys())


@pytest.mark.parametrize("name", ["cross_entropy", "bce", "focal"])
def test_balanced_weights_are_of_all_images_whatever_the_micro_batch(name):
    weights = compute_class_weight("balanced", classes=np.arange(3), y=LABELS.numpy())
    single = torch.stack([loss(LOGITS[i : i + 1], LABELS[i : i + 1], loss=name) for i in range(56)])
    balanced = loss(loss=name, class_weights="balanced")
    torch.testing.assert_close(balanced, (single * torch.from_numpy(weights).float()[LABELS]).mean())
    halves = [loss(LOGITS[i::2], LABELS[i::2], loss=name, class_weights="balanced") for i in range(2)]
    torch.testing.assert_close(balanced, torch.stack(halves).mean())
    given = loss(loss=name, class_weights={"dog": 2})
    torch.testing.assert_close(given, (single * torch.tensor([1.0, 2, 1])[LABELS]).mean())


@pytest.mark.parametrize(
    ("choice", "weights", "line"),
    [
        ("focl", None, "loss: 'focl': no such loss; did you mean 'focal'? Or register the loss"),
        (["bce"], None, "loss: ['bce']: must be a name, or a name with arguments"),
        ({"focal": 2}, None, "loss.focal: 2: must be a mapping of its arguments"),
        ({"focal": {"gama": 2}}, None, "loss.focal.gama: 2: no such argument; did you mean"),
        ({"bce": {"p": 2}}, None, "loss.bce.p: 2: no such argument; the loss takes none"),
        ({"focal": {"gamma": "x"}}, None, "loss.focal: {'gamma': 'x'}: fails on two images ("),
        ("one number", None, "loss: 'one number': fails on two images (the loss must return a finite"),
        ("bce", "balance", "class_weights: 'balance': must be balanced, or a mapping"),
        ("bce", {"dgo": 2}, "class_weights.dgo: 2: no such class; did you mean 'dog'?"),
        ("bce", {"dog": 0}, "class_weights.dog: 0: must be a number above 0"),
    ],
)
def test_an_error_names_the_loss_or_the_class_weights(monkeypatch, choice, weights, line):
    monkeypatch.setitem(net.LOSSES, "one number", F.cross_entropy)
    assert error_line(losses.check, choice, weights, CLASSES).startswith(f"hyperparameters.{line}")
    monkeypatch.setitem(net.LOSSES, "focl", lambda logits, targets: (logits - targets).square().sum(1))
    losses.check("focl", {"dog": 2}, CLASSES)
