"""Hosts: this one and network namespaces, each with a name, interfaces, a loopback and ports of its own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

# On Debian the hostname's address is of the loopback, as it is in a namespace for want of another.
CHIEF, OTHER, THIRD = (f"10.213.{os.getpid() % 250}.{number}" for number in (1, 2, 3))


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _ids(address: str) -> tuple[str, str, str]:
    """The names of a host's namespace, and of the two ends of its link to the bridge."""
    mark = f"{os.getpid()}{address[-1]}"
    return f"host{mark}", f"i{mark}", f"o{mark}"


@contextlib.contextmanager
def joined_namespaces(*addresses: str) -> Iterator[None]:
    """Joins namespaces with these addresses to this one, which has the address ``OTHER``, by a bridge."""
    if not all(shutil.which(each) for each in ("ip", "nsenter", "unshare")):
        pytest.skip("needs ip of iproute2, nsenter and unshare of util-linux, for more hosts")
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
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make another host of a network namespace: {error.stderr.strip()}")
        yield


def entering(*addresses: str) -> dict[str, list[str]]:
    """What goes before a command that is to run on a host, by its address; its name is ``host-1`` and so on."""
    entered = {}
    for address in addresses:
        mine = f"/proc/{os.getpid()}/ns/net"
        network = mine if address == OTHER else f"/run/netns/{_ids(address)[0]}"
        named = ["unshare", "--uts", "sh", "-c", f'hostname host-{address[-1]}; exec "$@"', "sh"]
        entered[address] = ["nsenter", f"--net={network}", *named]
    return entered


def cut(address: str, is_cut: bool = True) -> None:
    """Takes a host's cable out, or puts it in again."""
    ip("link", "set", _ids(address)[2], "down" if is_cut else "up")
