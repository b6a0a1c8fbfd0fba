"""A training of minutes: the plan of its steps, by a clock under the tests' control."""

import functools
import itertools
import json
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from determined import pytorch
from line_trial import LineTrial, fit
from support import Run, checkpoints, error_line
from torch import nn
from torch.optim import SGD

from deepspeed_trial import loop
from deepspeed_trial.plan import Plan
from deepspeed_trial.schedules import GroupSchedule, PlannedSchedule
from deepspeed_trial.time_budget import CHECKPOINT, VALIDATION, TimeBudget, Work, clock_text
from deepspeed_trial.trainer import Minutes


class Clock:
    seconds = 1000.0

    def __call__(self):
        return self.seconds


def train(budget, clock, step_seconds, work=None, start=0, stop=None, **costs):
    """Do the loop's work on the plan; return the fraction of each step at its training, and the steps done."""
    work = work or Work()
    budget.begin(start, work)
    fractions, done = [], start
    while done != budget.plan.total and done != stop:
        fractions.append(budget.plan.fraction(done))
        clock.seconds += step_seconds(done)
        done += 1
        if budget.is_due(done):
            budget.look(done)
        for what, period in (VALIDATION, work.validation_period), (CHECKPOINT, work.checkpoint_period):
            if costs and (done == budget.plan.total or (period and done % period == 0)):
                with budget.measuring(what):
                    clock.seconds += costs[what]
    return fractions, done


def check_schedule(fractions):
    """A schedule rises from 0 to 1 without a step back or a jump."""
    assert fractions[0] == 0 and fractions[-1] == 1
    steps = [after - before for before, after in itertools.pairwise(fractions)]
    assert min(steps) >= 0 and max(steps) < 0.1


def test_an_even_speed_needs_one_plan():
    clock, plan = Clock(), Plan()
    fractions, done = train(TimeBudget(5, plan, clock), clock, lambda step: 0.25)
    assert plan.plans == [(1, 1200)] and done == 1200
    assert [plan.position(step) for step in range(1200)] == list(range(1200))
    assert clock.seconds == 1000 + 300
    check_schedule(fractions)


def test_smaller_images_at_first_need_one_plan():
    """Seven tenths of the steps take 0.05 s, the remaining ones 0.15 s."""
    clock, plan = Clock(), Plan()
    work = Work(stages=((0.7, 1 / 3), (1.0, 1.0)))
    speed = lambda step: 0.05 if plan.fraction(step) < 0.7 else 0.15  # noqa: E731
    fractions, done = train(TimeBudget(5, plan, clock), clock, speed, work)
    assert plan.plans == [(1, 3750)] and done == 3750
    assert abs(clock.seconds - 1300) < 0.5
    check_schedule(fractions)


