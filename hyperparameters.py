"""The hyperparameters of ``CIFARTrial`` itself; every other one is DeepSpeed's, and checked in ``engine_rules.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import nets
from errors import InvalidInput, nearest
from rules import Rule, is_bool, is_count, is_number, one_of


def _counts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(is_count(each, 1) for each in value)


def _is_beta(value: Any) -> bool:
    """Whether a beta distribution can be drawn from with it: of less, torch's both draws are 0."""
    return is_number(value, 0, 1e6) and (value == 0 or value >= 0.001)


def _is_pattern(text: str) -> bool:
    try:
        return bool(text) and re.compile(text) is not None
    except re.error:
        return False


def _is_early_stopping(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, Mapping) or value.keys() - {"metric", "patience", "min_improvement"}:
        return False
    metric = value.get("metric", "loss")
    return (
        is_count(value.get("patience"), 1)
        and is_number(value.get("min_improvement", 0))
        and (metric in ("loss", "accuracy") or str(metric).startswith("accuracy/"))
    )


# The hyperparameters of CIFARTrial itself: the rule of each and what to say. Every other one is DeepSpeed's.
OWN: dict[str, Rule] = {
    "net": (nets.is_name, "no such network"),
    "net_args": (lambda v: v is None or isinstance(v, Mapping), "must be a mapping of the network's arguments"),
    "max_length": (lambda v: isinstance(v, Mapping), "must be {epochs: N} or {batches: N}"),
    "deepspeed_config": (lambda v: v is None or isinstance(v, str), "must be a file's name, e.g. ds_config.json"),
    "overwrite_deepspeed_args": (
        lambda v: v is None or isinstance(v, Mapping),
        "must be a mapping of DeepSpeed's keys",
    ),
    "weights": (
        lambda v: v is None or (isinstance(v, str) and bool(v)),
        "must be the path of a state_dict, e.g. a run's net.pt, or DEFAULT for a network of torchvision",
    ),
    "channels_last": (is_bool, "must be true or false"),
    "checkpoint_activations": (is_bool, "must be true or false"),
    "sync_batchnorm": (is_bool, "must be true or false"),
    "label_smoothing": (lambda v: is_number(v, 0, 1), "must be a number from 0 to below 1"),
    "mixup": (_is_beta, "must be 0 or a number of at least 0.001, e.g. 0.2"),
    "cutmix": (_is_beta, "must be 0 or a number of at least 0.001, e.g. 1"),
    "early_stopping": (
        _is_early_stopping,
        "must be e.g. {metric: loss, patience: 3, min_improvement: 0.01}: validations to wait, and for how much",
    ),
    "moe": (is_bool, "must be true or false"),
    "num_experts": (_counts, "must be a list with the experts of each MoE layer, e.g. [2]"),
    "ep_world_size": (lambda v: is_count(v, 1), "must be a whole number of at least 1"),
    "mlp_type": one_of("standard", "residual"),
    "top_k": one_of(1, 2),
    "min_capacity": (lambda v: is_count(v, 0), "must be a whole number of at least 0"),
    "noisy_gate_policy": one_of(None, "None", "RSample", "Jitter"),
    "moe_param_group": (is_bool, "must be true or false"),
    "moe_loss_coefficient": (is_number, "must be a number of at least 0"),
    "pipe_parallel_size": (lambda v: is_count(v, 1), "must be a whole number of at least 1"),
    "partition_method": (
        lambda v: (
            v in ("parameters", "uniform") or (isinstance(v, str) and v.startswith("type:") and _is_pattern(v[5:]))
        ),
        "must be one of parameters, uniform, type:REGEX",
    ),
}
MOE_ONLY = ("num_experts", "ep_world_size", "mlp_type", "top_k", "min_capacity", "noisy_gate_policy", "moe_param_group",
            "moe_loss_coefficient")  # fmt: skip


