"""What a checkpoint is of, and whether a trial can go on from it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from deepspeed_trial import redaction
from deepspeed_trial.checkpoints import by_name
from deepspeed_trial.checkpoints.safe_load import read_trial_state
from deepspeed_trial.engines import engine_dtype
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.patches.muon import MUON

FILE = "identity.json"
GROUPS = ("net", "mode", "position")
STAGE, PROCESSES = "zero_optimization.stage", "processes"
Identity = Mapping[str, Mapping[str, Any]]
Progress = Mapping[str, Any]


def identity_of(engines: Sequence[DeepSpeedEngine], seed: int, more: Iterable[Identity]) -> Identity:
    """What must be the same for a trial to go on from another's checkpoint, by the keys of its configuration.

    Args:
        engines: the trial's; the keys of all but the first have the engine's number before them.
        seed: of the experiment.
        more: what the trial's hooks add, in the groups ``net``, ``mode`` and ``position``.

    Returns:
        JSON values by key, in four groups: ``net`` and ``mode``, without which the engine's files are of no
        use, though the weights go on in another mode of the same precision and optimizer; ``position``,
        without which the place in the data is not; ``states`` that the optimizer keeps.
    """
    mode: dict[str, Any] = {PROCESSES: torch.distributed.get_world_size()}
    position: dict[str, Any] = {"reproducibility.experiment_seed": seed}
    net: dict[str, Any] = {}
    states: dict[str, bool] = {}
    for number, engine in enumerate(engines):
        prefix = f"model{number}: " if number else ""
        mode[f"{prefix}precision"] = str(engine_dtype(engine)).removeprefix("torch.")
        mode[f"{prefix}optimizer.type"] = engine.optimizer_name() or ""
        mode[f"{prefix}{STAGE}"] = int(engine.zero_optimization_stage())
        position[f"{prefix}train_batch_size"] = engine.train_batch_size()
        kept = _kept_states(engine.basic_optimizer)
        states.update({f"{prefix}{key}": value for key, value in kept.items()})
    for each in more:
        net.update(each.get("net", {}))
        mode.update(each.get("mode", {}))
        position.update(each.get("position", {}))
    return redaction.values({"net": net, "mode": mode, "position": position, "states": states})


def _kept_states(optimizer: torch.optim.Optimizer | None) -> dict[str, bool]:
    """Which of the settings are on with which an optimizer keeps a further state that it then needs."""
    if optimizer is None:
        return {}
    settings = {"amsgrad", "centered"}
    if isinstance(optimizer, torch.optim.RMSprop):
        settings.add("momentum")
    present = sorted(settings & optimizer.defaults.keys())
    return {f"optimizer.params.{key}": bool(optimizer.defaults[key]) for key in present}


def write(path: pathlib.Path, identity: Identity, progress: Progress) -> None:
    """Writes an identity, and how far the training is, beside the engine's files."""
    (path / FILE).write_text(json.dumps({**identity, "progress": progress}, indent=2))


def read(path: pathlib.Path, name: str) -> Identity:
    """What ``write`` wrote.

    Args:
        path: the checkpoint's folder.
        name: what to call it in an error line.

    Raises:
        InvalidInput: if it is missing or damaged.
    """
    try:
        saved = json.loads((path / FILE).read_text())
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
        reason = f"cannot be read ({one_line(error)}); {name} is damaged or not of this package"
        raise InvalidInput(f"{path / FILE}: {reason}") from error


def check_engines(path: pathlib.Path, name: str, engines: int) -> None:
    """Raises ``InvalidInput`` unless a checkpoint holds as many engines as the trial has."""
    held = len(list(path.glob("model*/")))
    if held != engines:
        reason = f"Failed to load deepspeed checkpoint. It holds {held} engines, and the trial has {engines}"
        raise InvalidInput(
            f"--resume: {name}: {reason}; go on from another checkpoint, or with the trial that saved it"
        )


def check(path: pathlib.Path, name: str, mine: Identity, trial_id: int) -> None:
    """Compares a checkpoint with the trial that is to go on from it.

    Args:
        path: the checkpoint's folder.
        name: what to call it in an error line.
        mine: the trial's identity.
        trial_id: of the trial; one that starts from another's checkpoint takes its weights, not its position.

    Raises:
        InvalidInput: with a line for each key that differs.
    """
    saved = read(path, name)
    same_trial = read_trial_state(path).get("trial_id") == trial_id
    obstacle = why_not_convertible(path, saved, mine)
    known = {**saved["net"], **saved["mode"], **saved["position"]}
    errors = []
    for group in GROUPS if same_trial else GROUPS[:2]:
        for key, value in mine[group].items():
            was = known.get(key)
            converts = obstacle is None and group == "mode" and not _is_fixed(key)
            if value != was and not converts:
                made_with = f"checkpoint {name} was made with {was!r}"
                errors.append(f"{key}: {value!r}: {made_with}; use that, or start anew")
    for key, needed in mine["states"].items():
        if needed and saved["states"].get(key) is False:
            errors.append(
                f"{key}: True: checkpoint {name} holds no state for it; set it to false, or start anew"
            )
    if errors:
        raise InvalidInput(errors if not obstacle else [*errors, f"--resume: {name}: {obstacle}"])


def is_same_form(saved: Identity, mine: Identity) -> bool:
    """Whether DeepSpeed's own files of a checkpoint go back into a trial's engines."""
    was = {**saved["net"], **saved["mode"]}  # where checkpoints of earlier versions have some
    return all(was.get(key) == value for key, value in mine["mode"].items())


def _is_fixed(key: str) -> bool:
    """Whether a key of the mode is of what the weights' states are, and not of where they lie."""
    return key.endswith(("precision", "optimizer.type"))


def why_not_convertible(path: pathlib.Path, saved: Identity, mine: Identity) -> str | None:
    """Why a checkpoint cannot go on in another mode; None if it can, or has the same."""
    if is_same_form(saved, mine):
        return None
    if mine["mode"][STAGE] and mine["mode"].get("optimizer.type") == MUON:
        return "Muon with ZeRO goes on with the same processes and ZeRO stage alone"
    if not (path / by_name.FOLDER).is_dir():
        made = "made by an earlier version, or with Muon and ZeRO, Adafactor, or an optimizer on NVMe"
        return f"it holds no states by the weights' names ({made})"
    return None
