"""Merges hyperparameters and a DeepSpeed configuration file into one checked configuration.

The hyperparameters have one of the three forms of Determined's DeepSpeed usage guide: ``deepspeed_config:
FILE``; the same with ``overwrite_deepspeed_args``; or DeepSpeed's own keys inline among the hyperparameters.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from deepspeed.runtime import constants
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from determined.pytorch.deepspeed import overwrite_deepspeed_config

from classify.config.hyperparameters import Hyperparameters
from classify.config.project import PROJECT
from classify.config.rules import RATE
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
    BATCH_KEYS,
    HYPER,
    MICRO_BATCH,
    REMOVED,
    TOTAL_BATCH,
    key_errors,
    known_keys,
    nearest_key,
)
from classify.engine.learning_rate import configured_errors, follow_learning_rate, follow_length
from classify.engine.optimizer_rules import is_muon, optimizer_class, rules, schedule_class, section_at
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import regular_file

# For each section, the function that returns the class of a type
INHERITING = {"optimizer": optimizer_class, "scheduler": schedule_class}
AUTO = "auto"  # Hugging Face's configurations contain it: https://huggingface.co/docs/transformers/deepspeed
# Values for "auto", by the key's path
AUTO_VALUES = {
    "optimizer.params.lr": 0.001,
    "scheduler.params.warmup_num_steps": 0.1,
    "gradient_clipping": 1.0,
}
AUTO_BATCH = 16
Steps = Callable[[int, int], int]  # (train_batch_size, micro-batches in a step) -> optimizer steps


class Merged(NamedTuple):
    """A DeepSpeed configuration that ``key_errors`` accepted.

    Attributes:
        config: the configuration; the schedule's peak follows the learning rate.
        tries: whether benchmarks choose the micro-batch; see ``asks_for_tries``.
    """

    config: dict[str, Any]
    tries: bool


def merge(hyper: Hyperparameters) -> Merged:
    """Merge any of the three forms into one configuration, and check each key and value.

    Raises:
        InvalidInput: with one line for each error.
    """
    errors: list[str] = []
    base, overrides = _forms(hyper, errors)
    _inherit(base, overrides)
    errors += _merge_errors(base, overrides)
    config = overwrite_deepspeed_config(base, overrides)
    _update_old_keys(config)
    tries = _leaves_micro_batch_open(config)
    resolve_auto(config)
    _raise(errors + key_errors(config, HYPER if hyper.deepspeed_config is None else ""))
    follow_learning_rate(config, overrides)
    return Merged(config, tries)


def asks_for_tries(hyper: Hyperparameters) -> bool:
    """Return whether benchmarks choose the micro-batch: it is ``auto``, and only the total batch is fixed.

    The function reads the file without merging the overrides, because the batch sizes are top-level keys.

    Raises:
        InvalidInput: if the file cannot be read.
    """
    base, overrides = _forms(hyper, [])
    return _leaves_micro_batch_open({**base, **overrides})


def resolve(
    merged: Merged, hyper: Hyperparameters, processes: int, device: str, steps: Steps | None = None
) -> dict[str, Any]:
    """Return the configuration for ``deepspeed.initialize``, checked before anything is built.

    Args:
        merged: the result of ``merge``.
        hyper: the hyperparameters, without conflicts.
        processes: the number of processes.
        device: ``cpu``, ``cuda`` or ``mps``.
        steps: a function that returns the number of optimizer steps of the training; None if the length is
            not known.

    Returns:
        The configuration with all three batch sizes, the schedule's peak and length, and an optimizer
        that the device runs without compiling.

    Raises:
        InvalidInput: with one line for each conflict.
    """
    config, tries = merged
    # Conflicts, and the batch sizes
    replicas = processes // hyper.pipe_parallel_size
    errors = combination_errors(config, hyper, device)
    errors += resolve_batch_sizes(config, replicas) or capacity_errors(config, hyper)
    if tries and (hyper.pipe_parallel_size > 1 or hyper.has_experts):
        errors.append(f"{MICRO_BATCH}: 'auto': pipelines and experts need a fixed size; give a number")
    _raise(errors)
    # The schedule's length
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


# ------------------------------------------------------------------------------------------ forms and merging


def _forms(hyper: Hyperparameters, errors: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the base configuration and its overrides, from any of the forms; add to ``errors``."""
    inline, source = copy.deepcopy(dict(hyper.inline)), hyper.deepspeed_config
    overrides = copy.deepcopy(dict(hyper.overwrite_deepspeed_args or {}))
    if source is None:
        if overrides:
            raise InvalidInput(
                "hyperparameters.overwrite_deepspeed_args: has no effect without"
                " hyperparameters.deepspeed_config; name a file there, e.g. ds_config.json"
            )
        return {}, inline
    errors += [f"hyperparameters.{k}: {v!r}: {_why_not_inline(k)}" for k, v in inline.items()]
    try:
        return _read(source), overrides
    except InvalidInput as error:
        raise InvalidInput([*errors, *error.errors]) from error