SPEEDS: dict[str, Any] = {
    "a slow start": lambda step: 20 if step == 0 else 2 if step == 1 else 0.1,
    "larger images at last": lambda step: 0.05 if step < 1500 else 0.15,
    "a host that others use": lambda step: 0.05 * (1 + step // 300 % 3),
    "a slower end": lambda step: 0.1 if step < 2400 else 0.25,
    "slow steps": lambda step: 4.0,
    "faster and faster": lambda step: 0.3 / (1 + step / 500),
}


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize("work", [Work(), Work(300, 500, 3.0, 2.0)], ids=["steps", "validations"])
def test_it_ends_in_time_with_its_schedule_complete(name, work):
    """The time includes validations, checkpoints and a test of twice a validation's length."""
    clock, plan = Clock(), Plan()
    costs = {"validation": 12.0, "checkpoint": 1.5} if work.validation_period else {}
    fractions, _ = train(TimeBudget(5, plan, clock), clock, SPEEDS[name], work, **costs)
    clock.seconds += 24.0 if work.test_share else 0
    assert 295 < clock.seconds - 1000 < 305
    check_schedule(fractions)
    assert len(plan.plans) < 25


def test_a_resumed_run_keeps_the_plan_and_the_time():
    clock, plan = Clock(), Plan()
    speed = SPEEDS["a host that others use"]
    budget = TimeBudget(5, plan, clock)
    before, stopped = train(budget, clock, speed, stop=1700)
    state = json.loads(json.dumps(budget.state_dict()))
    clock.seconds += 99999  # nothing runs then
    later = TimeBudget(5, Plan(), clock)
    later.load_state_dict(state, stopped)
    assert later.used == state["seconds"] > 0 and later.plan.plans == plan.plans
    assert later.plan.fraction(1700) == plan.fraction(1700)
    after, _ = train(later, clock, lambda step: 9.0 if step == 1700 else speed(step), start=stopped)
    check_schedule(before + after)
    assert 285 < later.used < 315
    assert later.summary()["seconds"] == later.used


@pytest.mark.parametrize("minutes", [2, 10])
def test_another_length_holds_after_a_resume(minutes):
    """Five minutes are half of ten; of two minutes none is left, so the schedule ends within a few steps."""
    clock = Clock()
    first = TimeBudget(5, Plan(), clock)
    _, done = train(first, clock, lambda step: 0.1)
    later = TimeBudget(minutes, Plan(), clock)
    later.load_state_dict(first.state_dict(), done)
    assert later.plan.fraction(done - 1) == min(1.0, 5 / minutes)
    fractions, end = train(later, clock, lambda step: 0.1, start=done)
    assert fractions[-1] == 1
    assert 2900 < end - done < 3100 if minutes == 10 else end - done <= 31


PLAN = {"total": 90, "from": [0, 0.0], "plans": [[1, 90]]}


def test_a_damaged_state_is_refused():
    state = {"minutes": 1, "seconds": 3.0, "costs": {"step": 0.1}, "plan": PLAN}
    TimeBudget(1, Plan()).load_state_dict(state, 10)
    damage: list[dict[str, Any]] = [{"minutes": "x"}, {"seconds": float("nan")}, {"costs": {}}]
    damage += [{"plan": {**PLAN, "from": [0, 2.0]}}, {"plan": {**PLAN, "plans": [[1]]}}]
    damage += [{"plan": {**PLAN, "total": 3, "plans": [[1, 3]]}}]  # 10 steps are done
    for each in damage:
        with pytest.raises(ValueError):
            TimeBudget(1, Plan()).load_state_dict({**state, **each}, 10)


def test_ranks_follow_the_first():
    clock, plans = Clock(), (Plan(), Plan())
    first, other = (TimeBudget(5, plan, clock) for plan in plans)
    other.begin(0, Work())
    train(first, clock, SPEEDS["faster and faster"], stop=500)
    other.follow(first.decisions())
    assert plans[0].state_dict() == plans[1].state_dict()
    assert other.is_due(first.next_look)


def test_times_look_as_on_a_clock():
    assert [clock_text(seconds) for seconds in (5.4, 245, 3845)] == ["0:05", "4:05", "1:04:05"]


def decay(total):
    steps = {"total_num_steps": total or 100, "warmup_num_steps": 5}
    return functools.partial(WarmupDecayLR, warmup_max_lr=0.01, **steps)


def clock():
    """Each step takes 0.1 seconds, the first ten half of that."""
    steps = PlannedTrial.made[-1].engines[0].global_steps
    return 0.05 * min(steps, 10) + 0.1 * max(0, steps - 10)


class PlannedTrial(LineTrial):
    """A trial whose learning rate falls to 0 with the plan; it keeps the rates of its steps."""

    made: list[LineTrial] = []

    def __init__(self, context):
        self.made.append(self)
        self.rates = []
        super().__init__(context)

    def _engine(self, config):
        net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1))
        schedule = functools.partial(PlannedSchedule, lr=0.01, make_for=decay, plan=self.context.plan)
        config = {key: value for key, value in config.items() if key != "scheduler"}
        parameters = net.parameters()
        engine, *_ = deepspeed.initialize(None, net, None, parameters, config=config, lr_scheduler=schedule)
        return self.context.wrap_model_engine(engine)

    def train_batch(self, *args):
        self.rates.append(self.engines[0].lr_scheduler.learning_rate)
        return super().train_batch(*args)


def test_a_corrected_plan_resumes_to_the_same_bits(tmp_path, monkeypatch, capsys):
    """The plan is right before the checkpoint of step 70."""
    monkeypatch.setattr(loop, "TimeBudget", functools.partial(TimeBudget, clock=clock))

    def run(name, **arguments):
        arguments = {"max_length": Minutes(0.3), "reporting_period": pytorch.Batch(10), **arguments}
        return fit(tmp_path / name, PlannedTrial, **arguments)

    straight, done = run("run", checkpoint_period=pytorch.Batch(70))
    plans = done.budget["plans"]
    assert len(plans) > 1 and plans[-1]["after"] < 70 and plans[-1]["steps"] == done.steps
    assert abs(done.budget["seconds"] - 18) <= 0.9
    assert capsys.readouterr().out.count("\nplan: ") + 1 == len(plans)
    counted = GroupSchedule(SGD([torch.zeros(1)]), 0.01, decay(done.steps))
    counted.step(done.steps - 2)
    assert straight.rates[0] == 0 and straight.rates[-1] == counted.learning_rate < 0.0002
    at_70 = checkpoints(Run(0, "", "", tmp_path / "run"))[70]
    again, finished = run("other", latest_checkpoint=str(at_70))
    assert finished.budget["plans"] == plans and finished.steps == done.steps
    assert finished.budget["seconds"] == pytest.approx(done.budget["seconds"])
    assert again.rates == straight.rates[-len(again.rates) :] and again.places[0][1] == 70
    assert all(map(torch.equal, straight.weights(), again.weights()))
    # A checkpoint without a plan
    run("counted", max_length=pytorch.Batch(3))
    at_3 = str(checkpoints(Run(0, "", "", tmp_path / "counted"))[3])
    line = error_line(lambda: run("timed", latest_checkpoint=at_3))
    assert "its training had no length in minutes (3 steps are done)" in line
