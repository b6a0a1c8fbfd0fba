"""A trial on a Determined cluster: its configuration, its logs and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import determined as det

from deepspeed_trial.errors import InvalidInput, LostRank, TrainingStopped, UnreadableData, is_said_here
from deepspeed_trial.experiment import Experiment

SINGLE = "single"  # the searcher of an experiment with one trial

logger = logging.getLogger("deepspeed_trial")


def on_cluster() -> bool:
    """Return whether this process runs in a trial of a Determined cluster."""
    info = det.get_cluster_info()
    return info is not None and info.task_type == "TRIAL"


def cluster_info() -> det.ClusterInfo:
    """Return the cluster's description of this trial; requires a cluster."""
    info = det.get_cluster_info()
    assert info is not None and on_cluster()
    return info


def cluster_experiment() -> Experiment | None:
    """Return the experiment of this process's trial; None without a cluster.

    The master has checked the experiment's fields and chosen the hyperparameters.
    """
    if not on_cluster():
        return None
    info = cluster_info()
    return Experiment(info.trial._config, info.trial.hparams)


def trial_seed(experiment: Experiment) -> int:
    """Return this trial's seed: ``experiment_seed`` for a single trial, the master's seed in a search.

    The master draws each trial's seed from a generator with ``experiment_seed``. For a single trial, the
    drawn seed would differ from the seed of a local run with the same configuration.
    """
    return experiment.seed if experiment.searcher == SINGLE else cluster_info().trial.trial_seed


@contextlib.contextmanager
def errors_end_the_trial() -> Iterator[None]:
    """Turn errors that a restart cannot cure into ``det.InvalidHP`` on a cluster, so that a search continues.

    Examples are bad input, a loss that is not finite, and too little memory. The trial's log shows the error
    lines, and the master does not restart the trial.
    """
    try:
        yield
    except (InvalidInput, TrainingStopped) as error:
        if on_cluster() and not isinstance(error, (LostRank, UnreadableData)):
            if is_said_here(error):
                print(error, file=sys.stderr)
            raise det.InvalidHP(str(error)) from error
        raise


@contextlib.contextmanager
def leaves_once_reported() -> Iterator[None]:
    """End the process as soon as Determined has reported invalid hyperparameters.

    The master kills the container 10 seconds after the report and shows the trial as canceled. A regular exit
    of Python can take longer on a busy host.
    """
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.__context__, det.InvalidHP):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def log_from_chief(experiment: Experiment, is_chief: bool) -> None:
    """Let Determined's loggers print everything on the chief, and only warnings on other ranks.

    The function also silences two useless lines: the representation of an object with the data-parallel
    ranks, and a note that a checkpoint on a shared file system needs no download.
    """
    level = logging.DEBUG if experiment.config.get("debug") else logging.INFO
    logging.basicConfig(level=level if is_chief else logging.WARNING, format=det.LOG_FORMAT)
    logging.getLogger("determined.common.storage.shared").setLevel(logging.ERROR)
    logging.getLogger("determined.pytorch").addFilter(
        lambda record: "ModelParallelUnit(" not in record.getMessage()
    )


def check_slots(processes: int) -> None:
    """Raise ``InvalidInput`` unless the trial has one process for each slot."""
    slots = sum(cluster_info().container_slot_counts)
    if slots and processes != slots:
        raise InvalidInput(
            f"resources.slots_per_trial: {slots}: the launcher started {processes} processes; put"
            " 'python3 -m deepspeed_trial.launch' before the command in the file's entrypoint"
        )
