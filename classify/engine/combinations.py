"""What does not go together: the network, its mode, the processes and the DeepSpeed configuration.

The constraints of Determined's DeepSpeed guide and DeepSpeed's own. Source:
https://docs.determined.ai/latest/model-dev-guide/api-guides/apis-howto/deepspeed/deepspeed.html
"""

from __future__ import annotations

import ctypes.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from classify.config.hyperparameters import EXPERTS_ONLY, Hyperparameters
from classify.engine.deepspeed_keys import HYPER, MICRO_BATCH, errors_of_whole
from classify.engine.optimizer_rules import is_muon, optimizer_class, optimizer_names, rules
from classify.engine.replaced_keys import gpu_errors
from classify.models.registry import MOE, NetSpec, on_meta_device
from classify.models.stages import layers_of
from deepspeed_trial.errors import InvalidInput, add_new
from deepspeed_trial.machine import is_installed

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# ----------------------------------------------------------------------- what a DeepSpeed configuration says


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage that a configuration asks for."""
    section = config.get("zero_optimization")
    return section.get("stage", 0) if isinstance(section, Mapping) else 0


def offloads(config: Mapping[str, Any], what: str) -> bool:
    """Whether ``offload_optimizer`` or ``offload_param`` is on."""
    section = (config.get("zero_optimization") or {}).get(what) or {}
    return section.get("device", "none") not in (None, "none")


def enabled(config: Mapping[str, Any], section: str) -> bool:
    """Whether ``{enabled: true}`` stands in a section."""
    return bool((config.get(section) or {}).get("enabled", False))


def dtype_name(config: Mapping[str, Any]) -> str:
    """What DeepSpeed calls the floating-point type of the weights: a key of ``DTYPES``."""
    if enabled(config, "fp16"):
        return "fp16"
    return "bf16" if enabled(config, "bf16") or enabled(config, "bfloat16") else "fp32"


# --------------------------------------------------------------------- the hyperparameters and the processes


def network_errors(hyper: Hyperparameters, processes: int) -> list[str]:
    """What among the trial's own hyperparameters does not go together, or not with so many processes."""
    errors = [*_net_errors(hyper), *_expert_errors(hyper, processes)]
    stages = hyper.pipe_parallel_size
    if processes % stages:
        what = f"does not divide {processes} processes; use a divisor"
        errors.append(f"{HYPER}pipe_parallel_size: {stages}: {what}")
    if hyper.channels_last and stages > 1:
        what = "stages of a pipeline exchange plain tensors; set it to false"
        errors.append(f"{HYPER}channels_last: True: {what}")
    if stages > 1 and not errors:
        errors += _pipeline_errors(hyper, stages)
    if hyper.test_time_augmentation and stages > 1:
        what = "does not go with a pipeline; use checkpoint.py evaluate --tta, or pipe_parallel_size: 1"
        errors.append(f"{HYPER}test_time_augmentation: {what}")
    if "partition_method" in hyper.given and stages == 1:
        what = "does nothing without a pipeline; set hyperparameters.pipe_parallel_size: 2 or more"
        errors.append(f"{HYPER}partition_method: {hyper.partition_method!r}: {what}")
    return errors


def _net_errors(hyper: Hyperparameters) -> Iterator[str]:
    """What the network does not go with."""
    name = hyper.net
    if hyper.moe and name not in ("net", MOE):
        yield f"{HYPER}moe: True: {name} has no experts; use net: {MOE}, or moe: false"
    if hyper.moe is False and name == MOE:
        yield f"{HYPER}moe: False: but net is {MOE}; use net: net"
    if hyper.net_args and hyper.has_experts:
        yield f"{HYPER}net_args: experts have hyperparameters of their own, such as num_experts; use those"
    if hyper.layer_decay and hyper.head_only is True:
        yield f"{HYPER}layer_decay: {hyper.layer_decay}: does nothing with head_only: true; remove one"
    if hyper.checkpoint_activations and hyper.has_experts:
        yield f"{HYPER}checkpoint_activations: True: does not go with experts; use smaller micro-batches"
    if hyper.checkpoint_activations and hyper.pipe_parallel_size > 1:
        yield f"{HYPER}checkpoint_activations: True: does not go with a pipeline; use smaller micro-batches"


def _expert_errors(hyper: Hyperparameters, processes: int) -> Iterator[str]:
    if not hyper.has_experts:
        for key in EXPERTS_ONLY if hyper.moe is None else ():
            if key in hyper.given:
                value = getattr(hyper, key)
                yield f"{HYPER}{key}: {value!r}: does nothing without moe; set {HYPER}moe: true"
        return
    ranks = hyper.ep_world_size
    if processes % ranks:
        yield f"{HYPER}ep_world_size: {ranks}: does not divide {processes} processes; use a divisor"
    for experts in hyper.num_experts:
        if experts % ranks:
            what = f"does not divide among ep_world_size {ranks} ranks; use a multiple of {ranks}"
            yield f"{HYPER}num_experts: {experts}: {what}"
        if experts < hyper.top_k:
            yield f"{HYPER}top_k: {hyper.top_k}: more than num_experts {experts}; use 1"
    if hyper.pipe_parallel_size > 1:
        what = "mixture of experts does not go with a pipeline; set pipe_parallel_size: 1 or moe: false"
        yield f"{HYPER}moe: true: {what}"


