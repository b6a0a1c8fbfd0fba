"""Checks of the ``optimizer`` and the ``scheduler`` section of a DeepSpeed configuration.

The classes of the installed torch and DeepSpeed determine the valid parameters and ranges.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from classify.config.rules import BOOL, RATE, Rule, is_count, is_finite, is_number, number, one_of, optional
from classify.config.sections import unknown_keys
from deepspeed_trial.errors import nearest, one_line
from deepspeed_trial.patches.muon import MUON
from deepspeed_trial.schedules import GroupSchedule

TORCH_SCHEDULES = ("OneCycleLR", "LinearLR", "PolynomialLR", "CosineAnnealingLR", "ExponentialLR")
# Parameters of schedules that count steps
LENGTHS = """warmup_num_steps total_num_steps cycle_first_step_size cycle_second_step_size decay_step_size
    lr_range_test_step_size total_steps total_iters T_max""".split()
# Parameters that DeepSpeed reads itself, and removes before it makes torch's Adam
ADAM_SWITCHES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
# Optimizers that compress the exchanged gradients with MPI or cupy, and the optimizer to use instead
COMPRESSED = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}


def section_at(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping at a path of keys; empty if there is none."""
    for key in path:
        inner = config.get(key)
        config = inner if isinstance(inner, Mapping) else {}
    return config


def optimizer_class(name: str) -> type[torch.optim.Optimizer] | None:
    """Return the torch class with an optimizer's parameters; None for DeepSpeed's own and unknown ones."""
    if name.lower() in ("adam", "adamw"):
        return torch.optim.AdamW
    if name.lower() == "adagrad":
        return torch.optim.Adagrad
    if name.lower() in DEEPSPEED_OPTIMIZERS:
        return None
    cls = getattr(torch.optim, name, None)
    usable = inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    return cls if usable and name not in ("Optimizer", "LBFGS", "SparseAdam") else None


