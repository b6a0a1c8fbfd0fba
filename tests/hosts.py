"""Two hosts: this one and a network namespace, which has interfaces, a loopback and ports of its own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

# On Debian the hostname's address is of the loopback, as it is in a namespace for want of another.
CHIEF, OTHER = "10.213.7.1", "10.213.7.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def joined_namespace() -> Iterator[str]:
    """The name of a namespace that is joined to this one: there is the chief, here the other host."""
    name, ends = f"chief{os.getpid()}", (f"c{os.getpid()}", f"o{os.getpid()}")
    if not (shutil.which("ip") and shutil.which("nsenter")):
        pytest.skip("needs ip of iproute2 and nsenter of util-linux, for a second host")
    with contextlib.ExitStack() as made:
        try:
            ip("netns", "add", name)
            made.callback(ip, "netns", "del", name)
            ip("link", "add", ends[0], "netns", name, "type", "veth", "peer", "name", ends[1])
            ip("-n", name, "addr", "add", f"{CHIEF}/24", "dev", ends[0])
            ip("addr", "add", f"{OTHER}/24", "dev", ends[1])
            for where, interface in (["-n", name], "lo"), (["-n", name], ends[0]), ([], ends[1]):
                ip(*where, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make a second host of a network namespace: {error.stderr.strip()}")
        yield name


def entering(namespace: str) -> dict[str, list[str]]:
    """What goes before a command that is to run on a host, by its address."""
    networks = {CHIEF: f"/run/netns/{namespace}", OTHER: f"/proc/{os.getpid()}/ns/net"}
    return {address: ["nsenter", f"--net={network}"] for address, network in networks.items()}
