"""Patches for DeepSpeed's Muon, applied on demand because its module takes seconds to import."""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_trial.patches import patch

MUON = "muon"  # DeepSpeed's name of the optimizer
USES_MUON = "use_muon"  # an attribute of a parameter, and a key of a parameter group
MODULE = "deepspeed.runtime.zero.muon.original_muon"


def _without_cuda() -> bool:
    return bool(get_accelerator().device_name() != "cuda")


@patch("deepspeed:set_optimizer_flags", versions=">=0.17.6", report="deepspeedai/DeepSpeed#7555", guards=())
def patch_muon_on_demand() -> None:
    """``deepspeed.initialize`` overwrites the attribute ``use_muon`` that a trial has set, e.g. on its head.

    It sets ``use_muon`` for all weights of at least two dimensions, except names with ``embed`` or
    ``lm_head``.
    """
    set_flags = deepspeed.set_optimizer_flags

    @functools.wraps(set_flags)
    def set_optimizer_flags(config: Any, model: torch.nn.Module) -> None:
        if config.optimizer_name == MUON:
            patch_muon()
        chosen = {each: getattr(each, USES_MUON) for each in model.parameters() if hasattr(each, USES_MUON)}
        set_flags(config, model)
        for parameter, uses in chosen.items():
            setattr(parameter, USES_MUON, uses)

    deepspeed.set_optimizer_flags = set_optimizer_flags


@functools.cache  # once a process
def patch_muon() -> None:
    """Apply the patches that Muon needs for convolutions, parameter groups and a CPU."""
    flatten_filters()
    keep_given_groups()
    compute_in_fp32()
    compute_uncompiled()


@patch(
    f"{MODULE}:muon_update",
    versions=">=0.17.6",
    report="deepspeedai/DeepSpeed#8552",
    digests=("6ad2f490a9af",),
)
def flatten_filters() -> None:
    """Muon fails on convolutions: it compares a matrix of filters with a gradient of four dimensions."""

    def flattened(update: Any, grad: Tensor, momentum: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if grad.ndim <= 2 or kwargs.get("is_expert_group"):
            return update(grad, momentum, *args, **kwargs)
        rows = momentum.flatten(1)
        result = update(grad.flatten(1), rows, *args, **kwargs)
        if rows.data_ptr() != momentum.data_ptr():  # rows are a copy if the filters are in channels_last
            momentum.copy_(rows.view_as(momentum))
        return result.reshape(grad.shape)

    _wrap_update(flattened)


@patch(f"{MODULE}:ns_compute_dtype", versions=">=0.17.6", digests=("d0cf2168c4f7",), when=_without_cuda)
def compute_in_fp32() -> None:
    """Muon computes in fp16 or bf16 if the accelerator supports it, which is slow on a CPU."""
    from deepspeed.runtime.zero.muon import original_muon

    original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32


@patch(
    f"{MODULE}:muon_update",
    versions=">=0.17.6",
    guards=(f"{MODULE}:zeropower_via_newtonschulz5",),
    digests=("a0de36ae27e9",),
    when=lambda: _without_cuda() and hasattr(torch.compiler, "set_stance"),  # torch has it since 2.6
)
def compute_uncompiled() -> None:
    """Muon compiles its matrix products, even on a CPU; that takes a minute and a C++ compiler."""

    def uncompiled(update: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return update(*args, **kwargs)

    _wrap_update(uncompiled)


@patch("deepspeed:DeepSpeedEngine._muon_param_groups", versions=">=0.17.6", digests=("d9c1dbfb8357",))
def keep_given_groups() -> None:
    """Muon regroups the parameters into two groups, and loses each group's ``lr_factor``.

    With the patch, the groups stay unchanged if each of them sets ``use_muon``.
    """
    split = deepspeed.DeepSpeedEngine._muon_param_groups

    @functools.wraps(split)
    def param_groups(parameters: Any, settings: Any) -> Any:
        parameters = list(parameters)
        whole = all(isinstance(each, dict) and USES_MUON in each for each in parameters)
        return parameters if whole else split(parameters, settings)

    deepspeed.DeepSpeedEngine._muon_param_groups = staticmethod(param_groups)


def _wrap_update(wrapper: Any) -> None:
    """Wrap Muon's update function in both modules that call it."""
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    update = original_muon.muon_update
    wrapped = functools.wraps(update)(functools.partial(wrapper, update))
    original_muon.muon_update = muon_optimizer.muon_update = wrapped
