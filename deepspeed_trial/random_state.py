"""The generators of random numbers from which a trial draws, and the order of its data."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler

State = tuple[Any, ...]


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch alike on every rank."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> State:
    """The states of the generators from which a trial draws, Python's, numpy's and torch's."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_state(state: State, device: torch.device) -> None:
    """Puts the generators into a state that ``random_state`` gave."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


@contextlib.contextmanager
def shuffled_by_seed(trial: Any, seed: int) -> Iterator[None]:
    """Has a loader with ``shuffle=True`` draw each epoch's order from the seed, on every rank the same."""
    build = trial.build_training_data_loader

    def build_with_generator() -> Any:
        loader = build()
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(seed)
        return loader

    trial.build_training_data_loader = build_with_generator
    try:
        yield
    finally:
        del trial.build_training_data_loader  # the class's again
