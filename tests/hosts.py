"""Hosts: this one and network namespaces, each with its name, interfaces, loopback and ports."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from matrix import DEEPSPEED
from support import PROJECT, environment, overrides, started, wait_until
from warm import Started

# A training of 40 steps; at this learning rate a difference of rounding does not grow
SHORT = overrides(
    data__dataset="digits",
    scheduling_unit=1,
    hyperparameters__max_length="{batches: 40}",
    **{f"{DEEPSPEED}scheduler__params__warmup_num_steps": 5, f"{DEEPSPEED}optimizer__params__lr": 0.0005},
)

# Debian gives the hostname an address of the loopback, and so does a namespace without other addresses.
CHIEF, OTHER, THIRD = (f"10.213.{os.getpid() % 250}.{number}" for number in (1, 2, 3))
# Runs a program in a network namespace, under a hostname: ``-c ENTER NETWORK NAME PROGRAM...``
ENTER = """
import ctypes, os, runpy, socket, sys
network, name, *sys.argv = sys.argv[1:]
libc = ctypes.CDLL(None)
assert not libc.setns(os.open(network, os.O_RDONLY), 0) and not libc.unshare(0x04000000)  # of CLONE_NEWUTS
socket.sethostname(name)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _ids(address: str) -> tuple[str, str, str]:
    """The names of a host's namespace, and of the two ends of its link to the bridge."""
    mark = f"{os.getpid()}{address[-1]}"
    return f"host{mark}", f"i{mark}", f"o{mark}"


@contextlib.contextmanager
def joined_namespaces(*addresses: str) -> Iterator[None]:
    """Join namespaces with these addresses to this one, whose address is ``OTHER``, by a bridge."""
    bridge = f"br{os.getpid()}"
    with contextlib.ExitStack() as made:
        try:
            ip("link", "add", bridge, "type", "bridge")
            made.callback(ip, "link", "del", bridge)
            ip("addr", "add", f"{OTHER}/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for address in addresses:
                name, inner, outer = _ids(address)
                ip("netns", "add", name)
                made.callback(ip, "netns", "del", name)
                ip("link", "add", inner, "netns", name, "type", "veth", "peer", "name", outer)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", inner)
                ip("link", "set", outer, "master", bridge)
                for where, interface in (["-n", name], "lo"), (["-n", name], inner), ([], outer):
                    ip(*where, "link", "set", interface, "up")
        except (
            OSError,
            subprocess.CalledProcessError,
        ) as error:  # iproute2 is missing, or the right to use it
            pytest.skip(f"cannot make another host of a network namespace: {getattr(error, 'stderr', error)}")
        yield


def _place(address: str) -> list[str]:
    """A host's network namespace and its name: ``host-1`` and so on."""
    mine = f"/proc/{os.getpid()}/ns/net"
    return [mine if address == OTHER else f"/run/netns/{_ids(address)[0]}", f"host-{address[-1]}"]


def entering(address: str) -> list[str]:
    """The words before a command that make it run on a host."""
    network, name = _place(address)
    return ["nsenter", f"--net={network}", "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]


@contextlib.contextmanager
def started_on(
    addresses: list[str], arguments: list[str], each: int = 1, **environment: str
) -> Iterator[list[Started]]:
    """Start ``each`` ranks of a Python program on every host, in forks."""
    hosts, ranks = len(addresses), []
    with contextlib.ExitStack() as stack:
        for rank in range(each * hosts):
            host, local = divmod(rank, each)
            numbers = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": host, "WORLD_SIZE": each * hosts}
            numbers |= {"LOCAL_WORLD_SIZE": each, "GROUP_WORLD_SIZE": hosts}
            numbers |= {"MASTER_PORT": 29500}  # a namespace has all its ports to itself
            variables: dict[str, Any] = {name: str(number) for name, number in numbers.items()} | environment
            program = ["-c", ENTER, *_place(addresses[host]), *arguments]
            ranks.append(stack.enter_context(started(program, MASTER_ADDR=CHIEF, **variables)))
        yield ranks


@contextlib.contextmanager
def processes(folder: pathlib.Path, *commands: tuple[list[str], dict]) -> Iterator[list[psutil.Popen]]:
    """Start commands, each with its variables, in new processes; kill them and their children in the end."""
    made: list[psutil.Popen] = []
    try:
        for number, (command, variables) in enumerate(commands):
            env = environment(**variables)
            with open(folder / f"{number}.log", "w") as log:
                made.append(psutil.Popen(command, cwd=PROJECT, env=env, stdout=log, stderr=log))
        yield made
    finally:
        for process in made:
            for each in [*process.children(recursive=True), process] if process.is_running() else []:
                each.kill()
            process.wait()


def wait_for_step(step: int, output: pathlib.Path, ranks: list[Any]) -> None:
    """Wait until a run has reported a step: its ``scheduling_unit`` is 1."""
    file = output / "metrics.jsonl"
    wait_until(lambda: file.exists() and file.read_text().count('"training"') >= step, *ranks)


def processes_on(address: str) -> list[str]:
    """The processes that run in a host's namespace."""
    return ip("netns", "pids", _ids(address)[0]).split()


def cut(address: str, is_cut: bool = True) -> None:
    """Take a host's cable out, or put it in again."""
    ip("link", "set", _ids(address)[2], "down" if is_cut else "up")
