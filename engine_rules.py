"""What makes a DeepSpeed configuration wrong, each rule with one line that names the key, its value and the mend.

Keys, types and ranges are those of the installed DeepSpeed and torch, asked rather than copied.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import json
from collections.abc import Mapping
from typing import Any

import pydantic
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig

from errors import nearest, one_line
from hyperparameters import is_moe
from optimizer_rules import optimizer_class, optimizer_faults, optimizer_names, scheduler_faults
from rules import Rule, is_bool, is_count, is_number

MICRO_BATCH = "train_micro_batch_size_per_gpu"
BATCH_KEYS = ("train_batch_size", MICRO_BATCH, "gradient_accumulation_steps")


# ------------------------------------------------------------------------------------------- DeepSpeed's keys


class _Recorder(dict):
    """A configuration that notes every key it is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: set[str] = set()

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
def known_keys(section: str | None = None) -> frozenset[str]:
    """The keys that the installed DeepSpeed reads, found by watching it read a configuration.

    Args:
        section: a top-level key whose own keys are asked for; empty if DeepSpeed does not say.
    """
    recorder = _Recorder()
    with contextlib.suppress(Exception):  # the empty configuration lacks a batch size; not every key holds a mapping
        DeepSpeedConfig(_Recorder({MICRO_BATCH: 1, section: recorder}) if section else recorder)
    return frozenset(recorder.asked if section else recorder.asked | set(BATCH_KEYS) | {"optimizer", "scheduler"})


@functools.cache
def _defaults() -> Any:
    return DeepSpeedConfig({MICRO_BATCH: 1})


def key_faults(config: Mapping[str, Any]) -> list[str]:
    """Checks every key and value by itself, at every level."""
    faults = []
    for key, value in config.items():
        if key in known_keys():
            faults += _value_faults(key, value)
        else:
            faults.append(_unknown(key, value))
    return faults + optimizer_faults(config) + scheduler_faults(config)


def _unknown(key: str, value: Any) -> str:
    head, _, rest = str(key).partition(".")
    if rest and head in known_keys():
        nested = functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)
        return f"{key}: {value!r}: DeepSpeed knows no dotted keys; write it nested: {json.dumps(nested)}"
    return f"{key}: {value!r}: DeepSpeed knows no such key; {nearest(key, known_keys())}"


def _value_faults(key: str, value: Any) -> list[str]:
    """Checks one top-level key other than the optimizer, the scheduler and the batch sizes."""
    if key in ("optimizer", "scheduler", *BATCH_KEYS):
        return []
    if key == "steps_per_print":
        return [] if is_count(value, 1) else [f"{key}: {value!r}: must be a whole number of at least 1"]
    if key == "zero_optimization" and isinstance(value, Mapping) and not is_count(value.get("stage", 0), 0):
        return [f"{key}.stage: {value['stage']!r}: must be a whole number from 0 to 3"]
    default = getattr(_defaults(), key, None)
    if isinstance(default, bool) and not isinstance(value, bool):
        return [f"{key}: {value!r}: must be true or false"]
    if isinstance(default, float) and not is_number(value):
        return [f"{key}: {value!r}: must be a number of at least 0"]
    if isinstance(value, Mapping):
        faults = _inner_faults(key, value)
        if faults:
            return faults
        known = known_keys(key)
        unknown = [inner for inner in value if known and inner not in known] if not _is_model(key) else []
        if unknown:
            return [f"{key}.{inner}: {value[inner]!r}: DeepSpeed knows no such key; {nearest(inner, known)}"
                    for inner in unknown]  # fmt: skip
    elif _is_model(key):
        return [f"{key}: {value!r}: must be a mapping, e.g. {{{_some_key(key)}: ...}}"]
    try:
        DeepSpeedConfig({MICRO_BATCH: 1, key: value})
    except pydantic.ValidationError as error:
        return [_model_fault(key, detail) for detail in error.errors()]
    except Exception as error:  # DeepSpeed's own checks raise errors of many types
        if key in ("fp16", "bf16") and isinstance(error, AssertionError):
            return []  # what goes with which stage; the whole is yet to be checked
        return [f"{key}: {value!r}: DeepSpeed refuses it ({one_line(error)}); mend or remove it"]
    return []


