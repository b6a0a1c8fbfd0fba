"""Sets a schedule's peak to ``optimizer.params.lr``, and its lengths from the length of the training.

DeepSpeed's schedules silently replace the optimizer's learning rate with their peak. Without this module, a
search over the learning rate would train every trial at the same rate.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from classify.config.schedules import PEAK_KEYS
from classify.engine.optimizer_rules import (
    LENGTHS,
    TORCH_SCHEDULES,
    built_errors,
    is_muon,
    optimizer_class,
    rules,
    schedule_class,
    section_at,
)

LEAST_KEYS = {"WarmupLR": "warmup_min_lr", "WarmupDecayLR": "warmup_min_lr", "OneCycle": "cycle_min_lr"}
LONGEST_WARMUP = 1000  # maximum steps of a warm-up whose length is not given
ENDLESS = ("WarmupLR", "LRRangeTest")  # schedules whose lengths do not depend on the training's length
PROVISIONAL = 1000  # steps of the schedule before the first plan; the first rate does not depend on them


def follow_learning_rate(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set the schedule's peak to ``optimizer.params.lr``.

    A peak that the overrides set, or that is in the same file as the rate, stays. The lowest rate keeps its
    ratio to the peak, unless the overrides set it.

    Args:
        config: the merged DeepSpeed configuration; changed in place.
        overrides: the overrides of the file.
    """
    scheduler, optimizer = config.get("scheduler") or {}, config.get("optimizer") or {}
    peak, least = (keys.get(scheduler.get("type", "")) for keys in (PEAK_KEYS, LEAST_KEYS))
    lr = (optimizer.get("params") or {}).get("lr")
    if peak is None or lr is None:
        return
    params = scheduler.setdefault("params", {})
    lr_overridden = "lr" in section_at(overrides, "optimizer", "params")
    overridden = section_at(overrides, "scheduler", "params")
    if peak not in params or (lr_overridden and peak not in overridden):
        if least is not None and params.get(peak) and least in params and least not in overridden:
            params[least] *= lr / params[peak]
        params[peak] = lr


