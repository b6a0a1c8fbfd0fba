"""What a checkpoint is of, whether a trial can go on from it, and how when its processes or ZeRO stage have changed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import pickle
import tempfile
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from errors import InvalidInput, one_line, unloadable
from hyperparameters import is_moe

IDENTITY = "identity.json"
TAG = "model0"  # the folder in which Determined has DeepSpeed save a trial's only engine


def _stage(enum: Any, name: str) -> ZeroStageEnum:
    """Stands for ``getattr``, by which some releases of Python 3.11 pickle the member of an enumeration."""
    if enum is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"getattr of {enum} is not allowed in a checkpoint")
    return ZeroStageEnum[name]


_stage.__module__, _stage.__name__, _stage.__qualname__ = "builtins", "getattr", "getattr"
# All that the pickles of a checkpoint may hold beside tensors and plain values: numpy's RNG state, and DeepSpeed's own.
_RECONSTRUCT: Any = np.zeros(0, dtype=np.uint32).__reduce__()[0]
ALLOWED = [_RECONSTRUCT, np.ndarray, np.dtype, type(np.dtype(np.uint32)),
           LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, _stage]  # fmt: skip


def identity(trial: Any) -> dict[str, Any]:
    """What must be the same, by the keys of the experiment file, for a trial to go on from another's checkpoint.

    Args:
        trial: a ``CIFARTrial``.
    """
    engine, hparams = trial.model_engine, trial.context.get_hparams()
    net = {
        "hyperparameters.net": "net" if is_moe(hparams) else hparams.get("net", "net"),
        "hyperparameters.net_args": dict(hparams.get("net_args") or {}),
        "hyperparameters.moe": is_moe(hparams),
        "hyperparameters.num_experts": list(hparams.get("num_experts", ())),
        "hyperparameters.mlp_type": hparams.get("mlp_type", "standard"),
        "hyperparameters.ep_world_size": hparams.get("ep_world_size", 1),
        "hyperparameters.pipe_parallel_size": hparams.get("pipe_parallel_size", 1),
        "hyperparameters.partition_method": hparams.get("partition_method", "parameters"),
        "data: classes": list(trial.train_set.classes),
        "data.image_size": list(trial.image_size),
    }
    mode = {
        "precision": str(trial.dtype).removeprefix("torch."),
        "optimizer.type": engine.optimizer_name() or "",
        "zero_optimization.stage": int(engine.zero_optimization_stage()),
        "processes": torch.distributed.get_world_size(),
    }
    position = {
        "train_batch_size": engine.train_batch_size(),
        "reproducibility.experiment_seed": trial.seed,
        "data: training images": len(trial.train_set),
        "data.augment": json.loads(json.dumps(vars(trial.data_config.augment))),
        "data.resize": list(trial.canvas),
        "data.normalize": [list(trial.mean), list(trial.std)],
        **{f"hyperparameters.{key}": hparams.get(key) or 0 for key in ("label_smoothing", "mixup", "cutmix")},
    }
    return {"net": net, "mode": mode, "position": position, "states": _kept_states(engine.basic_optimizer)}


def _kept_states(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """The switches without which an optimizer does not keep a state that it needs with them."""
    switches = {"amsgrad", "centered", *(["momentum"] if isinstance(optimizer, torch.optim.RMSprop) else [])}
    present = sorted(switches & optimizer.defaults.keys())
    return {f"optimizer.params.{key}": bool(optimizer.defaults[key]) for key in present}


def save_identity(trial: Any, path: pathlib.Path) -> None:
    """Writes it beside the engine's files."""
    (path / IDENTITY).write_text(json.dumps(identity(trial), indent=2))


def check(trial: Any, path: pathlib.Path, name: str, trial_id: int) -> None:
    """Looks into a checkpoint before anything of it is loaded.

    Args:
        trial: the ``CIFARTrial`` that is to go on from it.
        path: the checkpoint's folder.
        name: what to call it in an error line.
        trial_id: of this trial; one that starts from another's checkpoint takes its weights, not its position.

    Raises:
        InvalidInput: if a file is missing or damaged, if a pickle holds anything but what a checkpoint has to hold, or
            if the checkpoint is of another net, mode or place in the data.
    """
    saved = read_identity(path, name)
    state = _trial_state(path, name)
    for file in sorted([*path.glob("*.pth"), *path.glob(f"{TAG}/*.pt")]):
        _check_pickle(file)
    for rank in range(saved["mode"]["processes"]):
        if not (path / f"det_state_dict_rank{rank}.pth").exists():
            raise InvalidInput(f"{path / f'det_state_dict_rank{rank}.pth'}: is missing; go on from another checkpoint")
    mine = identity(trial)
    groups = ["net", "mode", "position"] if state.get("trial_id") == trial_id else ["net", "mode"]
    elastic = form_change(saved, mine) is None
    faults = []
    for group in groups:
        for key, value in mine[group].items():
            was = saved[group].get(key)
            if value != was and not (elastic and key in ("zero_optimization.stage", "processes")):
                faults.append(f"{key}: {value!r}: checkpoint {name} was made with {was!r}; use that, or start anew")
    for key, needed in mine["states"].items():
        if needed and saved["states"].get(key) is False:
            faults.append(f"{key}: True: checkpoint {name} holds no state for it; set it to false, or start anew")
    if faults:
        reason = form_change(saved, mine)
        raise InvalidInput(faults if not reason else [*faults, f"--resume: {name}: {reason}"])