def is_muon(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration's optimizer is DeepSpeed's Muon."""
    name = section_at(config, "optimizer").get("type")
    return isinstance(name, str) and name.lower() == MUON


def optimizer_names() -> list[str]:
    """Return the names of the optimizers that run on any device."""
    others = [name for name in dir(torch.optim) if name[:4] != "Adam" and optimizer_class(name)]
    return ["Muon", "Adam", "AdamW", *others, "Adamax"]


def schedule_class(name: str) -> Any:
    """Return DeepSpeed's or torch's class of a schedule; None for an unknown name."""
    if name in TORCH_SCHEDULES:
        return getattr(torch.optim.lr_scheduler, name)
    return getattr(lr_schedules, name) if name in lr_schedules.VALID_LR_SCHEDULES else None


def schedule_maker(config: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Return a function (optimizer) -> schedule; None for a configuration without a schedule."""
    section = config.get("scheduler")
    if section is None:
        return None
    return functools.partial(schedule_class(section["type"]), **section.get("params", {}))


_SHARE = number(0, 1)
_RATIO = Rule(lambda v: v == 1 or is_number(v, 0, 1), "must be a number from 0 to 1")
_DIVISOR = Rule(lambda v: is_number(v, 0, 1e300) and v > 0, "must be a number above 0")
_LENGTH = Rule(
    lambda v: is_count(v, 1) or (is_number(v, 0, 1) and v > 0),
    "must be a whole number of at least 1, or a share of the training between 0 and 1",
)
_NEVER = Rule(lambda v: v is False, "DeepSpeed's engine does not support it; remove it")
_RATES = """lr weight_decay warmup_min_lr warmup_max_lr cycle_min_lr cycle_max_lr lr_range_test_min_lr
    lr_range_test_step_rate decay_lr_rate decay_mom_rate max_lr eta_min""".split()


def _are_numbers(value: Any, defaults: tuple[Any, ...], is_right: Callable[[Any], bool] = is_finite) -> bool:
    """Return whether a value is a list of valid numbers with the default's length.

    Null is valid where the default is None.
    """
    if not isinstance(value, (list, tuple)) or len(value) != len(defaults):
        return False
    return all(is_right(v) or (v is None and d is None) for v, d in zip(value, defaults, strict=True))


# The rules of parameters that their classes do not check, or check without naming the parameter.
# Any other parameter must have the type of its default, and built_errors lets the class check it.
_PARAMS: dict[str, Rule] = {
    **dict.fromkeys(_RATES, RATE),
    **dict.fromkeys("momentum cycle_min_mom cycle_max_mom base_momentum max_momentum".split(), _SHARE),
    **dict.fromkeys("cos_min_ratio warmup_min_ratio pct_start".split(), _RATIO),
    **dict.fromkeys("div_factor final_div_factor gamma".split(), _DIVISOR),
    **dict.fromkeys(LENGTHS, _LENGTH),
    **dict.fromkeys("capturable differentiable".split(), _NEVER),
    **dict.fromkeys("foreach fused".split(), optional(BOOL)._replace(message="must be true, false or null")),
    **dict.fromkeys(ADAM_SWITCHES, BOOL),
    "decay_step_size": Rule(lambda v: v == 0 or _LENGTH.is_valid(v), _LENGTH.message),
    "anneal_strategy": one_of("cos", "linear"),
    "betas": Rule(
        lambda v: _are_numbers(v, (0.9, 0.999), lambda beta: is_number(beta, 0, 1)),
        "must be two numbers >= 0 and < 1",
    ),
    "warmup_type": one_of("log", "linear"),
}


def rules(cls: Any) -> dict[str, Rule]:
    """Return the rule of every parameter that the class of an optimizer or a schedule takes."""
    internal = {"self", "params", "optimizer", "last_batch_iteration", "last_epoch", "verbose"}
    internal |= {"epochs", "steps_per_epoch"}  # total_steps replaces them
    takes = inspect.signature(cls.__init__).parameters.items()
    return {name: _rule(name, declared.default) for name, declared in takes if name not in internal}


def _rule(name: str, default: Any) -> Rule:
    rule = _PARAMS.get(name) or _like(default)
    return optional(rule) if default is None else rule


def _like(default: Any) -> Rule:
    """Return the rule for a parameter, by the type of its default value."""
    if isinstance(default, bool):
        return BOOL
    if isinstance(default, (int, float)):
        return Rule(is_finite, f"must be a number, e.g. {default:g}")
    if isinstance(default, tuple):
        shown = ", ".join("null" if number is None else f"{number:g}" for number in default)
        return Rule(lambda v: _are_numbers(v, default), f"must be {len(default)} numbers, e.g. [{shown}]")
    return Rule(lambda v: is_finite(v) or isinstance(v, str), "must be a number")


def _section_errors(
    key: str, section: Any, names: list[str], known: Callable[[str], dict[str, Rule] | None]
) -> list[str]:
    """Return the errors of a section ``{type: NAME, params: {...}}``.

    Args:
        key: ``optimizer`` or ``scheduler``.
        section: the value of the key.
        names: the valid types, which the remedy lists.
        known: returns the rules of a type's parameters; None for an unknown type, empty to allow any.
    """
    if not isinstance(section, Mapping):
        return [f"{key}: {section!r}: must be a mapping, {{type: NAME, params: {{...}}}}"]
    others = {k: v for k, v in section.items() if k != "legacy_fusion"}
    errors = unknown_keys(f"{key}.", others, ("type", "params"), "DeepSpeed knows no such key")
    kind, params = section.get("type"), section.get("params", {})
    if not isinstance(params, Mapping):
        return [*errors, f"{key}.params: {params!r}: must be a mapping, e.g. {{lr: 0.001}}"]
    allowed = known(kind) if isinstance(kind, str) else None
    if allowed is None:
        return [*errors, f"{key}.type: {kind!r}: unknown; {nearest(kind, names)}"]
    if allowed:
        errors += unknown_keys(f"{key}.params.", params, allowed, f"{kind} takes no such parameter")
    for name, value in params.items():
        rule = allowed.get(name) or _PARAMS.get(name)
        if rule and not rule.is_valid(value):
            errors.append(f"{key}.params.{name}: {value!r}: {rule.message}")
    return errors


_POSITIVE_RATE = Rule(lambda v: RATE.is_valid(v) and v > 0, "must be a number above 0, at most 1e6")
_MUON_PARAMS = {
    **dict.fromkeys(("lr", "adam_lr"), _POSITIVE_RATE),
    **{name: _PARAMS[name] for name in ("momentum", "weight_decay", "betas", "torch_adam")},
    "eps": number(0, 1),
    "ns_method": one_of("gram", "standard"),
}


def _optimizer_parameters(name: str) -> dict[str, Rule] | None:
    if name.lower() == MUON:
        return _MUON_PARAMS
    cls = optimizer_class(name)
    if cls is None:  # DeepSpeed's optimizers for GPUs declare no parameters
        return {} if name.lower() in DEEPSPEED_OPTIMIZERS else None
    return rules(cls) | (dict.fromkeys(ADAM_SWITCHES, BOOL) if cls is torch.optim.AdamW else {})


def optimizer_errors(config: Mapping[str, Any]) -> list[str]:
    """Return the errors of the optimizer's type and parameters."""
    section = config.get("optimizer")
    if section is None:
        return ["optimizer: missing; give one, e.g. {type: Adam, params: {lr: 0.001}}"]
    kind = section_at(config, "optimizer").get("type")
    if other := COMPRESSED.get(str(kind).lower()):
        reason = "compresses the exchanged gradients with MPI or cupy, which is not supported here"
        return [f"optimizer.type: {kind!r}: {reason}; use {other}"]
    errors = _section_errors("optimizer", section, optimizer_names(), _optimizer_parameters)
    if not errors and "lr" not in section.get("params", {}):
        errors.append("optimizer.params.lr: missing; give the learning rate")
    if not errors and is_muon(config) and "adam_lr" not in section["params"]:
        errors.append("optimizer.params.adam_lr: missing; give Adam's learning rate, e.g. 0.001")
    return errors


def scheduler_errors(config: Mapping[str, Any]) -> list[str]:
    """Return the errors of the schedule's type and parameters; none without a schedule."""
    section = config.get("scheduler")
    if section is None:
        return []
    names = [*lr_schedules.VALID_LR_SCHEDULES, *TORCH_SCHEDULES]
    return _section_errors("scheduler", section, names, _scheduler_parameters)


def _scheduler_parameters(name: str) -> dict[str, Rule] | None:
    cls = schedule_class(name)
    return None if cls is None else rules(cls)


def built_errors(config: Mapping[str, Any]) -> list[str]:
    """Build optimizer and schedule for one small parameter; return an error line if that fails."""
    params = {k: v for k, v in config["optimizer"].get("params", {}).items() if k not in ADAM_SWITCHES}
    cls = optimizer_class(config["optimizer"]["type"])
    if is_muon(config):  # Muon takes only matrices; SGD also has a learning rate and a momentum to schedule
        cls, params = torch.optim.SGD, {"lr": params["lr"], "momentum": params.get("momentum", 0.95)}
    if cls is None:
        return []
    at, name = f"optimizer.params: {params!r}", cls.__name__
    try:
        optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **params)
        if section := config.get("scheduler"):
            at, name = f"scheduler.params: {section.get('params', {})!r}", section["type"]
            GroupSchedule(optimizer, optimizer.defaults["lr"], schedule_maker(config)).step()
    except Exception as error:
        return [f"{at}: {name} refuses these parameters ({one_line(error)}); change them"]
    return []
