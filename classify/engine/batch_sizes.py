"""The three batch fields of a DeepSpeed configuration: what fills those that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from classify.engine.deepspeed_keys import ACCUMULATION, BATCH_KEYS, MICRO_BATCH, TOTAL_BATCH
from classify.engine.migration import AUTO


def is_to_be_tried(config: Mapping[str, Any]) -> bool:
    """Whether a configuration leaves the micro-batch of the batch that it asks for to be found by trying."""
    asks = config.get(TOTAL_BATCH, AUTO) != AUTO and config.get(MICRO_BATCH) == AUTO
    return asks and config.get(ACCUMULATION, AUTO) == AUTO


def resolve(config: dict[str, Any], replicas: int) -> list[str]:
    """Fills in the batch fields that are missing, for the model replicas at hand.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel size.
    """
    given = {key: config[key] for key in BATCH_KEYS if config.get(key) is not None}
    total, micro, accumulation = (given.get(key) for key in BATCH_KEYS)
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        total = micro * accumulation * replicas
    elif micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * replicas)
    else:
        accumulation = accumulation or total // (micro * replicas)
    if micro * accumulation * replicas != total:
        return [_why_indivisible(given, replicas)]
    config.update(zip(BATCH_KEYS, (total, micro, accumulation), strict=True))
    return []


def _why_indivisible(given: dict[str, int], replicas: int) -> str:
    """Says by what ``train_batch_size`` must be divisible, and its nearest values that are."""
    total = given[TOTAL_BATCH]
    others = {key: value for key, value in given.items() if key != TOTAL_BATCH}
    factors = [f"{replicas} {'process' if replicas == 1 else 'processes'}"]
    factors += [f"{key} {value}" for key, value in others.items()]
    unit = replicas
    for value in others.values():
        unit *= value
    if len(given) == len(BATCH_KEYS):
        mend = f"use {unit}, or leave one of the three out"
        return f"{TOTAL_BATCH}: {total}: is not {' x '.join(factors)}; {mend}"
    below = total // unit * unit
    values = f"{below} or {below + unit}" if below else str(unit)
    return f"{TOTAL_BATCH}: {total}: does not divide among {' x '.join(factors)}; use {values}"
