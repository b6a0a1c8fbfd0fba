"""Hyperparameters + a DeepSpeed configuration file -> one checked DeepSpeed configuration.

The three forms of Determined's DeepSpeed usage guide: ``deepspeed_config: FILE``; the same with
``overwrite_deepspeed_args``; or DeepSpeed's own keys inline among the hyperparameters.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepspeed.runtime import constants
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from determined.pytorch.deepspeed import overwrite_deepspeed_config

from classify.config.hyperparameters import Hyperparameters
from classify.config.project import PROJECT
from classify.config.rules import RATE
from classify.engine import batch_sizes
from classify.engine.combinations import (
    capacity_errors,
    combination_errors,
    dtype_name,
    enabled,
    offloads,
    zero_stage,
)
from classify.engine.deepspeed_keys import (
    ACCUMULATION,
    HYPER,
    MICRO_BATCH,
    TOTAL_BATCH,
    key_errors,
    known_keys,
    nearest_key,
)
from classify.engine.learning_rate import configured_errors, follow_learning_rate, follow_length, section_at
from classify.engine.migration import resolve_auto
from classify.engine.optimizer_rules import is_muon, optimizer_class, rules, schedule_class
from classify.engine.replaced_keys import REPLACED, says
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import regular_file

# The file's parameters carry over to another optimizer or schedule as far as that one takes them.
INHERITING = {"optimizer": optimizer_class, "scheduler": schedule_class}
Steps = Callable[[int, int], int]  # from train_batch_size and the micro-batches in it to all optimizer steps


class Merged(NamedTuple):
    """A DeepSpeed configuration whose keys and values are right by themselves.

    Attributes:
        config: the configuration.
        overrides: what of it overrode its file.
        tries: whether the micro-batch is to be found by trying.
    """

    config: dict[str, Any]
    overrides: dict[str, Any]
    tries: bool


def merge(hyper: Hyperparameters) -> Merged:
    """Makes one configuration of any of the three forms, and checks every key and value by itself.

    Raises:
        InvalidInput: with one line for each that is wrong.
    """
    errors: list[str] = []
    base, overrides = _forms(hyper, errors)
    _inherit(base, overrides)
    errors += _merge_errors(base, overrides)
    config = overwrite_deepspeed_config(base, overrides)
    _modernise(config)
    tries = batch_sizes.is_to_be_tried(config)
    resolve_auto(config)
    _raise(errors + key_errors(config, HYPER if hyper.deepspeed_config is None else ""))
    return Merged(config, overrides, tries)


def resolve(
    merged: Merged, hyper: Hyperparameters, processes: int, device: str, steps: Steps | None = None
) -> dict[str, Any]:
    """Makes the configuration that ``deepspeed.initialize`` takes, and checks it before anything is built.

    Args:
        merged: from ``merge``.
        hyper: the hyperparameters, which go together.
        processes: how many there are.
        device: ``cpu`` or ``cuda``.
        steps: gives the optimizer steps of the whole training; None if that is not known.

    Returns:
        The configuration with all three batch fields, the schedule's peak and length, and an optimizer
        that the device runs without compiling.

    Raises:
        InvalidInput: with one line for each thing that does not go together.
    """
    config, overrides, tries = merged
    # What goes together, and the batch sizes
    replicas = processes // hyper.pipe_parallel_size
    errors = combination_errors(config, hyper, device)
    errors += batch_sizes.resolve(config, replicas) or capacity_errors(config, hyper)
    if tries and (hyper.pipe_parallel_size > 1 or hyper.has_experts):
        errors.append(f"{MICRO_BATCH}: 'auto': pipelines and experts are built for one size; give a number")
    _raise(errors)
    # The learning rate and its schedule
    follow_learning_rate(config, overrides)
    total = steps(config[TOTAL_BATCH], replicas * config[ACCUMULATION]) if steps else None
    follow_length(config, total)
    # Defaults other than DeepSpeed's
    _avoid_compiling(config, device)
    _suit_muon(config)
    _disable_throughput_timer(config)
    _reduce_bf16_in_fp32(config)
    _cast_buffers(config)
    _raise(configured_errors(config, hyper.minutes is not None))
    return config


def _raise(errors: list[str]) -> None:
    if errors:
        raise InvalidInput(errors)


# ----------------------------------------------------------------------------------------- forms and merging


def _forms(hyper: Hyperparameters, errors: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The base configuration and what overrides it, from whichever form the hyperparameters have."""
    inline, source = copy.deepcopy(dict(hyper.inline)), hyper.deepspeed_config
    overrides = copy.deepcopy(dict(hyper.overwrite_deepspeed_args or {}))
    if source is None:
        if overrides:
            mend = "name a file there, e.g. ds_config.json"
            raise InvalidInput(
                "hyperparameters.overwrite_deepspeed_args: overwrites nothing without"
                f" hyperparameters.deepspeed_config; {mend}"
            )
        return {}, inline
    errors += [f"hyperparameters.{k}: {v!r}: {_why_not_inline(k)}" for k, v in inline.items()]
    try:
        return _read(source), overrides
    except InvalidInput as error:
        raise InvalidInput([*errors, *error.errors]) from error


