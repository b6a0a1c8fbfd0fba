"""A run in MLflow: where ``MLFLOW_TRACKING_URI`` says, or where MLflow keeps runs by default.

Source: https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
"""

from __future__ import annotations

import getpass
import logging
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from typing_extensions import override

from deepspeed_trial.errors import printable
from deepspeed_trial.host_lock import lock_of, stand_ins
from deepspeed_trial.trackers.tracked_run import Entry, TrackedRun, Tracker, flat, metrics_of

KEY = "deepspeed_trial.run"  # the tag by which a resumed run is found
MOST_METRICS, MOST_PARAMETERS = 1000, 100  # of a request
LONGEST_KEY, LONGEST_VALUE = 250, 6000  # characters


class MlflowRun(Tracker):
    """A run of MLflow's. What it has recorded of a step it is not given again, which MLflow would add."""

    name = "mlflow"

    def __init__(self) -> None:
        for each in ("mlflow", "alembic"):  # which tell how they set a database up
            logging.getLogger(each).setLevel(logging.WARNING)
        self._recorded: dict[str, dict[int, float]] = {}  # by metric and step, before this process
        self._has_differed = False

    @override
    def start(self, run: TrackedRun, earlier: Sequence[Entry] | None) -> None:
        stand_ins().mkdir(parents=True, exist_ok=True)
        with lock_of(stand_ins(), "mlflow"):  # or trials of a search would all set a new database up
            self.client = client = MlflowClient()
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
            experiment = client.get_experiment_by_name(project)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(project)
        known = client.search_runs([experiment_id], f"tags.`{KEY}` = '{run.key}'", max_results=1)
        if known:
            self.run_id = known[0].info.run_id
            client.update_run(self.run_id, "RUNNING")
            for metric in known[0].data.metrics:
                history = client.get_metric_history(self.run_id, metric)
                self._recorded[metric] = {each.step: each.value for each in history}
        else:
            tags = {KEY: run.key, "mlflow.source.name": pathlib.Path(sys.argv[0]).name, **_user()}
            self.run_id = client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        self._log_parameters(run.config, known[0].data.params if known else {})
        for entry in earlier or ():
            self.log(entry)

    def _log_parameters(self, config: Mapping[str, Any], recorded: Mapping[str, str]) -> None:
        """Gives the configuration as parameters, which MLflow does not let change."""
        values = {_name(name): str(value)[:LONGEST_VALUE] for name, value in flat(config)}
        changed = {name for name, value in values.items() if recorded.get(name, value) != value}
        if changed:
            names = ", ".join(sorted(changed))
            print(f"note: mlflow: {printable(names)}: changed; the record keeps the first", file=sys.stderr)
        new = [Param(name, value) for name, value in values.items() if name not in recorded]
        for first in range(0, len(new), MOST_PARAMETERS):
            self.client.log_batch(self.run_id, params=new[first : first + MOST_PARAMETERS])

    @override
    def log(self, entry: Entry) -> None:
        step, time = entry["steps_completed"], int(entry["time"] * 1000)
        metrics = {_name(name): value for name, value in metrics_of(entry).items()}
        self._say_if_it_differs(step, metrics)
        new = [
            Metric(name, value, time, step)
            for name, value in metrics.items()
            if step not in self._recorded.get(name, {})
        ]
        for first in range(0, len(new), MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=new[first : first + MOST_METRICS])

    def _say_if_it_differs(self, step: int, metrics: Mapping[str, float]) -> None:
        recorded = self._recorded.get("training/loss", {}).get(step)
        if not self._has_differed and recorded not in (None, metrics.get("training/loss", recorded)):
            self._has_differed = True
            what = "training/loss is another than that of the run that was killed, which the record keeps"
            print(f"note: mlflow: step {step}: {what}", file=sys.stderr)

    @override
    def add_file(self, path: pathlib.Path) -> None:
        self.client.log_artifact(self.run_id, str(path))

    @override
    def finish(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)


def _user() -> dict[str, str]:
    try:
        return {"mlflow.user": getpass.getuser()}
    except (KeyError, OSError):  # a user without a name
        return {}


def _name(text: str) -> str:
    """The nearest name that MLflow takes, for which it must also be the path of a file."""
    parts = re.sub(r"[^/\w.\- ]", "_", text).split("/")
    return "/".join("_" if part.strip(".") == "" else part for part in parts)[:LONGEST_KEY]
