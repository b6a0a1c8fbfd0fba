"""Conflicts among the network, its parallelism, the processes and the DeepSpeed configuration.

The constraints are from Determined's DeepSpeed guide and from DeepSpeed. Source:
https://github.com/determined-ai/determined/blob/v0.38.1/docs/model-dev-guide/api-guides/apis-howto/deepspeed/deepspeed.rst
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.engine import DeepSpeedEngine

from classify.config.hyperparameters import EXPERTS_ONLY, Hyperparameters
from classify.engine.deepspeed_keys import HYPER, MICRO_BATCH, errors_of_whole
from classify.engine.optimizer_rules import is_muon, optimizer_class, optimizer_names, rules, section_at
from classify.models.registry import MOE, NetSpec, on_meta_device
from classify.models.stages import layers_of
from deepspeed_trial.errors import InvalidInput, add_new
from deepspeed_trial.machine import is_installed

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Keys of features that DeepSpeed has only for CUDA; a true or non-empty value turns the feature on
FOR_GPUS = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zenflow",
    "zero_optimization.offload_optimizer.super_offload",
    "compile.deepcompile",
    "aio.use_gds",
    "data_efficiency.data_routing.random_ltd.enabled",
)


# ------------------------------------------------------------------------------- readers of a configuration


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage."""
    return section_at(config, "zero_optimization").get("stage", 0)


def offloads(config: Mapping[str, Any], what: str) -> bool:
    """Return whether ``what`` is on: ``offload_optimizer`` or ``offload_param``."""
    return section_at(config, "zero_optimization", what).get("device", "none") not in (None, "none")


def enabled(config: Mapping[str, Any], section: str) -> bool:
    """Return whether a section has ``enabled: true``."""
    return bool(section_at(config, section).get("enabled", False))


def dtype_name(config: Mapping[str, Any]) -> str:
    """Return the floating-point type of the weights: a key of ``DTYPES``."""
    if enabled(config, "fp16"):
        return "fp16"
    return "bf16" if enabled(config, "bf16") or enabled(config, "bfloat16") else "fp32"


def _optimizer_name(config: Mapping[str, Any]) -> str:
    return section_at(config, "optimizer").get("type", "")


# ---------------------------------------------------------------------- the hyperparameters and the processes


def network_errors(hyper: Hyperparameters, processes: int) -> list[str]:
    """Return the conflicts of the hyperparameters with each other and with the number of processes."""
    errors = [f"{HYPER}{line}" for line in (*_net_errors(hyper), *_expert_errors(hyper, processes))]
    stages = hyper.pipe_parallel_size
    if processes % stages:
        reason = f"the number of processes, {processes}, is not a multiple of {stages}"
        reason += f"; use a divisor of {processes}"
        errors.append(f"{HYPER}pipe_parallel_size: {stages}: {reason}")
    if hyper.channels_last and stages > 1:
        reason = "the stages of a pipeline exchange contiguous tensors; set it to false"
        errors.append(f"{HYPER}channels_last: True: {reason}")
    if stages > 1 and not errors:
        errors += _pipeline_errors(hyper, stages)
    if hyper.test_time_augmentation and stages > 1:
        reason = "does not work with a pipeline; remove this key, or set pipe_parallel_size: 1"
        errors.append(f"{HYPER}test_time_augmentation: {hyper.test_time_augmentation}: {reason}")
    if hyper.teacher and stages > 1:
        reason = "does not work with a pipeline, whose last stage has no images; use pipe_parallel_size: 1"
        errors.append(f"{HYPER}teacher: {hyper.teacher}: {reason}")
    for name in ("teacher_weight", "teacher_temperature"):
        if name in hyper.given and not hyper.teacher:
            reason = f"has no effect without {HYPER}teacher; set teacher, or remove {name}"
            errors.append(f"{HYPER}{name}: {getattr(hyper, name)}: {reason}")
    if "partition_method" in hyper.given and stages == 1:
        reason = "has no effect without a pipeline; set hyperparameters.pipe_parallel_size: 2 or more"
        errors.append(f"{HYPER}partition_method: {hyper.partition_method!r}: {reason}")
    return errors


