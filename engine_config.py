"""Hyperparameters + a DeepSpeed configuration file -> one checked DeepSpeed configuration.

The three forms of Determined's DeepSpeed usage guide: ``deepspeed_config: FILE``; the same with
``overwrite_deepspeed_args``; or DeepSpeed's own keys inline among the hyperparameters.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime import constants
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from determined.pytorch.deepspeed import overwrite_deepspeed_config

import hyperparameters
from engine_rules import (
    BATCH_KEYS,
    combination_faults,
    dtype_name,
    enabled,
    key_faults,
    known_keys,
    offloads,
    zero_stage,
)
from errors import InvalidInput, nearest, one_line
from hyperparameters import is_moe
from optimizer_rules import RATE, built_faults, optimizer_class, rules, schedule_class, schedule_faults
from rules import is_count

# Where each schedule keeps its peak; WarmupCosineLR scales the optimizer's learning rate and so has none.
PEAK_KEYS = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr", "OneCycle": "cycle_max_lr"}
LEAST_KEYS = {"WarmupLR": "warmup_min_lr", "WarmupDecayLR": "warmup_min_lr", "OneCycle": "cycle_min_lr"}
# The base's parameters carry over to another optimizer or schedule as far as that one takes them.
INHERITING = {"optimizer": optimizer_class, "scheduler": schedule_class}


def resolve(
    hparams: Mapping[str, Any], slots: int, device: str, steps: Callable[[int, int], int] | None = None
) -> dict[str, Any]:
    """Makes the configuration that ``deepspeed.initialize`` takes, and checks it before anything is built.

    Args:
        hparams: the trial's hyperparameters, in any of the three forms.
        slots: the number of processes.
        device: ``cpu`` or ``cuda``.
        steps: gives the optimizer steps of the whole training for a ``train_batch_size`` and the micro-batches in it;
            None if that is not known.

    Returns:
        The merged configuration with all three batch fields, the schedule's peak and length, and an optimizer that
        the device runs without compiling.

    Raises:
        InvalidInput: with one line for each thing that is wrong.
    """
    faults = hyperparameters.faults(hparams, slots)
    if faults:
        raise InvalidInput(faults)
    base, overrides = _forms(hparams)
    _inherit(base, overrides)
    faults = _merge_faults(base, overrides)
    if faults:
        raise InvalidInput(faults)
    config = overwrite_deepspeed_config(base, overrides)
    _modernise(config)
    replicas = slots // hparams.get("pipe_parallel_size", 1)
    faults = key_faults(config)
    faults += combination_faults(config, hparams, device) if not faults else []
    faults += _resolve_batch_size(config, replicas) or _capacity_faults(config, hparams)
    if faults:
        raise InvalidInput(faults)
    _follow_learning_rate(config, overrides)
    _follow_length(config, replicas, steps)
    _avoid_compiling(config, device)
    _time_nothing(config)
    _sum_in_fp32(config)
    _cast_buffers(config)
    faults = schedule_faults(config) or built_faults(config)
    if faults:
        raise InvalidInput(faults)
    return config


def _forms(hparams: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The base configuration and what overrides it, from whichever form the hyperparameters have."""
    inline = {key: copy.deepcopy(value) for key, value in hparams.items() if key not in hyperparameters.OWN}
    source = hparams.get("deepspeed_config")
    overrides = hparams.get("overwrite_deepspeed_args") or {}
    if source is None:
        if overrides:
            raise InvalidInput(
                "hyperparameters.overwrite_deepspeed_args: overwrites nothing without hyperparameters.deepspeed_config;"
                " name a file there, e.g. ds_config.json"
            )
        return {}, inline
    if inline:
        known = [*hyperparameters.OWN, *known_keys()]
        raise InvalidInput(
            f"hyperparameters.{key}: {value!r}: "
            + (
                "stands beside deepspeed_config; move it under overwrite_deepspeed_args"
                if key in known_keys()
                else f"unknown key; {nearest(key, known)}"
            )
            for key, value in inline.items()
        )
    return _read(source), copy.deepcopy(dict(overrides))


