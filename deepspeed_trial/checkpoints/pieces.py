"""The location of each parameter in the tensors that the ranks' optimizers update, in every mode.

Checkpoints use the parameters' names in the *plain network*: without a pipeline, and with all experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import groups
from torch import Tensor, nn

from deepspeed_trial.engines import data_parallel_rank
from deepspeed_trial.patches.muon import USES_MUON

MOMENTUM = "momentum_buffer"
# DeepSpeed's classes that wrap the optimizer; this module does not know where other classes keep states
WRAPPERS = """FP16_Optimizer FP16_UnfusedOptimizer BF16_Optimizer
    DeepSpeedZeroOptimizer DeepSpeedZeroOptimizer_Stage3""".split()
# Optimizers whose states no other mode can use: statistics of rows and columns, or a rank's rounding errors
UNKNOWN = ("Adafactor", "OnebitAdam", "OnebitLamb", "ZeroOneAdam")
_EXPERT = re.compile(
    r"^(?P<layer>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<local>\d+)(?P<rest>.*)$"
)
LayerNames = Sequence[str] | None  # the plain network's names of a pipeline's layers; None without a pipeline


class Piece(NamedTuple):
    """The part of a parameter that this rank holds.

    Attributes:
        owner: the fp32 tensor that the optimizer updates; the parameter itself if it is frozen.
        start: index of the part's first element in the flattened parameter.
        numel: number of elements of the part; 0 if other ranks hold the whole parameter.
        first: index of the part's first element in the owner, if the owner is flat and has many parameters.
        group: index of the optimizer's parameter group; None if the parameter is frozen.
        is_shared: whether other ranks hold the same part.
        matrix: only if ZeRO 1 or 2 keeps Muon's momentum in whole matrices, else None: the index of the
            parameter's first element in that momentum, and the momentum's number of elements.
    """

    owner: Tensor
    start: int
    numel: int
    first: int = 0
    group: int | None = None
    is_shared: bool = False
    matrix: tuple[int, int] | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return this piece's elements of a tensor; the tensor has the layout of ``owner``."""
        is_whole = values.numel() == self.numel
        return values if is_whole else values.view(-1).narrow(0, self.first, self.numel)

    def of_moment(self, key: str, values: Tensor, shape: Sequence[int]) -> tuple[Tensor, int]:
        """Return the elements of a moment of the optimizer that this rank holds, and their place.

        Args:
            key: the moment's name, e.g. ``exp_avg``.
            values: the moment, in the optimizer's layout.
            shape: the parameter's shape.

        Returns:
            The elements, and the first one's index in the flattened parameter.
        """
        if key == MOMENTUM and self.matrix:
            return values.narrow(0, self.matrix[0], math.prod(shape)), 0
        return self.of(values), self.start


def named(engine: DeepSpeedEngine, layers: LayerNames) -> Iterator[tuple[str, tuple[int, ...], Piece, bool]]:
    """Yield the pieces that this rank holds.

    Yields:
        The parameter's name in the plain network; the parameter's shape; the piece; whether this rank writes
        the piece into a checkpoint. Exactly one rank writes a shared piece.
    """
    of_trained = trained(engine)
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        is_empty = not math.prod(shape)
        piece = of_trained.get(parameter) or _of_frozen(parameter)
        if is_empty:
            piece = Piece(parameter, 0, 0, is_shared=True)
        if piece.numel or is_empty:
            is_tied = getattr(parameter, "ds_pipe_replicated", False)  # to a layer of another stage
            is_first = not piece.is_shared or is_first_replica(engine, name)
            yield plain_name(engine, name, layers), shape, piece, is_first and not is_tied


def trained(engine: DeepSpeedEngine) -> dict[nn.Parameter, Piece]:
    """Return the piece of each parameter that the optimizer updates."""
    zero, optimizer = engine.optimizer, engine.basic_optimizer
    found: dict[nn.Parameter, Piece] = {}
    if zero is None:
        return found
    if engine.zero_optimization_stage() == 3:
        return _of_zero3(zero)
    owners = [group["params"] for group in optimizer.param_groups]
    flat = getattr(zero, "round_robin_bit16_groups", getattr(zero, "bf16_groups", None))
    if flat is not None:
        offsets = getattr(zero, "round_robin_bit16_offsets", None)
        for group, members in enumerate(flat):
            rank = torch.distributed.get_rank(zero.real_dp_process_group[group])
            is_muon = optimizer.param_groups[group].get(USES_MUON) and not getattr(zero, "cpu_offload", False)
            of_group = _of_flat(members, owners[group][0], group, rank, offsets and offsets[group])
            found |= _with_matrices(of_group) if is_muon else of_group
    elif hasattr(zero, "fp32_groups_flat"):  # 16-bit weights without ZeRO
        for group, members in enumerate(zero.fp16_groups):
            found |= _of_flat(members, owners[group][0], group, None)
    else:
        halves = getattr(zero, "fp16_groups", owners)
        for group, members in enumerate(halves):
            for parameter, owner in zip(members, owners[group], strict=True):
                found[parameter] = Piece(owner, 0, owner.numel(), 0, group, is_shared=True)
    return found