def _net_errors(hyper: Hyperparameters) -> Iterator[str]:
    """Yield the conflicts of the network; each line starts with the hyperparameter's name."""
    name, smaller = hyper.net, "set it to false, and use smaller micro-batches"
    if hyper.moe and name not in ("net", MOE):
        yield f"moe: True: {name} has no experts; use net: {MOE}, or moe: false"
    if hyper.moe is False and name == MOE:
        yield f"moe: False: contradicts net: {MOE}; use net: net, or remove moe"
    if hyper.net_args and hyper.has_experts:
        remedy = "use num_experts, mlp_type or top_k"
        yield f"net_args: {hyper.net_args!r}: has no effect on a network with experts; {remedy}"
    if hyper.layer_decay and hyper.head_only is True:
        yield f"layer_decay: {hyper.layer_decay}: has no effect with head_only: true; remove one of them"
    if hyper.checkpoint_activations and hyper.has_experts:
        yield f"checkpoint_activations: True: does not work with experts; {smaller}"
    if hyper.checkpoint_activations and hyper.pipe_parallel_size > 1:
        yield f"checkpoint_activations: True: does not work with a pipeline; {smaller}"


def _expert_errors(hyper: Hyperparameters, processes: int) -> Iterator[str]:
    """Yield the conflicts of the experts; each line starts with the hyperparameter's name."""
    if not hyper.has_experts:
        for key in EXPERTS_ONLY if hyper.moe is None else ():
            if key in hyper.given:
                yield f"{key}: {getattr(hyper, key)!r}: has no effect without moe; set {HYPER}moe: true"
        return
    ranks = hyper.ep_world_size
    if processes % ranks:
        reason = f"the number of processes, {processes}, is not a multiple of {ranks}"
        yield f"ep_world_size: {ranks}: {reason}; use a divisor of {processes}"
    for experts in hyper.num_experts:
        if experts % ranks:
            reason = f"is not a multiple of {ranks}, the value of ep_world_size; use e.g. {ranks}"
            yield f"num_experts: {experts}: {reason}"
        if experts < hyper.top_k:
            yield f"top_k: {hyper.top_k}: num_experts has a layer with only {experts}; set top_k: 1"
    if hyper.pipe_parallel_size > 1:
        reason = "mixture of experts does not work with a pipeline; set pipe_parallel_size: 1 or moe: false"
        yield f"moe: true: {reason}"


def _pipeline_errors(hyper: Hyperparameters, stages: int) -> list[str]:
    key, net = f"{HYPER}pipe_parallel_size: {stages}:", hyper.net
    try:
        layers = layers_of(on_meta_device(NetSpec(net, 10, (224, 224), hyper.net_args)))
    except InvalidInput as error:
        return error.errors
    if layers is None:
        other = "use the network net, alexnet, a vgg or an nn.Sequential, or set pipe_parallel_size: 1"
        return [f"{key} {net} is not a sequence of layers; {other}"]
    if stages > len(layers):
        return [f"{key} {net} has {len(layers)} layers; use at most {len(layers)} stages"]
    return []


# -------------------------------------------------------------------------------- the DeepSpeed configuration


def combination_errors(config: Mapping[str, Any], hyper: Hyperparameters, device: str) -> list[str]:
    """Return the conflicts within a configuration that ``key_errors`` accepted."""
    errors = [
        *_stage_errors(config, hyper),
        *_group_errors(config, hyper),
        *_muon_errors(config, hyper),
        *_precision_errors(config),
        *_average_errors(config, hyper),
        *_monitor_errors(config),
        *_nvme_errors(config),
        *_compile_errors(config, hyper, device),
    ]
    return add_new(errors, _device_errors(config, hyper, device)) or errors_of_whole(config)


def _stage_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> Iterator[str]:
    """Yield the conflicts of the ZeRO stage."""
    stage, pipeline = zero_stage(config), hyper.pipe_parallel_size > 1
    at = f"zero_optimization.stage: {stage}:"
    if pipeline and stage > 1:
        yield f"{at} a pipeline works only with ZeRO stage 0 or 1; use stage 1, or pipe_parallel_size: 1"
    if pipeline and stage == 0 and enabled(config, "fp16"):
        yield f"{at} DeepSpeed does not scale the loss of an fp16 pipeline without ZeRO; use stage 1"
    if offloads(config, "offload_param") and stage != 3:
        yield f"{at} offload_param works only with ZeRO stage 3; use stage 3, or remove offload_param"
    if offloads(config, "offload_optimizer") and stage not in (2, 3):
        reason = "this project supports offload_optimizer only at ZeRO stage 2 or 3"
        yield f"{at} {reason}; set the stage to 2, or remove offload_optimizer"
    if hyper.has_experts and stage == 3:
        yield f"{at} mixture of experts does not work with ZeRO stage 3; use stage 2 or less, or moe: false"
    if hyper.has_experts and stage > 0 and not hyper.moe_param_group:
        reason = f"ZeRO stage {stage} needs experts in separate parameter groups; set moe_param_group: true"
        yield f"{HYPER}moe_param_group: False: {reason}"


