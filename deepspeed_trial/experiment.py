"""What a Determined experiment configuration says of a training: its seed, length, periods and metric.

Source: https://docs.determined.ai/latest/reference/training/experiment-config-reference.html
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from determined import pytorch

from deepspeed_trial import redaction
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.machine import is_installed
from deepspeed_trial.plan import Minutes

PERIOD_UNITS = ("batches", "records", "epochs")
LENGTH_UNITS = ("batches", "epochs")
LENGTH = "hyperparameters.max_length"
MINUTES = "minutes"  # a length alone: what follows from time is no period
HANG_AFTER = 600.0  # seconds
SCHEDULING_UNIT = 100  # Determined's default, which a master writes into every configuration
TRACKERS = ("mlflow", "wandb")
LEAST_REPORTS = 50  # the points of a curve


@dataclass(frozen=True)
class Experiment:
    """An experiment configuration with one value for every hyperparameter.

    Attributes:
        config: the whole configuration, as Determined has it.
        hyperparameters: what the trial gets.
    """

    config: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """The seed of everything random: weights, order of the data, augmentation."""
        return int(self._section("reproducibility").get("experiment_seed") or 0)

    @property
    def max_length(self) -> tuple[str, float]:
        """The training length: ``("batches" | "epochs", N)``, or ``("minutes", M)`` of wall time.

        Raises:
            InvalidInput: if ``hyperparameters.max_length``, which the master does not check, is none.
        """
        length = of_one_unit(self.hyperparameters.get("max_length"))
        errors = length_errors(length)
        if errors or length is None:
            raise InvalidInput(errors)
        return next(iter(length.items()))

    @property
    def hang_after(self) -> float:
        """Seconds without a move of any rank after which a run ends.

        Raises:
            InvalidInput: if ``hyperparameters.hang_after`` is no number of at least 3.
        """
        seconds = self.hyperparameters.get("hang_after", HANG_AFTER)
        if errors := hang_errors(seconds):
            raise InvalidInput(errors)
        return float(seconds)

    @property
    def trackers(self) -> tuple[str, ...]:
        """Where else the run is written down: names of ``deepspeed_trial.trackers``.

        Raises:
            InvalidInput: if ``hyperparameters.track`` is no list of them, or one is not installed.
        """
        names = self.hyperparameters.get("track")
        if errors := tracker_errors(names):
            raise InvalidInput(errors)
        return tuple(dict.fromkeys(names or ()))

    @property
    def shown(self) -> dict[str, Any]:
        """The configuration that others may read; see ``redaction``."""
        return redaction.experiment(self.config)

    @property
    def name(self) -> str:
        """The experiment's; empty if it has none."""
        return str(self.config.get("name") or "")

    @property
    def slots(self) -> int:
        """Processes of a trial, one a slot; off a cluster the launcher says how many there are."""
        return int(self._section("resources").get("slots_per_trial") or 1)

    def period(self, field: str) -> tuple[str, int] | None:
        """A period such as ``min_validation_period``: (unit, N), or None if there is none."""
        return next(((unit, n) for unit, n in self._section(field).items() if n), None)

    @property
    def scheduling_unit(self) -> int:
        """Optimizer steps between two reports of training metrics."""
        return int(self.config.get("scheduling_unit") or SCHEDULING_UNIT)

    def checkpoints_to_keep(self, field: str) -> int:
        """How many checkpoints ``save_trial_best`` or ``save_trial_latest`` say to keep."""
        value = self._section("checkpoint_storage").get(field)
        return 1 if value is None else int(value)  # Determined's defaults

    @property
    def profiling(self) -> bool:
        """Whether to profile."""
        return bool(self._section("profiling").get("enabled"))

    @property
    def searcher(self) -> str:
        """The name of the search that makes the trials; ``single`` makes one."""
        return str(self._section("searcher").get("name") or "single")

    @property
    def metric(self) -> str:
        """The validation metric by which checkpoints and trials are compared; empty where none is named."""
        return str(self._section("searcher").get("metric") or "")

    @property
    def smaller_is_better(self) -> bool:
        """Whether smaller values of ``metric`` are better, as they are in Determined by default."""
        chosen = self._section("searcher").get("smaller_is_better")
        return True if chosen is None else bool(chosen)

    def notes(self) -> list[str]:
        """What the file leaves to a default that may surprise."""
        chosen = self._section("searcher").get("smaller_is_better")
        if chosen is not None or self.metric in ("", "loss"):
            return []
        what = f"not given, so a smaller {self.metric} is better, as in Determined"
        return [f"searcher.smaller_is_better: None: {what}; set it to false if a larger one is"]

    def length_notes(self, steps: int, epoch_steps: int, batch_size: int) -> list[str]:
        """Says where the last validation comes right after another.

        Args:
            steps: optimizer steps of the whole training.
            epoch_steps: those of an epoch.
            batch_size: images, or other records, a step.
        """
        unit, number = self.period("min_validation_period") or ("batches", sys.maxsize)
        factor = {"epochs": epoch_steps, "batches": 1, "records": 1 / batch_size}[unit]
        period = max(1, int(number * factor))
        rest = steps % period
        if not 0 < rest * 10 < period or rest == steps:
            return []
        what = f"the last validation comes only {rest} steps after the one before"
        return [f"{LENGTH}: {steps:,} steps: {what}; use {steps - rest:,} steps to leave it out"]

    def fit_arguments(self, batch_size: int, steps: int | None = None) -> dict[str, Any]:
        """Return the arguments of ``Trainer.fit`` that the configuration gives.

        Args:
            batch_size: images, or other records, an optimizer step: periods may count them.
            steps: optimizer steps of the whole training, if they are known. A short training reports at
                least ``LEAST_REPORTS`` times, unless ``scheduling_unit`` is not the default.
        """
        period = self.scheduling_unit
        if steps and period == SCHEDULING_UNIT:
            period = min(period, max(1, steps // LEAST_REPORTS))
        return {
            "max_length": train_unit(self.max_length, batch_size),
            "validation_period": train_unit(self.period("min_validation_period"), batch_size),
            "checkpoint_period": train_unit(self.period("min_checkpoint_period"), batch_size),
            "reporting_period": pytorch.Batch(period),
            "checkpoint_policy": self.config.get("checkpoint_policy") or "best",
            "step_zero_validation": bool(self.config.get("perform_initial_validation")),
            "profiling_enabled": self.profiling,
            "best_weights": bool(self.hyperparameters.get("best_weights")),
        }

    def _section(self, field: str) -> Mapping[str, Any]:
        return self.config.get(field) or {}


def of_one_unit(value: Any) -> Any:
    """Return a length or period without its null entries.

    A merge with the experiment file keeps the file's unit beside the new one. Null removes it.
    """
    if not isinstance(value, Mapping):
        return value
    return {unit: number for unit, number in value.items() if number is not None}


def unit_errors(field: str, value: Any, units: tuple[str, ...], least: int) -> list[str]:
    """Check that a value is ``{UNIT: N}`` with one of the units and a whole N of at least ``least``.

    Null entries do not count.
    """
    value = of_one_unit(value)
    form = " or ".join(f"{{{unit}: N}}" for unit in units)
    known = {*units, MINUTES} if field == LENGTH else {*units}
    if isinstance(value, Mapping) and len(value) > 1 and value.keys() <= known:
        unit, *others = list(value)[::-1]
        one = json.dumps({unit: value[unit], **dict.fromkeys(others)}, default=str)
        what = "has several units, perhaps by a merge of det's --config with the file; give null for all but"
        return [f"{field}: {dict(value)!r}: {what} one, e.g. --config {field}='{one}'"]
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in units:
        return [f"{field}: {value!r}: must be {form}"]
    unit, number = next(iter(value.items()))
    if type(number) is not int or not least <= number < 2**53:
        return [f"{field}.{unit}: {number!r}: must be a whole number of at least {least}"]
    return []


def length_errors(value: Any) -> list[str]:
    """Checks ``hyperparameters.max_length``."""
    value = of_one_unit(value)
    if not isinstance(value, Mapping) or list(value) != [MINUTES]:
        errors = unit_errors(LENGTH, value, LENGTH_UNITS, least=1)
        return [f"{line} or {{{MINUTES}: M}}" if "must be {" in line else line for line in errors]
    minutes = value[MINUTES]
    is_right = type(minutes) in (int, float) and 0 < minutes < 10**7
    return [] if is_right else [f"{LENGTH}.{MINUTES}: {minutes!r}: must be a number above 0, e.g. 30"]


def hang_errors(seconds: Any) -> list[str]:
    """Checks ``hyperparameters.hang_after``."""
    is_number = type(seconds) in (int, float) and 3 <= seconds < 10**6
    return [] if is_number else [f"hyperparameters.hang_after: {seconds!r}: must be seconds, at least 3"]


def tracker_errors(value: Any) -> list[str]:
    """Check ``hyperparameters.track``: names of trackers that are installed here."""
    field = "hyperparameters.track"
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(name in TRACKERS for name in value):
        return [f"{field}: {value!r}: must be a list of some of {', '.join(TRACKERS)}, e.g. [mlflow]"]
    missing = [name for name in dict.fromkeys(value) if not is_installed(name)]
    return [f"{field}: {name}: is not installed here; pip install {name}" for name in missing]


def train_unit(period: tuple[str, float] | None, batch_size: int) -> pytorch.TrainUnit:
    """Puts (unit, N) into Determined's terms; None is a period that never ends.

    Args:
        period: ``batches``, ``records``, ``epochs`` or ``minutes``, and how many.
        batch_size: records an optimizer step.
    """
    if period is None:
        return pytorch.Batch(sys.maxsize)
    unit, number = period
    if unit == MINUTES:
        return Minutes(number)
    number = int(number)
    if unit == "epochs":
        return pytorch.Epoch(number)
    return pytorch.Batch(number if unit == "batches" else max(number // batch_size, 1))
