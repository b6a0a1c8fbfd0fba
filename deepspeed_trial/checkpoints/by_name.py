"""An engine's state, whole and by the names of its weights: what any form of engine goes on from.

DeepSpeed's own files go back into an engine of the same ZeRO stage and number of ranks, to the bit. For all
others a checkpoint has this beside them: the weights in fp32 and each of the optimizer's moments, gathered
from the ranks, a file each, and the counts. Moments lie in the optimizer as the weights do, so they are
gathered and spread in their place.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from deepspeed_trial import messages
from deepspeed_trial.checkpoints import safe_load
from deepspeed_trial.checkpoints.weights import mismatch
from deepspeed_trial.errors import ErrorList, InvalidInput
from deepspeed_trial.full_weights import (
    exchange_masters,
    gather_full_state_dict,
    master_weights,
    plain_name,
    put_untrained,
    scatter_full_state_dict,
    update_network,
)
from deepspeed_trial.patches.muon import USES_MUON

FOLDER = "by_name"  # of a checkpoint, with a folder for each engine
WEIGHTS, STATE = "weights.pt", "state.pt"
MOMENTUM = "momentum_buffer"
COUNTS = ("global_steps", "global_samples", "skipped_steps")  # of an engine
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of a changing loss scale
MEND = "go on from another checkpoint"

LayerNames = Sequence[str] | None  # what a pipeline's layers are called in the plain network


def folder_of(checkpoint: pathlib.Path, index: int) -> pathlib.Path:
    """Where a checkpoint has the state of an engine, by its number."""
    return checkpoint / FOLDER / f"model{index}"


# --------------------------------------------------------------------------------------------------- to files


def save(engine: DeepSpeedEngine, folder: pathlib.Path, layers: LayerNames) -> None:
    """Writes an engine's state on the first rank; every rank has to call it.

    Nothing is written of an optimizer whose states do not lie as its weights do: of Muon with ZeRO, of
    Adafactor, and on NVMe.

    Args:
        engine: the engine.
        folder: where to.
        layers: the names of a pipeline's layers.
    """
    kept = _kept_by_all(engine)
    if kept is None:
        return
    moments, scalars = kept
    is_chief = torch.distributed.get_rank() == 0
    scaler, schedule = _changing_scale(engine), engine.lr_scheduler
    if is_chief:
        folder.mkdir(parents=True)
        state = {
            "counts": {key: int(getattr(engine, key)) for key in COUNTS},
            "schedule": schedule.state_dict() if schedule else None,
            "scale": {key: getattr(scaler, key) for key in SCALE if hasattr(scaler, key)},
            "scalars": scalars,
            "moments": list(moments),
        }
        torch.save(state, folder / STATE)
    weights = gather_full_state_dict(engine, layers)
    if is_chief:
        torch.save(weights, folder / WEIGHTS)
    del weights
    for key, dtype in moments.items():
        values = [_moment(engine, weight, key) for weight in master_weights(engine)]
        exchange_masters(engine, values)
        gathered = gather_full_state_dict(engine, layers, trained_only=True)
        if is_chief:
            torch.save({name: each.to(dtype) for name, each in gathered.items()}, folder / f"{key}.pt")
        exchange_masters(engine, values)


def _moment(engine: DeepSpeedEngine, weight: Tensor, key: str) -> Tensor:
    """A copy of a moment of one of the weights that the optimizer steps; zeros where there is none."""
    moment = engine.basic_optimizer.state.get(weight, {}).get(key)
    return torch.zeros_like(weight) if moment is None else moment.detach().to(weight, copy=True)


def _kept_by_all(engine: DeepSpeedEngine) -> tuple[dict[str, torch.dtype], dict[str, float]] | None:
    """The moments that any rank keeps, with their types, and what is one number; None if there is more."""
    everyone = messages.all_gather(_kept(engine))
    if None in everyone:
        return None
    moments = {key: getattr(torch, dtype) for kept, _ in everyone for key, dtype in kept.items()}
    return dict(sorted(moments.items())), {key: value for _, one in everyone for key, value in one.items()}


def _kept(engine: DeepSpeedEngine) -> tuple[dict[str, str], dict[str, float]] | None:
    if engine.basic_optimizer is None:
        return None
    moments: dict[str, str] = {}
    scalars: dict[str, float] = {}
    for weight in master_weights(engine):
        for key, value in engine.basic_optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor) and value.shape == weight.shape and key != "step":
                moments[key] = str(value.dtype).removeprefix("torch.")
            elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                scalars[key] = max(float(value), scalars.get(key, float(value)))
            elif value is not None:
                return None
    return moments, scalars


def _changing_scale(engine: DeepSpeedEngine) -> Any:
    """What keeps fp16's loss scale, if it changes by itself."""
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)
    changes = getattr(scaler, "dynamic_loss_scale", False) or getattr(scaler, "dynamic", False)
    return scaler if engine.fp16_enabled() and changes else None


# ------------------------------------------------------------------------------------------------- from files


@contextlib.contextmanager
def loading_by_name(engine: DeepSpeedEngine, folder: pathlib.Path, layers: LayerNames) -> Iterator[None]:
    """Has ``engine.load_checkpoint``, as trials call it, load what ``save`` wrote.

    Args:
        engine: an engine that has not trained.
        folder: what ``save`` got.
        layers: the names of a pipeline's layers.
    """
    engine.load_checkpoint = functools.partial(_load, engine, folder, layers)
    try:
        yield
    finally:
        del engine.load_checkpoint  # the class's again


