"""The settings of a training in a Determined experiment configuration: seed, length, periods and metric.

Source: https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/experiment-config-reference.rst
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
MINUTES = "minutes"  # unit of lengths, not of periods
HANG_AFTER = 600.0  # seconds
SCHEDULING_UNIT = 100  # Determined's default; a master writes it into every configuration
TRACKERS = ("mlflow", "wandb")
LEAST_REPORTS = 50  # in a short training, so that its curves have enough points


@dataclass(frozen=True)
class Experiment:
    """An experiment configuration with one value for every hyperparameter.

    Attributes:
        config: the whole configuration, with Determined's keys.
        hyperparameters: hyperparameters of the trial.
    """

    config: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """Seed of weights, order of the data, and augmentation."""
        return int(self._section("reproducibility").get("experiment_seed") or 0)

    @property
    def max_length(self) -> tuple[str, float]:
        """Length of the training: ``("batches" | "epochs", N)``, or ``("minutes", M)`` of wall time.

        Raises:
            InvalidInput: if ``hyperparameters.max_length`` is invalid; the master does not check it.
        """
        length = of_one_unit(self.hyperparameters.get("max_length"))
        errors = length_errors(length)
        if errors or length is None:
            raise InvalidInput(errors)
        return next(iter(length.items()))

    @property
    def hang_after(self) -> float:
        """The run ends after this many seconds without progress of any rank.

        Raises:
            InvalidInput: if ``hyperparameters.hang_after`` is not a number of at least 3.
        """
        seconds = self.hyperparameters.get("hang_after", HANG_AFTER)
        if errors := hang_errors(seconds):
            raise InvalidInput(errors)
        return float(seconds)

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers that record the run; see ``deepspeed_trial.trackers``.

        Raises:
            InvalidInput: if ``hyperparameters.track`` is not a list of trackers, or a tracker is not
                installed.
        """
        names = self.hyperparameters.get("track")
        if errors := tracker_errors(names):
            raise InvalidInput(errors)
        return tuple(dict.fromkeys(names or ()))

    @property
    def shown(self) -> dict[str, Any]:
        """Configuration without secrets; see ``redaction``."""
        return redaction.experiment(self.config)

    @property
    def name(self) -> str:
        """Name of the experiment; empty if it has none."""
        return str(self.config.get("name") or "")

    @property
    def slots(self) -> int:
        """Slots of a trial on a cluster, with one process each; locally the launcher starts the processes."""
        return int(self._section("resources").get("slots_per_trial") or 1)

    def period(self, field: str) -> tuple[str, int] | None:
        """Return a period such as ``min_validation_period`` as (unit, N); None if it is not set."""
        return next(((unit, n) for unit, n in self._section(field).items() if n), None)

    @property
    def scheduling_unit(self) -> int:
        """Optimizer steps between reports of training metrics."""
        return int(self.config.get("scheduling_unit") or SCHEDULING_UNIT)

    def checkpoints_to_keep(self, field: str) -> int:
        """Return the number of checkpoints to keep: ``save_trial_best`` or ``save_trial_latest``."""
        value = self.storage.get(field)
        return 1 if value is None else int(value)  # Determined's defaults

    @property
    def storage(self) -> Mapping[str, Any]:
        """The section ``checkpoint_storage``."""
        return self._section("checkpoint_storage")

    @property
    def profiling(self) -> bool:
        """Whether the run is profiled."""
        return bool(self._section("profiling").get("enabled"))

    @property
    def searcher(self) -> str:
        """Name of the searcher; ``single`` starts one trial."""
        return str(self._section("searcher").get("name") or "single")

    @property
    def metric(self) -> str:
        """Validation metric for comparing checkpoints and trials; empty if none is configured."""
        return str(self._section("searcher").get("metric") or "")

    @property
    def smaller_is_better(self) -> bool:
        """Whether smaller values of ``metric`` are better; Determined's default is true."""
        chosen = self._section("searcher").get("smaller_is_better")
        return True if chosen is None else bool(chosen)

    def notes(self) -> list[str]:
        """Return a line for each default that may surprise a user."""
        chosen = self._section("searcher").get("smaller_is_better")
        if chosen is not None or self.metric in ("", "loss"):
            return []
        what = f"not given, so a smaller {self.metric} is better, as in Determined"
        return [f"searcher.smaller_is_better: {what}; if larger is better, set it to false"]

    def length_notes(self, steps: int, epoch_steps: int, batch_size: int) -> list[str]:
        """Return a note if the last validation comes shortly after another.

        Args:
            steps: optimizer steps of the whole training.
            epoch_steps: optimizer steps in an epoch.
            batch_size: images or other records in a step.
        """
        unit, number = self.period("min_validation_period") or ("batches", sys.maxsize)
        factor = {"epochs": epoch_steps, "batches": 1, "records": 1 / batch_size}[unit]
        period = max(1, int(number * factor))
        rest = steps % period
        if not 0 < rest * 10 < period or rest == steps:
            return []
        what = f"the last validation comes only {rest} steps after the previous one"
        return [f"{LENGTH}: {steps:,} steps: {what}; use {steps - rest:,} steps to avoid this"]

    def fit_arguments(self, batch_size: int, steps: int | None = None) -> dict[str, Any]:
        """Return the configuration's arguments for ``Trainer.fit``.

        Args:
            batch_size: images or other records in an optimizer step; periods may count records.
            steps: optimizer steps of the whole training, if known. A short training reports at least
                ``LEAST_REPORTS`` times, unless ``scheduling_unit`` differs from the default.
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

    Determined merges a new unit with the file's unit instead of replacing it. A null entry removes a unit.
    """
    if not isinstance(value, Mapping):
        return value
    return {unit: number for unit, number in value.items() if number is not None}


