"""A linear head on stored features: multinomial logistic regression in float64, with an L2 penalty."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import joblib
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

INVERSE_PENALTIES = (0.001, 0.01, 0.1)  # scikit-learn's C, for features with a standard deviation of 1
FOLDS = 5
STEPS = 300  # the maximum number of steps of L-BFGS
WIDEST = 512  # the maximum number of features in cross-validation


def fit(
    features: np.ndarray, labels: np.ndarray, inverse_penalty: float, intercept: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Fit a linear head in one thread, so the result is bit-identical on any number of cores.

    Args:
        features: float64 (N, D).
        labels: int64 (N,), with each of the numbers 0 to C - 1 at least once.
        inverse_penalty: scikit-learn's ``C``, for features scaled to a standard deviation of 1.
        intercept: whether the head has a bias.

    Returns:
        Weights (C, D) and biases (C,), float64, for features that are not scaled.
    """
    with _one_thread():
        mean, scale = _moments(features, intercept)
        weights, biases = _fit((features - mean) / scale, labels, inverse_penalty, intercept)
        weights = weights / scale
        return weights, biases - weights @ mean


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute matrix products with one thread, and hide the warning that a fit has not converged."""
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _moments(features: np.ndarray, intercept: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation (D,); the mean is 0 for a head without a bias."""
    mean = features.mean(0) if intercept else np.zeros(features.shape[1])
    least = 1e-6 * max(1e-30, float(np.abs(features).max()))
    return mean, np.maximum(features.std(0), least)


def _fit(
    vectors: np.ndarray, labels: np.ndarray, inverse_penalty: float, intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    model = LogisticRegression(C=inverse_penalty, fit_intercept=intercept, max_iter=STEPS)
    model.fit(vectors, labels)
    weights, biases = model.coef_, np.broadcast_to(model.intercept_, len(model.coef_))
    if len(weights) == 1:  # for two classes scikit-learn returns only the weights of the second class
        weights, biases = np.concatenate([-weights, weights]) / 2, np.array([-biases[0], biases[0]]) / 2
    return weights, biases


def probabilities(features: np.ndarray, weights: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """Return the probability of each class, float64 (N, C), for features (N, D)."""
    scores = features @ weights.T + biases
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def _reduced(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (N, D); if D is above 512, projected onto their 512 largest principal components.

    The components keep their scale, so an L2 penalty has the same effect.
    """
    if vectors.shape[1] <= WIDEST:
        return vectors
    _, basis = np.linalg.eigh(vectors.T @ vectors)
    return vectors @ basis[:, : -WIDEST - 1 : -1]


def held_out(features: np.ndarray, labels: np.ndarray, intercept: bool = True) -> tuple[np.ndarray, float]:
    """Cross-validate heads; return the held-out probabilities (N, C) and the best inverse penalty.

    Each image's probabilities come from a head that was fitted without the image. The best inverse penalty
    has the lowest loss on the held-out images. The number of threads does not change the result.

    Args:
        features: float64 (N, D).
        labels: int64 (N,); each class has at least two images.
        intercept: whether the head has a bias.
    """
    count = max(2, min(FOLDS, int(np.bincount(labels).min())))
    folds = list(StratifiedKFold(count, shuffle=True, random_state=0).split(features, labels))

    def predict(inverse_penalty: float, fold: tuple[Any, Any]) -> np.ndarray:
        train, rest = fold
        return probabilities(vectors[rest], *_fit(vectors[train], labels[train], inverse_penalty, intercept))

    with _one_thread(), joblib.parallel_config("threading", n_jobs=joblib.cpu_count()):
        mean, scale = _moments(features, intercept)
        vectors = _reduced((features - mean) / scale)
        tasks = itertools.product(INVERSE_PENALTIES, folds)
        parts = joblib.Parallel()(joblib.delayed(predict)(*task) for task in tasks)
    found, losses = [], []
    for number in range(len(INVERSE_PENALTIES)):
        scores = np.empty((len(labels), int(labels.max()) + 1))
        for (_, rest), part in zip(folds, parts[number * count :], strict=False):
            scores[rest] = part
        found.append(scores)
        losses.append(-np.log(scores[np.arange(len(labels)), labels].clip(1e-12)).mean())
    best = int(np.argmin(losses))
    return found[best], INVERSE_PENALTIES[best]
