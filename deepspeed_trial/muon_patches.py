"""Every patch of DeepSpeed's Muon, each a function named after what it cures.

``mend_muon_on_demand`` is applied once a process, by ``deepspeed_patches.prepare_accelerator``; the others by
it, when a configuration asks for Muon, for its module takes seconds to import. Checked with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

MUON = "muon"  # what DeepSpeed calls it
USES_MUON = "use_muon"  # of a parameter, and of a parameter group


def mend_muon_on_demand() -> None:
    """Has ``deepspeed.initialize`` mend Muon first, and keep ``use_muon`` where a trial has set it.

    DeepSpeed 0.19 sets it for every weight of two dimensions or more whose name lacks ``embed`` and
    ``lm_head``: for a classifier's head and a class token, too. Not needed once it leaves alone what is set.
    """
    if not hasattr(deepspeed, "set_optimizer_flags"):  # before 0.17.6 there was no Muon
        return
    set_flags = deepspeed.set_optimizer_flags

    def set_optimizer_flags(config: Any, model: torch.nn.Module) -> None:
        if config.optimizer_name != MUON:
            return
        mend_muon()
        chosen = {each: getattr(each, USES_MUON) for each in model.parameters() if hasattr(each, USES_MUON)}
        set_flags(config, model)
        for parameter, uses in chosen.items():
            setattr(parameter, USES_MUON, uses)

    deepspeed.set_optimizer_flags = set_optimizer_flags


@functools.cache  # once a process
def mend_muon() -> None:
    """Applies what Muon needs on convolutions and on a CPU."""
    flatten_filters()
    keep_given_groups()
    if get_accelerator().device_name() == "cpu":
        compute_in_fp32()
        compute_uncompiled()


def flatten_filters() -> None:
    """Has Muon take a convolution's filters as the rows of a matrix.

    DeepSpeed 0.19.8 does so for the iteration alone, and then fails as it compares the matrix with the
    gradient of four dimensions. Not needed with its pull request 8552.
    """

    def flattened(update: Any, grad: Tensor, momentum: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if grad.ndim <= 2 or kwargs.get("is_expert_group"):
            return update(grad, momentum, *args, **kwargs)
        rows = momentum.flatten(1)
        result = update(grad.flatten(1), rows, *args, **kwargs)
        if rows.data_ptr() != momentum.data_ptr():  # a copy, of filters in channels_last
            momentum.copy_(rows.view_as(momentum))
        return result.reshape(grad.shape)

    _wrap_update(flattened)


def compute_in_fp32() -> None:
    """Has the Newton-Schulz iteration computed in fp32 on a CPU.

    DeepSpeed 0.19.8 takes fp16 or bf16 wherever the accelerator computes them, which a CPU does slowly. Not
    needed once its ``ns_compute_dtype`` asks whether they are faster.
    """
    from deepspeed.runtime.zero.muon import original_muon

    original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32


def compute_uncompiled() -> None:
    """Has Muon computed without ``torch.compile`` on a CPU.

    DeepSpeed 0.19.8 compiles it at the first step: for a minute, and with a C++ compiler, for a few products
    of matrices. Not needed once it compiles for GPUs alone.
    """

    def uncompiled(update: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return update(*args, **kwargs)

    if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
        _wrap_update(uncompiled)


def keep_given_groups() -> None:
    """Has Muon keep parameter groups as they are that say themselves whether they use it.

    DeepSpeed 0.19.8 makes its own two of each, with the keys that it knows, so that a group's ``lr_factor``
    would be lost. Not needed once it keeps the others.
    """
    split = deepspeed.DeepSpeedEngine._muon_param_groups

    def param_groups(parameters: Any, settings: Any) -> Any:
        parameters = list(parameters)
        whole = all(isinstance(each, dict) and USES_MUON in each for each in parameters)
        return parameters if whole else split(parameters, settings)

    deepspeed.DeepSpeedEngine._muon_param_groups = staticmethod(param_groups)


def _wrap_update(wrapper: Any) -> None:
    """Puts a function around Muon's update, in both modules by whose names it is called."""
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    wrapped = functools.partial(wrapper, original_muon.muon_update)
    original_muon.muon_update = muon_optimizer.muon_update = wrapped
