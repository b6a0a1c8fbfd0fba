"""What makes the ``optimizer`` or the ``scheduler`` section of a DeepSpeed configuration wrong.

Parameters and ranges are those of the classes in the installed torch and DeepSpeed, asked rather than copied.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from classify.config.rules import (
    ANY,
    BOOL,
    RATE,
    Rule,
    is_count,
    is_finite,
    is_number,
    number,
    one_of,
    optional,
)
from deepspeed_trial.errors import nearest, one_line
from deepspeed_trial.patches.muon import MUON
from deepspeed_trial.schedules import GroupSchedule

TORCH_SCHEDULES = ("OneCycleLR", "LinearLR", "PolynomialLR", "CosineAnnealingLR")
# The parameters of schedules that count steps.
LENGTHS = """warmup_num_steps total_num_steps cycle_first_step_size cycle_second_step_size decay_step_size
    lr_range_test_step_size total_steps total_iters T_max""".split()
ADAM_SWITCHES = (
    "torch_adam",
    "adam_w_mode",
    "fp32_optimizer_states",
)  # DeepSpeed's own, taken off before torch's Adam


def optimizer_class(name: str) -> type[torch.optim.Optimizer] | None:
    """The torch class whose parameters an optimizer of DeepSpeed takes, or None if it has none."""
    if name.lower() in ("adam", "adamw"):
        return torch.optim.AdamW
    if name.lower() == "adagrad":
        return torch.optim.Adagrad
    if name.lower() in DEEPSPEED_OPTIMIZERS:
        return None
    found = getattr(torch.optim, name, None)
    usable = inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)
    return found if usable and name not in ("Optimizer", "LBFGS", "SparseAdam") else None


def is_muon(config: Mapping[str, Any]) -> bool:
    """Whether a configuration's optimizer is DeepSpeed's Muon."""
    name = (config.get("optimizer") or {}).get("type", "")
    return isinstance(name, str) and name.lower() == MUON


def optimizer_names() -> list[str]:
    """The optimizers that run on any device."""
    return [
        "Muon",
        "Adam",
        "AdamW",
        *(n for n in dir(torch.optim) if n[:4] != "Adam" and optimizer_class(n)),
        "Adamax",
    ]


def schedule_class(name: str) -> Any:
    """The class of a schedule, DeepSpeed's or torch's, or None if there is none of that name."""
    if name in TORCH_SCHEDULES:
        return getattr(torch.optim.lr_scheduler, name)
    return getattr(lr_schedules, name) if name in lr_schedules.VALID_LR_SCHEDULES else None


def schedule_maker(config: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """What makes a configuration's schedule for an optimizer; None if it has none."""
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
_NEVER = Rule(lambda v: v is False, "DeepSpeed's steps do not go with it; remove it")


def _are_betas(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple)) and len(value) == 2 and all(is_number(each, 0, 1) for each in value)
    )


# The rules of parameters, by name, that their classes do not check, or not in a way that names the parameter.
# Every other one has to be of its default's kind, and the class has the last word: see built_errors.
_PARAMS: dict[str, Rule] = {
    **dict.fromkeys("lr weight_decay warmup_min_lr warmup_max_lr cycle_min_lr cycle_max_lr".split(), RATE),
    **dict.fromkeys(
        "lr_range_test_min_lr lr_range_test_step_rate decay_lr_rate decay_mom_rate".split(), RATE
    ),
    **dict.fromkeys("max_lr eta_min".split(), RATE),
    **dict.fromkeys("momentum cycle_min_mom cycle_max_mom base_momentum max_momentum".split(), _SHARE),
    **dict.fromkeys("cos_min_ratio warmup_min_ratio pct_start".split(), _RATIO),
    **dict.fromkeys("div_factor final_div_factor".split(), _DIVISOR),
    **dict.fromkeys(LENGTHS, _LENGTH),
    **dict.fromkeys("capturable differentiable".split(), _NEVER),
    **dict.fromkeys("foreach fused".split(), optional(BOOL)._replace(message="must be true, false or null")),
    **dict.fromkeys(ADAM_SWITCHES, BOOL),
    "decay_step_size": Rule(lambda v: v == 0 or _LENGTH.is_valid(v), _LENGTH.message),
    "anneal_strategy": one_of("cos", "linear"),
    "betas": Rule(_are_betas, "must be two numbers from 0 to below 1"),
    "warmup_type": one_of("log", "linear"),
}


def rules(cls: Any) -> dict[str, Rule]:
    """The parameters that an optimizer's or a schedule's class takes, and the rule of each."""
    given = {"self", "params", "optimizer", "last_batch_iteration", "last_epoch", "verbose"}
    given |= {"epochs", "steps_per_epoch"}  # another way to say total_steps
    takes = {name: each.default for name, each in inspect.signature(cls.__init__).parameters.items()}
    return {name: _rule(name, default) for name, default in takes.items() if name not in given}


def _rule(name: str, default: Any) -> Rule:
    rule = _PARAMS.get(name) or _like(default)
    return optional(rule) if default is None else rule


