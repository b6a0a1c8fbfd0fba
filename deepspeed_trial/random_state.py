"""The random number generators of a trial: Python's, NumPy's and torch's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

State = tuple[Any, ...]


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch with the same seed on every rank, and let GPUs compute deterministically.

    By default sums of a GPU depend on the order of its threads. torch warns of an operation that
    has no deterministic form. A trial may call ``torch.use_deterministic_algorithms(False)``.
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def random_state(device: torch.device) -> State:
    """Return the states of all generators."""
    gpu = None if device.type == "cpu" else getattr(torch, device.type).get_rng_state()
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def set_random_state(state: State, device: torch.device) -> None:
    """Set the generators to the states that ``random_state`` returned."""
    python, numpy, cpu, gpu = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if gpu is not None:
        getattr(torch, device.type).set_rng_state(gpu)


@contextlib.contextmanager
def randomness_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators as they were before the block."""
    before = random_state(device)
    yield
    set_random_state(before, device)
