"""Learning rates: a schedule's peak and lengths, and what follows the plan of a length in minutes."""

import itertools
import json
import math
from typing import Any

import pytest
import torch
from support import DIGITS, PROJECT, checkpoints, error_line, overrides, train_many
from support import rates as reported_rates

import train
from classify.config import experiment_fields, experiment_file
from classify.config.hyperparameters import Hyperparameters
from classify.engine import deepspeed_config
from classify.engine.learning_rate import counts_steps, planned
from classify.engine.optimizer_rules import TORCH_SCHEDULES, schedule_maker
from classify.engine.trial_config import TrialConfig
from classify.models import registry
from deepspeed_trial.plan import Plan
from deepspeed_trial.schedules import GroupSchedule, PlannedSchedule
from workbench.search import specification

RATE = 0.0123
OPTIMIZER = {"type": "Adam", "params": {"lr": 0.1}}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 0.2},
    "WarmupDecayLR": {"warmup_num_steps": 0.1},
    "WarmupCosineLR": {"warmup_num_steps": 0.2, "cos_min_ratio": 0.0},
    "OneCycle": {"cycle_first_step_size": 0.3},
    "OneCycleLR": {},
    "LinearLR": {"start_factor": 1.0, "end_factor": 0.01},
    "PolynomialLR": {"power": 2.0},
    "CosineAnnealingLR": {},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 0.1},
}


def of_digits(hyper, plan=None) -> TrialConfig:
    return TrialConfig.resolve(hyper, {"data": {"dataset": "digits"}}, 1, "cpu", plan=plan)


def resolve(scheduler, length=None, plan=None, **more):
    hyper = {"train_batch_size": 32, "optimizer": OPTIMIZER, "max_length": length or {"minutes": 3}, **more}
    return of_digits(hyper | ({"scheduler": scheduler} if scheduler else {}), plan)


def adam(lr=0.1):
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates_of(schedule, steps):
    """The learning rate and the betas of each step."""
    found = []
    for _ in range(steps):
        found.append((schedule.learning_rate, schedule.optimizer.param_groups[0]["betas"]))
        schedule.step()
    return found


def hyper_in(form, schedule, folder):
    """Hyperparameters of 20 steps with one schedule and learning rate in one of the three forms."""
    scheduler = {"type": schedule, "params": SCHEDULES[schedule]}
    whole = {
        "train_batch_size": 32,
        "optimizer": {"type": "Adam", "params": {"lr": RATE}},
        "scheduler": scheduler,
    }
    (folder / "ds.json").write_text(json.dumps(whole))
    # The base file has another rate
    over = {"optimizer": {"params": {"lr": RATE}}, "scheduler": scheduler}
    forms: dict[str, dict[str, Any]] = {
        "file": {"deepspeed_config": str(folder / "ds.json")},
        "override": {"deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": over},
        "inline": whole,
    }
    return {**forms[form], "max_length": {"batches": 20}}


@pytest.mark.parametrize("form", ["file", "override", "inline"])
def test_every_schedule_peaks_at_the_optimizers_learning_rate(tmp_path, form):
    """DeepSpeed would silently take the schedule's peak instead."""
    rates = {}
    for kind in SCHEDULES.keys() - {"LRRangeTest"}:
        config = of_digits(hyper_in(form, kind, tmp_path)).deepspeed
        schedule = GroupSchedule(adam(RATE), RATE, schedule_maker(config))
        rates[kind] = [rate for rate, _ in rates_of(schedule, 20)]
        assert max(rates[kind]) == pytest.approx(RATE, rel=1e-6), kind
        # The lengths follow the training's: a decay ends with it
        assert (rates[kind][-1] < 0.5 * RATE) == (kind != "WarmupLR"), kind
    # A training by one of DeepSpeed's schedules, and by one of torch's
    kinds = ["WarmupLR", "OneCycleLR"] if form == "override" else ["WarmupDecayLR"]
    assert "OneCycleLR" in TORCH_SCHEDULES and "WarmupLR" not in TORCH_SCHEDULES
    for kind in kinds:
        chosen = overrides(hyperparameters=json.dumps(hyper_in(form, kind, tmp_path)), scheduling_unit=1)
        (made,) = train_many(tmp_path, {kind: [*DIGITS, *chosen]}).values()
        assert made.code == 0, made.stderr
        assert reported_rates(made) == pytest.approx(rates[kind]), kind


def test_the_least_rate_keeps_its_share_of_the_peak():
    def cycle(**chosen):
        hparams = {"deepspeed_config": "experiments/cifar10-67.json", "overwrite_deepspeed_args": chosen}
        hyper = Hyperparameters.parse(hparams, registry.check_name)
        resolved = deepspeed_config.resolve(deepspeed_config.merge(hyper), hyper, 1, "cpu", lambda *_: 7038)
        params = resolved["scheduler"]["params"]
        return params["cycle_min_lr"], params["cycle_max_lr"]

    half = {"params": {"lr": 0.003}}
    assert cycle() == (0.002, 0.006)
    assert cycle(optimizer=half) == pytest.approx((0.001, 0.003))
    assert cycle(optimizer=half, scheduler={"params": {"cycle_min_lr": 0.0001}}) == (0.0001, 0.003)


