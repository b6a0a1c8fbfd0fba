"""A trial on two hosts: this one and a network namespace, which has interfaces, a loopback and ports of its own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from typing import Any

import pytest
from containers import ENTRYPOINT, SMALL, container
from master import Master
from support import environment, execute, free_port

# On Debian the hostname's address is of the loopback, as it is in a namespace for want of another.
CHIEF, OTHER = "10.213.7.1", "10.213.7.2"
RECORD = 'python3 -c \'import json, os; json.dump(dict(os.environ), open("environment-" + os.environ["RANK"], "w"))\''


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespace():
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


def test_a_trial_on_two_hosts(tmp_path, namespace):
    """One process on each; ssh's command line holds no secret, and what a shell would read arrives as it was."""
    networks = {CHIEF: f"/run/netns/{namespace}", OTHER: f"/proc/{os.getpid()}/ns/net"}
    hosts: dict[str, dict[str, Any]] = {
        address: {"files": str(tmp_path / address), "enter": ["nsenter", f"--net={network}"]}
        for address, network in networks.items()
    }
    mine = {"MINE": """it's "$HOME" `id`; \\ """, "EMPTY": ""}
    ports = {name: str(free_port()) for name in ("C10D_PORT", "DTRAIN_SSH_PORT")}
    (tmp_path / OTHER).mkdir()
    (tmp_path / OTHER / "shared").symlink_to(tmp_path / CHIEF / "shared")
    with Master(OTHER) as master:
        for rank, address in enumerate(hosts):
            folder = tmp_path / address
            variables = container(
                folder,
                master,
                1,
                {**SMALL, "max_length": {"batches": 20}},
                rank=rank,
                addresses=tuple(hosts),
                config={"entrypoint": "python3 -m harness.launch bash record.sh"},
            )
            (folder / "model/record.sh").write_text(f"{RECORD}\nexec python3 train.py\n")
            hosts[address]["environment"] = {**variables, **ports, **mine, "TEST_HOSTS": json.dumps(hosts)}
            hosts[address]["environment"]["HOST_OF_ITS_OWN"] = address
        other = subprocess.Popen(
            ["bash", "-c", ENTRYPOINT],
            cwd=tmp_path / OTHER / "model",
            env=environment(**hosts[OTHER]["environment"]),
            start_new_session=True,
        )
        try:
            command = [*hosts[CHIEF]["enter"], "bash", "-c", ENTRYPOINT]
            chief = tmp_path / CHIEF
            run = execute(command, chief, cwd=chief / "model", **hosts[CHIEF]["environment"])
        finally:  # as the master does with containers that wait for the chief
            os.killpg(other.pid, signal.SIGKILL)
            other.wait()
    assert run.code == 0, run.stderr
    assert master.bodies("/daemon") and max(master.metrics("validation")) == 20
    output = run.stdout + run.stderr
    assert "identifier" not in output and "secret-token" not in output
    for rank, address in enumerate(hosts):
        recorded = json.loads((tmp_path / CHIEF / f"model/environment-{rank}").read_text())
        expected = {**mine, "HOST_OF_ITS_OWN": address, "DET_SESSION_TOKEN": "secret-token"}
        assert expected.items() <= recorded.items()
        config = hosts[address]["environment"]["DET_EXPERIMENT_CONFIG"]
        assert recorded["DET_EXPERIMENT_CONFIG"] == config
