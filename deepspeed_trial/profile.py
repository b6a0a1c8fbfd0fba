"""Profiles a few steps with torch's profiler."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

AFTER, WARM_UP, STEPS = 10, 2, 5  # steps left out, warmed up with, and profiled


@contextlib.contextmanager
def profiled(context: Any, is_wanted: bool) -> Iterator[None]:
    """Profile some of the chief's steps during the block, or run the profiler that the trial has set.

    Args:
        context: the trial's context.
        is_wanted: whether to profile.
    """
    if not (is_wanted and context.services.is_chief):
        with context.profiler or contextlib.nullcontext():
            yield
        return
    context.set_profiler(schedule=torch.profiler.schedule(wait=AFTER, warmup=WARM_UP, active=STEPS, repeat=1))
    with context.profiler as profiler:
        yield
    needed = AFTER + WARM_UP + STEPS
    if profiler.step_num < needed:
        steps = f"a profile needs {needed} steps, and the run had {profiler.step_num}"
        print(f"no profile: {steps}", file=sys.stderr)
    else:
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
        context.services.keep_profile(table)