def unit_errors(field: str, value: Any, units: tuple[str, ...], least: int) -> list[str]:
    """Return error lines unless a value is ``{UNIT: N}`` with a valid unit and a whole N >= ``least``.

    Null entries are ignored.
    """
    value = of_one_unit(value)
    form = " or ".join(f"{{{unit}: N}}" for unit in units)
    known = {*units, MINUTES} if field == LENGTH else {*units}
    if isinstance(value, Mapping) and len(value) > 1 and value.keys() <= known:
        unit, *others = list(value)[::-1]
        one = json.dumps({unit: value[unit], **dict.fromkeys(others)}, default=str)
        what = "has several units, perhaps because det merged --config into the file"
        return [f"{field}: {dict(value)!r}: {what}; set all but one to null: --config {field}='{one}'"]
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in units:
        return [f"{field}: {value!r}: must be {form}"]
    unit, number = next(iter(value.items()))
    if type(number) is not int or not least <= number < 2**53:
        return [f"{field}.{unit}: {number!r}: must be a whole number of at least {least}"]
    return []


def length_errors(value: Any) -> list[str]:
    """Return error lines about ``hyperparameters.max_length``."""
    value = of_one_unit(value)
    if not isinstance(value, Mapping) or list(value) != [MINUTES]:
        errors = unit_errors(LENGTH, value, LENGTH_UNITS, least=1)
        return [f"{line} or {{{MINUTES}: M}}" if "must be {" in line else line for line in errors]
    minutes = value[MINUTES]
    is_right = type(minutes) in (int, float) and 0 < minutes < 10**7
    return [] if is_right else [f"{LENGTH}.{MINUTES}: {minutes!r}: must be a number above 0, e.g. 30"]


def hang_errors(seconds: Any) -> list[str]:
    """Return error lines about ``hyperparameters.hang_after``."""
    is_number = type(seconds) in (int, float) and 3 <= seconds < 10**6
    line = f"hyperparameters.hang_after: {seconds!r}: must be a number of seconds of at least 3"
    return [] if is_number else [line]


def tracker_errors(value: Any) -> list[str]:
    """Return error lines about ``hyperparameters.track``: trackers that are unknown or not installed here."""
    field = "hyperparameters.track"
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(name in TRACKERS for name in value):
        return [f"{field}: {value!r}: must be a list of some of {', '.join(TRACKERS)}, e.g. [mlflow]"]
    missing = [name for name in dict.fromkeys(value) if not is_installed(name)]
    return [f"{field}: {name}: is not installed here; pip install {name}" for name in missing]


def train_unit(period: tuple[str, float] | None, batch_size: int) -> pytorch.TrainUnit:
    """Convert (unit, N) to Determined's type; None becomes a period that never ends.

    Args:
        period: the unit (``batches``, ``records``, ``epochs`` or ``minutes``) and N.
        batch_size: records in an optimizer step.
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