def _pipeline_errors(hyper: Hyperparameters, stages: int) -> list[str]:
    key = f"{HYPER}pipe_parallel_size: {stages}:"
    try:
        layers = layers_of(on_meta_device(NetSpec(hyper.net, 10, (224, 224), hyper.net_args)))
    except InvalidInput as error:
        return error.errors
    if layers is None:
        return [
            f"{key} {hyper.net} is no sequence of layers; use net, an nn.Sequential, alexnet or a vgg, or 1"
        ]
    if stages > len(layers):
        return [f"{key} {hyper.net} has {len(layers)} layers; use at most {len(layers)}"]
    return []


# ------------------------------------------------------------------------------- the DeepSpeed configuration


def combination_errors(config: Mapping[str, Any], hyper: Hyperparameters, device: str) -> list[str]:
    """What of a configuration, whose keys are right by themselves, does not go together."""
    errors = [
        *_stage_errors(config, hyper),
        *_group_errors(config, hyper),
        *_muon_errors(config, hyper),
        *_precision_errors(config),
        *_average_errors(config, hyper),
        *_monitor_errors(config),
        *(error for what in ("offload_optimizer", "offload_param") for error in _nvme_errors(config, what)),
    ]
    return add_new(errors, _device_errors(config, hyper, device)) or errors_of_whole(config)


def _stage_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> Iterator[str]:
    """What the ZeRO stage does not go with."""
    stage, pipeline = zero_stage(config), hyper.pipe_parallel_size > 1
    at = f"zero_optimization.stage: {stage}:"
    if pipeline and stage > 1:
        yield f"{at} a pipeline goes with ZeRO stage 0 or 1 only; set it to 1, or pipe_parallel_size to 1"
    if pipeline and stage == 0 and enabled(config, "fp16"):
        yield f"{at} DeepSpeed does not scale the loss of an fp16 pipeline without ZeRO; set it to 1"
    if offloads(config, "offload_param") and stage != 3:
        yield f"{at} offload_param works with ZeRO stage 3 only; set it to 3 or remove offload_param"
    if offloads(config, "offload_optimizer") and stage not in (2, 3):
        yield f"{at} offload_optimizer works with ZeRO stage 2 and 3 only; set it to 2 or remove it"
    if hyper.has_experts and stage == 3:
        yield f"{at} mixture of experts does not go with ZeRO stage 3; set it to 2 or less, or moe to false"
    if hyper.has_experts and stage > 0 and not hyper.moe_param_group:
        what = f"ZeRO stage {stage} needs a group of parameters each for experts; set it to true"
        yield f"{HYPER}moe_param_group: False: {what}"


def _group_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> Iterator[str]:
    """What of the parameter groups the optimizer does not take."""
    name = (config.get("optimizer") or {}).get("type", "")
    if not is_muon(config):
        for index, entry in enumerate(hyper.parameter_groups or ()):
            if "muon" in entry:
                what = f"does nothing with {name}; use optimizer.type: Muon, or remove it"
                yield f"{HYPER}parameter_groups[{index}].muon: {entry['muon']!r}: {what}"
    stage = zero_stage(config)
    grouped = hyper.parameter_groups or hyper.weight_decay_on != "all" or hyper.layer_decay or hyper.head_only
    if stage and grouped and name.lower() == "adagrad":
        what = f"at ZeRO stage {stage} DeepSpeed has Adagrad in one group; use stage 0, or another optimizer"
        yield f"optimizer.type: {name!r}: {what}"
    cls = optimizer_class(name)
    if cls is None or "weight_decay" in rules(cls):
        return
    mend = f"{name} has no weight decay; remove it, or use another optimizer"
    if hyper.weight_decay_on != "all":
        yield f"{HYPER}weight_decay_on: {hyper.weight_decay_on!r}: {mend}"
    for index, entry in enumerate(hyper.parameter_groups or ()):
        if "weight_decay" in entry:
            yield f"{HYPER}parameter_groups[{index}].weight_decay: {entry['weight_decay']!r}: {mend}"


