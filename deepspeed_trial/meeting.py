"""The store through which a run's ranks meet. If all ranks are on one host, other hosts cannot reach it."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import os
import re
import socket

import psutil
from torch.distributed import TCPStore

from deepspeed_trial.errors import InvalidInput

LOOPBACK = "127.0.0.1"
_stores = collections.Counter[str]()  # stores opened so far, by purpose; the numbers are equal on all ranks

LEAST = {
    "RANK": 0,
    "LOCAL_RANK": 0,
    "WORLD_SIZE": 1,
    "LOCAL_WORLD_SIZE": 1,
    "LOCAL_SIZE": 1,
    "MASTER_PORT": 1,
}


def check_ranks() -> None:
    """Check the environment variables that a launcher sets for its ranks.

    Raises:
        InvalidInput: with a line for each variable that is not a number in its range.
    """
    given = {name: os.environ[name] for name in LEAST if name in os.environ}
    errors = [
        f"{name}: {value!r}: must be a whole number of at least {LEAST[name]}; unset it, or use torchrun"
        for name, value in given.items()
        if not re.fullmatch("[0-9]{1,9}", value) or int(value) < LEAST[name]
    ]
    rank, size = given.get("RANK", "0"), given.get("WORLD_SIZE", "1")
    if not errors and int(rank) >= int(size):
        errors = [f"RANK: {rank!r}: must be below WORLD_SIZE, which is {size}; unset both, or use torchrun"]
    if errors:
        raise InvalidInput(errors)


def local_size() -> int:
    """Return the number of ranks on this host."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def is_launchers_store() -> bool:
    """Return whether torchrun opens the store, so that the store survives a restart of the ranks.

    Otherwise each start of the ranks opens a new store, and hosts may differ in their number of restarts.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(mine: str = "") -> None:
    """Set the network addresses that the ranks use.

    Ranks on one host use the loopback interface, which other hosts cannot reach. By default torch's store
    listens on all interfaces, and gloo at the hostname's address. Rank 0 opens the store, unless
    torchrun has opened it.

    Args:
        mine: the address of this host for ranks on other hosts; looked up if empty.

    Raises:
        InvalidInput: if the launcher's port is in use.
    """
    mine = mine or _own_address()
    for name, addresses in psutil.net_if_addrs().items():
        if mine in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if mine == LOOPBACK:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    if "MASTER_PORT" in os.environ and not is_launchers_store():
        if _is_one_host():
            os.environ["MASTER_ADDR"] = LOOPBACK
        if os.environ.get("RANK") == "0":
            _serve_at(int(os.environ["MASTER_PORT"]), os.getpid())


@functools.cache  # keeps the store open until the process ends
def _serve_at(port: int, process: int) -> TCPStore:
    try:
        return serve(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        what = "in use, e.g. by a run that is still stopping; wait for its end, or give another port"
        raise InvalidInput(f"--master_port: {port}: {what}") from error


def serve(port: int) -> TCPStore:
    """Open a store at a port; 0 selects any free port."""
    if _is_one_host():
        listener = socket.create_server((LOOPBACK, port))
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port))
    port = listener.getsockname()[1]
    # multi_tenant: torch's own rendezvous, in this process and at this port, uses this store, too
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def meet_in_chief(purpose: str, is_chief: bool) -> TCPStore:
    """Return this rank's connection to a new store in rank 0's process.

    The store does not end with the launcher. Every rank calls it the same number of times for a purpose.
    """
    _stores[purpose] += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") if is_launchers_store() else 0
    key = f"{purpose}/{attempt}/{_stores[purpose]}"
    meeting = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if is_chief:
        store = serve(0)
        meeting.set(key, f"{_own_address() or os.environ['MASTER_ADDR']} {store.port}")
        return store
    address, port = meeting.get(key).decode().split()
    return TCPStore(address, int(port), is_master=False)


def _is_one_host() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) == local_size()


def _own_address() -> str:
    return LOOPBACK if _is_one_host() else _address_towards(os.environ.get("MASTER_ADDR", ""))


def _address_towards(host: str) -> str:
    """Return the address of this host's interface towards another host; empty if it cannot be looked up.

    It is also empty on the first host if the host's name resolves to the loopback address, as on Debian.
    """
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        address = probe.getsockname()[0]
        return "" if address.startswith("127.") else address
    return ""
