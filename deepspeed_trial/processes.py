"""Cores and process group of a run's processes."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os

import deepspeed
import joblib
import psutil
import torch
from deepspeed.accelerator import get_accelerator
from determined import core

from deepspeed_trial.cluster import cluster_info
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.experiment import HANG_AFTER
from deepspeed_trial.meeting import check_ranks, local_size, meet
from deepspeed_trial.messages import Ranks
from deepspeed_trial.patches.process import limit_waiting, prepare_process
from deepspeed_trial.watch import joining

PATIENCE = 3  # a collective waits this multiple of ``hang_after`` for a slow rank
MANUAL = "DET_MANUAL_INIT_DISTRIBUTED"  # Determined's variable: the trial starts the process group itself


def device_type() -> str:
    """Return ``cuda`` if there is a GPU, ``mps`` for a Mac's GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else str(get_accelerator().device_name())


def share_cores() -> None:
    """Limit each local process to its share of the cores; with all cores, each would be far slower."""
    check_ranks()
    if local_size() > 1 and not _user_chose_threads():
        torch.set_num_threads(threads_per_process(local_size()))


def threads_per_process(processes: int) -> int:
    """Return the number of threads per process, if ``processes`` share this host.

    A process that is bound to fewer cores than its launcher may use all its cores.
    """
    cores = joblib.cpu_count()
    shared = cores
    if hasattr(os, "sched_getaffinity"):  # on Linux
        launchers = len(os.sched_getaffinity(os.getppid()))
        if len(os.sched_getaffinity(0)) < launchers:
            shared = launchers
    return max(1, min(cores, shared // processes))


def threads_of_each(here: int) -> int:
    """Return the threads of each of the ``here`` ranks that this process starts; see ``share_cores``."""
    if here == 1 or _user_chose_threads():
        share_cores()
        return torch.get_num_threads()
    return threads_per_process(here)


def _user_chose_threads() -> bool:
    """Return whether the user set ``OMP_NUM_THREADS``; torchrun sets it to 1 if it is missing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(psutil.Error):
            return "OMP_NUM_THREADS" in psutil.Process(os.getppid()).environ()
    return "OMP_NUM_THREADS" in os.environ


def start_process_group(hang_after: float = HANG_AFTER) -> None:
    """Start the process group of torch and DeepSpeed; a single process needs no launcher and no port.

    Args:
        hang_after: seconds to wait until other ranks have joined; collectives wait three times as long.

    Raises:
        InvalidInput: if there are more processes than GPUs, or the launcher's port is in use.
    """
    prepare_process()
    meet()
    if torch.distributed.is_initialized() or os.environ.get(MANUAL):
        return  # an earlier run in this process has started the group, or the trial starts it
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device_type() != "cpu":
            _take_gpu()
    else:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")  # DeepSpeed reads them
        backend = get_accelerator().communication_backend_name()
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    _init_distributed(hang_after)
    atexit.register(torch.distributed.destroy_process_group)


def _init_distributed(hang_after: float) -> None:
    """Start the group with a time limit; DeepSpeed's default differs between releases, 10 or 30 minutes."""
    minutes = float(os.environ.get("DEEPSPEED_TIMEOUT") or PATIENCE * hang_after / 60)  # DeepSpeed's variable
    limit = datetime.timedelta(minutes=minutes)
    limit_waiting(limit)
    with joining(hang_after):
        deepspeed.init_distributed(auto_mpi_discovery=False, timeout=limit)


def _take_gpu() -> None:
    gpus, processes = torch.cuda.device_count(), local_size()
    if device_type() == "mps":
        reason = "a Mac's GPU trains in one process; use 1, or set DS_ACCELERATOR=cpu"
        raise InvalidInput(f"--nproc-per-node: {processes}: {reason}")
    if processes > gpus:
        raise InvalidInput(
            f"--nproc-per-node or --num_gpus: {processes}: more than this host's GPUs; use at most {gpus}"
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def join_local_processes(hang_after: float) -> core.DistributedContext:
    """Join the processes that ``deepspeed``, ``torchrun`` or ``srun`` started, or start alone."""
    start_process_group(hang_after)
    return _ranks()


def _ranks() -> Ranks:
    env = os.environ
    return Ranks(
        rank=int(env.get("RANK", 0)),
        size=int(env.get("WORLD_SIZE", 1)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_size=local_size(),
        cross_rank=int(env.get("CROSS_RANK") or env.get("GROUP_RANK") or 0),
        cross_size=int(env.get("CROSS_SIZE") or env.get("GROUP_WORLD_SIZE") or 1),
        chief_ip=env.get("DET_CHIEF_IP") or env.get("MASTER_ADDR"),
    )


def join_cluster_processes(hang_after: float) -> core.DistributedContext | None:
    """Join the processes that Determined's launch layer started; without it, start alone and return None."""
    if "USE_DEEPSPEED" not in os.environ:  # Determined's launch layers set it
        start_process_group(hang_after)
        return None
    prepare_process()
    info = cluster_info()
    meet(info.container_addrs[info.container_rank])
    if not os.environ.get(MANUAL):
        _init_distributed(hang_after)
    return _ranks()
