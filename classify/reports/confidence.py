"""Temperature scaling, and the threshold of the answer "unknown".

The temperature T of softmax(logits / T) minimises the cross-entropy of the validation images, as in
https://arxiv.org/abs/1706.04599. The threshold is the score that 99 % of the validation images reach.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

KEPT = 0.99  # share of the validation images that keep their answer at the threshold
MOST = 2**20  # maximum logits in a fit, which reads evenly spaced images of a larger validation
COLDEST, HOTTEST = 0.01, 100.0  # limits of the temperature


def score(logits: Tensor, temperature: float) -> Tensor:
    """Return the confidence, (N,) float64: the largest probability at a temperature.

    Args:
        logits: (N, C).
        temperature: T of softmax(logits / T).
    """
    return (logits.double() / temperature).softmax(1).amax(1)


def fit(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float] | None:
    """Return temperature and threshold; None without images or if a logit is not finite.

    Apart from rounding, the result does not depend on the order of the images.

    Args:
        logits: (N, C) float32.
        labels: (N,) int64.
    """
    from scipy.optimize import minimize_scalar  # takes a second to import

    if not len(logits) or not np.isfinite(logits).all():
        return None
    scores = logits.astype(np.float64)
    scores -= scores.max(1, keepdims=True)
    right = scores[np.arange(len(labels)), labels]

    def cross_entropy(log: float) -> float:
        temperature = math.exp(log)
        return float(np.mean(np.log(np.exp(scores / temperature).sum(1)) - right / temperature))

    temperature = 1.0  # without a mistake the cross-entropy has no minimum above 0
    if (right < 0).any():
        bounds = math.log(COLDEST), math.log(HOTTEST)
        found = minimize_scalar(cross_entropy, bounds=bounds, method="bounded", options={"xatol": 1e-6})
        temperature = math.exp(found.x)
    ordered = score(torch.from_numpy(logits), temperature).sort().values
    return temperature, float(ordered[int((1 - KEPT) * len(ordered))])