def _load(
    engine: DeepSpeedEngine, folder: pathlib.Path, layers: LayerNames, *_: Any, **__: Any
) -> tuple[str, dict[str, Any]]:
    state, weights = safe_load.read(folder / STATE), safe_load.read(folder / WEIGHTS)
    put_untrained(engine, weights, layers)
    scatter_full_state_dict(engine, weights, layers)
    update_network(engine)
    for key in state["moments"]:
        _load_moment(engine, key, safe_load.read(folder / f"{key}.pt"), layers)
    for group, weight in _weights_of_groups(engine):
        kept = engine.basic_optimizer.state[weight]
        for key, value in state["scalars"].items():
            if kept:  # or the optimizer keeps nothing of this weight
                kept[key] = _as_kept(engine.basic_optimizer, group, weight, value)
    for key in COUNTS:
        setattr(engine, key, state["counts"][key])
    if engine.lr_scheduler and state["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(state["schedule"])
    if scaler := _changing_scale(engine):
        for key in state["scale"].keys() & vars(scaler).keys():
            setattr(scaler, key, state["scale"][key])
    return str(folder), {}


def _load_moment(
    engine: DeepSpeedEngine, key: str, moments: Mapping[str, Tensor], layers: LayerNames
) -> None:
    values = [torch.zeros_like(weight) for weight in master_weights(engine)]
    exchange_masters(engine, values)
    scatter_full_state_dict(engine, moments, layers)
    exchange_masters(engine, values)
    dtype = next(iter(moments.values())).dtype if moments else torch.float32
    for (group, weight), value in zip(_weights_of_groups(engine), values, strict=True):
        if USES_MUON not in group or group[USES_MUON] == (key == MOMENTUM):
            engine.basic_optimizer.state[weight][key] = value.to(dtype)


def _weights_of_groups(engine: DeepSpeedEngine) -> list[tuple[Mapping[str, Any], Tensor]]:
    """Each of the ``master_weights``, in their order, with its parameter group."""
    optimizer, weights = engine.basic_optimizer, master_weights(engine)
    if engine.zero_optimization_stage() == 3:  # which has a weight in its group while it is stepped
        groups = engine.optimizer.sub_group_to_group_id
        return [(optimizer.param_groups[groups[index]], weight) for index, weight in enumerate(weights)]
    return [(group, weight) for group in optimizer.param_groups for weight in group["params"]]


def _as_kept(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor, value: float
) -> Tensor | int | float:
    """A number as an optimizer keeps it: torch's in a tensor, DeepSpeed's own as a count."""
    stepping = getattr(optimizer, "aux_optimizer", None) or optimizer  # Muon's, for what is no matrix
    if type(stepping).__module__.startswith("torch."):
        on_device = group.get("fused") or group.get("capturable")
        return torch.tensor(value, device=weight.device if on_device else "cpu")
    return int(value) if value.is_integer() else value


def check(
    path: pathlib.Path, engines: Sequence[DeepSpeedEngine], layers: LayerNames, progress: Mapping[str, Any]
) -> None:
    """Looks into what ``save`` wrote, before engines load it.

    Args:
        path: the checkpoint's folder.
        engines: those that are to load it, of whose networks this rank may hold a part.
        layers: the names of a pipeline's layers.
        progress: how far the training was, as the checkpoint's identity says.

    Raises:
        InvalidInput: with a line for each file that is missing or damaged, or does not go with its engine.
    """
    errors = ErrorList()
    for index, engine in enumerate(engines):
        folder, moments = folder_of(path, index), []
        with errors.collecting():
            counted = progress.get("engines")
            counts = counted[index] if isinstance(counted, list) and len(counted) > index else {}
            moments = _check_state(folder / STATE, counts)
        trained: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            held = trained if parameter.requires_grad else others
            held[plain_name(engine, name, layers)] = torch.empty(shape, device="meta")
        for file, wanted in {
            WEIGHTS: {**trained, **others},
            **{f"{key}.pt": trained for key in moments},
        }.items():
            with errors.collecting():
                found = safe_load.read(folder / file)
                if not isinstance(found, dict) or not all(
                    isinstance(each, Tensor) for each in found.values()
                ):
                    raise InvalidInput(f"{folder / file}: holds no weights; {MEND}")
                if wrong := mismatch({name: found[name] for name in wanted.keys() & found.keys()}, wanted):
                    raise InvalidInput(f"{folder / file}: {wrong}; {MEND}")
    errors.raise_any()


def _check_state(file: pathlib.Path, counts: Mapping[str, Any]) -> list[str]:
    """The names of the moments, if a file holds what goes with the counts of the checkpoint's identity."""
    state = safe_load.read(file)
    kinds = {"counts": dict, "scale": dict, "scalars": dict, "moments": list}
    for key, kind in kinds.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            raise InvalidInput(f"{file}: {key} is missing; {MEND}")
    for key in COUNTS:
        if state["counts"].get(key) != counts.get(key):
            there = f"{key}: {state['counts'].get(key)!r}: but identity.json has {counts.get(key)!r}"
            raise InvalidInput(f"{file}: {there}; {MEND}")
    return state["moments"]
