"""A run's reports, given to trackers beside the training, which goes on whatever becomes of them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import determined as det

from deepspeed_trial import redaction
from deepspeed_trial.errors import one_line, printable
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local.metrics_log import scalars
from deepspeed_trial.trackers.tracked_run import FAILED, FINISHED, KILLED, Entry, TrackedRun, Tracker

FILE = "tracked.json"  # in a run's folder
RETRY = 30.0  # seconds after which what has failed is tried again
TRIES = 20  # after which it is left out, for it may be what fails
LAST_WORDS = 60.0  # seconds that a tracker has at the end of a run


def make_tracker(name: str) -> Tracker:
    """The tracker of that name, whose library is imported now."""
    if name == "mlflow":
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from deepspeed_trial.trackers.mlflow_run import MlflowRun

        return MlflowRun()
    from deepspeed_trial.trackers.wandb_run import WandbRun

    return WandbRun()


class Tracking:
    """Gives trackers what a run reports, each in a thread of its own.

    Args:
        names: of ``tracked_run.TRACKERS``.
        run: which run, on the chief; None on other ranks, where nothing is reported.
    """

    def __init__(self, names: Iterable[str] = (), run: TrackedRun | None = None) -> None:
        self.names = tuple(dict.fromkeys(names))
        self._run, self._is_started = run, False
        self._senders = [_Sender(name, run) for name in self.names] if run else []

    def follow(self, train: Any) -> None:
        """Has every report to Determined's training context given to the trackers as well."""
        if not self._senders:
            return

        def follow(name: str, group: str | None) -> None:
            report: Callable[..., Any] = getattr(train, name)
            given: list[Any] = [group] if group else []

            def report_and_track(*args: Any, **kwargs: Any) -> Any:
                result = report(*args, **kwargs)
                self._report(*given, *args, **kwargs)
                return result

            setattr(train, name, report_and_track)

        follow("report_training_metrics", "training")
        follow("report_validation_metrics", "validation")
        follow("report_metrics", None)

    def _report(self, group: str, steps_completed: int, metrics: dict[str, Any], *_: Any, **__: Any) -> None:
        if not self._is_started:  # a trial's own, before the training
            return
        numbers = scalars(metrics)
        entry = {"group": group, "steps_completed": steps_completed, "time": time.time(), **numbers}
        self._do("log", entry)

    def start(self, earlier: Sequence[Entry] | None) -> None:
        """Begins, or goes on with a run that had made these reports; None where they are not known."""
        self._is_started = True
        self._do("start", self._run, earlier)

    def add_files(self, paths: Iterable[pathlib.Path]) -> None:
        """Has each tracker keep copies of files; they must stay until ``finish``."""
        for path in paths:
            self._do("add_file", path)

    def finish(self, status: str) -> None:
        """Ends the records, for which trackers have ``LAST_WORDS`` seconds."""
        self._do("finish", status)
        deadline = time.monotonic() + LAST_WORDS
        for each in self._senders:
            each.close(deadline)

    def _do(self, what: str, *arguments: Any) -> None:
        for each in self._senders:
            each.jobs.put((what, arguments))


class _Sender:
    """One tracker and the thread in which it is told what happens, in order."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.run = name, run
        self.jobs: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()
        self._is_closing = threading.Event()
        self._has_failed = self._has_gaps = self._is_done = False
        # A daemon, for no server may keep a run from its end
        self._thread = threading.Thread(target=self._send, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        tracker: Tracker | None = None
        is_started = False
        while True:
            what, arguments = self.jobs.get()
            if what == "finish" and not is_started:  # the run failed before its training
                self._is_done = True
                return
            for _ in range(TRIES if is_started else sys.maxsize):
                try:
                    tracker = tracker or make_tracker(self.name)
                    getattr(tracker, what)(*arguments)
                    break
                except Exception as error:  # a tracker's own, of any kind
                    if not self._wait(error):
                        return
            else:
                self._has_gaps = True
            is_started = is_started or what == "start"
            if what == "finish":
                self._is_done = not self._has_gaps
                return

    def _wait(self, error: Exception) -> bool:
        """Says the first time that it fails; waits, and tells whether to try again."""
        if not self._has_failed:
            self._has_failed = True
            what = "fails, and is tried again while the training goes on"
            self._say(f"{what} ({one_line(error)})")
        if self._is_closing.is_set():
            return False
        self._is_closing.wait(RETRY)
        return True  # once more at the end

    def close(self, deadline: float) -> None:
        """Waits for what is still to be sent, and says where it could not be."""
        if self._has_failed:
            self._is_closing.set()
        with contextlib.suppress(KeyboardInterrupt):  # a second signal: no more waiting
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._is_closing.set()
        if not self._is_done:
            self._say("has not taken everything; metrics.jsonl has it, and --resume latest gives it again")

    def _say(self, what: str) -> None:
        print(printable(f"note: {self.name}: {what}"), file=sys.stderr, flush=True)


@contextlib.contextmanager
def tracked(tracking: Tracking, train: Any, was_interrupted: Callable[[], bool]) -> Iterator[Tracking]:
    """Gives trackers what is reported in the block, and ends their records when and as it ends.

    Args:
        tracking: of this run.
        train: Determined's training context, which the reports are made to.
        was_interrupted: whether a signal, or the cluster, has ended the training.
    """
    tracking.follow(train)
    status = FAILED
    try:
        yield tracking
        status = KILLED if was_interrupted() else FINISHED
    finally:
        tracking.finish(status)


def tracking_here(experiment: Experiment, is_chief: bool, output: pathlib.Path, goes_on: bool) -> Tracking:
    """What tracks a run off a cluster, whose folder keeps which record is its own.

    Args:
        experiment: which says by what.
        is_chief: whether this rank reports.
        output: the run's folder.
        goes_on: whether the record goes on that the folder has.
    """
    names, file = experiment.trackers, output / FILE
    if not (names and is_chief):
        return Tracking(names)
    key = uuid.uuid4().hex
    if goes_on:
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, AttributeError
        ):  # not there, or damaged
            key = uuid.UUID(json.loads(file.read_text())["run"]).hex
    partial = file.with_name(f".{FILE}")
    partial.write_text(json.dumps({"run": key}) + "\n")
    os.replace(partial, file)
    name = os.path.relpath(output).removeprefix(f"runs{os.sep}")
    return Tracking(names, _run(experiment, key, name))


def tracking_on_cluster(experiment: Experiment, is_chief: bool, info: det.ClusterInfo) -> Tracking:
    """What tracks a trial of a cluster, whose number says which record is its own."""
    names, trial = experiment.trackers, info.trial
    if not (names and is_chief):
        return Tracking(names)
    if "mlflow" in names and "MLFLOW_TRACKING_URI" not in os.environ:
        mend = "set it in environment.environment_variables"
        print(f"note: mlflow: MLFLOW_TRACKING_URI: is not set; the container alone has the record; {mend}")
    name = f"experiment {trial.experiment_id}, trial {trial.trial_id}"
    return Tracking(names, _run(experiment, f"{info.cluster_id}-{trial.trial_id}", name))


def _run(experiment: Experiment, key: str, name: str) -> TrackedRun:
    config = redaction.experiment({**experiment.config, "hyperparameters": dict(experiment.hyperparameters)})
    return TrackedRun(key, name, experiment.name or "deepspeed-trials", config)
