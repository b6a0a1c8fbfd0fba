"""What a trial on a Determined cluster is told, and how it ends there."""

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
TO_THE_END = (SINGLE, "random", "grid")  # searchers that stop no trial
RECORDED_WITHIN = 10.0  # seconds that the master may take for a validation

logger = logging.getLogger("deepspeed_trial")


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


def trial_seed(experiment: Experiment) -> int:
    """The seed of this trial: in an experiment of one trial the file's, as off a cluster.

    The master draws one for each trial, by a generator that starts from the file's seed, which gives a single
    trial another seed than a run of the same file off a cluster.
    """
    return experiment.seed if experiment.searcher == SINGLE else cluster_info().trial.trial_seed


@contextlib.contextmanager
def errors_end_the_trial() -> Iterator[None]:
    """On a cluster turns ``InvalidInput`` into ``det.InvalidHP``, so that a search goes on.

    The errors stay in the trial's log, and the trial is not restarted. Nor is one that was stopped because
    its loss is not finite or its memory is not enough.
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
    """Ends the process as soon as Determined has reported invalid hyperparameters; goes around its context.

    The master gives the container 10 seconds from the report on, then kills it and shows the trial as
    canceled. Python's own end alone can take as long on a busy host.
    """
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.__context__, det.InvalidHP):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def log_from_chief(is_chief: bool) -> None:
    """Let Determined's loggers print everything on the chief, and warnings alone on other ranks.

    Two lines that nobody can act on are left out: which object holds a rank's place among the ranks, and that
    the files of a checkpoint on a shared file system need no download.
    """
    level = logging.DEBUG if cluster_info().trial._debug else logging.INFO
    logging.basicConfig(level=level if is_chief else logging.WARNING, format=det.LOG_FORMAT)
    logging.getLogger("determined.common.storage.shared").setLevel(logging.ERROR)
    logging.getLogger("determined.pytorch").addFilter(
        lambda record: "ModelParallelUnit(" not in record.getMessage()
    )


def check_slots(processes: int) -> None:
    """Raises ``InvalidInput`` unless one process was started for each of the trial's slots."""
    slots = sum(cluster_info().container_slot_counts)
    if slots and processes != slots:
        raise InvalidInput(
            f"resources.slots_per_trial: {slots}: but {processes} processes were started; have"
            " python3 -m deepspeed_trial.launch before the command in the file's entrypoint"
        )