def faults(hparams: Mapping[str, Any], slots: int) -> list[str]:
    """Checks the hyperparameters that are this trial's, each by itself and against the processes."""
    found = []
    for key, (holds, must) in OWN.items():
        if key in hparams and not holds(hparams[key]):
            mend = f"; {nearest(hparams[key], nets.names())}, or register it in net.py" if key == "net" else ""
            found.append(f"hyperparameters.{key}: {hparams[key]!r}: {must}{mend}")
    if found:
        return found
    found += _net_faults(hparams)
    if "moe" not in hparams and not is_moe(hparams):
        found += [
            f"hyperparameters.{key}: {hparams[key]!r}: does nothing without moe; set hyperparameters.moe: true"
            for key in MOE_ONLY
            if key in hparams
        ]
    if is_moe(hparams):
        found += _moe_faults(hparams, slots)
    stages = hparams.get("pipe_parallel_size", 1)
    if slots % stages:
        found.append(f"hyperparameters.pipe_parallel_size: {stages}: does not divide {slots} processes; use a divisor")
    if hparams.get("channels_last") and stages > 1:
        found.append(
            "hyperparameters.channels_last: True: stages of a pipeline exchange plain tensors; set it to false"
        )
    if stages > 1 and not found:
        found += _pipeline_faults(hparams, stages)
    if "partition_method" in hparams and stages == 1:
        method = hparams["partition_method"]
        found.append(f"hyperparameters.partition_method: {method!r}: does nothing without a pipeline; "
                      "set hyperparameters.pipe_parallel_size: 2 or more")  # fmt: skip
    return found


def is_moe(hparams: Mapping[str, Any]) -> bool:
    """Whether a mixture of experts is asked for, in either way."""
    return bool(hparams.get("moe")) or hparams.get("net") == "net-moe"


def _net_faults(hparams: Mapping[str, Any]) -> list[str]:
    """What the network does not go with."""
    name, found = hparams.get("net", "net"), []
    if hparams.get("moe") and name not in ("net", "net-moe"):
        found.append(f"hyperparameters.moe: True: {name} has no experts; use net: net-moe, or moe: false")
    if hparams.get("moe") is False and name == "net-moe":
        found.append("hyperparameters.moe: False: but net is net-moe; use net: net")
    own = name in (*nets.own.NETS, "net-moe")
    if hparams.get("weights") == "DEFAULT" and own:
        mend = "give the path of a state_dict"
        found.append(f"hyperparameters.weights: 'DEFAULT': {name} has no pretrained weights; {mend}")
    if hparams.get("net_args") and is_moe(hparams):
        found.append(
            "hyperparameters.net_args: experts have hyperparameters of their own, such as num_experts; use those"
        )
    if hparams.get("checkpoint_activations") and is_moe(hparams):
        found.append(
            "hyperparameters.checkpoint_activations: True: does not go with experts; use smaller micro-batches"
        )
    if hparams.get("checkpoint_activations") and hparams.get("pipe_parallel_size", 1) > 1:
        found.append(
            "hyperparameters.checkpoint_activations: True: does not go with a pipeline; use smaller micro-batches"
        )
    return found


def _pipeline_faults(hparams: Mapping[str, Any], stages: int) -> list[str]:
    name, key = hparams.get("net", "net"), "hyperparameters.pipe_parallel_size"
    try:
        layers = nets.layers(nets.outline(name, 10, (224, 224), hparams.get("net_args")))
    except InvalidInput as error:
        return error.faults
    if layers is None:
        return [f"{key}: {stages}: {name} is no sequence of layers; use net, an nn.Sequential, alexnet or a vgg, or 1"]
    if stages > len(layers):
        return [f"{key}: {stages}: {name} has {len(layers)} layers; use at most {len(layers)}"]
    return []


def _moe_faults(hparams: Mapping[str, Any], slots: int) -> list[str]:
    faults = []
    ranks = hparams.get("ep_world_size", 1)
    if slots % ranks:
        faults.append(f"hyperparameters.ep_world_size: {ranks}: does not divide {slots} processes; use a divisor")
    for experts in hparams.get("num_experts", ()):
        if experts % ranks:
            faults.append(f"hyperparameters.num_experts: {experts}: does not divide among ep_world_size {ranks} ranks; "
                          f"use a multiple of {ranks}")  # fmt: skip
        if experts < hparams.get("top_k", 1):
            faults.append(f"hyperparameters.top_k: {hparams['top_k']}: more than num_experts {experts}; use 1")
    if hparams.get("pipe_parallel_size", 1) > 1:
        faults.append("hyperparameters.moe: true: mixture of experts does not go with a pipeline; "
                      "set pipe_parallel_size: 1 or moe: false")  # fmt: skip
    return faults
