"""The methods that Determined's local test mode calls on a trial class; Determined 0.38 removed them.

    det experiment create const.yaml . --local --test --config entrypoint=model_def:CIFARTrial

``python3 train.py --test`` does the same without Determined's test mode.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import determined as det
from determined import core, pytorch

from deepspeed_trial import processes
from deepspeed_trial.checkpoints.store import LocalCheckpoints
from deepspeed_trial.context import TrialContext, make_context
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.random_state import seed_everything
from deepspeed_trial.services import LocalServices
from deepspeed_trial.trainer import Trainer


def make_test_context(core_context: core.Context, env: det.EnvContext) -> TrialContext:
    """Make the trial's context; its checkpoint goes into a folder that ``det`` removes."""
    storage = pathlib.Path(env.experiment_config["checkpoint_storage"]["host_path"])
    core_context.preempt.start()
    core_context.train = core.DummyTrainContext(storage / "tensorboard")  # det's context has no folder
    core_context.checkpoint = LocalCheckpoints(storage, core_context.distributed, 1, 1, lambda step: None)
    experiment = Experiment(env.experiment_config, env.hparams)
    return make_context(LocalServices(core_context, experiment), env.trial_seed)


class _TestController:
    """Train, validate and save one batch; ``det`` calls these methods."""

    def __init__(self, trial: Any, context: TrialContext) -> None:
        self.trial, self.context = trial, context

    @staticmethod
    def pre_execute_hook(env: det.EnvContext, distributed_backend: Any) -> None:
        """Start a process group of one process, and seed the random generators."""
        processes.start_process_group()
        seed_everything(env.trial_seed)

    @classmethod
    def from_trial(
        cls, trial_inst: Any, context: Any, env: det.EnvContext, workloads: Any
    ) -> _TestController:
        """Return the controller. Determined still passes ``workloads``, but no longer uses them."""
        return cls(trial_inst, context)

    def run(self) -> None:
        """Run the test in this package's trainer."""
        experiment = self.context.experiment
        self.trial.check_experiment({**experiment.config, "hyperparameters": experiment.hyperparameters})
        Trainer(self.trial, self.context).fit(max_length=pytorch.Batch(1), test_mode=True)


class LocalTestMode:
    """A base class that lets ``det experiment create ... --local --test`` run a ``DeepSpeedTrial``."""

    trial_context_class: Any = staticmethod(make_test_context)
    trial_controller_class: Any = _TestController

    @staticmethod
    def check_experiment(config: Mapping[str, Any]) -> Any:
        """Raise ``InvalidInput`` if the experiment configuration is invalid; this default accepts all."""
