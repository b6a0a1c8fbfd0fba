"""Find the fastest micro-batch (``auto``) or configuration (``--tune``) by benchmarks, called tries.

A try runs a few steps in the real engine and processes (``deepspeed_trial/attempts.py``), with at most two
micro-batches per optimizer step, and extrapolates the time of a complete step. All tried configurations have
the same global batch, so a complete step computes the same in all of them, up to rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from classify.engine.combinations import offloads
from classify.engine.deepspeed_keys import ACCUMULATION, MICRO_BATCH, TOTAL_BATCH
from classify.engine.memory import Forecaster
from classify.engine.trial_config import TrialConfig
from deepspeed_trial.attempts import NO_MEMORY, Attempt
from deepspeed_trial.errors import InvalidInput, TrainingStopped
from deepspeed_trial.experiment import Experiment

SURE = 0.85  # share of a forecast that the measured memory always reached
STEADY = 0.97  # rates count as equal if their ratio is between this number and its inverse
# Replacements for hyperparameters that shorten a training, make its first steps smaller, or record it
PLAIN = {"max_length": {"batches": 1000}, "progressive_resizing": None, "early_stopping": None, "track": None}
RECOMPUTE, STAGE, OFFLOAD = "checkpoint_activations", "zero_optimization.stage", "offload"


@dataclass(frozen=True)
class Try:
    """A tried configuration and its result.

    Attributes:
        changes: ZeRO stage, activation checkpointing and offload, if they differ from the file's.
        micro_batch: images per process and micro-batch.
        accumulation: micro-batches per optimizer step.
        images_per_second: throughput of all ranks; 0 if the configuration did not train.
        peak_memory: peak memory in MiB, the maximum over ranks.
        reason: the reason why the configuration did not train; empty if it did.
    """

    changes: Mapping[str, Any]
    micro_batch: int
    accumulation: int
    images_per_second: float = 0.0
    peak_memory: float = 0.0
    reason: str = ""

    @property
    def outcome(self) -> str:
        """The result as text."""
        if self.reason:
            return self.reason
        return f"{self.images_per_second:,.4g} images/s, {self.peak_memory:,.0f} MiB"


class Tries:
    """Tries configurations of one experiment, each once.

    Args:
        config: the resolved configuration; ``Tries`` ignores its micro-batch.
        experiment: the experiment before it was resolved.
        attempt: a function that benchmarks an experiment, given a lower bound of the bytes that a rank needs.
        tell: a function that prints a finished try.

    Attributes:
        done: the tries, in order.
    """

    def __init__(
        self,
        config: TrialConfig,
        experiment: Experiment,
        attempt: Callable[[Experiment, int], Attempt],
        tell: Callable[[Try], None],
    ) -> None:
        self.config, self.experiment = config, experiment
        self._attempt, self._tell = attempt, tell
        self.done: list[Try] = []
        self._errors: tuple[str, ...] = ()
        self._forecasters: dict[str, Forecaster | None] = {}

    @property
    def share(self) -> int:
        """The number of images of a process in an optimizer step."""
        return self.config.batch // self.config.replicas

    def best_micro_batch(self, changes: Mapping[str, Any]) -> Try | None:
        """Return the fastest micro-batch with the given changes; None if no micro-batch trains.

        The tries start with the largest micro-batch that trains, and halve it until a smaller one is slower
        or fails, or until two tries in a row are not faster.
        """
        best: Try | None = None
        flat = 0
        for micro_batch in halves(self.share):
            tried = self.one(changes, micro_batch)
            if tried.reason:
                if best:
                    break
                continue
            rate = tried.images_per_second
            if best is None or rate * STEADY > best.images_per_second:
                best, flat = tried, 0
                continue
            flat += 1
            if flat == 2 or rate < STEADY * best.images_per_second:
                break
        return best

    def is_limited(self, best: Try | None) -> bool:
        """Return whether memory limits the micro-batch of the best configuration."""
        changes, micro_batch = (best.changes, best.micro_batch) if best else ({}, 0)
        return any(
            tried.reason.startswith(NO_MEMORY)
            and tried.micro_batch > micro_batch
            and tried.changes == changes
            for tried in self.done
        )

    def one(self, changes: Mapping[str, Any], micro_batch: int) -> Try:
        """Try a configuration, or return its earlier try if there is one."""
        accumulation = self.share // micro_batch
        for before in self.done:
            if (before.changes, before.micro_batch) == (changes, micro_batch):
                return before
        kept = min(accumulation, 2)
        batch = {
            TOTAL_BATCH: micro_batch * kept * self.config.replicas,
            MICRO_BATCH: micro_batch,
            ACCUMULATION: kept,
        }
        hyperparameters = changed(self.experiment.hyperparameters, changes, batch)
        tried = dataclasses.replace(self.experiment, hyperparameters=plain(hyperparameters))
        how = self._attempt(tried, self._needs(changes, tried, micro_batch))
        self._errors = how.errors or self._errors
        rate = 0.0 if how.reason else self.config.batch / how.step_seconds(accumulation)
        made = Try(changes, micro_batch, accumulation, rate, how.peak_memory, how.reason)
        self.done.append(made)
        self._tell(made)
        return made

    def _needs(self, changes: Mapping[str, Any], tried: Experiment, micro_batch: int) -> int:
        """Return a lower bound of the bytes that a rank will allocate; 0 if unknown."""
        key = str(changes)
        if key not in self._forecasters:
            self._forecasters[key] = None
            with contextlib.suppress(InvalidInput):  # the try fails with the same error
                processes, device = self.config.processes, self.config.device
                config = TrialConfig.resolve(tried.hyperparameters, tried.config, processes, device)
                self._forecasters[key] = Forecaster(config)
        if (forecaster := self._forecasters[key]) is None:
            return 0
        found = forecaster(micro_batch)
        return int((found.total - found.parts["base"]) * SURE)

    def fail(self, advice: str) -> NoReturn:
        """Raise an error with the reason why no configuration trains.

        Args:
            advice: the remedy if memory ran out.

        Raises:
            InvalidInput: if the trial refused a configuration.
            TrainingStopped: if memory ran out, or a process ended.
        """
        if self._errors:
            raise InvalidInput(list(self._errors))
        last = self.done[-1]
        remedy = advice if last.reason.startswith(NO_MEMORY) else "set a number to see the whole error"
        raise TrainingStopped(f"{MICRO_BATCH}: auto: {last.reason} with {last.micro_batch}; {remedy}")


def halves(share: int, largest: int | None = None) -> Iterator[int]:
    """Yield the micro-batches to try: divisors of a process's share, each at most half of the one before."""
    micro_batch = min(share, largest or share)
    while micro_batch:
        if share % micro_batch == 0:
            yield micro_batch
            micro_batch //= 2
        else:
            micro_batch -= 1


