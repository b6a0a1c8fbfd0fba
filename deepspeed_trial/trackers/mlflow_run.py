"""A run in MLflow, sent by MLflow's asynchronous logging.

Source: https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
"""

import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# MLflow reads these; with them, a server that does not answer delays a run by a minute at most
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", "5")  # between two requests
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
import mlflow
from mlflow.entities import Metric, Param

from deepspeed_trial.host_lock import lock_of, stand_ins

KEY = "deepspeed_trial.run"  # the tag that identifies a run


class Record:
    """A run at ``MLFLOW_TRACKING_URI``; keeps the first value of a parameter, and of a metric in a step."""

    def __init__(self, key: str, name: str, project: str, config: Mapping[str, Any], has_all: bool) -> None:
        for library in ("mlflow", "alembic"):  # they raise the errors that they log
            logging.getLogger(library).setLevel(logging.CRITICAL)
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        stand_ins().mkdir(parents=True, exist_ok=True)
        with lock_of(stand_ins(), "mlflow"):  # else two trials of a search create the database
            self._client = client = mlflow.MlflowClient()
            experiment = client.get_experiment_by_name(project)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(project)
        known = client.search_runs([experiment_id], f"tags.`{KEY}` = '{key}'", max_results=1)
        tags = {KEY: key, "mlflow.source.name": sys.argv[0], "mlflow.user": os.environ.get("USER", "unknown")}
        run = known[0] if known else client.create_run(experiment_id, run_name=name, tags=tags)
        self._id = run.info.run_id
        client.update_run(self._id, "RUNNING")
        histories = {metric: client.get_metric_history(self._id, metric) for metric in run.data.metrics}
        self._recorded = {(metric, value.step) for metric in histories for value in histories[metric]}
        new = [Param(path, value) for path, value in _flat(config) if path not in run.data.params]
        self._sent = [client.log_batch(self._id, params=new, synchronous=False)]

    def log(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step that the record lacks."""
        named = {_name(name): value for name, value in metrics.items()}
        new = [name for name in named if (name, step) not in self._recorded]
        values = [Metric(name, named[name], int(seconds * 1000), step) for name in new]
        self._sent.append(self._client.log_batch(self._id, values, synchronous=False))

    def add_file(self, path: pathlib.Path) -> None:
        """Send a file."""
        self._client.log_artifact(self._id, str(path))

    def finish(self, status: str) -> None:
        """Wait until MLflow has received everything, and end MLflow's run."""
        mlflow.flush_async_logging()
        for operation in filter(None, self._sent):  # None: the record had everything
            operation.wait()
        self._client.set_terminated(self._id, status)


def _name(text: str) -> str:
    """Return a similar name that is valid in MLflow and as the path of a file."""
    parts = re.sub(r"[^/\w.\- ]", "_", text).split("/")
    return "/".join("_" if part.strip(".") == "" else part for part in parts)[:250]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a nested mapping with their dotted paths."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield _name(f"{prefix}{key}"), str(value)[:6000]  # the longest value that MLflow takes
