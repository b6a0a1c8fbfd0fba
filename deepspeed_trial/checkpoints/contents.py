"""What a checkpoint's files have to hold: checked before anything of them is loaded."""

from __future__ import annotations

import contextlib
import math
import pathlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.pipe import PipelineModule
from determined import core
from torch import Tensor

from deepspeed_trial.checkpoints import files, safe_load
from deepspeed_trial.checkpoints.by_name import COUNTS, MEND, MOMENTUM
from deepspeed_trial.checkpoints.identity import FILE, PROCESSES, Identity, Progress
from deepspeed_trial.checkpoints.weights import mismatch
from deepspeed_trial.errors import ErrorList, InvalidInput, UnusableCheckpoint, one_line
from deepspeed_trial.out_of_memory import is_out_of_memory
from deepspeed_trial.patches.muon import MUON, USES_MUON

_MAIN = re.compile(r"(?:zero_pp_rank_\d+_)?(mp_rank_\d+)_model_states\.pt")
SCHEDULED = "last_batch_iteration"  # of its schedule
PARTITION = "single_partition_of_fp32_groups"  # of ZeRO 1 and 2, without its padding
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", MOMENTUM, "square_avg"}
# What Determined would load in place of a rank's own file: none of its or our trials writes them.
FOREIGN = ("state_dict.pth", "determined/state_dict.pth", "pedl/state_dict.pth", "checkpoint.pt")


def progress_of(state: Any, engines: Sequence[DeepSpeedEngine]) -> Progress:
    """How far a training is, by each of those that count it: Determined's state and the engines."""
    counts = [{key: int(getattr(engine, key)) for key in COUNTS} for engine in engines]
    for engine, counted in zip(engines, counts, strict=True):
        if hasattr(engine.lr_scheduler, SCHEDULED):
            counted[SCHEDULED] = engine.lr_scheduler.last_batch_iteration
    return {"trial_state.pkl": dict(vars(state)), "engines": counts}


def check(
    path: pathlib.Path, saved: Identity, engines: Sequence[DeepSpeedEngine], steps: int, trial_id: int
) -> None:
    """Looks into every file of a checkpoint.

    Args:
        path: the checkpoint's folder.
        saved: its identity, which ``identity.check`` has passed.
        engines: those that are to load it; none where the trial loads them in a way of its own.
        steps: how many the training that goes on from it has done, as its metadata or the master say.
        trial_id: of the trial that goes on.

    Raises:
        InvalidInput: with a line for each file that is missing or damaged, or holds anything but what a
            checkpoint has to hold, or is of another step.
    """
    errors = ErrorList()
    with errors.collecting():
        _check_steps(path, saved["progress"], steps, trial_id)
    ranks = (path / f"det_state_dict_rank{rank}.pth" for rank in range(saved["mode"][PROCESSES]))
    missing = next((file for file in ranks if not file.exists()), None)
    if missing:
        errors.lines.append(f"{missing}: is missing; {MEND}")
    errors.lines += [f"{path / n}: does not belong to it; {MEND}" for n in FOREIGN if (path / n).exists()]
    for file in sorted(path.glob("det_state_dict_rank*.pth")):
        with errors.collecting():
            _check_rank_state(file)
    counted = saved["progress"].get("engines")
    for index, engine in enumerate(engines):
        with errors.collecting():
            counts = counted[index] if isinstance(counted, list) and len(counted) > index else {}
            _check_engine_files(path / f"model{index}", engine, counts)
    errors.raise_any()


@contextlib.contextmanager
def loading(name: str, distributed: core.DistributedContext) -> Iterator[None]:
    """Ends what looks into a checkpoint or loads it with one line on every rank, if it fails on any.

    Args:
        name: of the checkpoint, for the line.
        distributed: the ranks.

    Raises:
        UnusableCheckpoint: with the lines of ``InvalidInput``, or one for what no check has found.
    """
    failed: Exception | None = None
    lines: list[str] = []
    try:
        yield
    except InvalidInput as error:
        failed, lines = error, error.errors
    except Exception as error:  # DeepSpeed, torch and the trial's callbacks raise each their own
        if is_out_of_memory(error):
            raise
        failed, lines = error, [f"--resume: {name}: cannot be loaded ({one_line(error)}); {MEND}"]
    for each in distributed.allgather(lines):
        if each:
            raise UnusableCheckpoint(each) from failed