def _why_not_inline(key: str) -> str:
    if key in known_keys():
        return "stands beside deepspeed_config; move it under overwrite_deepspeed_args"
    return f"unknown key; {nearest_key(key, 'hyperparameters.overwrite_deepspeed_args.')}"


def _read(source: str) -> dict[str, Any]:
    """Reads a DeepSpeed configuration file; a relative path is of the working directory or the project."""
    path = source if os.path.exists(source) else PROJECT / source
    at = f"hyperparameters.deepspeed_config: {source!r}"
    try:
        config = overwrite_deepspeed_config(str(regular_file(path)), {})
    except FileNotFoundError:
        raise InvalidInput(f"{at}: no such file; give the path of a JSON file") from None
    except (ValueError, OSError, RecursionError) as error:  # malformed, a key twice, not readable, too deep
        raise InvalidInput(f"{at}: not a JSON file ({one_line(error)}); mend it") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{at}: holds no JSON object; mend it")
    return config


def _inherit(base: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Takes from the base what another optimizer or schedule has no use for."""
    for key, find in INHERITING.items():
        kind = section_at(overrides, key).get("type")
        old = section_at(base, key)
        if isinstance(kind, str) and kind != old.get("type") and isinstance(old.get("params"), dict):
            cls = find(kind)
            # DeepSpeed's own for GPUs do not say what they take; all take these.
            takes = rules(cls) if cls else dict.fromkeys(("lr", "weight_decay"), RATE)
            kept = {k: v for k, v in old["params"].items() if k in takes and takes[k].is_valid(v)}
            base[key]["params"] = kept


def _merge_errors(base: Any, overrides: dict[str, Any], path: str = "") -> list[str]:
    """Takes out mappings that would overwrite a single value, which Determined's merging cannot do."""
    errors = []
    for key, value in list(overrides.items()):
        if isinstance(value, Mapping) and key in base:
            if isinstance(base[key], Mapping):
                errors += _merge_errors(base[key], overrides[key], f"{path}{key}.")
            elif base[key] is not None:
                errors.append(f"{path}{key}: {dict(value)!r}: must be a single value such as {base[key]!r}")
                del overrides[key]
            else:
                base[key] = {}
    return errors


def _modernise(config: dict[str, Any]) -> None:
    """Puts what older configurations say into today's keys, and leaves out sections that say nothing."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and isinstance(zero.get("cpu_offload"), bool) and zero.pop("cpu_offload"):
        zero.setdefault("offload_optimizer", {"device": "cpu"})
    for key, value in list(config.items()):
        if value is None or (key in REPLACED and not says(value)):
            del config[key]


# --------------------------------------------------------------------------- defaults other than DeepSpeed's


def _avoid_compiling(config: dict[str, Any], device: str) -> None:
    """On a CPU takes torch's Adam, where DeepSpeed would first compile a kernel of its own for a minute."""
    optimizer = config["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw", "muon"):  # which has Adam for the rest
        params = optimizer.setdefault("params", {})
        if device == "cpu":
            params.setdefault("torch_adam", True)
        elif not params.get("torch_adam"):
            params.pop("fused", None)  # as DeepSpeed's own kernels are
    if device == "cpu" and offloads(config, "offload_optimizer"):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if optimizer["type"].lower() not in DEEPSPEED_OPTIMIZERS:
        config.setdefault("zero_allow_untested_optimizer", True)  # all of torch's step element by element


def _suit_muon(config: dict[str, Any]) -> None:
    """With Muon clips nothing unless told to, and has ZeRO 3 reduce whole gradients, or DeepSpeed refuses."""
    if not is_muon(config):
        return
    config.setdefault("gradient_clipping", 0.0)
    if zero_stage(config) == 3:
        config["zero_optimization"]["reduce_scatter"] = False


def _disable_throughput_timer(config: dict[str, Any]) -> None:
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


def _reduce_bf16_in_fp32(config: dict[str, Any]) -> None:
    """Sums gradients in fp32 over ranks, with ZeRO also over micro-batches: bf16 loses more with every rank.

    Source: https://github.com/deepspeedai/DeepSpeed/issues/3979
    """
    if not (enabled(config, "bf16") or enabled(config, "bfloat16")):
        return
    config.setdefault("communication_data_type", "fp32")
    if zero_stage(config) > 0:  # without ZeRO the engine accumulates in the dtype of the weights only
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