def follow_length(config: dict[str, Any], total: int | None, longest_warmup: float = LONGEST_WARMUP) -> None:
    """Set the schedule's missing lengths and defaults, and convert fractions of the training to steps.

    Args:
        config: the DeepSpeed configuration; changed in place.
        total: optimizer steps of the training; None if they are not known.
        longest_warmup: the maximum steps of the default warm-up, which is a tenth of the training.
    """
    scheduler = config.get("scheduler")
    if scheduler is None:
        return
    params = scheduler.setdefault("params", {})
    if scheduler["type"] == "OneCycle":
        params.setdefault("cycle_min_lr", params["cycle_max_lr"] / 10)
        cls = optimizer_class(config["optimizer"]["type"])
        if is_muon(config) or (cls is not None and "betas" not in rules(cls)):
            params.setdefault("cycle_momentum", False)  # it would change Adam's first beta
    elif scheduler["type"] == "OneCycleLR":
        params.setdefault("cycle_momentum", False)
    if total is None:
        return
    params.update({key: max(1, round(params[key] * total)) for key in _shares(params)})
    takes = rules(schedule_class(scheduler["type"]))
    for key in ("total_num_steps", "total_steps", "total_iters", "T_max"):
        if key in takes and params.get(key) is None:
            params[key] = total
    if "warmup_num_steps" in takes:
        params.setdefault("warmup_num_steps", int(min(longest_warmup, max(2, total // 10))))
    if "cycle_first_step_size" in takes:
        params.setdefault("cycle_first_step_size", max(1, total // 2))


def counts_steps(config: Mapping[str, Any]) -> bool:
    """Return whether the schedule is independent of the training's length; True without a schedule."""
    section = config.get("scheduler")
    params = section_at(config, "scheduler", "params")
    return section is None or (
        section["type"] in ENDLESS and any(key in params for key in LENGTHS) and not _shares(params)
    )


def planned(config: Mapping[str, Any], total: int | None) -> dict[str, Any]:
    """Return the configuration of a training in minutes, with a schedule for ``total`` steps.

    ``total`` is None before there is a plan.
    """
    fitted = {**config, "scheduler": copy.deepcopy(config["scheduler"])}
    # The warm-up has no limit in steps, so that it is the same share of the training in every plan
    follow_length(fitted, total or PROVISIONAL, longest_warmup=float("inf"))
    params = fitted["scheduler"].get("params", {})
    if fitted["scheduler"]["type"] == "OneCycleLR" and _rises_in_one_step(params):
        params["pct_start"] = min(1.0, 2 / params["total_steps"])
    return fitted


def configured_errors(config: Mapping[str, Any], is_timed: bool) -> list[str]:
    """Return the errors of optimizer and schedule, after ``follow_length``.

    Args:
        config: the DeepSpeed configuration.
        is_timed: whether the training's length is a time; the schedule then has no length yet.
    """
    if not is_timed or counts_steps(config):
        return schedule_errors(config) or built_errors(config)
    params = config["scheduler"].get("params", {})
    reason = "is a number of steps, and a training of minutes has no fixed number of steps"
    remedy = "leave it out, or give a share of the training, e.g. 0.1"
    if counted := [key for key in LENGTHS if (params.get(key) or 0) >= 1]:
        return [f"scheduler.params.{key}: {params[key]}: {reason}; {remedy}" for key in counted]
    fitted = planned(config, None)
    return schedule_errors(fitted) or built_errors(fitted)


def _shares(params: Mapping[str, Any]) -> list[str]:
    """Return the names of the lengths that are fractions of the training."""
    return [key for key in LENGTHS if 0 < (params.get(key) or 0) < 1]


def schedule_errors(config: Mapping[str, Any]) -> list[str]:
    """Return the errors of the schedule's rates and lengths: missing, or in conflict with each other."""
    kind, params = section_at(config, "scheduler").get("type"), section_at(config, "scheduler", "params")
    if shares := _shares(params):
        reason = "is a share of a training without a length; give hyperparameters.max_length"
        return [f"scheduler.params.{key}: {params[key]}: {reason}" for key in shares]
    if kind in TORCH_SCHEDULES:
        return _torch_errors(kind, params)
    if kind == "OneCycle" and params["cycle_min_lr"] > params["cycle_max_lr"]:
        low, high = params["cycle_min_lr"], params["cycle_max_lr"]
        reason = f"is above cycle_max_lr, which is {high}; use less, e.g. {high / 10:g}"
        return [f"scheduler.params.cycle_min_lr: {low}: {reason}"]
    if kind not in ("WarmupDecayLR", "WarmupCosineLR"):
        return []
    if "total_num_steps" not in params:
        return ["scheduler.params.total_num_steps: missing; give it, or hyperparameters.max_length"]
    total, warmup = params["total_num_steps"], params.get("warmup_num_steps", 1000)  # DeepSpeed's default
    if warmup < total:
        return []
    remedy = f"use less, e.g. {max(2, total // 10)}" if total > 2 else "train for more steps, or use WarmupLR"
    reason = f"leaves no step for the decay: the schedule has {total} steps; {remedy}"
    return [f"scheduler.params.warmup_num_steps: {warmup}: {reason}"]


def _torch_errors(kind: str, params: Mapping[str, Any]) -> list[str]:
    if kind == "ExponentialLR":  # it has no length
        return []
    length = {"OneCycleLR": "total_steps", "CosineAnnealingLR": "T_max"}.get(kind, "total_iters")
    if length not in params:
        return [f"scheduler.params.{length}: missing; give it, or hyperparameters.max_length"]
    total, rise = params[length], params.get("pct_start", 0.3)
    if kind == "OneCycleLR" and _rises_in_one_step(params):
        share = f"{min(1.0, 2 / total):g}"
        reason = f"the rise takes 1 of {total} steps, and torch then divides by zero; use {share}"
        return [f"scheduler.params.pct_start: {rise}: {reason}"]
    return []


def _rises_in_one_step(params: Mapping[str, Any]) -> bool:
    """Return whether OneCycleLR rises in one step: torch would then divide by zero."""
    return params.get("pct_start", 0.3) * params["total_steps"] == 1


def schedule_notes(config: Mapping[str, Any], total: int | None) -> list[str]:
    """Return a note if the rise to the peak rate is longer than the training.

    Args:
        config: the DeepSpeed configuration.
        total: optimizer steps of the training; None if they are not known.
    """
    params = section_at(config, "scheduler", "params")
    return [
        f"scheduler.params.{key}: {params[key]}: the training has {total:,} steps, so the learning rate never"
        f" reaches its peak; use less, e.g. {max(2, total // 10)}, or train for longer"
        for key in ("warmup_num_steps", "cycle_first_step_size")
        if total is not None and params.get(key, 0) > total
    ]