def _of_flat(
    members: Sequence[nn.Parameter],
    owner: Tensor,
    group: int,
    rank: int | None,
    offsets: Sequence[int] | None = None,
) -> dict[nn.Parameter, Piece]:
    """Return this rank's pieces of parameters that are concatenated and cut into parts of equal length.

    Args:
        members: the parameters.
        owner: the tensor with this rank's part of the concatenated parameters.
        group: the index of the parameter group.
        rank: the index of this rank's part; None if every rank holds all parameters.
        offsets: the index of each parameter's first element, if there is padding between parameters.
    """
    begin, end, found = (rank or 0) * owner.numel(), 0, {}
    for index, parameter in enumerate(members):
        offset = offsets[index] if offsets else end
        end = offset + parameter.numel()
        start = max(0, begin - offset)
        count = max(0, min(parameter.numel(), begin + owner.numel() - offset) - start)
        found[parameter] = Piece(owner, start, count, offset + start - begin, group, rank is None)
    return found


def _with_matrices(pieces: dict[nn.Parameter, Piece]) -> dict[nn.Parameter, Piece]:
    """Add each parameter's place in Muon's momentum, which ZeRO 1 and 2 keep in whole matrices."""
    here = {parameter: piece for parameter, piece in pieces.items() if piece.numel}
    total, first = sum(parameter.numel() for parameter in here), 0
    for parameter, piece in here.items():
        pieces[parameter] = piece._replace(matrix=(first, total))
        first += parameter.numel()
    return pieces


def _of_zero3(zero: Any) -> dict[nn.Parameter, Piece]:
    found = {}
    for index, members in enumerate(zero.fp16_groups):
        first, group = 0, zero.sub_group_to_group_id[index]
        for parameter in members:
            owner = zero.fp32_partitioned_groups_flat[index]
            found[parameter] = Piece(owner, *_partition(parameter), first, group)
            first += parameter.partition_numel()
    return found


def _of_frozen(parameter: Any) -> Piece:
    if hasattr(parameter, "ds_tensor"):  # partitioned by ZeRO 3
        return Piece(parameter.ds_tensor, *_partition(parameter))
    return Piece(parameter, 0, parameter.numel(), is_shared=True)


def _partition(parameter: Any) -> tuple[int, int]:
    """Return the first element and the number of elements of this rank's part, without padding."""
    share = parameter.partition_numel()
    start = share * torch.distributed.get_rank(parameter.ds_process_group)
    return start, max(0, min(share, parameter.ds_numel - start))


def buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a ``state_dict`` holds, with their names."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def is_first_replica(engine: DeepSpeedEngine, name: str) -> bool:
    """Return whether this rank is the first of the ranks with the same parameter or buffer."""
    if found := _EXPERT.match(name):
        layer = engine.module.get_submodule(found["layer"])
        return bool(groups._get_expert_data_parallel_rank(layer.expert_group_name) == 0)
    return data_parallel_rank(engine) == 0


def name_in_stage(name: str, layers: Sequence[str]) -> str:
    """Return the plain network's name of a pipeline's weight; ``name`` begins with the layer's number."""
    index, _, rest = name.partition(".")
    return f"{layers[int(index)]}.{rest}"


def plain_name(engine: DeepSpeedEngine, name: str, layers: LayerNames) -> str:
    """Return a weight's name in the plain network.

    On a rank, the name may have a pipeline layer's number, or an expert's number among the rank's experts.
    """
    if layers:
        return name_in_stage(name, layers)
    found = _EXPERT.match(name)
    if not found:
        return name
    layer = engine.module.get_submodule(found["layer"])
    first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
    expert = first + int(found["local"])
    return f"{found['layer']}.deepspeed_moe.experts.deepspeed_experts.{expert}{found['rest']}"


def are_known(engine: DeepSpeedEngine) -> bool:
    """Return whether this module can locate the complete state of an engine.

    The result is False if the engine uses NVMe, tensor parallelism or DeepSpeed's data efficiency, or if a
    layer overrides ``get_extra_state``. It is also False for an optimizer in ``UNKNOWN``, and for a state
    that is neither a number nor of the shape of its weight.
    """
    zero, optimizer, grid = engine.optimizer, engine.basic_optimizer, getattr(engine, "grid", None)
    away = ("swap_optimizer", "params_in_nvme_and_cpu", "save_muon_momentum_buffer_in_memory")
    modules, parameters = engine.module.modules(), engine.module.named_parameters()
    return (
        (zero is optimizer or type(zero).__name__ in WRAPPERS)
        and type(optimizer).__name__ not in UNKNOWN
        and (engine.mpu is None or (grid is not None and grid.get_slice_parallel_world_size() == 1))
        and not any(getattr(zero, name, False) for name in away)
        and not (engine.random_ltd_enabled() or engine.curriculum_learning_enabled())
        and all(type(each).get_extra_state is nn.Module.get_extra_state for each in modules)
        and all(getattr(each, "allreduce", True) or _EXPERT.match(name) for name, each in parameters)
        and _has_known_states(engine)
    )


def _has_known_states(engine: DeepSpeedEngine) -> bool:
    """Return whether each state of the optimizer is a number, or floats in the shape of its weight."""
    states = engine.basic_optimizer.state if engine.basic_optimizer else {}
    return all(
        _is_known(piece, kind, value)
        for piece in (trained(engine).values() if states else ())
        if piece.numel
        for kind, value in states.get(piece.owner, {}).items()
    )


def _is_known(piece: Piece, kind: str, value: Any) -> bool:
    if not isinstance(value, Tensor):
        return value is None or isinstance(value, bool | int | float)
    is_fractions = value.is_floating_point() or value.is_complex()
    is_matrices = kind == MOMENTUM and piece.matrix is not None
    return value.numel() == 1 or (is_fractions and (value.shape == piece.owner.shape or is_matrices))
