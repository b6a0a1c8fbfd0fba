"""One schedule, DeepSpeed's or torch's, for all parameter groups of an engine's optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from deepspeed_trial.plan import Plan

CYCLED = ("momentum", "betas")  # what a schedule may change beside the rate
FACTOR = "lr_factor"  # of a parameter group: its rate is so many times the schedule's
STARTS_AFTER = "starts_after"  # of a parameter group: the steps for which its rate is 0
# What a parameter group may be configured with where its optimizer, as DeepSpeed's Muon, has no defaults.
SETTINGS = ("lr", FACTOR, STARTS_AFTER, "weight_decay", "momentum", "betas", "eps", "ns_method")


class _Rate(torch.optim.Optimizer):
    """An optimizer of one group that trains nothing, for a schedule to act on."""

    def step(self, closure: Any = None) -> Any:
        """Does nothing; a schedule of torch's wants it done before its own step."""


class GroupSchedule:
    """A schedule of one rate, of which each parameter group has ``lr_factor`` times.

    Schedules of torch's and DeepSpeed's set the rate of every group alike, or take each group's own for its
    start, and torch's refuse ZeRO's optimizers. This one lets the schedule act on a group that stands for all
    of them, and passes on what it sets. Give it to ``deepspeed.initialize`` as ``lr_scheduler``, with all
    arguments but the first bound.

    Args:
        optimizer: torch's, whose groups may have a key ``lr_factor``, 1 where they have none, and
            ``starts_after``.
        lr: the rate without a schedule, or with one that scales it.
        make: makes the schedule for an optimizer; None for a rate that stays.

    Attributes:
        last_batch_iteration: the steps that are done, less 1, as DeepSpeed's schedules count and save them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr: float, make: Callable[[Any], Any] | None = None
    ) -> None:
        self.optimizer, self.lr, self.make = optimizer, lr, make
        held = {
            key: group[key] for key in reversed(CYCLED) for group in optimizer.param_groups if key in group
        }
        self.last_batch_iteration = -1
        self._cycled = dict(list(held.items())[-1:])  # the momentum where there is one, or Adam's betas
        self._restart()
        self._pass_on()

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, of a group whose factor is 1."""
        return float(self._now()["lr"])

    def step(self, batch_iteration: int | None = None) -> None:
        """Goes on by a step, or to where it is after ``batch_iteration + 1`` steps from the start.

        A schedule of torch's that has come to the end of its steps stays there.
        """
        wanted = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        if wanted + 1 < self._done:
            self._restart()
        while self._done <= wanted:
            self._advance()
        self.last_batch_iteration = wanted
        self._pass_on()

    def act_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Acts on another optimizer in the place of the one that it was made with."""
        self.optimizer = optimizer
        self._pass_on()

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The steps alone: all else is the configuration's."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where the saved one was; its rates are those of this one after as many steps."""
        self.step(state["last_batch_iteration"])

    def _restart(self) -> None:
        # Steps from the start give the same bits as an uninterrupted run, which closed forms do not.
        settings = {"lr": self.lr, **self._cycled}
        self._rate = _Rate([torch.nn.Parameter(torch.zeros(1))], settings)
        self._schedule = self.make(self._rate) if self.make else None
        self._rate.step()
        self._done, self.last_batch_iteration = 0, -1

    def _advance(self) -> None:
        self._done += 1
        last = getattr(self._schedule, "total_steps", None)  # of torch's OneCycleLR, which raises after it
        if self._schedule is not None and (last is None or self._done < last):
            self._schedule.step()

    def _now(self) -> dict[str, Any]:
        """What the schedule has set."""
        return self._rate.param_groups[0]

    def _pass_on(self) -> None:
        now = self._now()
        for group in self.optimizer.param_groups:
            waits = self.last_batch_iteration + 1 < group.get(STARTS_AFTER, 0)
            group["lr"] = 0.0 if waits else now["lr"] * group.get(FACTOR, 1)
            group.update({key: now[key] for key in self._cycled if key in group})


class PlannedSchedule(GroupSchedule):
    """The same for a training whose length is planned as it goes.

    After each plan it is the schedule of a training of that length, at the place that the plan says; between
    two of its steps the rate is linear. With a plan that is never corrected it is that of the length, to the
    bit.

    Args:
        optimizer: as of ``GroupSchedule``.
        lr: the same.
        make_for: gives what makes the schedule, for a number of steps; None before there is a plan.
        plan: of the training.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr: float,
        make_for: Callable[[int | None], Callable[[Any], Any]],
        plan: Plan,
    ) -> None:
        self.plan, self.make_for = plan, make_for
        super().__init__(optimizer, lr, make_for(plan.total))
        plan.followers.append(self._follow)

    @override
    def step(self, batch_iteration: int | None = None) -> None:
        """Goes on by a step, or to where it is after ``batch_iteration + 1`` steps from the start."""
        done = (self.last_batch_iteration if batch_iteration is None else batch_iteration - 1) + 1
        place = self.plan.position(done + 1)
        if place < self._done - 1:
            self._restart()
        self._place = place
        while self._done < math.ceil(self._place):
            self._before = dict(self._rate.param_groups[0])
            self._advance()
        self.last_batch_iteration = done
        self._pass_on()

    def _follow(self) -> None:
        done, self.make = self.last_batch_iteration, self.make_for(self.plan.total)
        self._restart()
        self.step(done)

    @override
    def _restart(self) -> None:
        super()._restart()
        self._place, self._before = 0.0, dict(self._rate.param_groups[0])

    @override
    def _now(self) -> dict[str, Any]:
        after, share = super()._now(), self._place - (self._done - 1)
        if share == 1 or not self._done:
            return after
        return {key: _between(self._before[key], after[key], share) for key in ("lr", *self._cycled)}


def _between(before: Any, after: Any, share: float) -> Any:
    """A share of the way from one number, or tuple of numbers, to another."""
    if isinstance(before, (tuple, list)):
        return type(before)(_between(a, b, share) for a, b in zip(before, after, strict=True))
    return before + (after - before) * share if share else before


def learning_rate(engine: Any) -> float:
    """The rate of an engine's next step, of a parameter group whose factor is 1."""
    schedule = engine.lr_scheduler
    return schedule.learning_rate if isinstance(schedule, GroupSchedule) else float(engine.get_lr()[0])
