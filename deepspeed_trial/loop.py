"""The training loop: step, report, validate, save, stop, and at the end the test.

Read ``run`` and ``train`` first: they show everything that happens in a training, in order. The loop calls a
``DeepSpeedTrial`` and its callbacks as Determined's trainer does, and uses Determined's public Core API. It
differs from Determined 0.38 on purpose:

- Periods may be longer than an epoch, and ``train_batch`` gets the true index of the epoch.
- Metrics stay on the device until a report, which fetches and averages them once.
- A resumed trial continues at the same batch of the same order, also under gradient accumulation.
- A validation restores the random number generators, so the number of validations does not change the
  weights.
- A signal or the master stops a training within a few steps; a search stops it after a validation.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import determined as det
import torch
from deepspeed.accelerator import get_accelerator
from determined import core, pytorch

from deepspeed_trial import engines, loaders, metrics, time_budget
from deepspeed_trial.checkpoints.safe_load import State
from deepspeed_trial.events import Callback, NonFiniteLossMonitor
from deepspeed_trial.loaders import Batches
from deepspeed_trial.out_of_memory import explain_out_of_memory
from deepspeed_trial.place import CHECKPOINT, DATA, END, REPORT, TEST, TRAINING, VALIDATION
from deepspeed_trial.plan import Minutes
from deepspeed_trial.profile import profiled
from deepspeed_trial.random_state import randomness_kept
from deepspeed_trial.saving import Saving
from deepspeed_trial.settings import Due, Outcome, Settings
from deepspeed_trial.time_budget import TimeBudget

MONITOR = "deepspeed_trial.monitor"  # a name that no callback of a trial has
FP16_TOLERANCE = 64  # steps in a row that fp16 may skip while its loss scale falls
TEST_GROUP = "test"  # group of the metrics in the master's database and in metrics.jsonl

logger = logging.getLogger("deepspeed_trial")


class Loop:
    """Trains, validates, saves and tests any ``DeepSpeedTrial``; ``Trainer.fit`` makes and runs it.

    Args:
        trial: a ``DeepSpeedTrial``, constructed with ``context``.
        context: a ``TrialContext``.
        settings: the settings of this training.
        first_step: optimizer steps done at ``settings.checkpoint``.

    Attributes:
        state: progress of the trial.
        test: metrics of the test, on rank 0.
        outcome: the reason for the end of the training.
        budget: the time budget of a length in minutes; else None.
    """

    data: loaders.Data
    batches: Iterator[Any] | None

    def __init__(self, trial: Any, context: Any, settings: Settings, first_step: int) -> None:
        self.trial, self.context, self.settings, self.first_step = trial, context, settings, first_step
        self.services, self.core, self.place = context.services, context.core, context.place
        self.is_chief = context.distributed.rank == 0
        self.engines: list[Any] = context.models
        if not self.engines:
            what = "Must have at least one model engine; wrap one with context.wrap_model_engine()"
            raise det.errors.InvalidExperimentException(what)
        whole_steps = context.use_pipeline_parallel or not context.accumulates
        self.calls_per_step = 1 if whole_steps else context.get_num_micro_batches_per_slot()
        tolerance = FP16_TOLERANCE if any(engine.fp16_enabled() for engine in self.engines) else 0
        self.monitor = NonFiniteLossMonitor(self.engines, self.calls_per_step, tolerance)
        self.callbacks = {**trial.build_callbacks(), MONITOR: self.monitor}
        self.saving = Saving(trial, context, self.callbacks)
        length = settings.length
        by_time = isinstance(length, Minutes) and not settings.test_mode
        self.budget = TimeBudget(length.minutes, context.plan) if by_time else None
        self.state = State(self.services.trial_id)
        self.outcome = Outcome.STOPPED
        self._is_invalid = False
        self.test: dict[str, Any] = {}
        self.last_metrics: dict[str, Any] = {}  # of the last micro-batch
        self._chosen: str | None = None  # checkpoint with the best weights, if these are not the last

    @property
    def steps(self) -> int:
        """Optimizer steps done, including the steps before a resume."""
        return self.state.batches_trained

    @property
    def total(self) -> int:
        """Optimizer steps of the whole training; known once the data is loaded."""
        length = self.settings.length
        if self.settings.test_mode:
            return 1
        if self.budget:
            return self.context.plan.total or sys.maxsize
        assert isinstance(length.value, int)
        return length.value * self.data.epoch if isinstance(length, pytorch.Epoch) else length.value

    @property
    def checkpoint(self) -> str | None:
        """UUID of the checkpoint with the final weights."""
        return self._chosen or self.monitor.checkpoint

    def run(self) -> None:
        """Set up, train to the length or a stop, and test.

        Raises:
            InvalidInput: if the data is too small.
            UnusableCheckpoint: if the checkpoint is not this trial's, or damaged.
            TrainingStopped: if the training cannot continue.
        """
        advice = self.saving.hooks.advise_on_memory
        with explain_out_of_memory(self._where, advice), contextlib.ExitStack() as ends:
            self._set_up(ends)
            ends.callback(self.services.progress.close)
            total = self.context.plan.total if self.budget else self.total
            self.services.progress.begin(total, self.data.epoch, self.first_step, self._work(), self.budget)
            if self.context.tracking.names:
                self.context.tracking.start(self.services.metrics())
            with self.services.stoppable():
                self._plan()
                if not self.context.get_stop_requested():  # else the checkpoint's run had stopped early
                    with profiled(self.context, self.settings.profiling):
                        self.outcome = self.train()
                if self.outcome in (Outcome.COMPLETE, Outcome.STOPPED):
                    self.choose_weights()
                    if self.data.test:
                        self.test = self.run_test(self.data.test)
                self._write_events()
                self.place.begin(END, self.steps)

    def train(self) -> Outcome:
        """Step, report, validate and save, until the length or a stop; return the reason for the end."""
        try:
            validates_first = self.settings.step_zero_validation and not self.steps
            if validates_first and self.services.last_validation() is None:
                self.validate()
            elif self.steps < self.total and Due.VALIDATION in self._due():
                self.validate_unless_current()  # a stop had skipped this validation
            while self.steps < self.total:
                batch_metrics, due, is_stop = self.step_until_due()
                self.report(batch_metrics)
                if is_stop:
                    self.save_unless_current()
                    return Outcome.INTERRUPTED
                if self.is_chief and (Due.END in due or Due.REPORT in due):
                    self.core.train.report_progress(min(1.0, self.steps / self.total))
                for event in due:
                    if event is Due.VALIDATION:
                        self.validate_unless_current()
                    elif event is Due.CHECKPOINT:
                        self.save_unless_current()
                    self._write_events()
                    if stop := self._stop_after(event):
                        self.save_unless_current()
                        return stop
            self.validate_unless_current()
            self.save_unless_current()
            return Outcome.INVALID if self._is_invalid else Outcome.COMPLETE
        except det.InvalidHP:
            self.save_unless_current()
            raise

    def _write_events(self) -> None:
        """Write TensorBoard's events; on a cluster, upload them."""
        self.context.flush_tensorboard()
        self.services.upload_tensorboard()

    def step_until_due(self) -> tuple[list[dict[str, Any]], list[Due], bool]:
        """Train until an event is due, an epoch ends, or all ranks stop.

        Returns:
            The metrics of each micro-batch, on the device; the events that are due; whether to stop.
        """
        if self.is_chief:
            self.core.train.set_status("training")
        for engine in self.engines:
            engine.train()
        self.context.reset_reducers()
        batch_metrics: list[dict[str, Any]] = []
        while True:
            step, (epoch, in_epoch) = self.steps, divmod(self.steps, self.data.epoch)
            self.context.place_in_data = step, self.data.epoch
            self.place.begin(TRAINING, step + 1)
            if not in_epoch:
                self._tell("on_training_epoch_start", epoch)
            batch_metrics += self.train_step(epoch, step)
            self.state.batches_trained += 1
            ends_epoch = in_epoch == self.data.epoch - 1
            if ends_epoch:
                self._tell("on_training_epoch_end", epoch)
                self.state.epochs_trained += 1
            self._correct_plan()
            due = self._due()
            self._tell("on_optimizer_step")
            self.services.progress.step(self.steps, self.last_metrics)
            reports = ends_epoch or bool(due)
            is_stop = self.services.is_last(self.steps, reports)
            if reports or is_stop:
                return batch_metrics, due, is_stop

    def train_step(self, epoch: int, step: int) -> list[dict[str, Any]]:
        """Do one optimizer step, and return the metrics of its micro-batches.

        Raises:
            TrainingStopped: if fp16's loss scale cannot fall further.
        """
        batch_metrics = []
        with self.monitor.explaining_overflow(step + 1):
            for _ in range(self.calls_per_step):
                self.place.enter(DATA)
                result = self.trial.train_batch(self.batches, epoch, step)
                if self.context.mpu.should_report_metrics:
                    batch_metrics.append(metrics.kept(result))
        if self.context.profiler:
            self.context.profiler.step()
        if not self.context.use_pipeline_parallel:
            rest = self.engines[0].micro_steps % self.context.get_num_micro_batches_per_slot()
            assert not rest, "did not train for gradient accumulation steps"
        self.last_metrics = batch_metrics[-1] if batch_metrics else {}
        return batch_metrics

    # --------------------------------------------------------------------- reports, validations and test

    def report(self, batch_metrics: list[dict[str, Any]]) -> None:
        """Report the metrics of the steps since the last report, averaged over the ranks."""
        workload = None
        with self.place.during(REPORT, self.steps):
            averaged = metrics.averaged_over_ranks(metrics.fetched(batch_metrics), self.context.distributed)
            reduced = self.context.reduce_metrics(for_training=True)
            if self.is_chief:
                workload = det.util.make_metrics(None, averaged)
                workload["avg_metrics"].update(metrics.as_numpy(reduced))
                metrics.write_training(self.context, self.steps, workload, self.calls_per_step)
                self.core.train.report_training_metrics(
                    steps_completed=self.steps,
                    metrics=workload["avg_metrics"],
                    batch_metrics=workload["batch_metrics"],
                )
        workload = self.context.distributed.broadcast(workload)
        self._tell("on_training_workload_end", **workload)

    def validate(self) -> None:
        """Validate, report, and save if the checkpoint policy requires it."""
        with self._measuring(time_budget.VALIDATION):
            with self.place.during(VALIDATION, self.steps), randomness_kept(self.context.device):
                validation = self._evaluate(self.data.validation, VALIDATION)
                self.state.last_val = self.steps
                is_best = False
                if self.is_chief:
                    metrics.write_scalars(self.context, self.steps, validation, is_validation=True)
                    best = self.core.train.get_experiment_best_validation()
                    self._count(validation)
                    self.core.train.report_validation_metrics(self.steps, validation)
                    is_best = self.settings.saves_after(validation, best, self.context.experiment)
            if self.context.distributed.broadcast(is_best):
                self.save_unless_current()

    def run_test(self, batches: Batches) -> dict[str, Any]:
        """Evaluate the final weights on the test data; report and return the metrics."""
        with self.place.during(TEST, self.steps), randomness_kept(self.context.device):
            result = self._evaluate(batches, TEST)
            if self.is_chief:
                self._count(result)
                self.core.train.report_metrics(TEST_GROUP, self.steps, dict(result))
            return result

    @torch.no_grad()
    def _evaluate(self, batches: Batches, kind: str) -> Any:
        """Return metrics by name, reduced over batches and ranks, on every rank; every rank calls it."""
        for engine in self.engines:
            engines.broadcast_buffers(engine)
        if self.is_chief:
            self.core.train.set_status("validating")
        self.context.reset_reducers()
        for engine in self.engines:
            engine.eval()
        began = time.monotonic()
        self._tell(f"on_{kind}_start")
        if kind == VALIDATION:
            self._tell("on_validation_epoch_start")
        most = 1 if self.settings.test_mode else None
        of_batches = metrics.evaluated(self.trial, self.context, batches, most)
        if kind == VALIDATION:
            self._tell("on_validation_epoch_end", of_batches)
        distributed, reducer = self.context.distributed, self.trial.evaluation_reducer()
        result = metrics.reduced_over_ranks(of_batches, reducer, distributed)
        result.update(metrics.as_numpy(self.context.reduce_metrics(for_training=False)))
        result = distributed.broadcast(result)
        self._tell(f"on_{kind}_end", result)
        if self.is_chief:
            logger.info(f"evaluated {batches.count} batches per rank in {time.monotonic() - began:.1f} s")
        return result

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method on every callback that has it."""
        for callback in self.callbacks.values():
            if isinstance(callback, Callback) or hasattr(pytorch.PyTorchCallback, event):
                getattr(callback, event)(*args, **kwargs)

    # --------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Save a checkpoint."""
        with self._measuring(time_budget.CHECKPOINT), self.place.during(CHECKPOINT, self.steps):
            if self.is_chief:
                self.core.train.set_status("checkpointing")
            self.state.last_ckpt = self.steps
            metadata = {
                "determined_version": det.__version__,
                "steps_completed": self.steps,
                "framework": f"torch-{torch.__version__}",
                "format": "pickle",
            }
            try:
                with self.core.checkpoint.store_path(metadata, shard=True) as (path, uuid):
                    self.saving.write(path, self.state, self.budget)
                self._tell("on_checkpoint_upload_end", uuid=uuid)
            except det.InvalidHP:
                self.core.train.report_early_exit(core.EarlyExitReason.INVALID_HP)
                self._is_invalid = True

    def save_unless_current(self) -> None:
        """Save, unless the last checkpoint was saved at this step."""
        if self.state.last_ckpt != self.steps:
            self.save()

    def validate_unless_current(self) -> None:
        """Validate, unless the last validation was at this step."""
        if self.state.last_val != self.steps:
            self.validate()

    def choose_weights(self) -> None:
        """Load the best checkpoint if the settings require it; otherwise print a note about a better one."""
        best = None if self.settings.test_mode else self.services.best_checkpoint()
        best = self.context.distributed.broadcast(best)
        if best is None or best[1] == self.steps:
            return
        name, step = best
        metric = self.context.experiment.metric
        if self.settings.best_weights:
            with self.core.checkpoint.restore_path(name) as path:
                self.saving.load(path, name)
            self._chosen = name
            if self.is_chief:
                self.services.progress.judge_by(step)
                print(f"weights: of step {step:,}, the best by {metric}", flush=True)
        elif self.is_chief:
            # Without test data, the validation may use the test's examples, which may not choose the weights
            other = "; hyperparameters.best_weights: true uses its weights" if self.data.test else ""
            print(f"weights: of the last step; by {metric} step {step:,} is better{other}", flush=True)

    # ---------------------------------------------------------------------------------------- the details

    def _set_up(self, ends: contextlib.ExitStack) -> None:
        """Start the callbacks, build the data, and load the checkpoint; ``ends`` collects the clean-up."""
        name = self.settings.checkpoint
        with contextlib.ExitStack() as restored:
            folder = None
            if name is not None:  # checked before the loaders are built, which may take long
                folder = pathlib.Path(restored.enter_context(self.core.checkpoint.restore_path(name)))
                self.saving.check(folder, name, self.first_step)
            for callback in self.callbacks.values():
                callback.on_trial_startup(self.first_step, name)
                ends.callback(callback.on_trial_shutdown)
            self.data = loaders.build(self.trial, self.context, self.first_step)
            # An iterator draws random numbers, so it is made before the load
            self.batches = None if self.data.training is None else iter(self.data.training)
            ends.callback(setattr, self, "batches", None)  # ends its workers; a garbage collector may be late
            if folder and name:
                if self.budget and self.first_step:
                    self.saving.load_budget(folder, name, self.first_step, self.budget)
                self.state = self.saving.load(folder, name)
                if self.steps:
                    self.context.place_in_data = self.steps - 1, self.data.epoch
                    if self.services.last_validation() == self.steps:
                        self.state.last_val = self.steps  # it came after the checkpoint was saved
        self._tell("on_training_start")
        if self.settings.profiling:
            self.core.profiler.on()

    def _plan(self) -> None:
        """Set the length of the schedules; the plan of a length in minutes changes during the training."""
        if self.budget:
            self.budget.begin(self.steps, self._work())
        elif not self.settings.test_mode:
            self.context.plan.fix(self.total)

    def _work(self) -> time_budget.Work:
        size = self.engines[0].train_micro_batch_size_per_gpu()
        trained = size * self.context.get_num_micro_batches_per_slot()
        return self.settings.work(self.data, trained, self.saving.hooks.stages())

    def _correct_plan(self) -> None:
        """For a length in minutes, correct the plan when that is due, by the chief's clock on all ranks."""
        if not self.budget or not self.budget.is_due(self.steps):
            return
        get_accelerator().synchronize()
        if self.is_chief and self.budget.look(self.steps):
            self.services.progress.plan(self.total, self.budget.describe(self.steps))
        self.budget.follow(self.context.distributed.broadcast(self.budget.decisions()))

    def _due(self) -> list[Due]:
        return self.settings.due(self.steps, self.total, self.data.epoch)

    def _stop_after(self, event: Due) -> Outcome | None:
        """Return the reason to end the training after an event; None to continue."""
        if self._is_invalid:
            return Outcome.INVALID
        is_judged = event is Due.VALIDATION and self.steps < self.total
        if is_judged and self.services.has_search_stopped(self.steps):
            return Outcome.SEARCH_STOPPED
        return Outcome.STOPPED if self.context.get_stop_requested() else None

    def _count(self, evaluation: dict[str, Any]) -> None:
        """Add the numbers of steps and epochs, which searchers read, unless the trial reports them."""
        evaluation.setdefault("batches", self.steps)
        evaluation.setdefault("epochs", self.state.epochs_trained)

    def _measuring(self, work: str) -> contextlib.AbstractContextManager[None]:
        return self.budget.measuring(work) if self.budget else contextlib.nullcontext()

    def _where(self) -> str:
        return f"in step {self.steps + 1}" if hasattr(self, "batches") else "before the first step"
