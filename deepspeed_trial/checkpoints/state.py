"""The state of an engine on disk, in one format that an engine in any mode reads."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from deepspeed_trial.checkpoints import pieces, shards
from deepspeed_trial.checkpoints.pieces import MOMENTUM, LayerNames, Piece, plain_name
from deepspeed_trial.checkpoints.safe_load import is_count
from deepspeed_trial.checkpoints.shards import AVERAGE, BUFFERS, REMEDY, WEIGHTS, Part, Shards
from deepspeed_trial.checkpoints.weights import mismatch
from deepspeed_trial.errors import InvalidInput

COUNTS = ("global_steps", "global_samples", "skipped_steps")  # of an engine
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of a dynamic loss scale
Averages = Mapping[Tensor, Tensor]  # from master weights and buffers to their averages of the same shape


def save(engine: DeepSpeedEngine, folder: pathlib.Path, layers: LayerNames, averages: Averages) -> None:
    """Write an engine's tensors. Every rank calls it and writes its parts.

    Args:
        engine: the engine; ``pieces.are_known(engine)`` must be true.
        folder: the folder to write into.
        layers: the names of a pipeline's layers.
        averages: averages to write, too.

    Raises:
        OSError: if the disk is full or fails.
    """
    shards.write(folder, torch.distributed.get_rank(), dict(_parts(engine, layers, averages)))


def _parts(engine: DeepSpeedEngine, layers: LayerNames, averages: Averages) -> Iterator[tuple[str, Part]]:
    for name, shape, piece, is_written in pieces.named(engine, layers):
        if not is_written:
            continue
        yield f"{WEIGHTS}/{name}", Part(piece.of(piece.owner), piece.start, shape)
        if piece.owner in averages:
            yield f"{AVERAGE}/{name}", Part(piece.of(averages[piece.owner]), piece.start, shape)
        for kind, value in _states(engine, piece).items():
            if _is_moment(piece, kind, value):
                values, start = piece.of_moment(kind, value, shape)
                if start == piece.start:  # else another rank writes the whole matrix
                    yield f"{kind}/{name}", Part(values, start, shape)
            elif value is not None and piece.start == 0:
                yield f"{kind}/{name}", Part(torch.as_tensor(value), 0, ())
    for name, buffer in pieces.buffers(engine.module):
        if pieces.is_first_replica(engine, name):
            plain, shape = plain_name(engine, name, layers), tuple(buffer.shape)
            yield f"{BUFFERS}/{plain}", Part(buffer, 0, shape)
            if buffer in averages:
                yield f"{AVERAGE}/{plain}", Part(averages[buffer], 0, shape)


def _states(engine: DeepSpeedEngine, piece: Piece) -> dict[str, Any]:
    """Return the optimizer's states for a piece; none for a frozen parameter."""
    return {} if piece.group is None else engine.basic_optimizer.state.get(piece.owner, {})


def _is_moment(piece: Piece, kind: str, value: Any) -> bool:
    is_matrices = kind == MOMENTUM and piece.matrix is not None
    is_alike = kind != "step" and getattr(value, "shape", None) == piece.owner.shape
    return isinstance(value, Tensor) and (is_alike or is_matrices)


