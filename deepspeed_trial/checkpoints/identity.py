"""The settings that a checkpoint records, and the check whether a trial can resume from it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from deepspeed_trial import redaction
from deepspeed_trial.checkpoints import shards
from deepspeed_trial.checkpoints.safe_load import read_trial_state
from deepspeed_trial.engines import engine_dtype
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import regular_file

FILE = "identity.json"
GROUPS = ("net", "mode", "position")
IMPORTED = "imported"  # key of the progress, if Determined's own trainer saved the checkpoint
STAGE, PROCESSES = "zero_optimization.stage", "processes"
Identity = Mapping[str, Mapping[str, Any]]
Progress = Mapping[str, Any]


def identity_of(engines: Sequence[DeepSpeedEngine], seed: int, more: Identity) -> Identity:
    """Return the settings to compare when a trial resumes from a checkpoint.

    Args:
        engines: the trial's engines; the keys of a second engine begin with ``model1: ``.
        seed: ``experiment_seed``.
        more: settings from ``TrialHooks.identity``, in the groups ``net``, ``mode`` and ``position``.

    Returns:
        JSON values by key, in four groups. ``net``: a difference makes the weights useless. ``mode``: only
        precision and optimizer must be equal. ``position``: a difference loses the place in the data.
        ``states``: whether the optimizer keeps each optional state.
    """
    mode: dict[str, Any] = {PROCESSES: torch.distributed.get_world_size()}
    position: dict[str, Any] = {"reproducibility.experiment_seed": seed}
    states: dict[str, Any] = {}
    for number, engine in enumerate(engines):
        prefix = f"model{number}: " if number else ""
        mode[f"{prefix}precision"] = str(engine_dtype(engine)).removeprefix("torch.")
        mode[f"{prefix}optimizer.type"] = engine.optimizer_name() or ""
        mode[f"{prefix}{STAGE}"] = int(engine.zero_optimization_stage())
        position[f"{prefix}train_batch_size"] = engine.train_batch_size()
        kept = _kept_states(engine.basic_optimizer)
        states.update({f"{prefix}{key}": value for key, value in kept.items()})
    groups: dict[str, dict[str, Any]] = {"net": {}, "mode": mode, "position": position, "states": states}
    for group in GROUPS:
        groups[group].update(more.get(group, {}))
    return redaction.values(groups)


def _kept_states(optimizer: torch.optim.Optimizer | None) -> dict[str, bool]:
    """Return, by the key of each optional state's setting, whether the optimizer keeps that state."""
    if optimizer is None:
        return {}
    settings = {"amsgrad", "centered"}
    if isinstance(optimizer, torch.optim.RMSprop):
        settings.add("momentum")
    present = sorted(settings & optimizer.defaults.keys())
    return {f"optimizer.params.{key}": bool(optimizer.defaults[key]) for key in present}


def write(path: pathlib.Path, identity: Identity, progress: Progress) -> None:
    """Write an identity and the progress of the training into a checkpoint."""
    (path / FILE).write_text(json.dumps({**identity, "progress": progress}, indent=2))


def read(path: pathlib.Path, name: str) -> Identity:
    """Read an identity that ``write`` has written.

    Args:
        path: the checkpoint's folder.
        name: the checkpoint's name in error lines.

    Raises:
        InvalidInput: if it is missing or damaged.
    """
    try:
        saved = json.loads(regular_file(path / FILE).read_text())
        groups = {group: saved[group] for group in GROUPS}
        groups.update({group: saved.get(group) or {} for group in ("states", "progress")})
        for group, values in groups.items():
            if not isinstance(values, dict):
                raise ValueError(f"{group}: {values!r}")
        for key, least in (PROCESSES, 1), (STAGE, 0):
            value = groups["mode"].get(key)
            if type(value) is not int or value < least:
                raise ValueError(f"{key}: {value!r}")
        return groups
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"cannot be read ({one_line(error)}): {name} is damaged, or another program saved it"
        raise InvalidInput(f"{path / FILE}: {reason}; {shards.REMEDY}") from error


def _shown(value: Any, most: int = 500) -> str:
    """Format a value for an error line, and shorten it; None stands for a default."""
    text = "the default" if value is None else repr(value)
    return text if len(text) <= most else f"{text[:most]} ..."


def check_engines(path: pathlib.Path, name: str, engines: int) -> None:
    """Raise ``InvalidInput`` if the numbers of engines of a checkpoint and of the trial differ."""
    held = len(list(path.glob("model*/")))
    if held != engines:
        reason = f"Failed to load deepspeed checkpoint. It holds {held} engines, and the trial has {engines}"
        raise InvalidInput(
            f"--resume: {name}: {reason}; resume from another checkpoint, or with the trial that saved it"
        )


def check(path: pathlib.Path, name: str, mine: Identity, trial_id: int) -> None:
    """Compare a checkpoint with the trial that resumes from it.

    Args:
        path: the checkpoint's folder.
        name: the checkpoint's name in error lines.
        mine: the trial's identity.
        trial_id: the trial's number; a trial takes only the weights from another trial's checkpoint.

    Raises:
        InvalidInput: with a line for each key that differs.
    """
    saved = read(path, name)
    same_trial = read_trial_state(path).trial_id == trial_id
    known = {**saved["net"], **saved["mode"], **saved["position"]}
    is_other_mode = any(known.get(key) != value for key, value in mine["mode"].items())
    converts = shards.are_in(path)
    errors = []
    for group in GROUPS if same_trial else GROUPS[:2]:
        for key, value in mine[group].items():
            if key not in known and saved["progress"].get(IMPORTED):
                continue
            was = known.get(key)
            is_fixed = group != "mode" or key.endswith(("precision", "optimizer.type"))
            if value != was and (is_fixed or not converts):
                made_with = f"checkpoint {name} was made with {_shown(was)}"
                errors.append(f"{key}: {_shown(value)}: {made_with}; use that value, or start a new run")
    for key, needed in mine["states"].items():
        if needed and saved["states"].get(key) is False:
            errors.append(
                f"{key}: True: checkpoint {name} has no state for it; set it to false, or start a new run"
            )
    if errors:
        if is_other_mode and not converts:
            made = "an earlier version, an optimizer on NVMe or the trial's own save method wrote them"
            what = f"its files fit only the settings that saved them ({made})"
            errors.append(f"--resume: {name}: {what}; resume with those settings")
        raise InvalidInput(errors)
