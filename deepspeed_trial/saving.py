"""Writing, checking and loading a trial's checkpoints; all files are checked before any is loaded."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import pickle
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import determined as det
import torch
from determined import pytorch
from determined.pytorch.deepspeed import DeepSpeedTrial

from deepspeed_trial import engines, redaction
from deepspeed_trial.checkpoints import contents, identity, pieces, safe_load, shards, state
from deepspeed_trial.checkpoints.identity import Identity
from deepspeed_trial.checkpoints.safe_load import State
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.events import Callback, TrialHooks
from deepspeed_trial.full_weights import update_network
from deepspeed_trial.input_files import parsed
from deepspeed_trial.place import GATHER
from deepspeed_trial.random_state import random_state, set_random_state
from deepspeed_trial.time_budget import TimeBudget

ENGINES = "engines"  # key of a rank's file
GPU_STATES = {"cuda": "gpu_rng_state", "mps": "mps_rng_state"}  # keys of the generator's state, by device
BUDGET = "budget"  # key of a checkpoint's progress: the plan, and the time used

logger = logging.getLogger("deepspeed_trial")


class Saving:
    """Writes a trial's checkpoints and reads them.

    Args:
        trial: a ``DeepSpeedTrial``.
        context: the trial's context.
        callbacks: the callbacks; their states are saved.
    """

    def __init__(self, trial: Any, context: Any, callbacks: Mapping[str, pytorch.PyTorchCallback]) -> None:
        self.trial, self.context, self.callbacks, self.services = trial, context, callbacks, context.services
        self.engines: list[Any] = context.models
        hooks = [callback for callback in callbacks.values() if isinstance(callback, TrialHooks)]
        if len(hooks) > 1:
            raise InvalidInput(f"build_callbacks: returned {len(hooks)} TrialHooks; return one")
        self.hooks = hooks[0] if hooks else TrialHooks()

    def identity(self) -> Identity:
        """Return the settings that a run must share with this one to exchange checkpoints."""
        return identity.identity_of(self.engines, self.context.experiment.seed, self.hooks.identity())

    # --------------------------------------------------------------------------------------------- write

    def write(self, path: pathlib.Path, progress: State, budget: TimeBudget | None) -> None:
        """Write a checkpoint into a folder. Every rank calls it."""
        path.mkdir(parents=True, exist_ok=True)
        is_chief, rank = self.context.distributed.rank == 0, self.context.distributed.rank
        if is_chief:
            self.services.copy_code(self.hooks.code(), path)
            (path / "trial_state.pkl").write_bytes(pickle.dumps(asdict(progress)))
            self._write_load_data(path)
        of_rank = {
            "callbacks": {name: callback.state_dict() for name, callback in self.callbacks.items()},
            "rng_state": _random_numbers(self.context),
            ENGINES: [state.numbers(engine) for engine in self.engines],
        }
        for callback in self.callbacks.values():
            callback.on_checkpoint_save_start(of_rank)
        torch.save(of_rank, path / f"det_state_dict_rank{rank}.pth")
        trial = type(self.trial)
        is_default = trial.save is DeepSpeedTrial.save and trial.load is DeepSpeedTrial.load
        are_known = all(pieces.are_known(engine) for engine in self.engines)
        if is_default and all(self.context.distributed.allgather(are_known)):
            self.context.place.enter(GATHER)
            for index, engine in enumerate(self.engines):
                folder = shards.folder_of(path, index)
                state.save(engine, folder, self.hooks.layer_names(), self.hooks.averages())
        else:
            self.trial.save(self.context, path)
        for callback in self.callbacks.values():
            callback.on_checkpoint_end(str(path))
            callback.on_checkpoint_write_end(str(path))
        if is_chief:
            identity.write(path, self.identity(), {BUDGET: budget.state_dict()} if budget else {})

    def _write_load_data(self, path: pathlib.Path) -> None:
        """Write the file that ``determined.pytorch.load_trial_from_checkpoint_path`` reads."""
        experiment = self.context.experiment
        load_data = {
            "trial_type": "DeepSpeedTrial",
            "experiment_config": redaction.experiment(dict(experiment.config)),
            "hparams": redaction.values(dict(self.context.get_hparams())),
        }
        (path / "load_data.json").write_text(json.dumps(load_data))

    # ---------------------------------------------------------------------------------------------- read

    def check(self, path: pathlib.Path, name: str, steps: int) -> None:
        """Check a checkpoint: its files on one rank of each host, its weights on every rank.

        Args:
            path: the checkpoint's folder.
            name: its name in error lines.
            steps: optimizer steps that the trial has done, from the metadata or the master.

        Raises:
            UnusableCheckpoint: on every rank, with the lines of the first rank that found errors.
        """
        with contents.loading(name, self.context.distributed):
            if self.context.distributed.local_rank == 0:
                saved = identity.read(path, name)
                if type(self.trial).save is DeepSpeedTrial.save:
                    identity.check_engines(path, name, len(self.engines))
                identity.check(path, name, self.identity(), self.services.trial_id)
                contents.check(path, saved, steps, self.services.trial_id)
            if shards.are_in(path):
                for index, engine in enumerate(self.engines):
                    state.check(engine, shards.folder_of(path, index), self.hooks.layer_names())

    def load_budget(self, path: pathlib.Path, name: str, steps: int, budget: TimeBudget) -> None:
        """Restore the plan of a training whose length is in minutes.

        Call it before ``load``: the schedules follow the plan.

        Raises:
            InvalidInput: if the checkpoint has no plan for minutes, or a damaged one.
        """
        file, plan = path / identity.FILE, identity.read(path, name)["progress"].get(BUDGET)
        if plan is None:
            what = f"its training had no length in minutes ({steps:,} steps are done)"
            remedy = "set max_length to epochs or batches, or start a new run"
            raise InvalidInput(f"--resume: {name}: {what}; {remedy}")
        with parsed(f"{file}: progress.{BUDGET}: is damaged", shards.REMEDY):
            budget.load_state_dict(plan, steps)

    def load(self, path: pathlib.Path, name: str) -> State:
        """Load a checkpoint that ``check`` accepted. Every rank calls it.

        Returns:
            The trial's progress; from another trial's checkpoint only the weights are loaded.
        """
        rank = self.context.distributed.rank
        with contents.loading(name, self.context.distributed), contextlib.ExitStack() as around:
            for engine in self.engines:
                around.enter_context(engines.keep_configured_hyperparameters(engine))
            around.enter_context(safe_load.allowed_globals())
            ranks = identity.read(path, name)["mode"][identity.PROCESSES]
            file = path / f"det_state_dict_rank{rank % ranks}.pth"  # more ranks than before share the files
            of_rank = torch.load(file, map_location="cpu", weights_only=True)
            for callback in self.callbacks.values():
                callback.on_checkpoint_load_start(of_rank)
            self._load_engines(path, name, of_rank)
            _set_random_numbers(of_rank["rng_state"], self.context)
            self._load_callbacks(of_rank["callbacks"])
            for callback in self.callbacks.values():
                if isinstance(callback, Callback):
                    callback.on_checkpoint_load_end(path)
        progress = safe_load.read_trial_state(path)
        return progress if progress.trial_id == self.services.trial_id else State(self.services.trial_id)

    def _load_engines(self, path: pathlib.Path, name: str, of_rank: Mapping[str, Any]) -> None:
        if not shards.are_in(path):
            self.trial.load(self.context, path)
            return
        # Any rank's error ends all ranks here, before they update each other's networks
        with contents.loading(name, self.context.distributed):
            for index, engine in enumerate(self.engines):
                folder = shards.folder_of(path, index)
                state.read(engine, folder, self.hooks.layer_names(), self.hooks.averages())
                state.load_numbers(engine, of_rank[ENGINES][index])
        for engine in self.engines:
            update_network(engine)

    def _load_callbacks(self, states: Mapping[str, Any]) -> None:
        for name, callback in self.callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])
            elif det.util.is_overridden(callback.load_state_dict, pytorch.PyTorchCallback):
                logger.warning(
                    f"callback {name!r}: the checkpoint lacks its state, so the callback starts from scratch"
                )


def _random_numbers(context: Any) -> dict[str, Any]:
    """Return the states of the random number generators under Determined's names."""
    python, numpy, cpu, gpu = random_state(context.device)
    states = {"cpu_rng_state": cpu, "np_rng_state": numpy, "random_rng_state": python}
    return states if gpu is None else {**states, GPU_STATES[context.device.type]: gpu}


def _set_random_numbers(states: Mapping[str, Any], context: Any) -> None:
    here = context.device.type
    there = next((device for device, name in GPU_STATES.items() if name in states), "cpu")
    gpu = states[GPU_STATES[here]] if here == there != "cpu" else None
    python, numpy, cpu = (states[f"{name}_rng_state"] for name in ("random", "np", "cpu"))
    set_random_state((python, numpy, cpu, gpu), context.device)
    if here != there:
        logger.warning(
            f"the checkpoint was made on {there}, this run is on {here}: random numbers will differ"
        )