def check(engine: DeepSpeedEngine, folder: pathlib.Path, layers: LayerNames) -> None:
    """Check that saved tensors fit this rank's parts of the parameters.

    Args:
        engine: an engine in any mode.
        folder: the folder with the tensors.
        layers: the names of a pipeline's layers.

    Raises:
        InvalidInput: with a line for each damaged file or tensor, or a line if another network saved them.
    """
    saved, wanted = Shards(folder), {}
    if not pieces.are_known(engine):
        what = "holds tensors in parts, which an engine in this mode cannot load"
        raise InvalidInput(f"{folder}: {what}; resume in the mode that saved it")
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        wanted[plain_name(engine, name, layers)] = torch.empty(shape, device="meta")
    for key in [f"{kind}/{name}" for name, kinds in saved.kinds.items() if name in wanted for kind in kinds]:
        shape = tuple(wanted[key.partition("/")[2]].shape)
        if saved.shapes[key] not in (shape, ()):
            what = f"{key} is {saved.shapes[key]}, but {shape} in this network"
            raise InvalidInput(f"{folder}: {what}; {REMEDY}")
        dtype, is_number = saved.dtype(key), math.prod(saved.shapes[key]) == 1
        if not (dtype.is_floating_point or dtype.is_complex or is_number):
            raise InvalidInput(f"{folder}: {key}: {dtype} is no type of an optimizer's state; {REMEDY}")
    for name, average in saved.network.items():  # the key of the average, or else of the weight or buffer
        for key in (f"{WEIGHTS}/{name}", f"{BUFFERS}/{name}"):
            if saved.shapes.get(key, saved.shapes[average]) != saved.shapes[average]:
                what = f"{key} is {saved.shapes[key]}, but {average} is {saved.shapes[average]}"
                raise InvalidInput(f"{folder}: {what}; {REMEDY}")
    for name, buffer in pieces.buffers(engine.module):
        wanted[plain_name(engine, name, layers)] = torch.empty_like(buffer, device="meta")
    _check_moments(engine, saved, folder, layers)
    found = saved.outlines()
    if layers or engine.has_moe_layers:  # other ranks have other weights
        found = {name: outline for name, outline in found.items() if name in wanted}
    if wrong := mismatch(found, wanted):
        raise InvalidInput(f"{folder}: {wrong}; {REMEDY}, or with the network that saved it")


def _check_moments(engine: DeepSpeedEngine, saved: Shards, folder: pathlib.Path, layers: LayerNames) -> None:
    """Check that the weights of a parameter group have the same kinds of states; a weight may have none."""
    of_groups: dict[int, tuple[str, list[str]]] = {}
    for name, _, piece, _ in pieces.named(engine, layers):
        kinds = saved.kinds.get(name, [])
        if piece.group is None or not kinds:
            continue
        other, expected = of_groups.setdefault(piece.group, (name, kinds))
        if missing := sorted({*expected} ^ {*kinds}):
            lacks, has = (name, other) if missing[0] in expected else (other, name)
            raise InvalidInput(
                f"{folder}: {missing[0]}/{lacks} is missing, but {missing[0]}/{has} is there; {REMEDY}"
            )


@torch.no_grad()
def read(engine: DeepSpeedEngine, folder: pathlib.Path, layers: LayerNames, averages: Averages) -> None:
    """Read tensors, checked by ``check``, into this rank's parts of the master weights, states and buffers.

    The caller must then call ``full_weights.update_network``.

    Args:
        engine: an engine in any mode, with the optimizer that saved the tensors.
        folder: the folder with the tensors.
        layers: the names of a pipeline's layers.
        averages: gets the saved averages, or the weights if no averages were saved.

    Raises:
        ValueError: if a count is negative or not finite.
    """
    saved = Shards(folder)
    counts: dict[tuple[Tensor, str], Tensor] = {}
    for name, shape, piece, _ in pieces.named(engine, layers):
        saved.copy(f"{WEIGHTS}/{name}", piece.of(piece.owner), piece.start)
        if piece.owner in averages:
            saved.copy(saved.network[name], piece.of(averages[piece.owner]), piece.start)
        if piece.group is None:
            continue
        for kind in saved.kinds.get(name, []):
            key, state = f"{kind}/{name}", engine.basic_optimizer.state[piece.owner]
            if saved.shapes[key] == shape and kind != "step":
                moment = state[kind] = _moment(piece, kind, state.get(kind), saved.dtype(key))
                saved.copy(key, *piece.of_moment(kind, moment, shape))
            else:  # a count; parameters with the same owner share the greatest count
                count, before = saved.read(key), counts.get((piece.owner, kind))
                if not 0 <= count.item() < math.inf:
                    raise ValueError(f"{key}: {count.item()}: must be at least 0 and finite")
                counts[piece.owner, kind] = count if before is None else torch.maximum(count, before)
                state[kind] = _number(engine.basic_optimizer, piece, counts[piece.owner, kind])
    for name, buffer in pieces.buffers(engine.module):
        plain = plain_name(engine, name, layers)
        saved.copy(f"{BUFFERS}/{plain}", buffer)
        if buffer in averages:
            saved.copy(saved.network[plain], averages[buffer])


