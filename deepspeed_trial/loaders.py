"""A trial's data on this rank: training, validation and test batches, and their counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import determined as det
import torch
from determined import pytorch
from torch.utils.data import RandomSampler

from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.random_state import randomness_kept

UNREPRODUCIBLE = (
    "{method}() returned a {kind}. The reproducibility of a trial needs a determined.pytorch.DataLoader."
    " If your loader shuffles, shards and resumes by itself, disable this check in the trial's __init__:"
    " context.disable_dataset_reproducibility_checks()"
)
TOO_FEW_FOR_A_PIPELINE = (
    "{what}: the number of train micro batches in its loader should not be less than the number of gradient"
    " accumulation steps, which a pipeline evaluates together"
)

logger = logging.getLogger("deepspeed_trial")


@dataclass(frozen=True)
class Batches:
    """Data to evaluate on.

    Attributes:
        loader: yields micro-batches; None on a rank that reads no data.
        count: calls of ``evaluate_batch``; equal on all ranks.
        size: examples per call.
    """

    loader: Any
    count: int
    size: int


@dataclass(frozen=True)
class Data:
    """All loaders of a rank.

    Attributes:
        training: an endless loader of micro-batches; None on a rank that reads no data.
        epoch: optimizer steps in an epoch; equal on all ranks.
        validation: batches from ``build_validation_data_loader``.
        test: batches from ``build_test_data_loader``; None if the trial has no test data.
    """

    training: Any
    epoch: int
    validation: Batches
    test: Batches | None


def build(trial: Any, context: Any, steps: int) -> Data:
    """Build a trial's loaders. Every rank calls it.

    Args:
        trial: a ``DeepSpeedTrial``.
        context: the trial's context.
        steps: optimizer steps done; the training data continues after them.

    Raises:
        InvalidInput: if there is too little data for a step or an evaluation.
        RuntimeError: if a loader is not Determined's and the trial did not disable that check.
    """
    accumulation = context.get_num_micro_batches_per_slot()
    builds, training, batches = context.mpu.should_build_data_loader, None, None
    if builds:
        training = _training(trial, context, steps * accumulation)
        batches = len(training)
    validation = _evaluated("validation data", trial.build_validation_data_loader, builds, context)
    counts = [number for number in context.distributed.allgather(batches) if number is not None]
    _warn_if_unequal(context, "training data", counts)
    epoch = min(counts) // accumulation
    if not epoch:
        what = f"a rank has fewer than the {accumulation} micro-batches of an optimizer step"
        raise InvalidInput(f"training data: {what}; use more data, fewer processes or a smaller batch")
    return Data(training, epoch, validation, _test(trial, context, builds))


def _test(trial: Any, context: Any, builds: bool) -> Batches | None:
    """Return the test data; None if there is none. Reading the first batch changes no random generator."""
    build = getattr(trial, "build_test_data_loader", None)
    loader = build() if build and builds else None
    if not any(context.distributed.allgather(loader is not None)):
        return None
    with randomness_kept(context.device):
        return _evaluated("test data", lambda: loader, loader is not None, context)


def _training(trial: Any, context: Any, skip: int) -> Any:
    """Return the endless loader, from micro-batch ``skip`` on; the order is the same on all ranks."""
    loader = trial.build_training_data_loader()
    if not isinstance(loader, pytorch.DataLoader):
        _refuse_unless_allowed(context, "build_training_data_loader", loader)
        logger.warning("Please make sure custom data loader repeats indefinitely.")
        return loader
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        # torch's global generator may differ between ranks, and differs after a resume
        loader.sampler.generator = torch.Generator().manual_seed(context.get_trial_seed())
    mpu = context.mpu
    return loader.get_data_loader(
        repeat=True, skip=skip, num_replicas=mpu.data_parallel_world_size, rank=mpu.data_parallel_rank
    )


def _evaluated(what: str, build: Callable[[], Any], builds: bool, context: Any) -> Batches:
    """Return data to evaluate on; the rank with the fewest batches sets the number for every rank.

    Args:
        what: name of the data in error lines.
        build: the trial's method that returns the loader.
        builds: whether this rank calls ``build``.
        context: the trial's context.
    """
    loader, found = None, None
    micro_batches = context.get_num_micro_batches_per_slot() if context.use_pipeline_parallel else 1
    if builds:
        loader, mpu = build(), context.mpu
        if isinstance(loader, pytorch.DataLoader):
            ranks = {"num_replicas": mpu.data_parallel_world_size, "rank": mpu.data_parallel_rank}
            loader = loader.get_data_loader(repeat=False, skip=0, **ranks)
        else:
            _refuse_unless_allowed(context, "build_validation_data_loader", loader)
        first = next(iter(loader), None)
        count = len(loader) // micro_batches
        found = count, 0 if first is None else pytorch.data_length(first) * micro_batches
        if len(loader) and not count:
            raise det.errors.InvalidExperimentException(TOO_FEW_FOR_A_PIPELINE.format(what=what))
    counts, sizes = zip(*filter(None, context.distributed.allgather(found)), strict=True)
    if not min(counts):
        raise InvalidInput(f"{what}: a rank gets no batch; use more data, fewer processes or smaller batches")
    _warn_if_unequal(context, what, counts)
    return Batches(loader, min(counts), min(sizes))


def _refuse_unless_allowed(context: Any, method: str, loader: Any) -> None:
    if context.checks_reproducibility:
        raise RuntimeError(UNREPRODUCIBLE.format(method=method, kind=type(loader).__name__))


def _warn_if_unequal(context: Any, what: str, counts: Sequence[int]) -> None:
    if min(counts) < max(counts) and context.distributed.rank == 0:
        least, most = min(counts), max(counts)
        logger.warning(f"ranks have {least} to {most} batches of {what}; every rank uses {least}")