def check_loaded(engines: Sequence[DeepSpeedEngine]) -> None:
    """Whether optimizers have got states that go with their weights, which DeepSpeed does not ask.

    Raises:
        ValueError: if not.
    """
    for engine in engines:
        optimizer = engine.basic_optimizer
        if optimizer is None:
            continue
        for group in optimizer.param_groups:
            is_whole = group.get(
                USES_MUON, False
            )  # its momentum is of whole matrices, not of ZeRO's partition
            held = {each: optimizer.state[each] for each in group["params"] if each in optimizer.state}
            if len({frozenset(state) for state in held.values()}) > 1:
                raise ValueError("the optimizer's states of its weights are not alike")
            for weight, state in held.items():
                _check_moments(
                    weight,
                    {key: each for key, each in state.items() if key != MOMENTUM} if is_whole else state,
                )
        steps = engine.global_steps - engine.skipped_steps
        if "betas" in optimizer.defaults and steps > 0 and not optimizer.state:
            raise ValueError("the optimizer's moments are missing")


def _check_moments(weight: Tensor, state: Mapping[str, Any]) -> None:
    for key in MOMENTS & state.keys():
        shape = tuple(getattr(state[key], "shape", ()))
        if shape != weight.shape and weight.numel() and state[key] is not None:
            raise ValueError(f"the optimizer's {key} of a weight {tuple(weight.shape)} is {shape}")
    if torch.as_tensor(state.get("step", 0)).numel() != 1:
        raise ValueError("the optimizer's step is no number")


def _check_steps(path: pathlib.Path, progress: Progress, steps: int, trial_id: int) -> None:
    """Compares the steps in Determined's state with all else that says how many there were."""
    state = safe_load.read_trial_state(path)
    file, done = path / "trial_state.pkl", state["batches_trained"]
    if (path / files.METADATA).exists():
        try:
            said = files.read_metadata(path)["steps_completed"]
        except (OSError, ValueError, RecursionError) as error:
            reason = f"cannot be read ({one_line(error)})"
            raise InvalidInput(f"{path / files.METADATA}: {reason}; {MEND}") from error
        if said != done:
            raise InvalidInput(_differ(path / files.METADATA, "steps_completed", said, file.name, done))
    for key, value in progress.get("trial_state.pkl", state).items():
        if state.get(key) != value:
            raise InvalidInput(_differ(file, key, state.get(key), FILE, value))
    if state["trial_id"] == trial_id and done != steps:
        raise InvalidInput(_differ(file, "batches_trained", done, "the run", steps))
    if state["trial_id"] != trial_id and steps:  # a cluster starts another trial's weights at step 0
        what = f"{file}: trial_id: {state['trial_id']}: is of a trial of a cluster"
        raise InvalidInput(
            f"{what}, whose place in the data this run cannot take; start a run with its weights"
        )


def _differ(file: pathlib.Path, key: str, value: Any, other: str, there: Any) -> str:
    return f"{file}: {key}: {value!r}: but {other} has {there!r}; {MEND}"


def _check_rank_state(file: pathlib.Path) -> None:
    """Whether a rank's file has the callbacks' states, and states that random number generators take."""
    state = safe_load.read(file)
    for key in ("callbacks", "rng_state"):
        if not isinstance(state, dict) or not isinstance(state.get(key), dict):
            raise InvalidInput(f"{file}: {key} is missing; {MEND}")
    rng = state["rng_state"]
    try:
        torch.Generator().set_state(rng["cpu_rng_state"])
        np.random.RandomState().set_state(rng["np_rng_state"])
        random.Random().setstate(rng["random_rng_state"])
    except Exception as error:  # each generator refuses in its own way
        raise InvalidInput(f"{file}: rng_state: is no state ({one_line(error)}); {MEND}") from error


def _check_engine_files(folder: pathlib.Path, engine: DeepSpeedEngine, counts: Mapping[str, Any]) -> None:
    """Whether DeepSpeed's files of an engine are all there, and hold its weights, states and counts."""
    held = {file.name: safe_load.read(file) for file in sorted(folder.glob("*.pt"))}
    nvme = getattr(engine, "zero_nvme_offload_optimizer", bool)()
    main = {name: found[1] for name in held if (found := _MAIN.fullmatch(name))}
    if not main:
        raise InvalidInput(f"{folder}: {'holds no weights' if folder.is_dir() else 'is missing'}; {MEND}")
    for name, value in held.items():
        if not isinstance(value, dict):
            raise InvalidInput(f"{folder / name}: is a {type(value).__name__}, no mapping; {MEND}")
        if name.endswith("_optim_states.pt") and not _has_optimizer(value):
            raise InvalidInput(f"{folder / name}: holds no optimizer; {MEND}")
    for name, place in main.items():
        value = held[name]
        for key in (*COUNTS, "dp_world_size", "mp_world_size"):
            if type(value.get(key)) is not int or value[key] < 0:
                what = f"{key}: {value.get(key)!r}: must be a whole number"
                raise InvalidInput(f"{folder / name}: {what}; {MEND}")
        held_counts = {**(value.get("lr_scheduler") or {}), **value}
        for key, count in counts.items():
            if held_counts.get(key) != count:
                raise InvalidInput(_differ(folder / name, key, held_counts.get(key), FILE, count))
        if wrong := _other_weights(value, engine):
            raise InvalidInput(f"{folder / name}: {wrong}; {MEND}, or with the network that made it")
        if engine.optimizer is None or _has_optimizer(value):
            continue
        if not any(each.startswith("expp_rank_") for each in held):  # without ZeRO a rank of experts has one
            _check_partitions(folder, held, place, value, nvme, engine.optimizer_name() == MUON)