def _read(source: str) -> dict[str, Any]:
    """Reads a DeepSpeed configuration file, beside the working directory's files or this one."""
    candidates = [pathlib.Path(source), pathlib.Path(__file__).parent / source]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise InvalidInput(f"hyperparameters.deepspeed_config: {source!r}: no such file; give the path of a JSON file")
    try:
        config = overwrite_deepspeed_config(str(path), {})
    except (ValueError, OSError) as error:  # malformed JSON, a key given twice, not text, not readable
        raise InvalidInput(
            f"hyperparameters.deepspeed_config: {source!r}: not a JSON file ({one_line(error)}); mend it"
        ) from error
    if not isinstance(config, dict):
        raise InvalidInput(f"hyperparameters.deepspeed_config: {source!r}: holds no JSON object; mend it")
    return config


def _inherit(base: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Takes from the base what another optimizer or schedule has no use for."""
    for key, find in INHERITING.items():
        kind = _at(overrides, key).get("type")
        old = _at(base, key)
        if isinstance(kind, str) and kind != old.get("type") and isinstance(old.get("params"), dict):
            cls = find(kind)
            # DeepSpeed's own for GPUs do not say what they take; all take these.
            takes = rules(cls) if cls else dict.fromkeys(("lr", "weight_decay"), RATE)
            base[key]["params"] = {k: v for k, v in old["params"].items() if k in takes and takes[k][0](v)}


def _merge_faults(base: Any, overrides: Mapping[str, Any], path: str = "") -> list[str]:
    """Finds mappings that would overwrite what is none, which Determined's merging cannot do."""
    faults = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and key in base:
            if isinstance(base[key], Mapping):
                faults += _merge_faults(base[key], value, f"{path}{key}.")
            elif base[key] is not None:
                faults.append(f"{path}{key}: {dict(value)!r}: must be a single value such as {base[key]!r}")
            else:
                base[key] = {}
    return faults


def _modernise(config: dict[str, Any]) -> None:
    """Puts what older configurations say into today's keys, and leaves out sections that say nothing."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and isinstance(zero.get("cpu_offload"), bool) and zero.pop("cpu_offload"):
        zero.setdefault("offload_optimizer", {"device": "cpu"})
    for key in [key for key, value in config.items() if value is None]:
        del config[key]


def _resolve_batch_size(config: dict[str, Any], replicas: int) -> list[str]:
    """Fills in the batch fields that are missing, for the model replicas at hand.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel size.
    """
    given = {key: config[key] for key in BATCH_KEYS if config.get(key) is not None}
    faults = [
        f"{key}: {value!r}: must be a whole number of at least 1"
        for key, value in given.items()
        if not is_count(value, 1)
    ]
    if faults:
        return faults
    total, micro, accumulate = (given.get(key) for key in BATCH_KEYS)
    if total is None and micro is None:
        return ["train_batch_size: missing; give it or train_micro_batch_size_per_gpu"]
    if total is None:
        assert micro is not None
        accumulate = accumulate or 1
        total = micro * accumulate * replicas
    elif micro is None:
        accumulate = accumulate or 1
        micro = total // (accumulate * replicas)
    else:
        accumulate = accumulate or total // (micro * replicas)
    if micro * accumulate * replicas != total:
        return [_batch_fault(given, replicas)]
    config.update(zip(BATCH_KEYS, (total, micro, accumulate), strict=True))
    return []


def _capacity_faults(config: Mapping[str, Any], hparams: Mapping[str, Any]) -> list[str]:
    micro, capacity = config[BATCH_KEYS[1]], hparams.get("min_capacity", 0)
    if not is_moe(hparams) or capacity <= micro:
        return []
    return [f"hyperparameters.min_capacity: {capacity}: more than a micro-batch of {micro} images; use at most {micro}"]


def _batch_fault(given: dict[str, int], replicas: int) -> str:
    """Says by what ``train_batch_size`` must be divisible, and its nearest values that are."""
    total = given["train_batch_size"]
    unit_name = "process" if replicas == 1 else "processes"
    factors = [f"{replicas} {unit_name}"] + [f"{key} {value}" for key, value in given.items() if key != BATCH_KEYS[0]]
    unit = replicas
    for key in BATCH_KEYS[1:]:
        unit *= given.get(key, 1)
    if len(given) == len(BATCH_KEYS):
        return f"train_batch_size: {total}: is not {' x '.join(factors)}; use {unit}, or leave one of the three out"
    below = total // unit * unit
    values = f"{below} or {below + unit}" if below else str(unit)
    return f"train_batch_size: {total}: does not divide among {' x '.join(factors)}; use {values}"


def _follow_learning_rate(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Makes the schedule's peak follow ``optimizer.params.lr``, unless the peak is given with it or over it.

    The least rate keeps its share of the peak, unless it is given over it. DeepSpeed's own schedules silently replace
    the optimizer's learning rate by theirs, so that a search over the learning rate alone would search nothing.
    """
    scheduler, optimizer = config.get("scheduler") or {}, config.get("optimizer") or {}
    peak, least = (keys.get(scheduler.get("type", "")) for keys in (PEAK_KEYS, LEAST_KEYS))
    lr = (optimizer.get("params") or {}).get("lr")
    if peak is None or least is None or lr is None:
        return
    params = scheduler.setdefault("params", {})
    lr_overridden = "lr" in _at(overrides, "optimizer", "params")
    overridden = _at(overrides, "scheduler", "params")
    if peak not in params or (lr_overridden and peak not in overridden):
        if params.get(peak) and least in params and least not in overridden:
            params[least] *= lr / params[peak]
        params[peak] = lr


def _at(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for key in path:
        inner = config.get(key)
        config = inner if isinstance(inner, Mapping) else {}
    return config


def _follow_length(config: dict[str, Any], replicas: int, steps: Callable[[int, int], int] | None) -> None:
    """Fits the schedule's lengths to the training where they are not given."""
    scheduler = config.get("scheduler")
    parts = replicas * config["gradient_accumulation_steps"]
    total = None if steps is None else steps(config["train_batch_size"], parts)
    if scheduler is None:
        return
    params = scheduler.setdefault("params", {})
    if scheduler["type"] == "OneCycle":
        params.setdefault("cycle_min_lr", params["cycle_max_lr"] / 10)
        cls = optimizer_class(config["optimizer"]["type"])
        if cls is not None and "betas" not in rules(cls):
            params.setdefault("cycle_momentum", False)  # it cycles the first beta
    if total is None:
        return
    takes = rules(schedule_class(scheduler["type"]))
    if "total_num_steps" in takes:
        params.setdefault("total_num_steps", total)
    if "warmup_num_steps" in takes:
        params.setdefault("warmup_num_steps", min(1000, max(2, total // 10)))
    if "cycle_first_step_size" in takes:
        params.setdefault("cycle_first_step_size", max(1, total // 2))


def _avoid_compiling(config: dict[str, Any], device: str) -> None:
    """On a CPU takes torch's Adam, where DeepSpeed would first compile a kernel of its own for over a minute."""
    optimizer = config["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw"):
        params = optimizer.setdefault("params", {})
        if device == "cpu":
            params.setdefault("torch_adam", True)
        elif not params.get("torch_adam"):
            params.pop("fused", None)  # as DeepSpeed's own kernels are
    if device == "cpu" and offloads(config, "offload_optimizer"):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if optimizer["type"].lower() not in DEEPSPEED_OPTIMIZERS:
        config.setdefault("zero_allow_untested_optimizer", True)  # all of torch's step element by element


def _time_nothing(config: dict[str, Any]) -> None:
    """Leaves DeepSpeed's throughput timer off, which waits for the device twice in every micro-batch."""
    timers = config.setdefault("timers", {})
    throughput = timers.setdefault("throughput", {}) if isinstance(timers, dict) else None
    if isinstance(throughput, dict):
        throughput.setdefault("enabled", False)


def _cast_buffers(config: dict[str, Any]) -> None:
    """Keeps running statistics in the dtype of the weights, as batch normalization wants them.

    DeepSpeed leaves buffers in fp32 since 0.19; before, it knew no other way.
    """
    if hasattr(constants, "BUFFER_DTYPE") and dtype_name(config) != "fp32":
        config.setdefault("data_types", {}).setdefault("buffer_dtype", dtype_name(config))


def _sum_in_fp32(config: dict[str, Any]) -> None:
    """Adds gradients up in fp32 over ranks and micro-batches, where bf16 would lose more with every rank.

    Source: https://github.com/deepspeedai/DeepSpeed/issues/3979
    """
    if not (enabled(config, "bf16") or enabled(config, "bfloat16")):
        return
    config.setdefault("communication_data_type", "fp32")
    if zero_stage(config) > 0:  # without ZeRO the engine accumulates in the dtype of the weights only
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