def _like(default: Any) -> Rule:
    """The rule that a value is of its default's kind."""
    if isinstance(default, bool):
        return BOOL
    if isinstance(default, (int, float)):
        return Rule(is_finite, f"must be a number, e.g. {default:g}")
    if isinstance(default, tuple):
        shown = ", ".join("null" if each is None else f"{each:g}" for each in default)
        return Rule(lambda v: _is_tuple_like(v, default), f"must be {len(default)} numbers, e.g. [{shown}]")
    return Rule(lambda v: is_finite(v) or isinstance(v, str), "must be a number")


def _is_tuple_like(value: Any, default: tuple[Any, ...]) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == len(default)
        and all(is_finite(v) or (v is None and d is None) for v, d in zip(value, default, strict=True))
    )


def _section_errors(
    key: str, section: Any, names: list[str], known: Callable[[str], dict[str, Rule] | None]
) -> list[str]:
    """Checks ``{type: NAME, params: {...}}``."""
    if not isinstance(section, Mapping):
        return [f"{key}: {section!r}: must be a mapping, {{type: NAME, params: {{...}}}}"]
    errors = [f"{key}.{k}: {v!r}: DeepSpeed knows no such key; {nearest(k, ('type', 'params'))}"
              for k, v in section.items() if k not in ("type", "params", "legacy_fusion")]  # fmt: skip
    kind, params = section.get("type"), section.get("params", {})
    if not isinstance(params, Mapping):
        return [*errors, f"{key}.params: {params!r}: must be a mapping, e.g. {{lr: 0.001}}"]
    allowed = known(kind) if isinstance(kind, str) else None
    if allowed is None:
        return [*errors, f"{key}.type: {kind!r}: unknown; {nearest(kind, names)}"]
    for name, value in params.items():
        rule = allowed.get(name) or _PARAMS.get(name) or ANY
        if allowed and name not in allowed:
            errors.append(
                f"{key}.params.{name}: {value!r}: {kind} takes no such parameter; {nearest(name, allowed)}"
            )
        elif not rule.is_valid(value):
            errors.append(f"{key}.params.{name}: {value!r}: {rule.message}")
    return errors


_MUON_PARAMS = {
    **dict.fromkeys(
        ("lr", "adam_lr"), Rule(lambda v: RATE.is_valid(v) and v > 0, "must be a number above 0, at most 1e6")
    ),
    **{name: _PARAMS[name] for name in ("momentum", "weight_decay", "betas", "torch_adam")},
    "eps": number(0, 1),
    "ns_method": one_of("gram", "standard"),
}


def _optimizer_parameters(name: str) -> dict[str, Rule] | None:
    if name.lower() == MUON:
        return _MUON_PARAMS
    cls = optimizer_class(name)
    if cls is None:  # DeepSpeed's own for GPUs do not say what they take
        return {} if name.lower() in DEEPSPEED_OPTIMIZERS else None
    return rules(cls) | (dict.fromkeys(ADAM_SWITCHES, BOOL) if cls is torch.optim.AdamW else {})


def optimizer_errors(config: Mapping[str, Any]) -> list[str]:
    """Checks the optimizer's type and parameters."""
    section = config.get("optimizer")
    if section is None:
        return ["optimizer: missing; give one, e.g. {type: Adam, params: {lr: 0.001}}"]
    errors = _section_errors("optimizer", section, optimizer_names(), _optimizer_parameters)
    if not errors and "lr" not in section.get("params", {}):
        errors.append("optimizer.params.lr: missing; give the learning rate")
    if not errors and is_muon(config) and "adam_lr" not in section["params"]:
        errors.append(
            "optimizer.params.adam_lr: missing; give the rate of what Muon does not train, e.g. 0.001"
        )
    return errors


def scheduler_errors(config: Mapping[str, Any]) -> list[str]:
    """Checks the schedule's type and parameters, where there is one."""
    section = config.get("scheduler")
    if section is None:
        return []
    names = [*lr_schedules.VALID_LR_SCHEDULES, *TORCH_SCHEDULES]
    return _section_errors("scheduler", section, names, _scheduler_parameters)


def _scheduler_parameters(name: str) -> dict[str, Rule] | None:
    cls = schedule_class(name)
    return None if cls is None else rules(cls)


def built_errors(config: Mapping[str, Any]) -> list[str]:
    """Builds the optimizer and the schedule on one small parameter, which finds what their classes refuse."""
    params = {k: v for k, v in config["optimizer"].get("params", {}).items() if k not in ADAM_SWITCHES}
    cls = optimizer_class(config["optimizer"]["type"])
    if is_muon(config):  # whose own is of matrices; its momentum is what a schedule may change
        cls, params = torch.optim.SGD, {"lr": params["lr"], "momentum": params.get("momentum", 0.95)}
    if cls is None:
        return []
    try:
        optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **params)
    except Exception as error:
        return [f"optimizer.params: {params!r}: {cls.__name__} refuses them ({one_line(error)}); mend them"]
    if config.get("scheduler") is None:
        return []
    section = config["scheduler"]
    try:
        GroupSchedule(optimizer, optimizer.defaults["lr"], schedule_maker(config)).step()
    except Exception as error:
        given = section.get("params", {})
        return [f"scheduler.params: {given!r}: {section['type']} refuses them ({one_line(error)}); mend them"]
    return []
