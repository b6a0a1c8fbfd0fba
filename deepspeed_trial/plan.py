"""How long a training is, in steps, and how far each of them is; a time budget plans it as it goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from determined import pytorch


class Minutes(pytorch.Batch):
    """A length of training in minutes of wall time, for ``Trainer.fit``; see docs/time-budget.md.

    To Determined's loop it is a number of steps, which changes with the plan.

    Args:
        minutes: above 0.
    """

    def __init__(self, minutes: float) -> None:
        super().__init__(sys.maxsize)
        self.minutes = minutes


def least_rest(done: int) -> int:
    """The steps in which a training whose time is over comes to the end of its schedule, given those done."""
    return max(1, done // 100)


class Plan:
    """The number of optimizer steps of a training, and how far each is on the way to the end.

    The step with index i, from 0, of N is at the fraction i / (N - 1) of the way. When the plan is corrected,
    the fraction of the last step that was done stays, and from there it goes linearly to 1, which the last
    step has. So it never jumps, never goes back, and always ends at 1.

    Attributes:
        total: optimizer steps of the whole training; None where that is not known yet.
        plans: each plan that was made: the steps that were done then, and the total.
        followers: called after each plan.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self.plans: list[tuple[int, int]] = []
        self.followers: list[Callable[[], None]] = []
        self._from: tuple[int, float] = (0, 0.0)  # the index of a step, and its fraction

    def fraction(self, index: int) -> float:
        """How far the step with an index is: 0 for the first, 1 for the last; 0 before there is a plan."""
        if self.total is None:
            return 0.0
        start, passed = self._from
        if index >= self.total - 1:
            return 1.0
        return passed + (1 - passed) * max(0, index - start) / max(1, self.total - 1 - start)

    def position(self, index: int) -> float:
        """The same in steps of a training of ``total`` steps: exactly ``index`` if it was never corrected."""
        if self.total is None:
            return 0.0
        return index if self._from == (0, 0.0) else self.fraction(index) * (self.total - 1)

    def has_passed(self, share: float, index: int) -> bool:
        """Whether the step with an index is beyond a share of the training."""
        return self.total is not None and self.position(index) >= share * self.total

    def make(self, done: int, total: int) -> None:
        """Makes a plan.

        Args:
            done: optimizer steps that are done.
            total: optimizer steps of the whole training.
        """
        if self.total is not None:
            self._from = max(0, done - 1), self.fraction(done - 1)
        self.total = total
        self.plans.append((done, total))
        self._tell()

    def fix(self, total: int | None) -> None:
        """Has a training so many steps, from its start on; None if that is not known."""
        if self.total != total:
            self.total, self._from = total, (0, 0.0)
            self._tell()

    def state_dict(self) -> dict[str, Any]:
        """The plan in JSON values."""
        return {"total": self.total, "from": list(self._from), "plans": [list(each) for each in self.plans]}

    def load_state_dict(self, state: Mapping[str, Any], done: int, longer: float = 1.0) -> None:
        """Goes on with a plan.

        Args:
            state: of ``state_dict``.
            done: optimizer steps that are done.
            longer: how many times as long the training is to be: of a longer one, less is done.

        Raises:
            ValueError: if it is no such state.
        """
        (start, passed), total = state["from"], state["total"]
        plans = [tuple(each) for each in state["plans"]]
        whole = [start, total, *(number for each in plans for number in each)]
        if any(type(each) is not int or each < 0 for each in whole) or not start < total >= done:
            raise ValueError("must hold whole numbers of steps")
        if type(passed) not in (int, float) or not 0 <= passed <= 1 or any(len(each) != 2 for each in plans):
            raise ValueError("must hold a fraction from 0 to 1, and plans")
        self.total, self.plans, self._from = total, plans, (start, passed)
        if longer != 1:
            self._from = done - 1, min(1.0, self.fraction(done - 1) / longer)
            self.total = max(done + least_rest(done), round(total * longer))
            self.plans.append((done, self.total))
        self._tell()

    def _tell(self) -> None:
        for follower in self.followers:
            follower()
