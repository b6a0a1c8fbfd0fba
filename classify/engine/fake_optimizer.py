"""torch's optimizer for fake tensors that holds what DeepSpeed's of the configuration does."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from classify.engine.optimizer_rules import ADAM_SWITCHES, is_muon, optimizer_class
from classify.engine.parameter_groups import Group
from classify.engine.trial_config import TrialConfig

ADAM = 8  # bytes of Adam's state for a number


def fake_optimizer(config: TrialConfig, group: Group, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of some tensors of a group; of Muon's a momentum, which is the state that it has.

    Args:
        config: the trial's.
        group: how its parameters are treated.
        tensors: what is stepped.
    """
    section = config.deepspeed["optimizer"]
    params = {key: value for key, value in section.get("params", {}).items() if key not in ADAM_SWITCHES}
    if is_muon(config.deepspeed):
        cls: Any = functools.partial(torch.optim.SGD, momentum=0.9) if group.muon else torch.optim.AdamW
        return cls(tensors, lr=params["lr"])
    cls = optimizer_class(section["type"])
    if cls is None:  # one of DeepSpeed's for GPUs, all of which have Adam's state or less
        return torch.optim.AdamW(tensors, lr=params["lr"])
    if config.device == "cuda":  # DeepSpeed's Adam has no temporaries; torch's steps all tensors together
        is_own = cls is torch.optim.AdamW and not section["params"].get("torch_adam")
        if is_own or "foreach" in inspect.signature(cls).parameters:
            params.setdefault("fused" if is_own else "foreach", True)
    return cls(tensors, **params)


def state_width(config: TrialConfig) -> int:
    """Bytes of the optimizer's state for a number that it trains, the most of any group's."""
    widths = [0]
    for group in config.groups:
        with FakeTensorMode():
            weight = torch.empty(1024, 1024)
            weight.grad = torch.empty_like(weight)
            try:
                optimizer = fake_optimizer(config, group, [weight])
                optimizer.step()
            except Exception:  # of one that needs the values
                return ADAM
            sizes = [each.nbytes for each in optimizer.state[weight].values() if isinstance(each, Tensor)]
        widths.append(round(sum(sizes) / weight.numel()))
    return max(widths)