_INNER: dict[str, Rule] = {
    "fp16.initial_scale_power": (lambda v: is_count(v, 0) and v <= 62, "must be a whole number from 0 to 62"),
    "flops_profiler.profile_step": (lambda v: is_count(v, 1), "must be a whole number of at least 1"),
    "flops_profiler.module_depth": (lambda v: is_count(v, -1), "must be a whole number of at least -1"),
    "flops_profiler.top_modules": (lambda v: is_count(v, 1), "must be a whole number of at least 1"),
    "flops_profiler.detailed": (is_bool, "must be true or false"),
    "zero_optimization.legacy_stage1": (lambda v: v is False, "DeepSpeed has it no more; remove it"),
}


def _inner_faults(section: str, values: Mapping[str, Any]) -> list[str]:
    """Checks what DeepSpeed takes unseen, and fails at in training."""
    faults = []
    for key, value in values.items():
        holds, must = _INNER.get(f"{section}.{key}", (lambda _: True, ""))
        if not holds(value):
            faults.append(f"{section}.{key}: {value!r}: {must}")
    return faults


_MODELS = {"zero_optimization": "zero_config", "fp16": "float16_config", "bf16": "bfloat16_config",
           "bfloat16": "bfloat16_config", "comms_logger": "comms_config", "compile": "compile_config"}  # fmt: skip


def _is_model(key: str) -> bool:
    """Whether DeepSpeed describes the section by a pydantic model, which checks keys and values by itself."""
    return key in _MODELS


def _some_key(key: str) -> str:
    return "stage" if key == "zero_optimization" else "enabled"


def _model_fault(section: str, detail: Any) -> str:
    inner = [str(each) for each in detail["loc"]]
    path, value = [section, *(inner[1:] if inner[:1] == [section] else inner)], detail["input"]
    if detail["type"] == "extra_forbidden":
        fields: Any = type(getattr(_defaults(), _MODELS.get(section, ""), None))
        known = getattr(fields, "model_fields", {}) if len(path) == 2 else {}
        hint = nearest(path[-1], known) if known else "remove it"
        return f"{'.'.join(path)}: {value!r}: DeepSpeed knows no such key; {hint}"
    return f"{'.'.join(path)}: {value!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}; change it"