def form_change(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> str | None:
    """Why DeepSpeed cannot turn a checkpoint into one for other processes or another ZeRO stage; None if it can.

    Source: https://www.deepspeed.ai/tutorials/universal-checkpointing/
    """
    was, now = (each["mode"]["zero_optimization.stage"] for each in (saved, mine))
    processes = saved["mode"]["processes"] == mine["mode"]["processes"]
    if was == now and processes:
        return None
    if saved["net"]["hyperparameters.moe"] or saved["net"]["hyperparameters.pipe_parallel_size"] > 1:
        return "DeepSpeed cannot spread the experts or stages of a checkpoint over other processes or ZeRO stages"
    if was == now or {was, now} == {1, 2}:
        return None
    return f"DeepSpeed cannot turn a checkpoint of ZeRO stage {was} into one of stage {now}"


def read_identity(path: pathlib.Path, name: str) -> dict[str, Any]:
    """What ``save_identity`` wrote."""
    try:
        saved = json.loads((path / IDENTITY).read_text())
        groups = {group: dict(saved[group]) for group in ("net", "mode", "position")}
        return {**groups, "states": dict(saved.get("states") or {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path / IDENTITY}: cannot be read ({one_line(error)}); {name} is damaged or not of this package"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values and refuses everything that would have to be looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def _trial_state(path: pathlib.Path, name: str) -> dict[str, Any]:
    file = path / "trial_state.pkl"
    try:
        state = _PlainUnpickler(io.BytesIO(file.read_bytes())).load()
        return dict(state)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise InvalidInput(f"{file}: cannot be read ({one_line(error)}); go on from another checkpoint") from error


def _check_pickle(file: pathlib.Path) -> None:
    """Reads a torch file's structure, but not its tensors, allowing nothing that runs code."""
    try:
        with allowed():
            torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise each their own
        reason = unloadable(error)
        raise InvalidInput(f"{file}: cannot be loaded safely ({reason}); go on from another checkpoint") from error


def allowed() -> contextlib.AbstractContextManager[Any]:
    """Lets ``torch.load`` read what a checkpoint has to hold, and nothing else that it would refuse."""
    if not hasattr(torch.serialization, "safe_globals"):  # before torch 2.5, whose torch.load checks nothing
        return contextlib.nullcontext()
    return torch.serialization.safe_globals(ALLOWED)


@contextlib.contextmanager
def keeping_settings(engine: Any) -> Iterator[None]:
    """Lets what loads a checkpoint into an engine leave the engine's settings as the experiment file has them.

    DeepSpeed takes the optimizer's parameters and the limit of its gradients from the checkpoint, so that a learning
    rate could never be changed, and fails where the checkpoint has no schedule. What a schedule moves is put where that
    one has it after as many steps.

    Args:
        engine: DeepSpeed's.
    """
    optimizer, schedule = engine.basic_optimizer, engine.lr_scheduler
    limit = getattr(engine.optimizer, "clip_grad", None)
    groups = [{key: group[key] for key in optimizer.defaults} for group in optimizer.param_groups]
    if schedule:
        load, schedule.last_batch_iteration = schedule.load_state_dict, None
        schedule.load_state_dict = lambda state: load(state) if state else None
    try:
        yield
    finally:
        if schedule:
            del schedule.load_state_dict  # the class's again
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)
    if limit is not None:
        engine.optimizer.clip_grad = limit
    if schedule:
        done = schedule.last_batch_iteration
        done = engine.global_steps - engine.skipped_steps - 1 if done is None else done
        if done >= 0:
            schedule.step(done)


@contextlib.contextmanager
def fitting(trial: Any, path: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
    """Gives the checkpoint in a form that this trial's engine can load: as it is, or converted.

    Args:
        trial: the ``CIFARTrial`` that is to go on from it.
        path: the folder of a checkpoint that ``check`` has passed.
        name: what to call it.
    """
    saved, mine = read_identity(path, name), identity(trial)
    if saved["mode"] == mine["mode"]:
        yield path
        return
    distributed, engine = trial.context.distributed, trial.model_engine
    processes = saved["mode"]["processes"]
    with contextlib.ExitStack() as stack:
        folder, fault = None, None
        if distributed.local_rank == 0:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="universal-checkpoint-")))
            os.symlink(path / "trial_state.pkl", folder / "trial_state.pkl")
            for rank in range(mine["mode"]["processes"]):  # each new rank takes an old one's random numbers
                file = f"det_state_dict_rank{rank}.pth"
                os.symlink(path / f"det_state_dict_rank{rank % processes}.pth", folder / file)
            if saved["mode"]["zero_optimization.stage"] == 0:  # every process holds all of it
                os.symlink(path / TAG, folder / TAG)
            else:
                fault = _convert(path / TAG, folder / TAG)
        folder, fault = distributed.broadcast_local((folder, fault))
        if fault:
            raise InvalidInput(f"--resume: {name}: DeepSpeed cannot convert it ({fault}); use {processes} processes")
        engine._config.load_universal_checkpoint = saved["mode"]["zero_optimization.stage"] > 0
        try:
            yield folder
        finally:
            engine._config.load_universal_checkpoint = False
            distributed.gather_local(None)  # before the folder goes


def _convert(source: pathlib.Path, target: pathlib.Path) -> str | None:
    """Makes a universal checkpoint; gives the reason where DeepSpeed cannot."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = types.SimpleNamespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal.main(arguments)
    except Exception as error:  # DeepSpeed's converter is a script with no errors of its own
        return one_line(error)
    return None
