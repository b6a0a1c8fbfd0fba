"""Patches for a process, applied before its first engine and its process group."""

from __future__ import annotations

import datetime
import functools
import logging
import warnings
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend

from deepspeed_trial.patches import patch, warn_of_unknown_release
from deepspeed_trial.patches.muon import patch_muon_on_demand

CPU = "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator"


def _on_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")


@functools.cache  # once a process
def prepare_process() -> None:
    """Apply the patches that a process needs before its first engine; warn about an untested release.

    Raises:
        InvalidInput: if DeepSpeed's code differs from the code for which a needed patch was written.
    """
    warn_of_unknown_release()
    silence_misleading_warnings()
    patch_muon_on_demand()
    allow_fp16_on_cpu()
    reduce_over_gloo()


def silence_misleading_warnings() -> None:
    """DeepSpeed, Determined and torch print three warnings at every start that require no action.

    Determined warns that APEX is missing, which DeepSpeed has not needed since 0.3. DeepSpeed warns
    that the learning rate was read before the first step; its own engine reads it. Torch warns that DeepSpeed
    uses deprecated names.
    """
    misleading = ("Missing package APEX", "learning rate from scheduler before it has started")
    for name in ("determined.pytorch", "DeepSpeed"):
        logging.getLogger(name).addFilter(
            lambda record: not any(text in record.getMessage() for text in misleading)
        )
    deprecated = ".*torch.distributed.* is deprecated"
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)


@patch(
    f"{CPU}.is_fp16_supported",
    versions=">=0.13",
    report="deepspeedai/DeepSpeed#7207",
    digests=("92128cbe7a3f", "42ae8cfbcddb"),
    when=_on_cpu,
)
def allow_fp16_on_cpu() -> None:
    """DeepSpeed refuses fp16 on a CPU without fp16 instructions, although torch supports it, slowly."""
    get_accelerator().is_fp16_supported = lambda: True


@patch(
    f"{CPU}.create_op_builder",
    versions=">=0.14.2",
    report="deepspeedai/DeepSpeed#7625",
    guards=("deepspeed.comm.torch:build_shm_op",),
    digests=("d9cf7876360d",),
    when=_on_cpu,
)
def reduce_over_gloo() -> None:
    """On a CPU, DeepSpeed spends most of a minute compiling an all-reduce over shared memory.

    The patch uses gloo's all-reduce, which gives the same bits on every machine.
    """
    builder = get_accelerator().create_op_builder
    get_accelerator().create_op_builder = lambda op: None if op == "ShareMemCommBuilder" else builder(op)


@patch(
    "deepspeed.comm.torch:TorchBackend.new_group",
    versions=">=0.13",
    report="huggingface/transformers#38933",
    digests=("249aef849cae",),
)
def limit_waiting(limit: datetime.timedelta) -> None:
    """DeepSpeed ignores the time limit of ``init_distributed`` for its groups, and uses torch's default.

    Args:
        limit: the maximum time that a collective waits for the other ranks.
    """

    @functools.wraps(TorchBackend.new_group)
    def new_group(self: TorchBackend, ranks: list[int]) -> Any:
        return torch.distributed.new_group(ranks, timeout=limit)

    TorchBackend.new_group = new_group
