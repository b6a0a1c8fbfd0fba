"""One learning rate: a schedule's peak follows ``optimizer.params.lr``, and its lengths the training's.

DeepSpeed's schedules silently replace the optimizer's learning rate by their own peak, so that a search
over the learning rate alone would search nothing.
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
)

LEAST_KEYS = {"WarmupLR": "warmup_min_lr", "WarmupDecayLR": "warmup_min_lr", "OneCycle": "cycle_min_lr"}
LONGEST_WARMUP = 1000  # steps, where the file gives none
ENDLESS = ("WarmupLR", "LRRangeTest")  # schedules that may count steps whatever the training's length is
BEFORE_A_PLAN = 1000  # steps, of which a schedule is until there is a plan: its first rate is that of any


def follow_learning_rate(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Makes the schedule's peak follow ``optimizer.params.lr``, unless the peak is given with it or over it.

    The lowest rate keeps its share of the peak, unless it is given over it.

    Args:
        config: the merged DeepSpeed configuration, which is changed.
        overrides: what the hyperparameters replace in the file.
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
    """Fits the schedule's lengths to the training where they are not given, or given as shares of it.

    Args:
        config: the DeepSpeed configuration, which is changed.
        total: optimizer steps of the whole training; None if that is not known.
        longest_warmup: the most steps of a warm-up that is not given, which is a tenth of the training.
    """
    scheduler = config.get("scheduler")
    if scheduler is None:
        return
    params = scheduler.setdefault("params", {})
    if scheduler["type"] == "OneCycle":
        params.setdefault("cycle_min_lr", params["cycle_max_lr"] / 10)
        cls = optimizer_class(config["optimizer"]["type"])
        if is_muon(config) or (cls is not None and "betas" not in rules(cls)):
            params.setdefault("cycle_momentum", False)  # it cycles the first beta
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
    """Whether the schedule, if there is one, is the same however long the training is."""
    section = config.get("scheduler")
    params = section_at(config, "scheduler", "params")
    return section is None or (
        section["type"] in ENDLESS and any(key in params for key in LENGTHS) and not _shares(params)
    )


def planned(config: Mapping[str, Any], total: int | None) -> dict[str, Any]:
    """The configuration of a training whose length is a time, for a plan of its steps; None before one."""
    fitted = {**config, "scheduler": copy.deepcopy(config["scheduler"])}
    # A warm-up of at most so many steps would be another share of the training with each plan
    follow_length(fitted, total or BEFORE_A_PLAN, longest_warmup=float("inf"))
    params = fitted["scheduler"].get("params", {})
    if fitted["scheduler"]["type"] == "OneCycleLR" and _rises_in_one_step(params):
        params["pct_start"] = min(1.0, 2 / params["total_steps"])
    return fitted


def configured_errors(config: Mapping[str, Any], is_timed: bool) -> list[str]:
    """Checks optimizer and schedule, once all is there that follows from the training's length.

    Args:
        config: the DeepSpeed configuration.
        is_timed: whether the length is a time, so that the schedule has no length yet.
    """
    if not is_timed or counts_steps(config):
        return schedule_errors(config) or built_errors(config)
    params = config["scheduler"].get("params", {})
    counted = [key for key in LENGTHS if (params.get(key) or 0) >= 1]
    what = "is a number of steps, and a training of minutes has as many as there is time for"
    shares = "leave it out, or give a share of the training, e.g. 0.1"
    if counted:
        return [f"scheduler.params.{key}: {params[key]}: {what}; {shares}" for key in counted]
    fitted = planned(config, None)
    return schedule_errors(fitted) or built_errors(fitted)


def _shares(params: Mapping[str, Any]) -> list[str]:
    """The lengths that are shares of the training."""
    return [key for key in LENGTHS if 0 < (params.get(key) or 0) < 1]


def schedule_errors(config: Mapping[str, Any]) -> list[str]:
    """Checks the schedule's rates and lengths against each other, once they are all there."""
    section = config.get("scheduler") or {}
    params = section.get("params", {})
    if shares := _shares(params):
        what = "is a share of a training without a length; give hyperparameters.max_length"
        return [f"scheduler.params.{key}: {params[key]}: {what}" for key in shares]
    if section.get("type") in TORCH_SCHEDULES:
        return _torch_errors(section["type"], params)
    if section.get("type") == "OneCycle" and params["cycle_min_lr"] > params["cycle_max_lr"]:
        low, high = params["cycle_min_lr"], params["cycle_max_lr"]
        what = f"more than cycle_max_lr ({high}); use less, e.g. {high / 10:g}"
        return [f"scheduler.params.cycle_min_lr: {low}: {what}"]
    if section.get("type") not in ("WarmupDecayLR", "WarmupCosineLR"):
        return []
    if "total_num_steps" not in params:
        return ["scheduler.params.total_num_steps: missing; give it, or hyperparameters.max_length"]
    total, warmup = params["total_num_steps"], params.get("warmup_num_steps", 1000)  # DeepSpeed's default
    if warmup >= total:
        less = f"use less, e.g. {max(2, total // 10)}"
        mend = less if total > 2 else "train for more steps, or use WarmupLR"
        what = f"leaves none of the {total} steps to decay in; {mend}"
        return [f"scheduler.params.warmup_num_steps: {warmup}: {what}"]
    return []


def _torch_errors(kind: str, params: Mapping[str, Any]) -> list[str]:
    length = {"OneCycleLR": "total_steps", "CosineAnnealingLR": "T_max"}.get(kind, "total_iters")
    if length not in params:
        return [f"scheduler.params.{length}: missing; give it, or hyperparameters.max_length"]
    total, rise = params[length], params.get("pct_start", 0.3)
    if kind == "OneCycleLR" and _rises_in_one_step(params):
        what = f"is 1 of {total} steps, and torch wants 0 or more than 1; use {min(1.0, 2 / total):g}"
        return [f"scheduler.params.pct_start: {rise}: {what}"]
    return []


def _rises_in_one_step(params: Mapping[str, Any]) -> bool:
    """Whether OneCycleLR's rise is of one step: torch divides by what is left of it, less a step."""
    return params.get("pct_start", 0.3) * params["total_steps"] == 1


def schedule_notes(config: Mapping[str, Any], total: int | None) -> list[str]:
    """Says where a schedule cannot get to its peak within the training.

    Args:
        config: the DeepSpeed configuration.
        total: optimizer steps of the whole training; None if that is not known.
    """
    params = section_at(config, "scheduler", "params")
    notes = []
    for key in ("warmup_num_steps", "cycle_first_step_size"):
        if total is not None and params.get(key, 0) > total:
            what = f"the training has {total:,} steps, so the learning rate never gets to its peak"
            mend = f"use less, e.g. {max(2, total // 10)}, or train for longer"
            notes.append(f"scheduler.params.{key}: {params[key]}: {what}; {mend}")
    return notes


def section_at(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The mapping at a path; empty where there is none."""
    for key in path:
        inner = config.get(key)
        config = inner if isinstance(inner, Mapping) else {}
    return config
