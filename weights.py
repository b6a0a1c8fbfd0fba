"""The weights of a network, whole and in fp32: out of an engine, however its ranks hold them, and into a network."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from errors import InvalidInput, unloadable

if TYPE_CHECKING:  # what is plain PyTorch here does without DeepSpeed
    import deepspeed

COUNT = "num_batches_tracked"  # of batch normalization, which files of before torch 0.4.1 lack
_EXPERT = re.compile(r"^(?P<layer>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<local>\d+)(?P<rest>.*)$")


@torch.no_grad()
def consolidate(engine: deepspeed.DeepSpeedEngine, layer_names: list[str] | None = None) -> dict[str, Tensor]:
    """Gives every weight of the network on the CPU in fp32: the optimizer's master copy where it keeps one.

    Every rank has to call it, for the weights are gathered from all of them.

    Args:
        engine: the engine.
        layer_names: the names of a pipeline's layers, by which its weights are called.

    Returns:
        The weights and buffers by name, in the order of the names.
    """
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    masters = dict(_masters(engine))
    held: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        whole = safe_get_full_fp32_param(parameter)
        if whole is None and hasattr(parameter, "ds_id"):
            with GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        if whole is None:
            whole = masters.get(id(parameter), parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        held[_name(engine, name, layer_names)] = whole.detach().float().cpu().reshape(shape)
    for name, buffer in _kept_buffers(engine.module):
        held[_name(engine, name, layer_names)] = buffer.detach().float().cpu()
    if layer_names or engine.has_moe_layers:  # ranks hold different weights
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, held)
        held = {name: weight for each in reversed(everyone) for name, weight in each.items()}
    return dict(sorted(held.items()))


def _kept_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a ``state_dict`` holds, by name."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _masters(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[int, Tensor]]:
    """The fp32 copies that DeepSpeed's optimizers for 16 bits keep without ZeRO, by the parameter's identity."""
    optimizer = engine.optimizer
    halves = [] if engine.zero_optimization() else getattr(optimizer, "fp16_groups", [])
    flat = getattr(optimizer, "fp32_groups_flat", None)
    for index, group in enumerate(halves):
        wholes = optimizer.unflatten(flat[index], group) if flat is not None else optimizer.fp32_groups[index]
        yield from zip(map(id, group), wholes, strict=True)


def _name(engine: deepspeed.DeepSpeedEngine, name: str, layer_names: list[str] | None) -> str:
    """What the plain network calls a weight that a pipeline or an expert-parallel rank calls by a number of its own."""
    if layer_names:
        index, _, rest = name.partition(".")
        return f"{layer_names[int(index)]}.{rest}"
    found = _EXPERT.match(name)
    if not found:
        return name
    from deepspeed.utils import groups

    layer = engine.module.get_submodule(found["layer"])
    first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
    expert = first + int(found["local"])
    return f"{found['layer']}.deepspeed_moe.experts.deepspeed_experts.{expert}{found['rest']}"


def of_module(module: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a plain network on the CPU in fp32, in the order of their names."""
    return {name: weight.detach().float().cpu() for name, weight in sorted(module.state_dict().items())}


def start_from(module: nn.Module, found: Mapping[str, Tensor], label: str) -> list[str]:
    """Puts weights into a network that is to be trained, all but those of a last layer for other classes.

    Args:
        module: the network.
        found: the weights by name.
        label: what to call them in an error line.

    Returns:
        The names of the weights that stay as they are, for they are of another size.

    Raises:
        InvalidInput: if they are of another network.
    """
    mine = {**dict(module.named_parameters(remove_duplicate=False)), **dict(_kept_buffers(module))}
    found = {name: value for name, value in found.items() if name in mine or not name.endswith(COUNT)}
    wanted = {name: each.shape for name, each in mine.items() if name in found or not name.endswith(COUNT)}
    last = next((name.rpartition(".")[0] for name in reversed(list(dict(module.named_parameters())))), "")
    other = _is_other_head(found, wanted, last)
    replaced = [name for name in wanted if other and name.rpartition(".")[0] == last]
    for name in sorted(wanted.keys() | found.keys()):
        if name not in replaced:
            _compare(name, found.get(name), wanted.get(name), label)
    with torch.no_grad():
        for name in wanted:
            if name not in replaced:
                mine[name].copy_(found[name])
    return replaced


def read(path: str, label: str = "") -> dict[str, Tensor]:
    """Reads a ``state_dict``, also one within a training checkpoint or of a ``DistributedDataParallel`` module.

    Args:
        path: the file.
        label: what to call it in an error line; its path if empty.

    Raises:
        InvalidInput: if the file cannot be read or holds none.
    """
    label = label or path
    try:
        found = _load(path)
    except Exception as error:  # torch, zipfile and pickle raise each their own
        raise InvalidInput(f"{label}: not a readable state_dict ({unloadable(error)}); give a net.pt") from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if isinstance(found, Mapping) and found and all(str(name).startswith("module.") for name in found):
        found = {name.removeprefix("module."): value for name, value in found.items()}
    if not isinstance(found, Mapping) or not all(_is_plain(*each) for each in found.items()):
        raise InvalidInput(f"{label}: holds no state_dict; give a net.pt")
    return dict(found)


def _is_plain(name: object, value: object) -> bool:
    if not (isinstance(name, str) and isinstance(value, Tensor)):
        return False
    return value.layout == torch.strided and not (value.is_quantized or value.is_meta or value.is_complex())


def said(replaced: list[str], label: str) -> str:
    """What ``start_from`` left at random, as a line."""
    return f"{label}: {', '.join(replaced)} start at random, for other classes"


def put_into(module: nn.Module, found: Mapping[str, Tensor], label: str) -> None:
    """Puts weights into a network; ``label`` names them in an error line. Raises ``InvalidInput`` where they differ."""
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        _compare(name, found.get(name), wanted[name].shape if name in wanted else None, label)
    module.load_state_dict(found)


def _compare(name: str, found: Tensor | None, wanted: torch.Size | None, label: str) -> None:
    here, there = (None if found is None else tuple(found.shape)), (None if wanted is None else tuple(wanted))
    if here != there:
        raise InvalidInput(
            f"{label}: {name} is {_shown(here)}, but {_shown(there)} in this network; give its own weights"
        )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(shape)


def _is_other_head(found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size], last: str) -> bool:
    """Whether the weights of the last layer are there, but for another number of classes."""
    name = f"{last}.weight"
    return (
        name in found
        and name in wanted
        and found[name].shape[1:] == wanted[name][1:]
        and (found[name].shape[0] != wanted[name][0])
    )


def _load(path: str) -> Any:
    if path.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    return torch.load(path, map_location="cpu", weights_only=True)


def sha256(weights: dict[str, Tensor]) -> str:
    """The digest of the names, shapes and bytes of weights, in their order."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()
