"""What the trials of a search have come to."""

from __future__ import annotations

import shlex
import warnings
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState

from classify.tuning.specification import Search
from deepspeed_trial import redaction


def quiet_optuna() -> None:
    """Silence Optuna's lines about trials and experimental features."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


@dataclass(frozen=True)
class Results:
    """A search's trials, compared.

    Attributes:
        study: Optuna's record of them.
        search: what is searched.
    """

    study: optuna.Study
    search: Search

    @property
    def metric(self) -> str:
        """By which trials are compared."""
        return self.search.experiment.metric

    @property
    def names(self) -> list[str]:
        """The searched hyperparameters."""
        return [each.name for each in self.search.ranges]

    @property
    def trials(self) -> list[FrozenTrial]:
        """All, by their numbers."""
        return self.study.get_trials(deepcopy=False)

    def score(self, trial: FrozenTrial) -> float | None:
        """Its best validation; None before the first."""
        values = trial.intermediate_values.values()
        return (min if self.search.experiment.smaller_is_better else max)(values, default=None)

    def best(self, trials: list[FrozenTrial]) -> FrozenTrial | None:
        """The best that was trained to its end; None if none was."""
        sign = -1 if self.search.experiment.smaller_is_better else 1
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        return max(complete, key=lambda trial: sign * (self.score(trial) or 0), default=None)

    def values(self, trial: FrozenTrial) -> str:
        """Its hyperparameters, as a line."""
        each = (f"{self.short(name)} {trial.params[name]!r}" for name in self.names)
        return ", ".join(each) or "as the file says"

    def short(self, name: str) -> str:
        """The last parts of a dotted path, as many as tell it from the others."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            short = ".".join(parts[-count:])
            if sum(other == short or other.endswith(f".{short}") for other in self.names) == 1:
                return short
        return name

    def waiting(self, trials: list[FrozenTrial]) -> int:
        """How many trials have not begun."""
        drawn = sum(trial.state == TrialState.WAITING for trial in trials)
        return drawn + len(self.search.missing(trials))

    def command(self, trial: FrozenTrial) -> str:
        """What trains with its hyperparameters."""
        command = ["python3", "train.py", "--config", self.search.file]
        for override in (*self.search.overrides, *self.search.overrides_of(trial.params)):
            command += ["--set", override]
        return shlex.join(redaction.command(command))
