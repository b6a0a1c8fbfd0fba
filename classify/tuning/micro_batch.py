"""``train_micro_batch_size_per_gpu: auto``: finds the fastest micro-batch that fits, by benchmarks."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from classify.config.hyperparameters import Hyperparameters
from classify.engine import deepspeed_config
from classify.engine.deepspeed_keys import MICRO_BATCH, TOTAL_BATCH
from classify.engine.memory import advise
from classify.engine.trial_config import TrialConfig
from classify.tuning.fastest import Tries, Try, changed
from deepspeed_trial import attempts, processes
from deepspeed_trial.context import TrialContext
from deepspeed_trial.errors import InvalidInput, TrainingStopped, printable
from deepspeed_trial.experiment import Experiment

FILE = "tried.json"  # in a run's folder: the tries and the choice, which a resumed run uses again


@dataclass(frozen=True)
class Choice:
    """A rank's choice of the micro-batch, made before the ranks join the process group.

    Attributes:
        config: the trial's configuration before the choice.
        micro_batch: the chosen micro-batch; 0 if none trains.
        tries: the tries; None if a resumed run uses its earlier choice.
        error: the reason why no micro-batch trains.
    """

    config: TrialConfig
    micro_batch: int
    tries: Tries | None = None
    error: InvalidInput | TrainingStopped | None = None

    def give(self, context: TrialContext) -> None:
        """Set the trial's micro-batch to the smallest choice of all ranks, and write the tries to a file.

        Raises:
            InvalidInput: if the trial refuses a configuration.
            TrainingStopped: if no micro-batch trains.
        """
        if self.error:
            raise self.error
        micro_batch = min(context.distributed.allgather(self.micro_batch))
        context.take_hyperparameters(changed(context.get_hparams(), {}, {MICRO_BATCH: micro_batch}))
        if self.tries and context.output and context.distributed.rank == 0:
            found = {
                **_of(self.config),
                MICRO_BATCH: micro_batch,
                "tries": [asdict(t) for t in self.tries.done],
            }
            (context.output / FILE).write_text(json.dumps(found, indent=2) + "\n")


def choose(
    trial_class: Callable[..., Any], experiment: Experiment, resumed: pathlib.Path | None
) -> Choice | None:
    """Try micro-batches if the configuration has ``auto``, and return the choice; else return None.

    Every rank calls it before the ranks join. The trial reports errors of the configuration later.

    Args:
        trial_class: the trial's class.
        experiment: the experiment.
        resumed: the folder of a run to resume.
    """
    threads, rank = processes.threads_of_each(1), int(os.environ.get("RANK") or 0)

    def attempt(changed: Experiment, needs: int) -> attempts.Attempt:
        return attempts.attempt(trial_class, changed, attempts.rank_of_all(), threads, needs)

    def tell(tried: Try) -> None:
        if rank == 0:
            print(printable(f"micro-batch {tried.micro_batch}: {tried.outcome}"), flush=True)

    with attempts.forking():
        try:
            form = Hyperparameters.parse_form(experiment.hyperparameters)
            if form is None or not deepspeed_config.asks_for_tries(form):
                return None
            count, device = int(os.environ.get("WORLD_SIZE") or 1), processes.device_type()
            config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, count, device)
        except InvalidInput:
            return None
        if resumed and (kept := _kept(resumed / FILE, config)):
            return Choice(config, kept)
        tries = Tries(config, experiment, attempt, tell)
        if best := tries.best_micro_batch({}):
            return Choice(config, best.micro_batch, tries)
        try:
            tries.fail(advise(config, None, 0))
        except (InvalidInput, TrainingStopped) as error:
            return Choice(config, 0, tries, error)


def _of(config: TrialConfig) -> dict[str, Any]:
    """Return the conditions under which a choice is valid."""
    return {"processes": config.processes, TOTAL_BATCH: config.batch}


def _kept(file: pathlib.Path, config: TrialConfig) -> int:
    """Return the choice of an earlier run with the same processes and batch; 0 without one."""
    try:
        found = json.loads(file.read_text())
        chosen = found[MICRO_BATCH] if isinstance(found, Mapping) else 0
        is_of = type(chosen) is int and all(found.get(key) == value for key, value in _of(config).items())
        return chosen if is_of and config.batch // config.replicas % chosen == 0 else 0
    except (OSError, ValueError, KeyError, ZeroDivisionError):
        return 0