def _moment(piece: Piece, kind: str, value: Any, dtype: torch.dtype) -> Tensor:
    """Return ``value`` if it is a moment of the optimizer, else zeros of the moment's shape."""
    if _is_moment(piece, kind, value):
        return value
    shape = (piece.matrix[1],) if kind == MOMENTUM and piece.matrix else piece.owner.shape
    return torch.zeros(shape, dtype=dtype, device=piece.owner.device)


def _number(optimizer: torch.optim.Optimizer, piece: Piece, value: Tensor) -> Tensor | float:
    """Return a number in the optimizer's type: a tensor for torch's optimizers, else an int or a float."""
    group = optimizer.param_groups[piece.group or 0]
    stepping = getattr(optimizer, "aux_optimizer", None) or optimizer  # Muon's optimizer of non-matrices
    if type(stepping).__module__.startswith("torch."):
        on_device = group.get("fused") or group.get("capturable")
        return value.float().view(()).to(piece.owner.device if on_device else "cpu", copy=True)
    number = value.item()
    return int(number) if number == int(number) else number


# ----------------------------------------------------------------------- numbers, the same on each rank


def numbers(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return an engine's step counts, loss scale, schedule, and the settings of its parameter groups."""
    scaler, schedule = _dynamic_scale(engine), engine.lr_scheduler
    groups = engine.basic_optimizer.param_groups if engine.basic_optimizer else []
    return {
        "counts": {key: int(getattr(engine, key)) for key in COUNTS},
        "scale": {key: getattr(scaler, key) for key in SCALE if hasattr(scaler, key)},
        "schedule": schedule.state_dict() if schedule else None,
        "groups": [{key: value for key, value in each.items() if key != "params"} for each in groups],
    }


def load_numbers(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Set an engine's numbers to a saved result of ``numbers``; the engine may be in another mode.

    Raises:
        ValueError: if a value's type differs from the engine's.
    """
    here = numbers(engine)
    for key in COUNTS:
        if not is_count(count := saved["counts"][key]):
            raise ValueError(f"{key}: {count!r}: must be a whole number")
        setattr(engine, key, count)
    if len(here["groups"]) == len(saved["groups"]):  # another mode may have other groups
        for index, values in enumerate(saved["groups"]):
            _check_types(f"groups.{index}", values, here["groups"][index])
            known = {key: value for key, value in values.items() if key in here["groups"][index]}
            engine.basic_optimizer.param_groups[index].update(known)
    if engine.lr_scheduler and saved["schedule"]:
        _check_types("schedule", saved["schedule"], here["schedule"])
        engine.lr_scheduler.load_state_dict(saved["schedule"])
    _check_types("scale", saved["scale"], here["scale"])
    for key in saved["scale"].keys() & here["scale"].keys():
        setattr(_dynamic_scale(engine), key, saved["scale"][key])


def _check_types(name: str, saved: Any, here: Any) -> None:
    """Raise ``ValueError`` if a saved value's type (mapping, list or number) differs from the engine's."""
    for kinds, kind in ((dict, "mapping"), ((list, tuple), "list"), ((int, float), "number")):
        if isinstance(here, kinds) and not isinstance(saved, kinds):
            raise ValueError(f"{name}: {saved!r}: must be a {kind}")
    if isinstance(here, dict):
        for key in here.keys() & saved.keys():
            _check_types(f"{name}.{key}", saved[key], here[key])
    elif isinstance(here, list | tuple):
        for index, (value, like) in enumerate(zip(saved, here, strict=False)):
            _check_types(f"{name}.{index}", value, like)


def _dynamic_scale(engine: DeepSpeedEngine) -> Any:
    """Return the object with fp16's dynamic loss scale; None if the scale is static."""
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)
    changes = getattr(scaler, "dynamic_loss_scale", False) or getattr(scaler, "dynamic", False)
    return scaler if engine.fp16_enabled() and changes else None