def plain(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with identical steps and a fixed length, for benchmarks."""
    set_back = {key: value for key, value in PLAIN.items() if hyperparameters.get(key)}
    if isinstance(hyperparameters.get("head_only"), Mapping):
        set_back["head_only"] = None
    return {**hyperparameters, **set_back}


def changed(
    hyperparameters: Mapping[str, Any], changes: Mapping[str, Any], deepspeed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return changed hyperparameters, in the experiment's form of the DeepSpeed configuration.

    Args:
        hyperparameters: the experiment's hyperparameters.
        changes: see ``Try``.
        deepspeed: DeepSpeed's keys to set.
    """
    zero: dict[str, Any] = {"stage": changes[STAGE]} if STAGE in changes else {}
    if changes.get(OFFLOAD):
        zero["offload_optimizer"] = {"device": "cpu"}
    found = dict(hyperparameters)
    if RECOMPUTE in changes:
        found[RECOMPUTE] = changes[RECOMPUTE]
    form = "overwrite_deepspeed_args" if found.get("deepspeed_config") is not None else None
    section = {**((found.get(form) or {}) if form else found), **deepspeed}
    if zero:
        section["zero_optimization"] = {**(section.get("zero_optimization") or {}), **zero}
    return {**found, form: section} if form else section


def find(tries: Tries) -> Try | None:
    """Return the fastest configuration; None if no configuration trains.

    It first tries micro-batches with the file's ZeRO stage, then the other stages with the best micro-batch.
    If memory limits the micro-batch, it also tries larger micro-batches with activation checkpointing and, on
    a GPU, with optimizer offload.
    """
    config = tries.config
    best = tries.best_micro_batch({})

    def consider(changes: Mapping[str, Any], is_limited: bool) -> None:
        nonlocal best
        if best and not is_limited:
            tried = (tries.one(changes, each) for each in halves(tries.share, best.micro_batch))
            found = next((each for each in tried if not each.reason), None)
        else:
            found = tries.best_micro_batch(changes)
        if found and (best is None or found.images_per_second > best.images_per_second):
            best = found

    is_limited = tries.is_limited(best)
    # With a single replica, a stage above 0 saves no memory
    most = 0 if config.replicas == 1 else 1 if config.stages > 1 else 2 if config.hyper.has_experts else 3
    for stage in range(most + 1):
        if stage != config.zero_stage:
            consider({STAGE: stage}, is_limited)
    if not tries.is_limited(best):
        return best
    if not config.hyper.checkpoint_activations and config.stages == 1 and not config.hyper.has_experts:
        consider({**(best.changes if best else {}), RECOMPUTE: True}, True)
    if config.device == "cuda" and config.stages == 1 and not offloads(config.deepspeed, "offload_optimizer"):
        changes = best.changes if best else {}
        consider({**changes, STAGE: max(1, changes.get(STAGE, config.zero_stage)), OFFLOAD: True}, True)
    return best
