"""A learning rate schedule, DeepSpeed's or torch's, shared by all parameter groups of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from deepspeed_trial.plan import Plan

CYCLED = ("momentum", "betas")  # settings that a schedule may change besides the learning rate
FACTOR = "lr_factor"  # key of a parameter group: multiplies the schedule's learning rate
STARTS_AFTER = "starts_after"  # key of a parameter group: its learning rate is 0 for this number of steps
# Settings of a parameter group for optimizers without defaults, such as DeepSpeed's Muon
SETTINGS = ("lr", FACTOR, STARTS_AFTER, "weight_decay", "momentum", "betas", "eps", "ns_method")


class _Rate(torch.optim.Optimizer):
    """A placeholder optimizer for a schedule, with one parameter group and no training."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing; torch warns about a schedule that steps before its optimizer."""


class GroupSchedule:
    """A schedule that scales one learning rate by the ``lr_factor`` of each parameter group.

    DeepSpeed's schedules set the same rate in every group. torch's schedules start from the rate of each
    group, and refuse ZeRO's optimizers. Here the schedule changes a placeholder optimizer with one group, and
    this class copies the placeholder's settings to all groups. Pass this class to ``deepspeed.initialize`` as
    ``lr_scheduler``, with all arguments bound except the first.

    Args:
        optimizer: a torch optimizer. Its groups may have the keys ``lr_factor``, by default 1, and
            ``starts_after``, by default 0.
        lr: the constant learning rate, or the rate that the schedule scales.
        make: creates the schedule for an optimizer; None for a constant rate.

    Attributes:
        last_batch_iteration: steps done minus 1, as in DeepSpeed's schedules.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr: float, make: Callable[[Any], Any] | None = None
    ) -> None:
        self.optimizer, self.lr, self.make = optimizer, lr, make
        held = {
            key: group[key] for key in reversed(CYCLED) for group in optimizer.param_groups if key in group
        }
        self.last_batch_iteration = -1
        self._cycled = dict(list(held.items())[-1:])  # the momentum, or Adam's betas
        self._restart()
        self._pass_on()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step of a group with ``lr_factor`` 1."""
        return float(self._now()["lr"])

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance by a step, or move to the state after ``batch_iteration + 1`` steps from the start.

        ``OneCycleLR`` keeps its last rate after ``total_steps``; torch itself would raise an error.
        """
        wanted = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        if wanted + 1 < self._done:
            self._restart()
        while self._done <= wanted:
            self._advance()
        self.last_batch_iteration = wanted
        self._pass_on()

    def act_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach the schedule to another optimizer."""
        self.optimizer = optimizer
        self._pass_on()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps; all other values follow from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the saved number of steps; the rates follow the current configuration."""
        self.step(state["last_batch_iteration"])

    def _restart(self) -> None:
        # Steps from the start give the bits of an uninterrupted run; a closed form would not
        settings = {"lr": self.lr, **self._cycled}
        self._rate = _Rate([torch.nn.Parameter(torch.zeros(1))], settings)
        self._schedule = self.make(self._rate) if self.make else None
        self._rate.step()
        self._done, self.last_batch_iteration = 0, -1

    def _advance(self) -> None:
        self._done += 1
        last = getattr(self._schedule, "total_steps", None)  # OneCycleLR raises an error after them
        if self._schedule is not None and (last is None or self._done < last):
            self._schedule.step()

    def _now(self) -> dict[str, Any]:
        """Return the current settings of the placeholder's group."""
        return self._rate.param_groups[0]

    def _pass_on(self) -> None:
        now = self._now()
        for group in self.optimizer.param_groups:
            waits = self.last_batch_iteration + 1 < group.get(STARTS_AFTER, 0)
            group["lr"] = 0.0 if waits else now["lr"] * group.get(FACTOR, 1)
            group.update({key: now[key] for key in self._cycled if key in group})


class PlannedSchedule(GroupSchedule):
    """A ``GroupSchedule`` for a training whose plan may change the number of steps.

    Each change creates a schedule of the new length, evaluated at the plan's position with linear
    interpolation between two steps. Without a change, the rates are bit-identical to a ``GroupSchedule``.

    Args:
        optimizer: as in ``GroupSchedule``.
        lr: as in ``GroupSchedule``.
        make_for: returns ``make`` for a number of steps, which is None before the first plan.
        plan: the plan of the training.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr: float,
        make_for: Callable[[int | None], Callable[[Any], Any] | None],
        plan: Plan,
    ) -> None:
        self.plan, self.make_for = plan, make_for
        super().__init__(optimizer, lr, make_for(plan.total))
        plan.followers.append(self._follow)

    @override
    def step(self, batch_iteration: int | None = None) -> None:
        """Advance by a step, or move to the state after ``batch_iteration + 1`` steps from the start."""
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
    """Interpolate between two numbers, or two tuples of numbers."""
    if isinstance(before, (tuple, list)):
        return type(before)(_between(a, b, share) for a, b in zip(before, after, strict=True))
    return before + (after - before) * share if share else before


def learning_rate(engine: Any) -> float:
    """Return the learning rate of an engine's next step in a parameter group with ``lr_factor`` 1."""
    schedule = engine.lr_scheduler
    return schedule.learning_rate if isinstance(schedule, GroupSchedule) else float(engine.get_lr()[0])