def _group_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> Iterator[str]:
    """Yield the conflicts of the optimizer with the parameter groups."""
    name, stage, entries = _optimizer_name(config), zero_stage(config), hyper.parameter_groups or ()
    cls = optimizer_class(name)
    if not is_muon(config):
        remedy = f"has no effect with {name}; use optimizer.type: Muon, or remove this key"
        yield from _group_keys(entries, "muon", remedy)
    grouped = entries or hyper.weight_decay_on != "all" or hyper.layer_decay or hyper.head_only
    if stage and grouped and name.lower() == "adagrad":
        reason = f"at ZeRO stage {stage} DeepSpeed puts all parameters of Adagrad into one group"
        yield f"optimizer.type: {name!r}: {reason}; use stage 0, or another optimizer"
    if cls is not None and "weight_decay" not in rules(cls):
        remedy = f"{name} has no weight decay; remove this key, or use another optimizer"
        if hyper.weight_decay_on != "all":
            yield f"{HYPER}weight_decay_on: {hyper.weight_decay_on!r}: {remedy}"
        yield from _group_keys(entries, "weight_decay", remedy)


def _group_keys(entries: tuple[Mapping[str, Any], ...], key: str, remedy: str) -> Iterator[str]:
    for index, entry in enumerate(entries):
        if key in entry:
            yield f"{HYPER}parameter_groups[{index}].{key}: {entry[key]!r}: {remedy}"


def _muon_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> Iterator[str]:
    """Yield the conflicts of DeepSpeed's Muon."""
    if not is_muon(config):
        return
    stage, clipping = zero_stage(config), config.get("gradient_clipping", 0)
    if stage and clipping:
        reason = f"at ZeRO stage {stage} DeepSpeed would clip Muon's updates, not the gradients"
        yield f"gradient_clipping: {clipping}: {reason}; set gradient_clipping: 0"
    if stage and hyper.has_experts:
        reason = "DeepSpeed's Muon does not support experts with ZeRO; use stage 0, or another optimizer"
        yield f"zero_optimization.stage: {stage}: {reason}"
    if stage == 1 and dtype_name(config) == "bf16":
        reason = "at stage 1 DeepSpeed's Muon does not support bf16 convolutions; use stage 0, 2 or 3"
        yield f"zero_optimization.stage: 1: {reason}"
    if stage == 3 and section_at(config, "scheduler", "params").get("cycle_momentum"):
        reason = "at ZeRO stage 3 a schedule cannot change Muon's momentum; set cycle_momentum: false"
        yield f"scheduler.params.cycle_momentum: True: {reason}"


