"""The processes of a run: their cores and process group."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket

import deepspeed
import determined as det
import joblib
import psutil
import torch
from deepspeed.accelerator import get_accelerator
from determined import core
from typing_extensions import override

from harness import deepspeed_patches
from harness.cluster import cluster_info
from harness.errors import InvalidInput
from harness.experiment import HANG_AFTER
from harness.hangs.joining import joining

PATIENCE = 3  # times as long as no rank may move, a collective waits for one that is slow, but works
FLUSHING = 5_000  # milliseconds that a rank may take to send its last message
MANUAL = "DET_MANUAL_INIT_DISTRIBUTED"  # Determined's variable: the trial starts the process group itself


def device_type() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def share_cores() -> None:
    """Gives each local process its part of the cores; with all of them each is several times slower."""
    if _local_size() > 1 and not _user_chose_threads():
        torch.set_num_threads(threads_per_process(_local_size()))


def threads_per_process(processes: int) -> int:
    """How many threads one of a host's processes should use.

    A process that is bound to fewer cores than its launcher may have those all to itself.
    """
    cores = joblib.cpu_count()
    shared = cores
    if hasattr(os, "sched_getaffinity"):  # on Linux
        launchers = len(os.sched_getaffinity(os.getppid()))
        if len(os.sched_getaffinity(0)) < launchers:
            shared = launchers
    return max(1, min(cores, shared // processes))


def threads_of_each(here: int) -> int:
    """How many threads a rank has, as ``share_cores`` gives them, of those that this process is to start."""
    if here == 1 or _user_chose_threads():
        share_cores()
        return torch.get_num_threads()
    return threads_per_process(here)


def _local_size() -> int:
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _user_chose_threads() -> bool:
    """Whether ``OMP_NUM_THREADS`` is the user's; torchrun sets it to 1 where it is missing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(psutil.Error):
            return "OMP_NUM_THREADS" in psutil.Process(os.getppid()).environ()
    return "OMP_NUM_THREADS" in os.environ


def start_process_group(hang_after: float = HANG_AFTER) -> None:
    """Starts torch's process group and DeepSpeed's; one process alone needs no launcher and no port.

    Args:
        hang_after: seconds that another rank may need to join, and a third of those that a collective waits.

    Raises:
        InvalidInput: if there are more processes than GPUs, or the launcher's port is in use.
    """
    deepspeed_patches.prepare_accelerator()
    if torch.distributed.is_initialized() or os.environ.get(MANUAL):
        return  # by an earlier run in this process; or by the trial itself
    size = int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ and size > 1:
        if size > _local_size():
            _choose_interface(_address_towards(os.environ.get("MASTER_ADDR", "")))
        if torch.cuda.is_available():
            _take_gpu()
    else:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")  # which DeepSpeed asks for
        backend = get_accelerator().communication_backend_name()
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    try:
        with joining(hang_after):
            _init_distributed(hang_after)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        what = "in use by another run, or one that is still stopping; wait for its end, or give another port"
        raise InvalidInput(f"--master_port: {os.environ['MASTER_PORT']}: {what}") from error
    atexit.register(torch.distributed.destroy_process_group)


def _init_distributed(hang_after: float) -> None:
    """Without a time limit of its own DeepSpeed takes one of its release: 30 minutes once, 10 now."""
    minutes = float(os.environ.get("DEEPSPEED_TIMEOUT") or PATIENCE * hang_after / 60)  # DeepSpeed's variable
    limit = datetime.timedelta(minutes=minutes)
    deepspeed_patches.limit_waiting(limit)
    deepspeed.init_distributed(auto_mpi_discovery=False, timeout=limit)


def _take_gpu() -> None:
    gpus, processes = torch.cuda.device_count(), _local_size()
    if processes > gpus:
        raise InvalidInput(
            f"--nproc-per-node or --num_gpus: {processes}: more than this host's GPUs; use at most {gpus}"
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


class Ranks(core.DistributedContext):
    """Determined's ranks, of which none leaves before what it has told the others is on its way.

    Determined only closes its sockets: a process that ends at once, as a forked one does, may take with it
    the last broadcast, for which another rank then waits.
    """

    @override
    def close(self) -> None:
        servers = [getattr(self, name, None) for name in ("_chief_zmq", "_local_chief_zmq")]
        clients = [getattr(self, name, None) for name in ("_worker_zmq", "_local_worker_zmq")]
        senders = [each._pub_socket for each in servers if each]
        for sender in senders + [each._push_socket for each in clients if each]:
            sender.context.destroy(linger=FLUSHING)
        super().close()


def join_local_processes(hang_after: float) -> core.DistributedContext:
    """Joins the processes that ``deepspeed``, ``torchrun`` or ``srun`` started, or is the only one."""
    start_process_group(hang_after)
    env = os.environ
    size = int(env.get("WORLD_SIZE", 1))
    ports = {}
    if size > 1 and torch.distributed.is_initialized():
        # Determined's own ports are fixed, which would keep a host to one run at a time.
        ports = dict(zip(("pub_port", "pull_port"), _free_ports(2), strict=True))
    return Ranks(
        rank=int(env.get("RANK", 0)),
        size=size,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_size=_local_size(),
        cross_rank=int(env.get("CROSS_RANK") or env.get("GROUP_RANK") or 0),
        cross_size=int(env.get("CROSS_SIZE") or env.get("GROUP_WORLD_SIZE") or 1),
        chief_ip=env.get("DET_CHIEF_IP") or env.get("MASTER_ADDR"),
        **ports,
    )


def join_cluster_processes(hang_after: float) -> core.DistributedContext | None:
    """Joins the processes that Determined's launch layer started; None for one that it did not start."""
    if not det._DistributedBackend().use_deepspeed():
        start_process_group(hang_after)
        return None
    deepspeed_patches.prepare_accelerator()
    info = cluster_info()
    if len(info.container_addrs) > 1:
        _choose_interface(info.container_addrs[info.container_rank])
    if not os.environ.get(MANUAL):
        with joining(hang_after):
            _init_distributed(hang_after)
    return core.DistributedContext.from_deepspeed()


def _choose_interface(mine: str) -> None:
    """Has gloo use an address of this host; it takes the hostname's, on Debian one of the loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        if mine in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _address_towards(host: str) -> str:
    """This host's address from which another is reached; empty where it is not known.

    Nor is it on the first host itself, where that has its own name for the loopback, as on Debian.
    """
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # which sends nothing
        address = probe.getsockname()[0]
        return "" if address.startswith("127.") else address
    return ""


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