def _why_not_inline(key: str) -> str:
    if key in known_keys():
        return "does not work with deepspeed_config; move it under overwrite_deepspeed_args"
    return f"unknown key; {nearest_key(key, 'hyperparameters.overwrite_deepspeed_args.')}"


def _read(source: str) -> dict[str, Any]:
    """Read a DeepSpeed configuration file, in the working directory or else the project's folder."""
    path = source if os.path.exists(source) else PROJECT / source
    at = f"hyperparameters.deepspeed_config: {source!r}"
    try:
        config = overwrite_deepspeed_config(str(regular_file(path)), {})
    except FileNotFoundError:
        raise InvalidInput(f"{at}: no such file; give the path of a JSON file") from None
    except (ValueError, OSError, RecursionError) as error:  # malformed, duplicate key, unreadable, too deep
        raise InvalidInput(f"{at}: not a JSON file ({one_line(error)}); correct it") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{at}: not a JSON object; correct it")
    return config


def _inherit(base: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """If the overrides change a type, remove from ``base`` the parameters that the new type does not take."""
    for key, find_class in INHERITING.items():
        kind = section_at(overrides, key).get("type")
        old = section_at(base, key)
        if isinstance(kind, str) and kind != old.get("type") and isinstance(old.get("params"), dict):
            cls = find_class(kind)
            # DeepSpeed's optimizers for GPUs declare no parameters; all take these two
            takes = rules(cls) if cls else dict.fromkeys(("lr", "weight_decay"), RATE)
            base[key]["params"] = {
                name: value
                for name, value in old["params"].items()
                if name in takes and takes[name].is_valid(value)
            }


def _merge_errors(base: Any, overrides: dict[str, Any], path: str = "") -> list[str]:
    """Remove each mapping that would override a single value, because Determined cannot merge them.

    Returns:
        A line for each removed mapping.
    """
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


def _update_old_keys(config: dict[str, Any]) -> None:
    """Convert old offload keys; remove null values, and the sections of ``REMOVED`` that are off."""
    zero = config.get("zero_optimization")
    for old, new in {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}.items():
        if isinstance(zero, dict) and isinstance(zero.get(old), bool) and zero.pop(old):
            zero.setdefault(new, {"device": "cpu"})
    for key, value in list(config.items()):
        is_off = value is False or (isinstance(value, Mapping) and not value.get("enabled", value))
        if value is None or (is_off and key in REMOVED):
            del config[key]


# ------------------------------------------------------------------------------------------------------- auto


def resolve_auto(config: dict[str, Any]) -> list[str]:
    """Replace or remove every ``"auto"``, and return the paths of those keys.

    A key of ``AUTO_VALUES`` gets the value there. DeepSpeed or the training's length sets the removed
    keys. If an ``"auto"`` leaves no batch size, ``train_batch_size`` becomes ``AUTO_BATCH``.
    """
    paths = sorted(_remove_autos(config))
    for path in AUTO_VALUES.keys() & set(paths):
        *sections, key = path.split(".")
        inner = config
        for section in sections:
            inner = inner[section]
        inner[key] = AUTO_VALUES[path]
    batch = {TOTAL_BATCH, MICRO_BATCH}
    if batch & set(paths) and not batch & config.keys():
        config[TOTAL_BATCH] = AUTO_BATCH
    return paths


def _remove_autos(config: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from _remove_autos(value, f"{path}{key}.")
        elif value == AUTO:
            del config[key]
            yield f"{path}{key}"


# ------------------------------------------------------------------------------------------------ batch sizes


def _leaves_micro_batch_open(config: Mapping[str, Any]) -> bool:
    """Return whether the total batch is set, the micro-batch is ``auto``, and the accumulation is not set."""
    total, micro, accumulation = (config.get(key) for key in BATCH_KEYS)
    return total not in (None, AUTO) and micro == AUTO and accumulation in (None, AUTO)


def resolve_batch_sizes(config: dict[str, Any], replicas: int) -> list[str]:
    """Fill in the missing batch sizes for the data-parallel size ``replicas``; return error lines.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel size.
    """
    given = {key: config[key] for key in BATCH_KEYS if config.get(key) is not None}
    total, micro, accumulation = (given.get(key) for key in BATCH_KEYS)
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        total = micro * accumulation * replicas
    elif micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * replicas)
    else:
        accumulation = accumulation or total // (micro * replicas)
    if micro * accumulation * replicas != total:
        return [_indivisible(given, replicas)]
    config.update(zip(BATCH_KEYS, (total, micro, accumulation), strict=True))
    return []


def _indivisible(given: dict[str, int], replicas: int) -> str:
    """Return the error for an indivisible ``train_batch_size``, with the nearest divisible values."""
    total = given[TOTAL_BATCH]
    others = {key: value for key, value in given.items() if key != TOTAL_BATCH}
    factors = [f"{replicas} {'process' if replicas == 1 else 'processes'}"]
    factors += [f"{key} {value}" for key, value in others.items()]
    unit = replicas * math.prod(others.values())
    if len(given) == len(BATCH_KEYS):
        reason = f"{' x '.join(factors)} is {unit}; use {unit}, or remove one of the three keys"
        return f"{TOTAL_BATCH}: {total}: {reason}"
    below = total // unit * unit
    values = f"{below} or {below + unit}" if below else str(unit)
    product = f"{unit}, which is {' x '.join(factors)}" if others else factors[0]
    return f"{TOTAL_BATCH}: {total}: is not a multiple of {product}; use {values}"


# --------------------------------------------------------------------------- defaults other than DeepSpeed's


def _avoid_compiling(config: dict[str, Any], device: str) -> None:
    """Select torch's Adam, on a GPU in its fused form: DeepSpeed would first compile its own for a minute.

    To compile it for a GPU, DeepSpeed needs nvcc, which torch's wheels lack. Also let ZeRO accept torch's
    optimizers.
    """
    optimizer, offload = config["optimizer"], offloads(config, "offload_optimizer")
    if optimizer["type"].lower() in ("adam", "adamw", "muon"):  # Muon includes an Adam
        params = optimizer.setdefault("params", {})
        if not params.setdefault("torch_adam", True):
            params.pop("fused", None)  # DeepSpeed's own Adam is always fused
        elif device == "cuda" and not (is_muon(config) or offload or params.get("foreach")):
            params.setdefault("fused", True)
    if offload and (device == "cpu" or optimizer.get("params", {}).get("torch_adam")):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if optimizer["type"].lower() not in DEEPSPEED_OPTIMIZERS:
        config.setdefault("zero_allow_untested_optimizer", True)


def _suit_muon(config: dict[str, Any]) -> None:
    """With Muon, do not clip by default; at ZeRO stage 3 reduce whole gradients, as DeepSpeed requires."""
    if not is_muon(config):
        return
    config.setdefault("gradient_clipping", 0.0)
    if zero_stage(config) == 3:
        config["zero_optimization"]["reduce_scatter"] = False


def _disable_throughput_timer(config: dict[str, Any]) -> None:
    """Turn off DeepSpeed's throughput timer, which waits for the device twice in every micro-batch."""
    timers = config.setdefault("timers", {})
    throughput = timers.setdefault("throughput", {}) if isinstance(timers, dict) else None
    if isinstance(throughput, dict):
        throughput.setdefault("enabled", False)


def _cast_buffers(config: dict[str, Any]) -> None:
    """Keep running statistics in the dtype of the weights, as batch normalization requires.

    Since version 0.19 DeepSpeed leaves buffers in fp32; earlier versions always cast them.
    """
    if hasattr(constants, "BUFFER_DTYPE") and dtype_name(config) != "fp32":
        config.setdefault("data_types", {}).setdefault("buffer_dtype", dtype_name(config))


def _reduce_bf16_in_fp32(config: dict[str, Any]) -> None:
    """Sum bf16 gradients in fp32 over ranks, with ZeRO also over micro-batches: bf16 sums lose precision.

    Source: https://github.com/deepspeedai/DeepSpeed/issues/3979
    """
    if not (enabled(config, "bf16") or enabled(config, "bfloat16")):
        return
    config.setdefault("communication_data_type", "fp32")
    if zero_stage(config) > 0:  # without ZeRO the engine accumulates in the weights' dtype
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
