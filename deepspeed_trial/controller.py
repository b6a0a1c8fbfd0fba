"""The loop with what a run needs around it: progress, signals, checked checkpoints, explained ends."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from determined import pytorch
from determined.pytorch.deepspeed import DeepSpeedTrial
from typing_extensions import override

from deepspeed_trial import engines, final_test, time_budget
from deepspeed_trial.callbacks import NonFiniteLossMonitor
from deepspeed_trial.checkpoints import by_name, contents, identity, safe_load
from deepspeed_trial.checkpoints.conversion import as_loadable
from deepspeed_trial.checkpoints.identity import Identity
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.hangs.place import END, GATHER
from deepspeed_trial.hooks import Code, TrialHooks
from deepspeed_trial.local import metrics_log
from deepspeed_trial.local.progress import LocalMetrics
from deepspeed_trial.local.signals import LocalPreempt
from deepspeed_trial.loop import Loop
from deepspeed_trial.out_of_memory import explain_out_of_memory
from deepspeed_trial.plan import Minutes
from deepspeed_trial.schedules import learning_rate
from deepspeed_trial.time_budget import TimeBudget, clock_text

PROFILED_AFTER, PROFILED_STEPS = 10, 5  # steps that torch's profiler leaves out, and records

MONITOR = "deepspeed_trial.monitor"  # which no callback of a trial is called
BUDGET = "budget"  # of a checkpoint: the plan and the time used
FP16_TOLERANCE = 64  # steps in a row that fp16 may skip while its loss scale comes down


class Controller(Loop):
    """Trains, validates and checkpoints any ``DeepSpeedTrial``; ``Trainer.fit`` makes and runs it.

    Args:
        records_steps: whether to record a few steps with torch's profiler.
        best_weights: whether to end with the weights of the best validation.
        kwargs: as Determined's controller takes them.
    """

    def __init__(self, records_steps: bool, best_weights: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.records_steps, self.best_weights = records_steps, best_weights
        self.kept_checkpoint: str | None = None  # with the final weights, if it is not the last one
        self.engines: list[Any] = self.context.models
        self.last_metrics: dict[str, Any] = {}  # of a micro-batch
        self.test_data: final_test.TestData | None = None
        self.test_metrics: dict[str, Any] = {}  # of the test at the end
        tolerance = FP16_TOLERANCE if any(engine.fp16_enabled() for engine in self.engines) else 0
        self.monitor = NonFiniteLossMonitor(self.engines, self.calls_per_step, tolerance)
        self.callbacks: dict[str, pytorch.PyTorchCallback] = {**self.callbacks, MONITOR: self.monitor}
        self.hooks = [each for each in self.callbacks.values() if isinstance(each, TrialHooks)]
        length = self.max_length
        by_time = isinstance(length, Minutes) and not self.test_mode
        self.budget = TimeBudget(length.minutes, self.context.plan) if by_time else None

    @property
    def local(self) -> LocalMetrics | None:
        """On the chief off a cluster, what keeps the metrics."""
        train = self.core_context.train
        return train if isinstance(train, LocalMetrics) and self.is_chief else None

    # ------------------------------------------------------------------------------------------ training

    @override
    def run(self) -> None:
        """Trains; refuses another run's checkpoint before the loaders are made, which may take long."""
        if self.local_training and self.latest_checkpoint is not None:
            name = str(self.latest_checkpoint)
            with self.core_context.checkpoint.restore_path(name) as path:
                self._check_checkpoint(pathlib.Path(path), name, self.identity())
        with explain_out_of_memory(self._step_in_words, self._memory_advice):
            try:
                super().run()
            except BaseException:
                self.context.place.is_leaving = True
                raise

    @override
    def _run(self) -> None:
        preempt = self.core_context.preempt
        with contextlib.ExitStack() as around:
            if self.local:
                around.callback(self.local.close)
                steps = self.context.plan.total if self.budget else self._total_steps()
                self.local.begin(steps, self.epoch_length, self.start_from_batch, self.budget)
            if self.context.tracking.names:
                self.context.tracking.start(metrics_log.read(self.local.output) if self.local else None)
            if isinstance(preempt, LocalPreempt):
                around.enter_context(preempt.gracefully())
            self._begin_plan()
            if not self.context.get_stop_requested():  # or the run that this one resumes had ended early
                with self._profiled():
                    super()._run()
            interrupted = isinstance(preempt, LocalPreempt) and preempt.requested
            is_done = self.steps_done >= self._total_steps() or self.context.get_stop_requested()
            if is_done and not interrupted:
                self._choose_weights()
                if self.test_data:
                    with final_test.testing(self, self.test_data):
                        self.test_metrics = self._validate()
            self.context.place.begin(END, self.steps_done)

    @override
    def _set_data_loaders(self) -> None:
        super()._set_data_loaders()
        self.test_data = final_test.make_data(self)

    def _total_steps(self) -> int:
        length = self.max_length.value
        assert isinstance(length, int)
        if self.test_mode:
            return 1
        return length * self.epoch_length if isinstance(self.max_length, pytorch.Epoch) else length

    def _choose_weights(self) -> None:
        """Load the best checkpoint if the last one is not the best, or say that it stays behind."""
        checkpoints, best = self.core_context.checkpoint, None
        if self.local and not self.test_mode and (names := checkpoints.best()):
            best = names[0], checkpoints.get_metadata(names[0])["steps_completed"]
        best = self.context.distributed.broadcast(best)
        if best is None or best[1] == self.steps_done:
            return
        name, step = best
        metric = self.context.experiment.metric
        if self.best_weights:
            steps = dict(vars(self.state))
            self.latest_checkpoint = self.kept_checkpoint = name
            with checkpoints.restore_path(name) as path:
                self._load(path)
            for key, value in steps.items():
                setattr(self.state, key, value)
        if self.local and self.best_weights:
            self.local.judge_by(step)
            print(f"weights: of step {step:,}, the best by {metric}", flush=True)
        elif self.local:
            # Without test data apart, the validation's images may be the test's
            other = "; hyperparameters.best_weights: true keeps them" if self.test_data else ""
            print(f"weights: of the last step; by {metric} step {step:,} is better{other}", flush=True)

    def _begin_plan(self) -> None:
        if self.budget:
            size = self.engines[0].train_micro_batch_size_per_gpu()
            trained = size * self.context.get_num_micro_batches_per_slot()
            validated = self.num_validation_batches * self.validation_batch_size
            tested = self.test_data.batches * self.test_data.batch_size if self.test_data else 0
            work = time_budget.Work(
                self._in_steps(self.validation_period),
                self._in_steps(self.checkpoint_period),
                validated / trained / 3,  # of a step, a third is the forward pass
                tested / max(1, validated),
            )
            self.budget.begin(self.steps_done, work)
        elif not self.test_mode:
            self.context.plan.fix(self._total_steps())

    def _in_steps(self, period: pytorch.TrainUnit) -> int | None:
        if not isinstance(period.value, int) or period.value >= sys.maxsize:
            return None
        return max(1, period.value * (self.epoch_length if isinstance(period, pytorch.Epoch) else 1))

    @override
    def _step_batch(self) -> None:
        """Counts the step; looks at the plan when it is time, on all ranks by the chief's clock."""
        super()._step_batch()
        if not self.budget or not self.budget.is_due(self.steps_done):
            return
        self._sync_device()
        if self.is_chief and self.budget.look(self.steps_done):
            total = self.context.plan.total
            when = f"by the speed of {self.steps_done:,}, {clock_text(self.budget.used)}"
            text = f"plan: {total:,} steps, {when} of {clock_text(self.budget.seconds)}"
            if self.local:
                self.local.plan(total, text)
            else:
                print(text, flush=True)
        self.budget.follow(self.context.distributed.broadcast(self.budget.decisions()))
        self._follow_plan()

    def _follow_plan(self) -> None:
        self.max_length.value = self.context.plan.total

    def _measuring(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.budget.measuring(what) if self.budget else contextlib.nullcontext()

    @override
    def _checkpoint(self, already_exiting: bool) -> None:
        with self._measuring(time_budget.CHECKPOINT):
            super()._checkpoint(already_exiting)

    def _step_in_words(self) -> str:
        return f"in step {self.steps_done + 1}" if self.state else "before the first step"

    def _memory_advice(self) -> str:
        return "; ".join(each.advise_on_memory() for each in self.hooks or [TrialHooks(self.context)])

    @override
    def after_step(self, boundaries: list[pytorch._TrainBoundary]) -> None:
        """Calls the hooks, shows the progress, and has a signal end the training after this step."""
        for each in self.hooks:
            each.on_optimizer_step()
        if self.local:
            self.local.step(self.steps_done, self.last_metrics)
        preempt = self.core_context.preempt
        if isinstance(preempt, LocalPreempt) and preempt.is_due(self.steps_done):
            for boundary in boundaries:
                if boundary.step_type == pytorch._TrainBoundaryType.REPORT:
                    boundary.limit_reached = True

    @override
    def _train_batch(self, epoch_idx: int, batch_idx: int) -> list[dict[str, Any]]:
        try:
            metrics = super()._train_batch(epoch_idx, batch_idx)
        except Exception as error:  # DeepSpeed's for this is a bare Exception
            if "loss scale already at minimum" not in str(error):
                raise
            where = f"in step {batch_idx + 1} (learning rate {learning_rate(self.engines[0]):g})"
            raise self.monitor.stopped(f"the gradients overflow at the least loss scale {where}") from error
        self.last_metrics = metrics[-1] if metrics else {}
        return metrics

    @override
    def _validate(self) -> dict[str, Any]:
        for engine in self.engines:
            engines.broadcast_buffers(engine)
        with self._measuring(time_budget.VALIDATION):
            return super()._validate()

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        """Records a few steps of the chief with torch's profiler, or what the trial's own profiler does."""
        if not (self.records_steps and self.is_chief):
            with self.context.profiler or contextlib.nullcontext():
                yield
            return
        schedule = torch.profiler.schedule(wait=PROFILED_AFTER, warmup=2, active=PROFILED_STEPS, repeat=1)
        self.context.set_profiler(schedule=schedule)
        with self.context.profiler as profiler:
            yield
        needed = PROFILED_AFTER + 2 + PROFILED_STEPS
        if self.local and profiler.step_num < needed:
            ends = f"its steps end with the {needed}th, and there were {profiler.step_num}"
            print(f"no profile: {ends}", file=sys.stderr)
        elif self.local:
            table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
            (self.local.output / "profile.txt").write_text(table)

    # --------------------------------------------------------------------------------------- checkpoints

    def identity(self) -> Identity:
        """What a run must have in common with this one to go on from its checkpoints, or the other way."""
        more = [each.identity() for each in self.hooks]
        return identity.identity_of(self.engines, self.context.experiment.seed, more)

    @override
    def code(self) -> Code:
        return next((each.code() for each in self.hooks), super().code())

    @override
    def _save(self, path: pathlib.Path) -> None:
        super()._save(path)
        self.context.place.enter(GATHER)
        for index, engine in enumerate(self.engines):
            by_name.save(engine, by_name.folder_of(path, index), self._layer_names())
        if self.is_chief:
            progress = dict(contents.progress_of(self.state, self.engines))
            if self.budget:
                progress[BUDGET] = self.budget.state_dict()
            identity.write(path, self.identity(), progress)

    @override
    def _load(self, load_path: pathlib.Path) -> None:
        name, mine = str(self.latest_checkpoint), self.identity()
        if not self.local_training:  # or it has been done
            self._check_checkpoint(load_path, name, mine)
        if self.budget and self.start_from_batch and not self.state:  # before schedules, which go by the plan
            self._load_budget(load_path, name)
        with contents.loading(name, self.context.distributed), contextlib.ExitStack() as around:
            for engine in self.engines:
                around.enter_context(engines.keep_configured_hyperparameters(engine))
            loadable = around.enter_context(
                as_loadable(
                    load_path, name, mine, self.engines, self._layer_names(), self.context.distributed
                )
            )
            around.enter_context(safe_load.allowed_globals())
            super()._load(loadable)
            for each in self.hooks:
                each.on_checkpoint_load_end(load_path)
            contents.check_loaded(self.engines)

    def _check_checkpoint(self, path: pathlib.Path, name: str, mine: Identity) -> None:
        """Looks into a checkpoint on one rank of each host, and raises on all what any has found."""
        with contents.loading(name, self.context.distributed):
            if self.context.distributed.local_rank != 0:
                return
            saved, trial = identity.read(path, name), type(self.trial)
            if trial.save is DeepSpeedTrial.save:
                identity.check_engines(path, name, len(self.engines))
            identity.check(path, name, mine, self.trial_id)
            is_same = identity.is_same_form(saved, mine)
            engines = self.engines if is_same and trial.load is DeepSpeedTrial.load else []
            contents.check(path, saved, engines, self.start_from_batch, self.trial_id)
            if not is_same:
                by_name.check(path, self.engines, self._layer_names(), saved["progress"])

    def _load_budget(self, path: pathlib.Path, name: str) -> None:
        assert self.budget
        file, state = path / identity.FILE, identity.read(path, name)["progress"].get(BUDGET)
        if state is None:
            what = f"has no plan of minutes, but a length of {self.start_from_batch:,} steps or more"
            raise InvalidInput(f"--resume: {name}: {what}; go on with that length, or start anew")
        try:
            self.budget.load_state_dict(state, self.start_from_batch)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidInput(f"{file}: progress.{BUDGET}: {one_line(error)}; it is damaged") from error
        self._follow_plan()

    def _layer_names(self) -> by_name.LayerNames:
        names = [each.layer_names() for each in self.hooks]
        return next((each for each in names if each is not None), None)