# ---------------------------------------------------------------------------------------------- combinations


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage that a configuration asks for."""
    section = config.get("zero_optimization")
    return section.get("stage", 0) if isinstance(section, Mapping) else 0


def offloads(config: Mapping[str, Any], what: str) -> bool:
    """Whether ``offload_optimizer`` or ``offload_param`` is on."""
    section = (config.get("zero_optimization") or {}).get(what) or {}
    return section.get("device", "none") not in (None, "none")


def enabled(config: Mapping[str, Any], section: str) -> bool:
    """Whether ``{enabled: true}`` stands in a section."""
    return bool((config.get(section) or {}).get("enabled", False))


def combination_faults(config: Mapping[str, Any], hparams: Mapping[str, Any], device: str) -> list[str]:
    """Checks what goes with what: the constraints of Determined's DeepSpeed guide and DeepSpeed's own.

    Source: https://docs.determined.ai/latest/model-dev-guide/api-guides/apis-howto/deepspeed/deepspeed.html
    """
    faults = []
    stage = zero_stage(config)
    at = f"zero_optimization.stage: {stage}:"
    if hparams.get("pipe_parallel_size", 1) > 1 and stage > 1:
        faults.append(f"{at} a pipeline goes with ZeRO stage 0 or 1 only; set it to 1, or pipe_parallel_size to 1")
    if hparams.get("pipe_parallel_size", 1) > 1 and stage == 0 and enabled(config, "fp16"):
        faults.append(f"{at} DeepSpeed does not scale the loss of an fp16 pipeline without ZeRO; set it to 1")
    if offloads(config, "offload_param") and stage != 3:
        faults.append(f"{at} offload_param works with ZeRO stage 3 only; set it to 3 or remove offload_param")
    if offloads(config, "offload_optimizer") and stage not in (2, 3):
        faults.append(f"{at} offload_optimizer works with ZeRO stage 2 and 3 only; set it to 2 or remove it")
    sums = (config.get("data_types") or {}).get("grad_accum_dtype")
    if sums not in (None, "fp32", "fp16", "bf16"):
        faults.append(f"data_types.grad_accum_dtype: {sums!r}: must be one of fp32, fp16, bf16")
    elif sums is not None and stage == 0 and sums != dtype_name(config):
        faults.append(
            f"data_types.grad_accum_dtype: {sums!r}: without ZeRO it has to be {dtype_name(config)}; remove it"
        )
    for what in ("offload_optimizer", "offload_param"):
        faults += _nvme_faults(config, what)
    if is_moe(hparams) and stage == 3:
        faults.append(f"{at} mixture of experts does not go with ZeRO stage 3; set it to 2 or less, or moe to false")
    if is_moe(hparams) and stage > 0 and hparams.get("moe_param_group") is False:
        faults.append(
            f"hyperparameters.moe_param_group: False: ZeRO stage {stage} needs a group of parameters each for experts;"
            " set it to true"
        )
    if (config.get("zero_optimization") or {}).get("zenflow") and device == "cpu":
        faults.append("zero_optimization.zenflow: needs a GPU, whose work it lets the CPU's steps overlap; remove it")
    if hparams.get("sync_batchnorm") and device == "cpu":
        faults.append("hyperparameters.sync_batchnorm: True: torch computes it on GPUs alone; set it to false")
    if enabled(config, "fp16") and (enabled(config, "bf16") or enabled(config, "bfloat16")):
        faults.append("bf16.enabled: True: fp16 is enabled too; set one of them to false")
    name = (config.get("optimizer") or {}).get("type", "")
    if device == "cpu" and name.lower() in DEEPSPEED_OPTIMIZERS and optimizer_class(name) is None:
        faults.append(f"optimizer.type: {name!r}: needs a GPU; on a CPU use one of {', '.join(optimizer_names())}")
    if name.lower() == "adagrad" and stage < 2 and dtype_name(config) in ("fp16", "bf16")[stage:]:
        faults.append(
            f"{at} DeepSpeed has {name} with {dtype_name(config)} from ZeRO stage"
            f" {1 if enabled(config, 'fp16') else 2} on; use that, or another optimizer"
        )
    if not faults:
        faults += _refused_whole(config)
    return faults


def dtype_name(config: Mapping[str, Any]) -> str:
    """What DeepSpeed calls the floating-point type of the weights."""
    if enabled(config, "fp16"):
        return "fp16"
    return "bf16" if enabled(config, "bf16") or enabled(config, "bfloat16") else "fp32"


def _nvme_faults(config: Mapping[str, Any], what: str) -> list[str]:
    section = (config.get("zero_optimization") or {}).get(what) or {}
    if section.get("device") != "nvme":
        return []
    key = f"zero_optimization.{what}"
    if not section.get("nvme_path"):
        return [f"{key}.nvme_path: {section.get('nvme_path')!r}: missing; give a folder on the NVMe disk"]
    if ctypes.util.find_library("aio") is None:
        return [f"{key}.device: 'nvme': DeepSpeed finds no libaio on this machine; install it or use device: cpu"]
    return []


def _refused_whole(config: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed itself refuses of the whole, but for the batch sizes, which depend on the processes."""
    whole = {key: value for key, value in config.items() if key not in BATCH_KEYS}
    try:
        DeepSpeedConfig({**whole, MICRO_BATCH: 1})
    except Exception as error:
        return [f"deepspeed_config: DeepSpeed refuses the whole ({one_line(error)}); mend what it names"]
    return []
