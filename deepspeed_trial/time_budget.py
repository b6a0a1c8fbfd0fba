"""Converts a training's length in minutes to a number of steps, by measuring the speed of the steps.

Only rank 0 measures and decides. It checks the plan after 1, 2, 4, 8, ... steps, and near the end after each
quarter of the remaining steps. It corrects a plan that would end too early or too late by more than
``TOLERANCE`` of the budget.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_trial.plan import Plan, least_rest

TOLERANCE = 0.01  # of the budget: a plan may end that much too early or too late
SLOW_STEPS = 2  # first steps, which compile kernels and fill caches; their speed gives too few steps
LEAST = 100  # least steps of a plan by slow steps, because a schedule cannot go back
NOT_WORTH = 0.0025  # share of the budget; with less time left the plan stays
STEP, VALIDATION, CHECKPOINT = "step", "validation", "checkpoint"
WITHIN = "within"  # a checkpoint that a validation saves


@dataclass(frozen=True)
class Work:
    """The work of a training in addition to its steps.

    Attributes:
        validation_period: optimizer steps between validations; None for a single one at the end.
        checkpoint_period: optimizer steps between checkpoints; None for a single one at the end.
        validation_steps: estimated duration of a validation, in training steps; used until one is measured.
        test_share: duration of the final test over the duration of a validation; 0 without a test.
        stages: the fraction of the training at each stage's end, in order up to 1, and the duration of its
            steps in full steps (steps of the last stage).
    """

    validation_period: int | None = None
    checkpoint_period: int | None = None
    validation_steps: float = 0.0
    test_share: float = 0.0
    stages: Sequence[tuple[float, float]] = ((1.0, 1.0),)

    def duration(self, steps: int, first: float, last: float) -> float:
        """Return the duration of steps, in full steps.

        Args:
            steps: the number of steps.
            first: the fraction of the training before the steps.
            last: the fraction after them; it rises linearly in between.
        """
        if last <= first:
            return steps * next(length for end, length in self.stages if first <= end)
        passed, lengths = first, 0.0
        for end, length in self.stages:
            lengths += length * max(0.0, min(end, last) - passed)
            passed = max(passed, min(end, last))
        return steps * lengths / (last - first)


class TimeBudget:
    """Corrects the number of steps so that a training lasts a given time.

    Args:
        minutes: wall time of the training.
        plan: the plan to set and correct.
        clock: returns seconds.

    Attributes:
        next_look: number of steps after which to check the plan next; equal on all ranks.
    """

    def __init__(self, minutes: float, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        self.minutes, self.plan, self.clock = minutes, plan, clock
        self.next_look = 1
        self.work = Work()
        self._used_before = 0.0  # seconds, in the runs that this one continues
        self._began: float | None = None
        self._costs: dict[str, float] = {}  # seconds by kind of work, e.g. of a full step
        self._first = 0  # steps done before this run
        self._looks: list[tuple[int, float, float]] = []  # at each check: steps, full steps, seconds
        self._other = 0.0  # seconds of validations and checkpoints in this run

    @property
    def seconds(self) -> float:
        """Length of the training in seconds."""
        return 60.0 * self.minutes

    @property
    def used(self) -> float:
        """Seconds since the start of the training, including runs before a resume."""
        return self._used_before + (0.0 if self._began is None else self.clock() - self._began)

    @property
    def left(self) -> float:
        """Seconds left; at least 0."""
        return max(0.0, self.seconds - self.used)

    def begin(self, done: int, work: Work) -> None:
        """Start the clock.

        Args:
            done: steps done before this run resumed.
            work: work in addition to the steps.
        """
        self.work, self._began, self._first = work, self.clock(), done
        self.next_look = done + 1
        self._looks = [(done, 0.0, self._used_before)]

    @contextlib.contextmanager
    def measuring(self, what: str) -> Iterator[None]:
        """Measure the duration of a validation or a checkpoint; a checkpoint may be part of a validation."""
        began, other = self.clock(), self._other
        try:
            yield
        finally:
            took = self.clock() - began
            own = took - (self._other - other)
            self._other = other + took
            # The last one counts most, because a busy host's speed changes
            self._costs[what] = (self._costs.get(what, own) + own) / 2
            if what == VALIDATION:
                self._costs[WITHIN] = (self._costs.get(WITHIN, took - own) + took - own) / 2

    def is_due(self, done: int) -> bool:
        """Return whether to check the plan after ``done`` steps; equal on all ranks."""
        return done == self.next_look and done != self.plan.total

    def look(self, done: int) -> bool:
        """Check the plan after a step; only rank 0 calls it.

        Args:
            done: steps done.

        Returns:
            Whether the plan was corrected.
        """
        now, (last, full_steps, _) = self.used, self._looks[-1]
        full_steps += self.work.duration(done - last, self._fraction(last), self._fraction(done))
        self._looks.append((done, full_steps, now - self._other))
        if done > self._first + 1 or STEP not in self._costs:  # a resumed run's first step is slow
            since = self._looks[-3] if len(self._looks) > 3 else self._looks[-2]
            self._costs[STEP] = (self._looks[-1][2] - since[2]) / (full_steps - since[1])
        left, total = self.seconds - now, self.plan.total
        corrects = total is None or abs(self._rest(done, total) - left) > TOLERANCE * self.seconds
        if corrects:
            # A training whose time is over ends a few steps later, and does not postpone that end
            least = done + least_rest(done)
            wanted = max(self._affordable(done, left), least if total is None else min(least, total))
            if done <= SLOW_STEPS:
                wanted = max(wanted, LEAST)
            corrects = wanted != total
            if corrects:
                self.plan.make(done, wanted)
        assert self.plan.total is not None
        rest = self.plan.total - done
        self.next_look = done + max(1, min(done - self._first, rest // 4))
        if rest * self._costs[STEP] < NOT_WORTH * self.seconds:
            self.next_look = max(self.next_look, self.plan.total)
        return corrects

    def _rest(self, done: int, total: int) -> float:
        """Return the remaining seconds after step ``done``, if the training has ``total`` steps."""
        return seconds_left(done, total, self._fraction(done), self._costs, self.work)

    def _fraction(self, done: int) -> float:
        """Return the fraction of the training after ``done`` steps."""
        return self.plan.fraction(done - 1)

    def _affordable(self, done: int, left: float) -> int:
        """Return the maximum total number of steps that fits in the remaining seconds."""
        more = range(done + 1, done + 2**50)
        return done + bisect.bisect_right(more, left, key=lambda total: self._rest(done, total))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {
            "minutes": self.minutes,
            "seconds": self.used,
            "costs": self._costs,
            "plan": self.plan.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], done: int) -> None:
        """Continue from the state of a checkpoint.

        Args:
            state: from ``state_dict``; if its length differs, the plan is scaled.
            done: steps done.

        Raises:
            ValueError, TypeError, KeyError: if the state does not come from ``state_dict``.
        """
        minutes, seconds, costs = state["minutes"], state["seconds"], dict(state["costs"])
        numbers = [minutes, seconds, *costs.values()]
        if any(type(n) not in (int, float) or not math.isfinite(n) or n < 0 for n in numbers):
            raise ValueError("must have minutes and seconds")
        if not minutes or STEP not in costs:
            raise ValueError("must have minutes, and the seconds of a step")
        self.plan.load_state_dict(state["plan"], done, self.minutes / minutes)
        self._used_before, self._costs = float(seconds), costs

    def summary(self) -> dict[str, Any]:
        """Return the minutes, the seconds used, and every plan, as JSON values."""
        plans = [{"after": done, "steps": total} for done, total in self.plan.plans]
        return {"minutes": self.minutes, "seconds": self.used, "plans": plans}

    def describe(self, done: int) -> str:
        """Return a line about the plan that was made after ``done`` steps."""
        when = f"{clock_text(self.used)} of {clock_text(self.seconds)}"
        return f"plan: {self.plan.total:,} steps, made after {done:,} steps and {when}"

    def decisions(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the decisions for the other ranks: the step of the next check, and the plans."""
        return self.next_look, self.plan.plans

    def follow(self, decisions: tuple[int, list[tuple[int, int]]]) -> None:
        """Apply the decisions of another rank."""
        self.next_look, plans = decisions
        for done, total in plans[len(self.plan.plans) :]:
            self.plan.make(done, total)


