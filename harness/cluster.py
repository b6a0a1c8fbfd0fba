"""What a trial on a Determined cluster is told, and how it ends there."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import determined as det

from harness.errors import InvalidInput, TrainingStopped
from harness.experiment import Experiment


def on_cluster() -> bool:
    """Whether this process runs in a trial of a Determined cluster."""
    info = det.get_cluster_info()
    return info is not None and info.task_type == "TRIAL"


def cluster_info() -> det.ClusterInfo:
    """What the cluster says of this trial; only on a cluster."""
    info = det.get_cluster_info()
    assert info is not None and on_cluster()
    return info


def cluster_experiment() -> Experiment | None:
    """The experiment of the trial that this process runs in; None off a cluster.

    Its fields were checked by the master, which also chose the hyperparameters.
    """
    if not on_cluster():
        return None
    info = cluster_info()
    return Experiment(info.trial._config, info.trial.hparams)


@contextlib.contextmanager
def errors_end_the_trial() -> Iterator[None]:
    """On a cluster turns ``InvalidInput`` into ``det.InvalidHP``, so that a search goes on.

    The errors stay in the trial's log, and the trial is not restarted. Nor is one that was stopped because
    its loss is not finite or its memory is not enough.
    """
    try:
        yield
    except (InvalidInput, TrainingStopped) as error:
        if on_cluster():
            print(error, file=sys.stderr)
            raise det.InvalidHP(str(error)) from error
        raise


def log_from_chief(is_chief: bool) -> None:
    """Has Determined's loggers print everything on the chief, and warnings alone on other ranks."""
    level = logging.DEBUG if cluster_info().trial._debug else logging.INFO
    logging.basicConfig(level=level if is_chief else logging.WARNING, format=det.LOG_FORMAT)


def check_slots(processes: int) -> None:
    """Raises ``InvalidInput`` unless one process was started for each of the trial's slots."""
    slots = sum(cluster_info().container_slot_counts)
    if slots and processes != slots:
        raise InvalidInput(
            f"resources.slots_per_trial: {slots}: but {processes} processes were started; have"
            " python3 -m harness.launch before the command in the file's entrypoint"
        )
