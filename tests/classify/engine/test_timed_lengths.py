"""A length in minutes: what of a configuration follows its plan, and what is refused."""

import itertools
import json
import math
from typing import Any

import pytest
import torch
from support import DIGITS, PROJECT, checkpoints, error_line, overrides, train_many

from classify.config import experiment_fields, experiment_file
from classify.engine.learning_rate import counts_steps, planned
from classify.engine.optimizer_rules import schedule_maker
from classify.engine.trial_config import TrialConfig
from classify.tuning import specification
from harness.plan import Plan
from harness.schedules import GroupSchedule, PlannedSchedule

OPTIMIZER = {"type": "Adam", "params": {"lr": 0.1}}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {},
    "WarmupDecayLR": {"warmup_num_steps": 0.1},
    "WarmupCosineLR": {"warmup_num_steps": 0.2, "cos_min_ratio": 0.0},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 0.3},
    "OneCycleLR": {"max_lr": 0.1},
    "LinearLR": {"start_factor": 1.0, "end_factor": 0.01},
    "PolynomialLR": {"power": 2.0},
    "CosineAnnealingLR": {},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 0.1},
}


def resolve(scheduler, length=None, plan=None, **more):
    hyper = {
        "net": "net",
        "train_batch_size": 32,
        "optimizer": OPTIMIZER,
        "max_length": length or {"minutes": 3},
        **more,
    }
    if scheduler:
        hyper["scheduler"] = scheduler
    return TrialConfig.resolve(hyper, {"data": {"dataset": "digits"}}, 1, "cpu", plan=plan)


def schedules(kind):
    """What makes a schedule of a plan, and one of a number of steps."""
    config = resolve({"type": kind, "params": SCHEDULES[kind]}).deepspeed

    def adam():
        return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def make_for(total):
        return schedule_maker(planned(config, total))

    return (
        lambda plan: PlannedSchedule(adam(), 0.1, make_for, plan),
        lambda total: GroupSchedule(adam(), 0.1, make_for(total)),
    )


def rates_of(schedule, steps):
    """The learning rate and the betas of each step."""
    found = []
    for _ in range(steps):
        found.append((schedule.learning_rate, schedule.optimizer.param_groups[0]["betas"]))
        schedule.step()
    return found


@pytest.mark.parametrize("kind", SCHEDULES)
def test_without_a_correction_the_rates_are_those_of_the_steps(kind):
    """The first, too, which comes before there is a plan."""
    by_plan, by_steps = schedules(kind)
    plan = Plan()
    schedule = by_plan(plan)
    first = rates_of(schedule, 1)
    plan.make(1, 200)
    assert first + rates_of(schedule, 199) == rates_of(by_steps(200), 200)


def test_a_rise_of_one_step_ends_no_training():
    """torch divides by its steps less one; a plan may come to any number of steps."""
    for rise in (0.01, 0.1, 0.5):
        config = resolve({"type": "OneCycleLR", "params": {"max_lr": 0.1, "pct_start": rise}}).deepspeed
        for total in range(2, 201):
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
            GroupSchedule(optimizer, 0.1, schedule_maker(planned(config, total))).step()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_with_corrections_the_rates_end_where_the_schedule_ends(kind):
    """They never jump, and a schedule that is loaded goes on with the same."""
    by_plan, by_steps = schedules(kind)
    plan = Plan()
    schedule, found = by_plan(plan), []
    totals = {1: 400, 30: 250, 100: 500, 260: 300}
    for step in range(1, 301):
        found += rates_of(schedule, 1)
        if step in totals:
            plan.make(step, totals[step])
    assert found[-1] == rates_of(by_steps(300), 300)[-1]
    assert max(abs(math.log(a / b)) for (a, _), (b, _) in itertools.pairwise(found[40:200])) < 0.1
    later = Plan()
    loaded = by_plan(later)
    later.load_state_dict(json.loads(json.dumps(plan.state_dict())), 299)
    loaded.load_state_dict({"last_batch_iteration": 298})
    assert (loaded.learning_rate, loaded.optimizer.param_groups[0]["betas"]) == found[-1]


def test_sizes_of_images_and_lookahead_follow_the_plan():
    plan = Plan()
    resizing = {"progressive_resizing": {"scale": 0.75, "until": 0.5}, "net": "airbench"}
    config = resolve(None, plan=plan, **resizing, net_args={"width": 2})
    full, small = (32, 32), (24, 24)
    assert config.steps is None and config.input_size(0) == small
    plan.make(1, 100)
    assert [config.input_size(step) for step in (49, 50)] == [small, full]
    plan.make(20, 300)
    assert config.steps == 300 and config.input_size(50) == small
    halves = [config.input_size(step) for step in range(20, 300)]
    assert halves.index(full) / 280 == pytest.approx((0.5 - 0.19) / (1 - 0.19), abs=0.01)


