"""What makes a key of a DeepSpeed configuration, or its value, wrong by itself.

Keys, types and ranges are those of the installed DeepSpeed and torch, asked rather than copied.
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
from classify.engine.replaced_keys import replaced_errors, today
from deepspeed_trial.errors import nearest, one_line

HYPER = "hyperparameters."
TOTAL_BATCH, MICRO_BATCH, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
BATCH_KEYS = (TOTAL_BATCH, MICRO_BATCH, ACCUMULATION)
# The sections that DeepSpeed describes by a pydantic model, which checks them, and where it keeps it.
_MODELS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "bfloat16": "bfloat16_config",
    "comms_logger": "comms_config",
    "compile": "compile_config",
}
# The expected kind of value, by the first word of a type of pydantic's errors.
_PLAIN = {
    "bool": "must be true or false",
    "int": "must be a whole number",
    "float": "must be a number",
    "string": "must be text",
    "dict": "must be a mapping",
    "model": "must be a mapping",
}
# Keys of sections, which a person may write without the section.
_NESTED = (
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "optimizer.params.momentum",
    "zero_optimization.stage",
)
# What DeepSpeed takes unchecked, and fails at in training.
_UNCHECKED: dict[str, Rule] = {
    "fp16.initial_scale_power": Rule(
        lambda v: is_count(v, 0) and v <= 62, "must be a whole number from 0 to 62"
    ),
    "flops_profiler.profile_step": whole(1),
    "flops_profiler.module_depth": whole(-1),
    "flops_profiler.top_modules": whole(1),
    "flops_profiler.detailed": BOOL,
    "zero_optimization.legacy_stage1": Rule(lambda v: v is False, "DeepSpeed has it no more; remove it"),
}


# ------------------------------------------------------------------------------------------ asking DeepSpeed


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
    with contextlib.suppress(
        Exception
    ):  # an empty configuration lacks a batch size; not every key is a section
        DeepSpeedConfig(_Recorder({MICRO_BATCH: 1, section: recorder}) if section else recorder)
    return frozenset(
        recorder.asked if section else recorder.asked | set(BATCH_KEYS) | {"optimizer", "scheduler"}
    )


@functools.cache
def _defaults() -> Any:
    return DeepSpeedConfig({MICRO_BATCH: 1})


def errors_of_whole(config: Mapping[str, Any]) -> list[str]:
    """What DeepSpeed itself refuses of the whole, but for the batch sizes, which depend on the processes."""
    whole = {key: value for key, value in config.items() if key not in BATCH_KEYS}
    try:
        DeepSpeedConfig({**whole, MICRO_BATCH: 1})
    except Exception as error:
        what = "DeepSpeed refuses the combination of keys that are right alone"
        return [f"deepspeed_config: {what} ({one_line(error)}); change the keys in this message"]
    return []


# ------------------------------------------------------------------------------------------------ the checks


def key_errors(config: Mapping[str, Any], path: str = "") -> list[str]:
    """Checks every key and value by itself, at every level.

    Args:
        config: the configuration.
        path: what stands before its keys, if they are among the hyperparameters themselves.
    """
    errors, config = replaced_errors(config), today(config)
    for key, value in config.items():
        errors += _value_errors(key, value) if key in known_keys() else [_unknown(key, value, path)]
    return errors + _batch_errors(config) + optimizer_errors(config) + scheduler_errors(config)


def _unknown(key: str, value: Any, path: str) -> str:
    head, _, rest = str(key).partition(".")
    if rest and head in known_keys():
        nested = functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)
        return f"{key}: {value!r}: DeepSpeed knows no dotted keys; write it nested: {json.dumps(nested)}"
    who = "unknown key" if path else "DeepSpeed knows no such key"
    return f"{path}{key}: {value!r}: {who}; {nearest_key(key, path)}"


def nearest_key(key: str, path: str) -> str:
    """Says which hyperparameter or key of DeepSpeed's a mistyped one may be, and where it stands.

    Args:
        key: the mistyped one.
        path: what stands before DeepSpeed's keys.
    """
    known = [*RULES, *known_keys(), *_NESTED]
    return nearest(key, known, {**dict.fromkeys(known, path), **dict.fromkeys(RULES, HYPER)})


def _batch_errors(config: Mapping[str, Any]) -> list[str]:
    """Checks the batch sizes, which are resolved later, each by itself."""
    given = {key: config[key] for key in BATCH_KEYS if config.get(key) is not None}
    if not {TOTAL_BATCH, MICRO_BATCH} & given.keys():
        return [f"{TOTAL_BATCH}: missing; give it or {MICRO_BATCH}"]
    wrong = {key: value for key, value in given.items() if not is_count(value, 1)}
    return [f"{key}: {value!r}: must be a whole number of at least 1" for key, value in wrong.items()]


def _value_errors(key: str, value: Any) -> list[str]:
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
        errors = _section_errors(key, value)
        if errors:
            return errors
    elif key in _MODELS:
        example = "{stage: 1}" if key == "zero_optimization" else "{enabled: true}"
        return [f"{key}: {value!r}: must be a mapping, e.g. {example}"]
    return _refused_alone(key, value)


def _section_errors(section: str, values: Mapping[str, Any]) -> list[str]:
    errors = []
    for key, value in values.items():
        rule = _UNCHECKED.get(f"{section}.{key}", ANY)
        if not rule.is_valid(value):
            errors.append(f"{section}.{key}: {value!r}: {rule.message}")
    known: frozenset[str] = frozenset() if section in _MODELS else known_keys(section)
    if errors or not known:
        return errors
    unknown = {key: value for key, value in values.items() if key not in known}
    return [
        f"{section}.{key}: {value!r}: DeepSpeed knows no such key; {nearest(key, known)}"
        for key, value in unknown.items()
    ]


def _refused_alone(key: str, value: Any) -> list[str]:
    """What DeepSpeed refuses of a configuration with this key alone."""
    try:
        DeepSpeedConfig({MICRO_BATCH: 1, key: value})
    except pydantic.ValidationError as error:
        return [_in_one_line(key, detail) for detail in error.errors()]
    except Exception as error:  # DeepSpeed's own checks raise errors of many types
        if key in ("fp16", "bf16") and isinstance(error, AssertionError):
            return []  # what goes with which stage; the whole is yet to be checked
        if isinstance(error, AttributeError) and not isinstance(value, Mapping):
            return [f"{key}: {value!r}: must be a mapping of DeepSpeed's keys; change or remove it"]
        return [f"{key}: {value!r}: DeepSpeed refuses it ({one_line(error)}); mend or remove it"]
    return []


def _without_repeats(detail: Any) -> str:
    """Return pydantic's message in the words of this project's other errors.

    Pydantic lists a choice twice that has two names, such as ZeRO's stage 3.
    """
    if rule := _PLAIN.get(detail["type"].partition("_")[0]):
        return rule
    choices = str(detail.get("ctx", {}).get("expected", ""))
    if detail["type"] != "enum":
        return str(detail["msg"])
    *others, last = dict.fromkeys(re.split(r", | or ", choices))
    return str(detail["msg"]).replace(choices, f"{', '.join(others)} or {last}" if others else last)


def _in_one_line(section: str, detail: Any) -> str:
    inner = [str(each) for each in detail["loc"]]
    path = ".".join([section, *(inner[1:] if inner[:1] == [section] else inner)])
    value, message = detail["input"], _without_repeats(detail)
    if detail["type"] == "extra_forbidden":
        model: Any = type(getattr(_defaults(), _MODELS.get(section, ""), None))
        fields = getattr(model, "model_fields", {}) if path.count(".") == 1 else {}
        known = [field.alias or name for name, field in fields.items()]
        hint = nearest(inner[-1], known) if known else "remove it"
        return f"{path}: {value!r}: DeepSpeed knows no such key; {hint}"
    message = message.removeprefix("Value error, ").removeprefix(f"{path} ")
    return f"{path}: {value!r}: {message[:1].lower()}{message[1:]}; change it"
