"""Sends the reports of a run to MLflow and Weights & Biases.

A tracker's library sends the reports in the background. After a failure this process sends no more reports to
that tracker. ``metrics.jsonl`` has every report, and a resumed run sends the missing ones.
"""

import contextlib
import functools
import importlib
import inspect
import os
import pathlib
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import determined as det

from deepspeed_trial import redaction
from deepspeed_trial.errors import one_line
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local import metrics_log

FILE = "tracked.json"  # in a run's folder: the key of its records
FINISHED, KILLED, FAILED = "FINISHED", "KILLED", "FAILED"  # MLflow's names of a run's end
GROUPS = {"training_metrics": "training", "validation_metrics": "validation", "metrics": ""}
REMEDY = "metrics.jsonl has every report, and --resume latest sends the missing ones"


class Tracking:
    """The records of a run in its trackers.

    Args:
        experiment: the configuration, which names the trackers.
        key: identifies the run, also after a resume; empty on a rank that reports nothing.
        name: the name that people see.
    """

    def __init__(self, experiment: Experiment | None = None, key: str = "", name: str = "") -> None:
        self.names = experiment.trackers if experiment else ()
        self._experiment, self._key, self._name = experiment, key, name
        self._records: dict[str, Any] = {}  # by tracker

    def start(self, earlier: Sequence[Mapping[str, Any]] | None) -> None:
        """Open the runs in the trackers; after a resume, send the earlier reports that a tracker lacks.

        Args:
            earlier: the lines of ``metrics.jsonl``; None if unknown.
        """
        if not (self._experiment and self._key):
            return
        hyperparameters = dict(self._experiment.hyperparameters)
        config = redaction.experiment({**self._experiment.config, "hyperparameters": hyperparameters})
        run = self._key, self._name, self._experiment.name or "deepspeed-trials", config, earlier is not None
        for tracker in self.names:
            with self._dropped_if_it_fails(tracker):
                module = importlib.import_module(f"deepspeed_trial.trackers.{tracker}_run")
                self._records[tracker] = module.Record(*run)
        for entry in earlier or ():
            metrics = {name: entry[name] for name in entry.keys() - {"group", "steps_completed", "time"}}
            self.log(entry["group"], entry["steps_completed"], metrics, entry.get("time"))

    def log(self, group: str, step: int, metrics: Mapping[str, Any], seconds: float | None = None) -> None:
        """Send the metrics that are single numbers, with a time (Unix seconds) or now; return immediately."""
        numbers = metrics_log.scalars(metrics) if self._records else {}
        named = {f"{group}/{name}": value for name, value in numbers.items()}
        self._all("log", step, seconds or time.time(), named)

    def add_files(self, paths: Iterable[pathlib.Path]) -> None:
        """Record copies of files."""
        for path in paths:
            self._all("add_file", path)

    def finish(self, status: str) -> None:
        """Wait for the servers, at most until a signal, and end the trackers' runs."""
        with contextlib.suppress(KeyboardInterrupt):
            self._all("finish", status)

    def _all(self, method: str, *arguments: Any) -> None:
        for tracker, record in list(self._records.items()):
            with self._dropped_if_it_fails(tracker):
                getattr(record, method)(*arguments)

    @contextlib.contextmanager
    def _dropped_if_it_fails(self, tracker: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._records.pop(tracker, None)
            print(f"note: {tracker}: {one_line(error)}; {REMEDY}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def tracked(tracking: Tracking, train: Any, was_interrupted: Callable[[], bool]) -> Iterator[Tracking]:
    """Send each report of Determined's training context to the trackers, until the block ends."""
    for kind, group in GROUPS.items() if tracking.names else ():
        report = functools.partial(_report, tracking, getattr(train, f"report_{kind}"), group)
        setattr(train, f"report_{kind}", report)
    status = FAILED
    try:
        yield tracking
        status = KILLED if was_interrupted() else FINISHED
    finally:
        tracking.finish(status)


def _report(tracking: Tracking, report: Callable[..., Any], group: str, *given: Any, **named: Any) -> None:
    report(*given, **named)
    arguments = inspect.signature(report).bind(*given, **named).arguments
    tracking.log(arguments.get("group", group), arguments["steps_completed"], arguments["metrics"])


def tracking_here(experiment: Experiment, is_chief: bool, output: pathlib.Path, resumes: bool) -> Tracking:
    """Return the tracking of a local run; a file in the run's folder stores its ``key``."""
    if not (experiment.trackers and is_chief):
        return Tracking(experiment)
    file = output / FILE
    stored = file.read_text(errors="replace") if resumes and file.exists() else ""
    found = re.search(r"[0-9a-f]{32}", stored)
    key = found[0] if found else uuid.uuid4().hex
    file.write_text(f'{{"run": "{key}"}}\n')
    return Tracking(experiment, key, os.path.relpath(output).removeprefix(f"runs{os.sep}"))


def tracking_on_cluster(experiment: Experiment, is_chief: bool, info: det.ClusterInfo) -> Tracking:
    """Return the tracking of a cluster's trial; the trial's number is the key."""
    key, name = f"{info.cluster_id}-{info.trial.trial_id}", f"experiment {info.trial.experiment_id}"
    if is_chief and "mlflow" in experiment.trackers and "MLFLOW_TRACKING_URI" not in os.environ:
        remedy = "set it in environment.environment_variables; else the record is lost with the container"
        print(f"note: mlflow: MLFLOW_TRACKING_URI: not set; {remedy}")
    return Tracking(experiment, key if is_chief else "", f"{name}, trial {info.trial.trial_id}")