def _check_partitions(
    folder: pathlib.Path,
    held: Mapping[str, Any],
    place: str,
    main: Mapping[str, Any],
    nvme: bool,
    is_muon: bool,
) -> None:
    """Whether ZeRO's partitions are all there, alike, and large enough for all weights.

    A rank that cannot load its own while the others can would leave them waiting for it.
    """
    states = []
    for rank in range(main["dp_world_size"]):
        name = f"zero_pp_rank_{rank}_{place}_optim_states.pt"
        found = held.get(name, held.get(f"bf16_{name}"))
        if found is None:
            raise InvalidInput(f"{folder / name}: is missing; {MEND}")
        states.append(found["optimizer_state_dict"])
        forms = [_form(state, is_muon) for state in (states[rank], states[0])]
        if forms[0] != forms[1] or not _are_of_one_size(states[rank], states[0]):
            raise InvalidInput(f"{folder / name}: is not partitioned as rank 0's; {MEND}")
        weights = f"zero_pp_rank_{rank}_{place}_model_states.pt"  # where ZeRO 3 partitions them, too
        own, first = held.get(weights), held.get(f"zero_pp_rank_0_{place}_model_states.pt")
        if first is not None and (own is None or _form(own.get("module")) != _form(first.get("module"))):
            raise InvalidInput(f"{folder / weights}: is missing, or not like rank 0's; {MEND}")
    shapes = [shape for group in main.get("param_shapes") or [] for shape in group.values()]
    least = sum(math.prod(shape) for shape in shapes)
    if not nvme and len(states) * sum(padded for _, padded in _sizes(states[0])) < least:
        raise InvalidInput(f"{folder}: its partitions hold less than the network's {least:,} weights; {MEND}")


def _sizes(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Weights of a rank's partition in each parameter group, without and with DeepSpeed's padding."""
    flat = state.get(PARTITION, state.get("fp32_flat_groups", []))
    padding = state.get("group_paddings", [0] * len(flat))
    return [(each.numel(), each.numel() + pad) for each, pad in zip(flat, padding, strict=True)]


def _are_of_one_size(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    sizes, others = (
        _sizes(one),
        _sizes(other),
    )  # bf16's file has the padding among the weights, ZeRO's has not
    return len(sizes) == len(others) and all(set(a) & set(b) for a, b in zip(sizes, others, strict=True))


def _form(value: Any, is_muon: bool = False) -> Any:
    """Keys, shapes and types of all that must be alike in the ranks' partitions."""
    if isinstance(value, dict):
        # Of other sizes and weights on each rank; Muon's momentum is of all matrices that begin or end there
        own = {PARTITION, "param_slice_mappings", *([MOMENTUM] if is_muon else [])}
        return {key: _form(each, is_muon) for key, each in value.items() if key not in own}
    if isinstance(value, (list, tuple)):
        return [_form(each, is_muon) for each in value]
    return tuple(value.shape) if isinstance(value, Tensor) else type(value)


def _has_optimizer(value: Mapping[str, Any]) -> bool:
    return any(isinstance(value.get(key), dict) for key in ("optimizer", "optimizer_state_dict"))


def _other_weights(value: Mapping[str, Any], engine: DeepSpeedEngine) -> str | None:
    """Which weights do not go with an engine's network, where one file names all of them."""
    if isinstance(engine.module, PipelineModule) or engine.has_moe_layers:
        return None
    found, wanted = value.get("module"), engine.module.state_dict()
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        return "holds no weights"
    # Of ZeRO 3 the file holds shapes, not of weights that are used twice
    groups = [*(value.get("param_shapes") or []), value.get("frozen_param_shapes") or {}]
    named = engine.module.named_parameters(remove_duplicate=False)
    whole = {name: each.ds_shape for name, each in named if hasattr(each, "ds_shape")}
    shapes = {name: shape for group in groups for name, shape in group.items() if name in whole}
    skipped = (whole.keys() & found.keys()) - shapes.keys()
    found = {**found, **{name: torch.empty(shape, device="meta") for name, shape in shapes.items()}}
    wanted = {**wanted, **{name: torch.empty(shape, device="meta") for name, shape in whole.items()}}
    for name in skipped:
        del found[name], wanted[name]
    return mismatch(found, wanted)