def test_counts_of_steps_are_of_schedules_without_an_end():
    for given, counts in {100: True, 0.1: False}.items():
        config = resolve({"type": "WarmupLR", "params": {"warmup_num_steps": given}}).deepspeed
        assert counts_steps(config) == counts
    for kind, key in {"WarmupDecayLR": "total_num_steps", "CosineAnnealingLR": "T_max"}.items():
        line = error_line(resolve, {"type": kind, "params": {key: 500}})
        assert line.startswith(
            f"scheduler.params.{key}: 500: is a number of steps, and a training of minutes"
        )
    line = error_line(resolve, {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100}})
    assert "scheduler.params.warmup_num_steps: 100" in line and "e.g. 0.1" in line


@pytest.mark.parametrize("minutes", [0, -1, "x", True, float("inf"), None])
def test_minutes_are_a_number_above_0(minutes):
    length = {"minutes": minutes}
    line = error_line(check, {"max_length": length})
    assert line == f"hyperparameters.max_length.minutes: {minutes!r}: must be a number above 0, e.g. 30"
    assert "hyperparameters.max_length: " in error_line(lambda: resolve(None, length))


def check(hyperparameters, **config):
    return experiment_fields.check({"hyperparameters": hyperparameters, **config})


def test_a_length_has_one_unit_and_a_search_none_of_minutes():
    line = error_line(check, {"max_length": {"minutes": 1, "epochs": 1}})
    assert line.endswith("must be {batches: N} or {epochs: N} or {minutes: M}")
    searcher = {"name": "adaptive_asha", "time_metric": "batches", "max_time": 9}
    line = error_line(lambda: check({"max_length": {"minutes": 1}}, searcher=searcher))
    assert "a search compares its trials after as many epochs or batches; use {epochs: N}" in line
    file = str(PROJECT / "experiments/search-random.yaml")
    with_minutes = ["hyperparameters.max_length={minutes: 3}"]
    assert "max_length: {'minutes': 3}: a search" in error_line(specification.load, file, with_minutes, 1)
    assert experiment_file.read(file, with_minutes)["hyperparameters"]["max_length"] == {"minutes": 3}


def test_a_run_of_seconds_says_its_plan_and_keeps_it(tmp_path):
    """With validations, a test at the end, lookahead and a schedule to 0; stopped, it goes on with the plan."""
    scheduler = "{type: WarmupDecayLR, params: {warmup_num_steps: 0.1, warmup_type: linear}}"
    row = [
        *DIGITS,
        *overrides(
            hyperparameters__max_length="{minutes: 0.05}",
            hyperparameters__overwrite_deepspeed_args__scheduler=scheduler,
            hyperparameters__weight_average="{lookahead: true, rising: true, every: 5}",
            data__validation=0.1,
            scheduling_unit=1,
        ),
    ]
    runs = train_many(tmp_path, {"check": [*row, "--check"], "run": row}, sigterm_at=3)
    assert "train.py: length 0.05 minutes, in steps as planned on the way" in runs["check"].stderr
    config = json.loads(runs["check"].stdout)
    assert config["scheduler"]["params"]["warmup_num_steps"] == 0.1
    assert "total_num_steps" not in config["scheduler"]["params"]
    stopped = runs["run"]
    assert stopped.code == 130 and "plan: " in stopped.stdout
    (checkpoint,) = checkpoints(stopped).values()
    kept = json.loads((checkpoint / "identity.json").read_text())["progress"]["budget"]
    begun = [each["learning_rate"] for each in stopped.metrics if each["group"] == "training"]
    runs = train_many(tmp_path, {"run": [*row, "--resume", "latest"], "test": [*row, "--test"]})
    assert runs["test"].code == runs["run"].code == 0, runs["test"].stderr + runs["run"].stderr
    assert "budget" not in runs["test"].summary
    summary = runs["run"].summary
    plans = [[plan["after"], plan["steps"]] for plan in summary["budget"]["plans"]]
    assert plans[: len(kept["plan"]["plans"])] == kept["plan"]["plans"] and plans[-1][1] == summary["steps"]
    assert 0 < kept["seconds"] < summary["budget"]["seconds"] and summary["test"]["images"] > 0
    rates = [each["learning_rate"] for each in runs["run"].metrics if each["group"] == "training"]
    assert len(rates) == summary["steps"] and rates[:3] == begun and rates[0] == 0
    counted = schedule_maker(planned(config, summary["steps"]))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.002)
    last = rates_of(GroupSchedule(optimizer, 0.002, counted), summary["steps"])[-1][0]
    assert rates[-1] == pytest.approx(last) and last < 0.002