def _precision_errors(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conflicts of the precision."""
    stage, dtype, name = zero_stage(config), dtype_name(config), _optimizer_name(config)
    sums = section_at(config, "data_types").get("grad_accum_dtype")
    at = f"data_types.grad_accum_dtype: {sums!r}:"
    if sums not in (None, *DTYPES):
        yield f"{at} must be one of {', '.join(DTYPES)}"
    elif sums is not None and stage == 0 and sums != dtype:
        yield f"{at} without ZeRO it must be the type of the weights, {dtype}; remove this key"
    if enabled(config, "fp16") and (enabled(config, "bf16") or enabled(config, "bfloat16")):
        yield "bf16.enabled: True: fp16 is enabled too; set one of them to false"
    if name.lower() == "adagrad" and stage < 2 and dtype in ("fp16", "bf16")[stage:]:
        first = 1 if enabled(config, "fp16") else 2
        reason = f"DeepSpeed supports {name} with {dtype} only from ZeRO stage {first} on"
        yield f"zero_optimization.stage: {stage}: {reason}; use that stage, or another optimizer"


def _average_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> Iterator[str]:
    """Yield an error for each setting that leaves no fp32 weights in memory to average."""
    if hyper.weight_average is None:
        return
    zero = section_at(config, "zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        if section_at(zero, key).get("device") == "nvme":
            at = f"zero_optimization.{key}.device: 'nvme':"
            yield f"{at} does not work with weight_average; use device: cpu"
    if section_at(zero, "offload_optimizer").get("super_offload"):
        at = "zero_optimization.offload_optimizer.super_offload"
        yield f"{at}: True: does not work with weight_average; set super_offload: false"
    if zero.get("zenflow"):
        yield "zero_optimization.zenflow: does not work with weight_average; remove one of them"
    for name in ("fp16", "bf16", "bfloat16"):
        key = f"{name.replace('bfloat', 'bf')}_master_weights_and_grads"
        if section_at(config, name).get(key):
            yield f"{name}.{key}: True: weight_average needs fp32 weights; set {key}: false"


def _device_errors(config: Mapping[str, Any], hyper: Hyperparameters, device: str) -> Iterator[str]:
    """Yield an error for each feature that needs CUDA, and for offload from a Mac's GPU."""
    if device == "cuda":
        return
    for key in ("offload_optimizer", "offload_param"):
        if device == "mps" and offloads(config, key):
            yield f"zero_optimization.{key}: a Mac's GPU shares the host's memory; remove this key"
    for path in FOR_GPUS:
        *sections, key = path.split(".")
        if value := section_at(config, *sections).get(key):
            yield f"{path}: {value!r}: needs a GPU with CUDA; remove it"
    if hyper.sync_batchnorm:
        yield f"{HYPER}sync_batchnorm: True: torch computes it only with CUDA; set it to false"
    name = _optimizer_name(config)
    if name.lower() in DEEPSPEED_OPTIMIZERS and optimizer_class(name) is None and not is_muon(config):
        yield f"optimizer.type: {name!r}: needs CUDA; without it use one of {', '.join(optimizer_names())}"


def _monitor_errors(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each monitor whose package is missing: DeepSpeed would end with a traceback."""
    for section, package in {"wandb": "wandb", "comet": "comet_ml"}.items():
        if enabled(config, section) and not is_installed(package):
            yield f"{section}.enabled: True: needs a package; pip install {package}, or set enabled: false"


def _nvme_errors(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("offload_optimizer", "offload_param"):
        section = section_at(config, "zero_optimization", key)
        if section.get("device") != "nvme":
            continue
        if not section.get("nvme_path"):
            reason = "missing; give a folder on the NVMe disk"
            yield f"zero_optimization.{key}.nvme_path: {section.get('nvme_path')!r}: {reason}"
        elif ctypes.util.find_library("aio") is None:
            reason = "DeepSpeed finds no libaio on this machine; install it or use device: cpu"
            yield f"zero_optimization.{key}.device: 'nvme': {reason}"


def _compile_errors(config: Mapping[str, Any], hyper: Hyperparameters, device: str) -> Iterator[str]:
    """Yield the reasons why DeepSpeed or torch cannot compile the network."""
    if not hyper.compile:
        return
    at = f"{HYPER}compile: True:"
    if hyper.pipe_parallel_size > 1:
        yield f"{at} does not work with a pipeline; set compile: false or pipe_parallel_size: 1"
    if hyper.has_experts:
        yield f"{at} does not work with experts; set it to false"
    if hyper.checkpoint_activations:
        yield f"{at} does not work with checkpoint_activations; set one of them to false"
    if zero_stage(config) == 3:
        yield f"{at} DeepSpeed's hooks of ZeRO stage 3 interrupt the code at every layer; use stage 2 or less"
    if "compile" not in vars(DeepSpeedEngine):  # nn.Module has a method of this name, too
        remedy = "use the Dockerfile's image, or set compile: false"
        yield f"{at} DeepSpeed {deepspeed.__version__} cannot compile; {remedy}"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch chooses it
    if device == "cpu" and not shutil.which(compiler):
        yield f"{at} there is no C++ compiler {compiler!r} here; install it, or set the variable CXX"


def capacity_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> list[str]:
    """Return an error line if an expert's minimum capacity is more than a micro-batch."""
    micro, capacity = config[MICRO_BATCH], hyper.min_capacity
    if not hyper.has_experts or capacity <= micro:
        return []
    reason = f"more than a micro-batch of {micro} images; use at most {micro}"
    return [f"{HYPER}min_capacity: {capacity}: {reason}"]
