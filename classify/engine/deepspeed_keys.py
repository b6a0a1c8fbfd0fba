"""Checks of a DeepSpeed configuration, key by key.

The installed DeepSpeed and torch determine the valid keys, types and ranges.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import pydantic
from deepspeed.runtime.config import DeepSpeedConfig

from classify.config.hyperparameters import RULES
from classify.config.rules import ANY, BOOL, Rule, is_count, is_number, whole
from classify.engine.optimizer_rules import optimizer_errors, scheduler_errors
from deepspeed_trial.errors import nearest, one_line

HYPER = "hyperparameters."
TOTAL_BATCH, MICRO_BATCH, ACCUMULATION = BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# Features that DeepSpeed has removed: a file may still switch them off.
REMOVED = """amp autotuning compression_training curriculum_learning eigenvalue elasticity graph_harvesting
    nebula progressive_layer_drop quantize_training sparse_attention sparse_gradients""".split()
# Keys that DeepSpeed ignores or that do not work here, and the remedy for each.
REPLACED = {
    "autotuning": "only DeepSpeed's launcher reads it; use search.py --config experiments/search-speed.yaml",
    "fp32_allreduce": "write communication_data_type: fp32",
    "allgather_size": "write zero_optimization.allgather_bucket_size",
    "aio.thread_count": "write intra_op_parallelism",
    "tensor_parallel": "is for language models; remove it",
    "datastates_ckpt": "needs another package, and this project writes its checkpoints itself; remove it",
}
# Sections that a pydantic model describes, and the attribute of DeepSpeedConfig that has the model.
_MODELS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "bfloat16": "bfloat16_config",
    "comms_logger": "comms_config",
    "compile": "compile_config",
}
# The messages for the types of pydantic's errors, by the type's first word.
_EXPECTED = {
    "bool": "must be true or false",
    "int": "must be a whole number",
    "float": "must be a number",
    "string": "must be text",
    "dict": "must be a mapping",
    "model": "must be a mapping",
}
# Nested keys that a person may write without their sections.
_NESTED = (
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "optimizer.params.momentum",
    "zero_optimization.stage",
)
# Rules for values that DeepSpeed does not check: a wrong value would fail in training.
_UNCHECKED: dict[str, Rule] = {
    "fp16.initial_scale_power": Rule(
        lambda v: is_count(v, 0) and v <= 62, "must be a whole number from 0 to 62"
    ),
    "flops_profiler.profile_step": whole(1),
    "flops_profiler.module_depth": whole(-1),
    "flops_profiler.top_modules": whole(1),
    "flops_profiler.detailed": BOOL,
    "zero_optimization.legacy_stage1": Rule(lambda v: v is False, "DeepSpeed no longer has it; remove it"),
}


class _Recorder(dict):
    """A configuration that records every key that DeepSpeed asks for."""

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
        return self  # so that "key in config.keys()" is recorded, too

    def __copy__(self) -> _Recorder:
        return self


@functools.cache
def known_keys(section: str | None = None) -> frozenset[str]:
    """Return the keys that the installed DeepSpeed reads while it parses a configuration.

    Args:
        section: a top-level key, to return the keys inside it; None to return the top-level keys.

    Returns:
        The keys; none for a section that DeepSpeed does not read key by key.
    """
    recorder = _Recorder()
    # DeepSpeed refuses an empty configuration, and a mapping where it expects a value
    with contextlib.suppress(Exception):
        DeepSpeedConfig(_Recorder({MICRO_BATCH: 1, section: recorder}) if section else recorder)
    top = set() if section else {*BATCH_KEYS, "optimizer", "scheduler"}
    return frozenset(recorder.asked | top)


@functools.cache
def _defaults() -> Any:
    return DeepSpeedConfig({MICRO_BATCH: 1})


def errors_of_whole(config: Mapping[str, Any]) -> list[str]:
    """Return DeepSpeed's error for the configuration with a micro-batch of 1 instead of its batch sizes."""
    whole = {key: value for key, value in config.items() if key not in BATCH_KEYS}
    try:
        DeepSpeedConfig({**whole, MICRO_BATCH: 1})
    except Exception as error:
        reason = "DeepSpeed refuses this combination of valid keys"
        return [f"deepspeed_config: {reason} ({one_line(error)}); change the keys in this message"]
    return []


def key_errors(config: Mapping[str, Any], path: str = "") -> list[str]:
    """Return an error line for each invalid key and value at every level, but not for combinations.

    Args:
        config: the configuration.
        path: the prefix of the keys in error lines, such as ``hyperparameters.``.
    """
    errors = []
    for key, value in config.items():
        if key in REPLACED:
            errors.append(f"{key}: {value!r}: {REPLACED[key]}")
        else:
            errors += _value_errors(key, value) if key in known_keys() else [_unknown(key, value, path)]
    if not {TOTAL_BATCH, MICRO_BATCH} & config.keys():
        errors.append(f"{TOTAL_BATCH}: missing; give it or {MICRO_BATCH}")
    return errors + optimizer_errors(config) + scheduler_errors(config)


