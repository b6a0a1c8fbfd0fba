"""The processes of a run and what DeepSpeed needs of each: cores, seeds, a process group, an accelerator.

Imported before DeepSpeed, which looks for an accelerator when it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator

import torch

if not torch.cuda.is_available():  # before DeepSpeed looks for an accelerator, and warns that it found none
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or torch's optimizers look for a driver in every step

import deepspeed
import joblib
import numpy as np
import psutil
from deepspeed.accelerator import get_accelerator
from determined import core

from errors import InvalidInput

if get_accelerator().device_name() == "cpu":
    # DeepSpeed refuses fp16 on processors without instructions for it, on which torch computes it all the same, slowly.
    get_accelerator().is_fp16_supported = lambda: True
    # DeepSpeed would compile a shared-memory all-reduce for most of a minute; gloo's gives the same bits everywhere.
    _builder = get_accelerator().create_op_builder
    get_accelerator().create_op_builder = lambda op: None if op == "ShareMemCommBuilder" else _builder(op)


def _not_misleading(record: logging.LogRecord) -> bool:
    """Keeps back two warnings that come at every start and ask for nothing."""
    message = record.getMessage()
    needs_apex = "Missing package APEX" in message  # not true since DeepSpeed 0.3
    no_rate_yet = "learning rate from scheduler before it has started" in message  # DeepSpeed's own engine asks for it
    return not (needs_apex or no_rate_yet)


for _name in ("determined.pytorch", "DeepSpeed"):
    logging.getLogger(_name).addFilter(_not_misleading)
# DeepSpeed calls torch's collectives by names that torch is about to rename.
warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)


def device_type() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def share_out_cores() -> None:
    """Gives each local process its part of the cores; with all the cores each they are several times slower."""
    if _local_size() > 1 and not _user_chose_threads():
        torch.set_num_threads(threads_of_each(_local_size()))


def threads_of_each(processes: int) -> int:
    """How many threads one of a host's processes should use: fewer cores than its launcher has may be all its own."""
    cores = joblib.cpu_count()
    shared = cores
    if hasattr(os, "sched_getaffinity"):  # on Linux
        launchers = len(os.sched_getaffinity(os.getppid()))
        if len(os.sched_getaffinity(0)) < launchers:
            shared = launchers
    return max(1, min(cores, shared // processes))


def _local_size() -> int:
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _user_chose_threads() -> bool:
    """Whether ``OMP_NUM_THREADS`` is the user's; torchrun sets it to 1 where it is missing, for any number of cores."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(psutil.Error):
            return "OMP_NUM_THREADS" in psutil.Process(os.getppid()).environ()
    return "OMP_NUM_THREADS" in os.environ


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch alike on every rank."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def local_processes() -> core.DistributedContext:
    """Joins the processes that ``deepspeed`` or ``torchrun`` started, or is the only one."""
    start_torch_distributed()
    env = os.environ
    size = int(env["WORLD_SIZE"])
    pub_port, pull_port = _free_ports(2) if size > 1 else (0, 0)  # fixed ones would keep a host to one run at a time
    return core.DistributedContext(
        rank=int(env["RANK"]),
        size=size,
        local_rank=int(env["LOCAL_RANK"]),
        local_size=_local_size(),
        cross_rank=int(env.get("CROSS_RANK") or env.get("GROUP_RANK") or 0),
        cross_size=int(env.get("CROSS_SIZE") or env.get("GROUP_WORLD_SIZE") or 1),
        chief_ip=env.get("DET_CHIEF_IP") or env.get("MASTER_ADDR"),
        pub_port=pub_port,
        pull_port=pull_port,
    )


@contextlib.contextmanager
def watching_peers(distributed: core.DistributedContext) -> Iterator[None]:
    """Ends this process soon after another rank of this host was killed, instead of waiting for it for ever.

    Where ``SEARCH_PID`` names the process of a search, its end stops the training as a SIGTERM does.
    """
    search = int(os.environ.get("SEARCH_PID", 0))
    here = distributed.allgather((distributed.rank, socket.gethostname(), os.getpid()))
    peers = {pid: rank for rank, host, pid in here if host == socket.gethostname() and pid != os.getpid()}
    done = threading.Event()

    def watch() -> None:
        stopping = False
        while not done.wait(1):
            if search and not stopping and not _is_alive(search):
                stopping = True
                os.kill(os.getpid(), signal.SIGTERM)
            for pid, rank in peers.items():
                if not _is_alive(pid) and not done.wait(3):  # time for a collective's own error
                    print(f"rank {rank} is gone; --resume latest goes on from the last checkpoint", file=sys.stderr)
                    os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_torch_distributed() -> None:
    """Starts torch's process group and DeepSpeed's; one process alone needs no launcher and no port.

    Raises:
        InvalidInput: if there are more processes than GPUs.
    """
    if torch.distributed.is_initialized():
        return  # by an earlier run in this process
    atexit.register(torch.distributed.destroy_process_group)
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if torch.cuda.is_available():
            gpus = torch.cuda.device_count()
            if _local_size() > gpus:
                raise InvalidInput(
                    f"--nproc-per-node or --num_gpus: {_local_size()}: more than this host's GPUs; use at most {gpus}"
                )
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        deepspeed.init_distributed(auto_mpi_discovery=False)
        return
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    backend = get_accelerator().communication_backend_name()
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(auto_mpi_discovery=False)


def _free_ports(count: int) -> list[int]:
    """Ports that are free on rank 0's host, the same on every rank."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        ports = [each.getsockname()[1] for each in sockets]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    torch.distributed.broadcast_object_list(ports, src=0, device=device)
    return ports
