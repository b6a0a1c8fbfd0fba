"""What Determined's local test mode expects of a trial class and, since its ``Trainer``, no longer finds in one.

    det experiment create const.yaml . --local --test --config entrypoint=model_def:CIFARTrial

The same with today's means is ``python3 train.py --test``.
"""

from __future__ import annotations

import pathlib
from typing import Any

import processes

import determined as det
import torch
from determined import core

import experiment
import harness
from local_checkpoints import LocalCheckpoints


def test_context(core_context: core.Context, env: det.EnvContext) -> harness.TrialContext:
    """The trial's context, on the CPU where there is no GPU; its checkpoint goes where ``det`` will remove it."""
    storage = pathlib.Path(env.experiment_config["checkpoint_storage"]["host_path"])
    core_context.preempt.start()
    core_context.train = core.DummyTrainContext(storage / "tensorboard")  # det's own names no folder for it
    core_context.checkpoint = LocalCheckpoints(storage, core_context.distributed, 1, 1, lambda step: None)
    return harness.TrialContext(
        core_context=core_context,
        trial_seed=env.trial_seed,
        hparams=env.hparams,
        slots_per_trial=1,
        num_gpus=min(1, torch.cuda.device_count()),
        exp_conf=dict(env.experiment_config),
        steps_completed=0,
        enable_tensorboard_logging=False,
    )


class TestController:
    """Trains, validates and saves one batch."""

    def __init__(self, trial: Any, context: harness.TrialContext, env: det.EnvContext) -> None:
        self.trial, self.context = trial, context
        self.experiment = experiment.check({**env.experiment_config, "hyperparameters": env.hparams})

    @staticmethod
    def pre_execute_hook(env: det.EnvContext, distributed_backend: Any) -> None:
        """Starts the one process's group and seeds it."""
        processes.start_torch_distributed()
        processes.seed_everything(env.trial_seed)

    @classmethod
    def from_trial(cls, trial_inst: Any, context: Any, env: det.EnvContext, workloads: Any) -> TestController:
        """Makes the controller; the workloads are those of a loop that Determined no longer has."""
        return cls(trial_inst, context, env)

    def run(self) -> None:
        """Runs the test in the trainer that trains for real."""
        harness.fit(self.trial, self.context, self.experiment, test_mode=True)
