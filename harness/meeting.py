"""Where the ranks of a run meet: one store, which of one host's ranks only that host can reach."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket

import psutil
from torch.distributed import TCPStore

from harness.errors import InvalidInput

LOOPBACK = "127.0.0.1"


def local_size() -> int:
    """How many ranks this host has."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def meet(mine: str = "") -> None:
    """Let ranks of one host meet on its loopback alone, which no other host reaches; else at an address.

    Rank 0 opens the store, unless torchrun has. By default torch's store listens for every host, and gloo at
    the hostname's address.

    Args:
        mine: this host's address, by which other hosts' ranks reach it; found out if empty.

    Raises:
        InvalidInput: if the launcher's port is in use.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    is_one_host = size == local_size()
    mine = LOOPBACK if is_one_host else mine or _address_towards(os.environ.get("MASTER_ADDR", ""))
    for name, addresses in psutil.net_if_addrs().items():
        if mine in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if is_one_host:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    if size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if is_one_host:
            os.environ["MASTER_ADDR"] = LOOPBACK
        if os.environ.get("RANK") == "0":
            _open_store(LOOPBACK if is_one_host else "", int(os.environ["MASTER_PORT"]), os.getpid())


@functools.cache  # it stays open as long as the process
def _open_store(address: str, port: int, process: int) -> TCPStore:
    try:
        listener = socket.create_server((address, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        what = "in use by another run, or one that is still stopping; wait for its end, or give another port"
        raise InvalidInput(f"--master_port: {port}: {what}") from error
    # torch's own rendezvous, in this process and at this port, takes a store for several tenants
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def connect() -> TCPStore:
    """Return a connection of its own to the store at ``MASTER_ADDR`` and ``MASTER_PORT``."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _address_towards(host: str) -> str:
    """This host's address from which another is reached; empty where it is not known.

    Nor is it on the first host itself, where that has its own name for the loopback, as on Debian.
    """
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # which sends nothing
        address = probe.getsockname()[0]
        return "" if address.startswith("127.") else address
    return ""
