"""Hyperparameters + a DeepSpeed configuration file -> one checked DeepSpeed configuration.

The three forms of Determined's DeepSpeed usage guide: ``deepspeed_config: FILE``; the same with
``overwrite_deepspeed_args``; or DeepSpeed's own keys inline among the hyperparameters.
"""

from __future__ import annotations

import copy
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from determined.pytorch.deepspeed import overwrite_deepspeed_config

from errors import InvalidInput, nearest, one_line

# Hyperparameters that are this trial's, not DeepSpeed's.
OWN_KEYS = ("net", "max_length", "deepspeed_config", "overwrite_deepspeed_args")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Where each schedule keeps its peak; WarmupCosineLR scales the optimizer's learning rate and so has none.
PEAK_KEYS = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr", "OneCycle": "cycle_max_lr"}


def resolve(hparams: Mapping[str, Any], slots: int, device: str) -> dict[str, Any]:
    """Makes the configuration that ``deepspeed.initialize`` takes, and checks it before anything is built.

    Args:
        hparams: the trial's hyperparameters, in any of the three forms.
        slots: the number of processes.
        device: ``cpu`` or ``cuda``.

    Returns:
        The merged configuration with all three batch fields, the schedule's peak and an optimizer that the device
        runs without compiling.

    Raises:
        InvalidInput: with one line for each thing that is wrong.
    """
    base, overrides = _forms(hparams)
    merged = overwrite_deepspeed_config(base, overrides)
    faults = _unknown_keys(merged) + _resolve_batch_size(merged, slots)
    if faults:
        raise InvalidInput(faults)
    _follow_learning_rate(merged, overrides)
    _avoid_compiling(merged, device)
    return merged


def engine_dtype(engine: deepspeed.DeepSpeedEngine) -> torch.dtype:
    """The floating-point type in which an engine wants its inputs."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def _forms(hparams: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The base configuration and what overrides it, from whichever form the hyperparameters have."""
    inline = {key: copy.deepcopy(value) for key, value in hparams.items() if key not in OWN_KEYS}
    source = hparams.get("deepspeed_config")
    overrides = hparams.get("overwrite_deepspeed_args") or {}
    if not isinstance(overrides, Mapping):
        raise InvalidInput(
            f"hyperparameters.overwrite_deepspeed_args: {overrides!r}: must be a mapping of DeepSpeed's keys"
        )
    if source is None:
        if overrides:
            raise InvalidInput(
                "hyperparameters.overwrite_deepspeed_args: overwrites nothing without hyperparameters.deepspeed_config;"
                " name a file there, e.g. ds_config.json"
            )
        return {}, inline
    if inline:
        known = [*OWN_KEYS, *known_keys()]
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


def _read(source: Any) -> dict[str, Any]:
    """Reads a DeepSpeed configuration file, beside the working directory's files or this one."""
    if not isinstance(source, str):
        raise InvalidInput(f"hyperparameters.deepspeed_config: {source!r}: must be a file's name, e.g. ds_config.json")
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


class _Recorder(dict):
    """A configuration that notes every key it is asked for."""

    asked: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # so that "key in config.keys()" is noted too

    def __copy__(self) -> _Recorder:
        return self


@functools.cache
def known_keys() -> frozenset[str]:
    """The top-level keys of the installed DeepSpeed, found by watching it read a configuration."""
    recorder = _Recorder(train_micro_batch_size_per_gpu=1)
    DeepSpeedConfig(recorder)
    return frozenset(recorder.asked | {"optimizer", "scheduler"})


def _unknown_keys(config: Mapping[str, Any]) -> list[str]:
    faults = []
    for key, value in config.items():
        if key in known_keys():
            continue
        head, _, rest = key.partition(".")
        if rest and head in known_keys():
            nested = functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)
            mend = f"write it nested: {json.dumps(nested)}"
        else:
            mend = nearest(key, known_keys())
        faults.append(f"{key}: {value!r}: DeepSpeed knows no such key; {mend}")
    return faults


def _resolve_batch_size(config: dict[str, Any], slots: int) -> list[str]:
    """Fills in the batch fields that are missing, for the processes at hand.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel size.
    """
    given = {key: config[key] for key in BATCH_KEYS if config.get(key) is not None}
    faults = [
        f"{key}: {value!r}: must be a whole number of at least 1"
        for key, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    if faults:
        return faults
    total, micro, accumulate = (given.get(key) for key in BATCH_KEYS)
    if total is None and micro is None:
        return ["train_batch_size: missing; give it or train_micro_batch_size_per_gpu"]
    if total is None:
        assert micro is not None
        accumulate = accumulate or 1
        total = micro * accumulate * slots
    elif micro is None:
        accumulate = accumulate or 1
        micro = total // (accumulate * slots)
    else:
        accumulate = accumulate or total // (micro * slots)
    if micro * accumulate * slots != total:
        return [_batch_fault(given, slots)]
    config.update(zip(BATCH_KEYS, (total, micro, accumulate), strict=True))
    return []


def _batch_fault(given: dict[str, int], slots: int) -> str:
    """Says by what ``train_batch_size`` must be divisible, and its nearest values that are."""
    total = given["train_batch_size"]
    factors = [f"{slots} processes"] + [f"{key} {value}" for key, value in given.items() if key != BATCH_KEYS[0]]
    unit = slots
    for key in BATCH_KEYS[1:]:
        unit *= given.get(key, 1)
    if len(given) == len(BATCH_KEYS):
        return f"train_batch_size: {total}: is not {' x '.join(factors)}; use {unit}, or leave one of the three out"
    below = total // unit * unit
    values = f"{below} or {below + unit}" if below else str(unit)
    return f"train_batch_size: {total}: does not divide among {' x '.join(factors)}; use {values}"


def _follow_learning_rate(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Makes the schedule's peak follow ``optimizer.params.lr``, unless the peak is given with it or over it.

    DeepSpeed's own schedules silently replace the optimizer's learning rate by theirs, so that a search over the
    learning rate alone would search nothing.
    """
    scheduler, optimizer = config.get("scheduler") or {}, config.get("optimizer") or {}
    peak = PEAK_KEYS.get(scheduler.get("type", ""))
    lr = (optimizer.get("params") or {}).get("lr")
    if peak is None or lr is None:
        return
    params = scheduler.setdefault("params", {})
    lr_overridden = "lr" in _at(overrides, "optimizer", "params")
    peak_overridden = peak in _at(overrides, "scheduler", "params")
    if peak not in params or (lr_overridden and not peak_overridden):
        params[peak] = lr


def _at(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for key in path:
        inner = config.get(key)
        config = inner if isinstance(inner, Mapping) else {}
    return config


def _avoid_compiling(config: dict[str, Any], device: str) -> None:
    """On a CPU takes torch's Adam, where DeepSpeed would first compile a kernel of its own for over a minute."""
    optimizer = config.get("optimizer") or {}
    if device == "cpu" and optimizer.get("type", "").lower() in ("adam", "adamw"):
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