def seconds_left(done: int, total: int, fraction: float, costs: Mapping[str, float], work: Work) -> float:
    """Return the remaining seconds after step ``done`` of a training.

    Args:
        done: optimizer steps done.
        total: optimizer steps of the whole training.
        fraction: fraction of the training that is done.
        costs: seconds by kind of work; it must have ``STEP``, the seconds of a full step.
        work: work in addition to the steps.
    """
    step = costs[STEP]
    validation, checkpoint = costs.get(VALIDATION, step * work.validation_steps), costs.get(CHECKPOINT, 0.0)
    validations = periods(work.validation_period, done, total)
    checkpoints = periods(work.checkpoint_period, done, total)
    rest = step * work.duration(total - done, fraction, 1.0) + work.test_share * validation
    rest += (validations - 1) * costs.get(WITHIN, 0.0)
    return rest + validations * validation + checkpoints * checkpoint


def periods(period: int | None, done: int, total: int) -> int:
    """Return how often a period ends from step ``done`` (included) on; the last step always ends one."""
    return 1 if period is None else -(-total // period) - (done - 1) // period


def clock_text(seconds: float) -> str:
    """Return seconds as ``4:05`` or ``1:04:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def about_text(seconds: float) -> str:
    """Return seconds as ``40 seconds``, ``12 minutes`` or ``3.5 hours``."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