def _muon_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> Iterator[str]:
    """What DeepSpeed's Muon does not go with."""
    if not is_muon(config):
        return
    stage, clipping = zero_stage(config), config.get("gradient_clipping", 0)
    if stage and clipping:
        what = f"at ZeRO stage {stage} DeepSpeed would clip Muon's updates, not the gradients"
        yield f"gradient_clipping: {clipping}: {what}; set it to 0"
    if stage and hyper.has_experts:
        what = "DeepSpeed's Muon does not know experts with ZeRO"
        yield f"zero_optimization.stage: {stage}: {what}; set it to 0, or use another optimizer"
    if stage == 1 and dtype_name(config) == "bf16":
        what = "DeepSpeed's Muon takes no convolutions there in bf16"
        yield f"zero_optimization.stage: 1: {what}; use stage 0, 2 or 3"
    schedule = config.get("scheduler") or {}
    if stage == 3 and (schedule.get("params") or {}).get("cycle_momentum"):
        what = "DeepSpeed's Muon keeps its momentum at ZeRO stage 3; set it to false"
        yield f"scheduler.params.cycle_momentum: True: {what}"


def _precision_errors(config: Mapping[str, Any]) -> Iterator[str]:
    """What the precision does not go with."""
    stage, dtype = zero_stage(config), dtype_name(config)
    sums = (config.get("data_types") or {}).get("grad_accum_dtype")
    at = f"data_types.grad_accum_dtype: {sums!r}:"
    if sums not in (None, *DTYPES):
        yield f"{at} must be one of {', '.join(DTYPES)}"
    elif sums is not None and stage == 0 and sums != dtype:
        yield f"{at} without ZeRO it has to be {dtype}; remove it"
    if enabled(config, "fp16") and (enabled(config, "bf16") or enabled(config, "bfloat16")):
        yield "bf16.enabled: True: fp16 is enabled too; set one of them to false"
    name = (config.get("optimizer") or {}).get("type", "")
    if name.lower() == "adagrad" and stage < 2 and dtype in ("fp16", "bf16")[stage:]:
        first = 1 if enabled(config, "fp16") else 2
        what = f"DeepSpeed has {name} with {dtype} from ZeRO stage {first} on"
        yield f"zero_optimization.stage: {stage}: {what}; use that, or another optimizer"


def _average_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> Iterator[str]:
    """Where an average of the weights has no fp32 weights in memory to follow."""
    if hyper.weight_average is None:
        return
    section = config.get("zero_optimization") or {}
    for what in ("offload_optimizer", "offload_param"):
        if (section.get(what) or {}).get("device") == "nvme":
            yield f"zero_optimization.{what}.device: 'nvme': does not go with weight_average; use device: cpu"
    if (section.get("offload_optimizer") or {}).get("super_offload"):
        key = "zero_optimization.offload_optimizer.super_offload"
        yield f"{key}: True: does not go with weight_average; set it to false"
    if section.get("zenflow"):
        yield "zero_optimization.zenflow: does not go with weight_average; remove one of them"
    for name in ("fp16", "bf16", "bfloat16"):
        key = f"{name.replace('bfloat', 'bf')}_master_weights_and_grads"
        if (config.get(name) or {}).get(key):
            yield f"{name}.{key}: True: weight_average needs fp32 weights; set it to false"


def _device_errors(config: Mapping[str, Any], hyper: Hyperparameters, device: str) -> Iterator[str]:
    """What a CPU cannot do."""
    if device != "cpu":
        return
    yield from gpu_errors(config)
    if hyper.sync_batchnorm:
        yield f"{HYPER}sync_batchnorm: True: torch computes it on GPUs alone; set it to false"
    name = (config.get("optimizer") or {}).get("type", "")
    if name.lower() in DEEPSPEED_OPTIMIZERS and optimizer_class(name) is None and not is_muon(config):
        yield f"optimizer.type: {name!r}: needs a GPU; on a CPU use one of {', '.join(optimizer_names())}"


def _monitor_errors(config: Mapping[str, Any]) -> Iterator[str]:
    """Where DeepSpeed's own monitors lack their packages, at which it ends with a traceback."""
    for section, package in {"wandb": "wandb", "comet": "comet_ml"}.items():
        if enabled(config, section) and not is_installed(package):
            yield f"{section}.enabled: True: needs a package; pip install {package}, or set it to false"


def _nvme_errors(config: Mapping[str, Any], what: str) -> Iterator[str]:
    section = (config.get("zero_optimization") or {}).get(what) or {}
    if section.get("device") != "nvme":
        return
    key = f"zero_optimization.{what}"
    if not section.get("nvme_path"):
        yield f"{key}.nvme_path: {section.get('nvme_path')!r}: missing; give a folder on the NVMe disk"
    elif ctypes.util.find_library("aio") is None:
        mend = "DeepSpeed finds no libaio on this machine; install it or use device: cpu"
        yield f"{key}.device: 'nvme': {mend}"


def capacity_errors(config: Mapping[str, Any], hyper: Hyperparameters) -> list[str]:
    """Checks that experts are not asked to take more images than there are in a micro-batch."""
    micro, capacity = config[MICRO_BATCH], hyper.min_capacity
    if not hyper.has_experts or capacity <= micro:
        return []
    what = f"more than a micro-batch of {micro} images; use at most {micro}"
    return [f"{HYPER}min_capacity: {capacity}: {what}"]
