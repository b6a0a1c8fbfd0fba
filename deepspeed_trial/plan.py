"""The number of steps of a training, and the progress of each step; a time budget corrects both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from determined import pytorch


class Minutes(pytorch.Batch):
    """A length of training in minutes of wall time, for ``Trainer.fit``; see docs/time-budget.md.

    The plan converts the minutes into a number of steps, and corrects that number during the training.

    Args:
        minutes: above 0.
    """

    def __init__(self, minutes: float) -> None:
        super().__init__(sys.maxsize)
        self.minutes = minutes


def least_rest(done: int) -> int:
    """Return how many more steps a training does when its time is up, to end its schedule: 1 % of ``done``.

    The number is at least 1.
    """
    return max(1, done // 100)


class Plan:
    """The number of optimizer steps of a training, and the fraction of the training at each step.

    Step i, counted from 0, of N is at the fraction i / (N - 1). A correction keeps the fraction of the last
    step done; from there the fraction rises linearly to 1 at the last step. It never jumps and never falls.

    Attributes:
        total: optimizer steps of the whole training; None before the first plan.
        plans: pairs of the steps done at a plan and the plan's total.
        followers: functions to call after each plan.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self.plans: list[tuple[int, int]] = []
        self.followers: list[Callable[[], None]] = []
        self._from: tuple[int, float] = (0, 0.0)  # the index of a step, and its fraction

    def fraction(self, index: int) -> float:
        """Return the fraction of the training at a step: 0 at the first, 1 at the last, 0 without a plan."""
        if self.total is None:
            return 0.0
        start, passed = self._from
        if index >= self.total - 1:
            return 1.0
        return passed + (1 - passed) * max(0, index - start) / max(1, self.total - 1 - start)

    def position(self, index: int) -> float:
        """Return the fraction times the last step's index: exactly ``index`` without a correction."""
        if self.total is None:
            return 0.0
        return index if self._from == (0, 0.0) else self.fraction(index) * (self.total - 1)

    def has_passed(self, share: float, index: int) -> bool:
        """Return whether a step is past a fraction of the training."""
        return self.total is not None and self.position(index) >= share * self.total

    def make(self, done: int, total: int) -> None:
        """Set the number of steps, or correct it.

        Args:
            done: optimizer steps done.
            total: optimizer steps of the whole training.
        """
        if self.total is not None:
            self._from = max(0, done - 1), self.fraction(done - 1)
        self.total = total
        self.plans.append((done, total))
        self._tell()

    def fix(self, total: int | None) -> None:
        """Set the number of steps for the whole training; None if unknown."""
        if self.total != total:
            self.total, self._from = total, (0, 0.0)
            self._tell()

    def state_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {"total": self.total, "from": list(self._from), "plans": [list(each) for each in self.plans]}

    def load_state_dict(self, state: Mapping[str, Any], done: int, longer: float = 1.0) -> None:
        """Continue a saved plan.

        Args:
            state: the result of ``state_dict``.
            done: optimizer steps done.
            longer: length of this training, as a multiple of the saved one.

        Raises:
            ValueError: if the state is damaged.
        """
        (start, passed), total = state["from"], state["total"]
        plans = [tuple(each) for each in state["plans"]]
        whole = [start, total, *(number for each in plans for number in each)]
        if any(type(each) is not int or each < 0 for each in whole) or not start < total >= done:
            raise ValueError("must have whole numbers of steps")
        if type(passed) not in (int, float) or not 0 <= passed <= 1 or any(len(each) != 2 for each in plans):
            raise ValueError("must hold a fraction from 0 to 1 and plans of two step numbers each")
        self.total, self.plans, self._from = total, plans, (start, passed)
        if longer != 1:
            self._from = done - 1, min(1.0, self.fraction(done - 1) / longer)
            self.total = max(done + least_rest(done), round(total * longer))
            self.plans.append((done, self.total))
        self._tell()

    def _tell(self) -> None:
        for follower in self.followers:
            follower()
