"""What DeepSpeed configurations of other years and programs say, and what stands for it here.

Keys that DeepSpeed had since 0.3 and that 0.19 refuses or does not know, and keys that only a GPU can run.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_MOQ = "DeepSpeed removed mixture-of-quantization; nothing replaces it, remove it"
_TEXT = "is for language models; remove it"

# By the key's path: what to write instead.
REPLACED = {
    "elasticity": "DeepSpeed removed it; a run goes on with any number of processes by itself, so remove it",
    "compression_training": "DeepSpeed removed it; compress the exported network, and remove it here",
    "progressive_layer_drop": "DeepSpeed removed it; timm's nets take net_args: {drop_path_rate: 0.1}",
    "eigenvalue": _MOQ,
    "quantize_training": _MOQ,
    "curriculum_learning": "DeepSpeed removed it; it was for texts, and progressive_resizing is for images",
    "sparse_attention": "DeepSpeed removed it; remove it",
    "nebula": "DeepSpeed removed it; checkpoints here are whole or not there, so remove it",
    "amp": "DeepSpeed removed it; use torch_autocast: {enabled: true, dtype: bfloat16}, bf16 or fp16",
    "sparse_gradients": "DeepSpeed removed it; remove it",
    "graph_harvesting": "DeepSpeed removed it; remove it",
    "autotuning": "is read by DeepSpeed's launcher alone; search.py --config experiments/search-speed.yaml"
    " finds the fastest settings",
    "cuda_visible_devices": "is an environment variable, CUDA_VISIBLE_DEVICES; remove it here",
    "datastates_ckpt": "needs a package of its own, and checkpoints here are DeepSpeed's; remove it",
    "disable_multiple_model_parts": "DeepSpeed has it no more; remove it",
    "fp32_allreduce": "write communication_data_type: fp32",
    "allgather_size": "write zero_optimization.allgather_bucket_size",
    "vocabulary_size": _TEXT,
    "sequence_parallel_size": _TEXT,
    "tensor_parallel": _TEXT,
    "deepcompile": "stands in a section: compile: {deepcompile: true}",
    "zenflow": "stands under zero_optimization",
    "mics_shard_size": "stands under zero_optimization",
    "optimizer_legacy_fusion": "is a parameter that DeepSpeed's optimizers have no more; remove it",
    "zero_optimization.cpu_offload_params": "write offload_param: {device: cpu}",
    "zero_optimization.legacy_stage1": "DeepSpeed has it no more; remove it",
    "zero_optimization.super_offload": "stands under offload_optimizer, and needs a GPU",
    "aio.thread_count": "write intra_op_parallelism",
}
_GPU = "needs a GPU; remove it to train on a CPU"
# By the key's path: what DeepSpeed has for GPUs alone, where its value switches it on.
FOR_GPUS = {
    "zero_optimization.zero_quantized_weights": _GPU,
    "zero_optimization.zero_quantized_gradients": _GPU,
    "zero_optimization.zero_quantized_nontrainable_weights": _GPU,
    "zero_optimization.zeropp_loco_param": _GPU,
    "zero_optimization.zenflow": "needs a GPU, whose work it lets the CPU's steps overlap; remove it",
    "zero_optimization.offload_optimizer.super_offload": _GPU,
    "compile.deepcompile": _GPU,
    "aio.use_gds": _GPU,
    "data_efficiency.data_routing.random_ltd.enabled": "needs a GPU and a network made for it; remove it",
}
# Optimizers that compress what ranks exchange: by which other each is replaced.
_ADAMS = ("lr", "betas", "eps", "weight_decay")
COMPRESSED = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}
_FUSED = {
    "max_grad_norm": "is of another library's Adam; write gradient_clipping",
    "bias_correction": "is of another library's Adam; every Adam corrects here, remove it",
    "eps_inside_sqrt": "is of another library's Adam; remove it",
}
# Where the value of a key goes today: its path, and what else stands there, if not the value itself.
_MOVED: dict[str, tuple[str, Any]] = {
    "fp32_allreduce": ("communication_data_type", "fp32"),
    "allgather_size": ("zero_optimization.allgather_bucket_size", None),
    "deepcompile": ("compile.deepcompile", None),
    "amp": ("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param", {"device": "cpu"}),
    "aio.thread_count": ("aio.intra_op_parallelism", None),
    "optimizer.params.max_grad_norm": ("gradient_clipping", None),
}


def replaced_errors(config: Mapping[str, Any]) -> list[str]:
    """A line for each key that has another form here, or none."""
    lines = [
        f"{path}: {_short(value)}: {REPLACED[path]}"
        for path, value in _found(config, REPLACED)
        if says(value)
    ]
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return lines
    kind, params = str(optimizer.get("type")), optimizer.get("params")
    if other := COMPRESSED.get(kind.lower()):
        what = "compresses what GPUs exchange, by MPI or cupy, which is not supported here"
        lines.append(f"optimizer.type: {kind!r}: {what}; use {other}")
    if isinstance(params, Mapping):
        lines += [f"optimizer.params.{key}: {params[key]!r}: {_FUSED[key]}" for key in _fused(kind, params)]
    return lines


def gpu_errors(config: Mapping[str, Any]) -> list[str]:
    """A line for each key that only a GPU can run, where it is switched on."""
    return [f"{path}: {_short(value)}: {FOR_GPUS[path]}" for path, value in _found(config, FOR_GPUS) if value]


def today(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what ``replaced_errors`` names in today's form, or without it."""
    new = copy.deepcopy(dict(config))
    optimizer = config.get("optimizer")
    kind, params = (
        (optimizer.get("type"), optimizer.get("params")) if isinstance(optimizer, Mapping) else ("", {})
    )
    fused = _fused(str(kind), params) if isinstance(params, Mapping) else []
    for path, value in _found(config, [*REPLACED, *(f"optimizer.params.{key}" for key in fused)]):
        *sections, key = path.split(".")
        _section(new, sections).pop(key)
        where, instead = _MOVED.get(path, ("", None))
        *sections, key = where.split(".")
        section = _section(new, sections)
        if where and says(value) and not says(section.get(key)):
            section[key] = value if instead is None else instead
    optimizer = new.get("optimizer")
    if isinstance(optimizer, dict) and (other := COMPRESSED.get(str(optimizer.get("type")).lower())):
        params = optimizer.get("params")
        taken = {k: v for k, v in params.items() if k in _ADAMS} if isinstance(params, dict) else {}
        new["optimizer"] = {"type": other, "params": taken}
    return new


def says(value: Any) -> bool:
    """Whether a key switches anything on."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", value))
    return value is not None and value is not False


def _fused(kind: str, params: Mapping[str, Any]) -> list[str]:
    """Parameters of another library's Adam; DeepSpeed's own Lamb has some of them."""
    return [key for key in _FUSED if key in params and (key == "max_grad_norm" or "lamb" not in kind.lower())]


def _section(config: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The mapping at a path, made if it is missing; another, which nothing holds, where there is none."""
    for key in keys:
        inner = config.setdefault(key, {})
        config = inner if isinstance(inner, dict) else {}
    return config


def _found(config: Mapping[str, Any], table: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for path in table:
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            yield path, value


def _short(value: Any) -> str:
    shortened = reprlib.Repr()
    shortened.maxdict = shortened.maxlevel = 2
    return shortened.repr(value)
