"""Evaluations: validations, and the test at the end."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from deepspeed_trial import engines, metrics
from deepspeed_trial.events import Events
from deepspeed_trial.loaders import Batches

VALIDATION, TEST = "on_validation", "on_test"  # the names of their events begin with these texts

logger = logging.getLogger("deepspeed_trial")


@torch.no_grad()
def evaluate(trial: Any, context: Any, batches: Batches, events: Events, kind: str, most: int | None) -> Any:
    """Evaluate batches. Every rank calls it.

    Args:
        trial: a ``DeepSpeedTrial``.
        context: the trial's context.
        batches: the data.
        events: sends ``<kind>_start`` and ``<kind>_end`` to callbacks.
        kind: ``VALIDATION`` or ``TEST``.
        most: maximum number of batches; None for all.

    Returns:
        Metrics by name, reduced over batches and ranks, on every rank.
    """
    distributed = context.distributed
    for engine in context.models:
        engines.broadcast_buffers(engine)
    if distributed.rank == 0:
        context.core.train.set_status("validating")
    context.reset_reducers()
    for engine in context.models:
        engine.eval()
    began = time.monotonic()
    events.tell(f"{kind}_start")
    if kind == VALIDATION:
        events.tell("on_validation_epoch_start")
    of_batches = metrics.evaluated(trial, context, batches, most)
    if kind == VALIDATION:
        events.tell("on_validation_epoch_end", of_batches)
    result = metrics.reduced_over_ranks(of_batches, trial.evaluation_reducer(), distributed)
    result.update(metrics.as_numpy(context.reduce_metrics(for_training=False)))
    result = distributed.broadcast(result)
    events.tell(f"{kind}_end", result)
    if distributed.rank == 0:
        logger.info(f"evaluated {batches.count} batches per rank in {time.monotonic() - began:.1f} s")
    return result