# ------------------------------------------------------------------------------------------- a length in minutes


def schedules(kind):
    """Functions that make a schedule of a plan, and one of a number of steps."""
    config = resolve({"type": kind, "params": SCHEDULES[kind]}).deepspeed

    def make_for(total):
        return schedule_maker(planned(config, total))

    return (
        lambda plan: PlannedSchedule(adam(), 0.1, make_for, plan),
        lambda total: GroupSchedule(adam(), 0.1, make_for(total)),
    )


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
    """They never jump, and a loaded schedule continues with the same."""
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
        is_count = "is a number of steps, and a training of minutes"
        assert line.startswith(f"scheduler.params.{key}: 500: {is_count}")
    line = error_line(resolve, {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100}})
    assert "scheduler.params.warmup_num_steps: 100" in line and "e.g. 0.1" in line


def check(hyperparameters, **config):
    return experiment_fields.check({"hyperparameters": hyperparameters, **config})


@pytest.mark.parametrize("minutes", [0, -1, "x", True, float("inf")])
def test_minutes_are_a_number_above_0(minutes):
    length = {"minutes": minutes}
    line = error_line(check, {"max_length": length})
    assert line == f"hyperparameters.max_length.minutes: {minutes!r}: must be a number above 0, e.g. 30"
    assert error_line(lambda: resolve(None, length)) == line


def test_a_length_has_one_unit_and_a_search_none_of_minutes():
    line = error_line(check, {"max_length": {"minutes": 1, "epochs": 1}})
    assert line.endswith("""null: --config hyperparameters.max_length='{"epochs": 1, "minutes": null}'""")
    line = error_line(check, {"max_length": {"minutes": None}})
    assert line.endswith("must be {batches: N} or {epochs: N} or {minutes: M}")
    searcher = {"name": "adaptive_asha", "time_metric": "batches", "max_time": 9}
    line = error_line(lambda: check({"max_length": {"minutes": 1}}, searcher=searcher))
    assert "a search compares trials of equal length; use {epochs: N} or {batches: N}" in line
    file = str(PROJECT / "experiments/search-random.yaml")
    with_minutes = ["hyperparameters.max_length={minutes: 3}"]
    assert "max_length: {'minutes': 3}: a search" in error_line(specification.load, file, with_minutes, 1)
    assert experiment_file.read(file, with_minutes)["hyperparameters"]["max_length"] == {"minutes": 3}


def test_a_run_of_seconds_says_its_plan_and_keeps_it(tmp_path, capsys):
    """With validations, a test at the end, lookahead and a schedule to 0; a resumed run keeps the plan."""
    scheduler = "{type: WarmupDecayLR, params: {warmup_num_steps: 0.1, warmup_type: linear}}"
    more = overrides(
        hyperparameters__max_length="{minutes: 0.05}",
        hyperparameters__overwrite_deepspeed_args__scheduler=scheduler,
        hyperparameters__weight_average="{lookahead: true, rising: true, every: 5}",
        data__validation=0.1,
        scheduling_unit=1,
    )
    row = [*DIGITS, *more]
    assert train.main([*row, "--check"]) == 0
    said = capsys.readouterr()
    assert "train.py: length 0.05 minutes, in a planned number of steps" in said.err
    config = json.loads(said.out)
    assert config["scheduler"]["params"]["warmup_num_steps"] == 0.1
    assert "total_num_steps" not in config["scheduler"]["params"]
    stopped = train_many(tmp_path, {"run": row}, sigterm_at=3)["run"]
    assert stopped.code == 130 and "plan: " in stopped.stdout
    (checkpoint,) = checkpoints(stopped).values()
    kept = json.loads((checkpoint / "identity.json").read_text())["progress"]["budget"]
    begun = reported_rates(stopped)
    runs = train_many(tmp_path, {"run": [*row, "--resume", "latest"], "test": [*row, "--test"]})
    assert runs["test"].code == runs["run"].code == 0, runs["test"].stderr + runs["run"].stderr
    assert "budget" not in runs["test"].summary
    summary = runs["run"].summary
    plans = [[plan["after"], plan["steps"]] for plan in summary["budget"]["plans"]]
    assert plans[: len(kept["plan"]["plans"])] == kept["plan"]["plans"] and plans[-1][1] == summary["steps"]
    assert 0 < kept["seconds"] < summary["budget"]["seconds"] and summary["test"]["images"] > 0
    rates = reported_rates(runs["run"])
    assert len(rates) == summary["steps"] and rates[:3] == begun and rates[0] == 0
    counted = schedule_maker(planned(config, summary["steps"]))
    last = rates_of(GroupSchedule(adam(0.002), 0.002, counted), summary["steps"])[-1][0]
    assert rates[-1] == pytest.approx(last) and last < 0.002