def _unknown(key: str, value: Any, path: str) -> str:
    head, _, rest = str(key).partition(".")
    if rest and head in known_keys():
        nested = functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)
        return f"{key}: {value!r}: DeepSpeed knows no dotted keys; write it nested: {json.dumps(nested)}"
    reason = "unknown key" if path else "DeepSpeed knows no such key"
    return f"{path}{key}: {value!r}: {reason}; {nearest_key(key, path)}"


def nearest_key(key: str, path: str) -> str:
    """Return the remedy for an unknown key: the hyperparameter or key of DeepSpeed that was probably meant.

    Args:
        key: the unknown key.
        path: the prefix of DeepSpeed's keys in the remedy.
    """
    known = [*RULES, *known_keys(), *_NESTED]
    return nearest(key, known, {**dict.fromkeys(known, path), **dict.fromkeys(RULES, HYPER)})


def _value_errors(key: str, value: Any) -> list[str]:
    """Return the errors of a top-level key; other functions check ``optimizer`` and ``scheduler``."""
    if key in ("optimizer", "scheduler"):
        return []
    if key in (*BATCH_KEYS, "steps_per_print"):
        return [] if is_count(value, 1) else [f"{key}: {value!r}: must be a whole number of at least 1"]
    if key == "zero_optimization" and isinstance(value, Mapping) and not is_count(value.get("stage", 0), 0):
        return [f"{key}.stage: {value['stage']!r}: must be a whole number from 0 to 3"]
    default = getattr(_defaults(), key, None)
    if isinstance(default, bool) and not isinstance(value, bool):
        return [f"{key}: {value!r}: must be true or false"]
    if isinstance(default, float) and not is_number(value):
        return [f"{key}: {value!r}: must be a number of at least 0"]
    if isinstance(value, Mapping):
        return _section_errors(key, value) or _refused_alone(key, value)
    if key in _MODELS:
        example = "{stage: 1}" if key == "zero_optimization" else "{enabled: true}"
        return [f"{key}: {value!r}: must be a mapping, e.g. {example}"]
    return _refused_alone(key, value)


def _section_errors(section: str, values: Mapping[str, Any]) -> list[str]:
    """Return the errors of a section's keys that DeepSpeed does not check."""
    errors = []
    for key, value in values.items():
        rule = _UNCHECKED.get(f"{section}.{key}", ANY)
        if not rule.is_valid(value):
            errors.append(f"{section}.{key}: {value!r}: {rule.message}")
    known: frozenset[str] = frozenset() if section in _MODELS else known_keys(section)
    if errors or not known:
        return errors
    return [_unknown_in(section, key, value, known) for key, value in values.items() if key not in known]


def _unknown_in(section: str, key: str, value: Any, known: frozenset[str] | list[str]) -> str:
    remedy = REPLACED.get(f"{section}.{key}") or (nearest(key, known) if known else "remove it")
    return f"{section}.{key}: {value!r}: DeepSpeed knows no such key; {remedy}"


def _refused_alone(key: str, value: Any) -> list[str]:
    """Return DeepSpeed's error for a configuration that has only this key."""
    try:
        DeepSpeedConfig({MICRO_BATCH: 1, key: value})
    except pydantic.ValidationError as error:
        return [_in_one_line(key, detail) for detail in error.errors()]
    except Exception as error:  # DeepSpeed's own checks raise errors of many types
        if key in ("fp16", "bf16") and isinstance(error, AssertionError):
            return []  # errors_of_whole checks the key: it is valid at some ZeRO stages
        if isinstance(error, AttributeError) and not isinstance(value, Mapping):
            return [f"{key}: {value!r}: must be a mapping of DeepSpeed's keys; change or remove it"]
        return [f"{key}: {value!r}: DeepSpeed refuses it ({one_line(error)}); change or remove it"]
    return []


def _in_one_line(section: str, detail: Any) -> str:
    """Convert an error of pydantic to the style of this project's errors."""
    inner = [str(part) for part in detail["loc"]]
    path = ".".join([section, *(inner[1:] if inner[:1] == [section] else inner)])
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        model: Any = type(getattr(_defaults(), _MODELS.get(section, ""), None))
        fields = getattr(model, "model_fields", {}) if path.count(".") == 1 else {}
        known = [field.alias or name for name, field in fields.items()]
        parent, _, last = path.rpartition(".")
        return _unknown_in(parent, last, value, known)
    message = _message(detail).removeprefix("Value error, ").removeprefix(f"{path} ")
    return f"{path}: {value!r}: {message[:1].lower()}{message[1:]}; change it"


def _message(detail: Any) -> str:
    if expected := _EXPECTED.get(detail["type"].partition("_")[0]):
        return expected
    choices = str(detail.get("ctx", {}).get("expected", ""))
    if detail["type"] != "enum":
        return str(detail["msg"])
    # pydantic lists a choice with two names twice, such as ZeRO's stage 3
    *others, last = dict.fromkeys(re.split(r", | or ", choices))
    return str(detail["msg"]).replace(choices, f"{', '.join(others)} or {last}" if others else last)
