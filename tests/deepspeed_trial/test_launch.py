"""The launch layer of a trial on a cluster."""

import base64
import json
import os
import subprocess
import sys
import types
from typing import Any

import determined as det
import pytest
from containers import SMALL, run_container
from master import Master

from deepspeed_trial import launch

BUSY = max(20, 2 * (os.cpu_count() or 1))  # processes that do nothing but compute


def cluster(hosts: int, slots: int = 2, allocation: str = "1.task.0", rank: int = 0) -> Any:
    """The part of a container's ClusterInfo that the launch layer reads."""
    read = {"container_addrs": [f"10.0.0.{host}" for host in range(hosts)], "allocation_id": allocation}
    return types.SimpleNamespace(**read, container_rank=rank, container_slot_counts=[slots] * hosts)


def option(command: list[str], name: str) -> str:
    (found,) = (each for each in command if each.startswith(f"--{name}="))
    return found.partition("=")[2]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Undo a test's changes of the environment."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_the_launcher_is_waited_for():
    """Determined would sleep for a grace period, then send the launcher a signal: exit code 241."""
    for hosts in (1, 2):
        command = launch.in_each_slot(cluster(hosts), ["train"])
        assert command[command.index("--on-exit") + 1] == "WAIT"
        assert command[command.index("--on-fail") + 1] == "SIGTERM"  # a dead worker still ends the others
        assert "--log_level=warning" in command


def test_two_trials_never_share_a_port(monkeypatch):
    def port(allocation, hosts):
        command = launch.in_each_slot(cluster(hosts, allocation=allocation), ["train"])
        return int(option(command, "master_port"))

    ports = {port(f"1.{number}.0", hosts) for number in range(5) for hosts in (1, 2)}
    assert len(ports) == 5 and all(1024 < each < 32768 for each in ports)  # below the ports that systems lend
    monkeypatch.setitem(os.environ, "C10D_PORT", "29403")  # kept by the master for this trial alone
    assert port("1.0.0", 1) == port("1.0.0", 2) == 29403


@pytest.mark.parametrize(("visible", "devices"), [("", [0, 1, 2]), ("2,GPU-7", ["2", "GPU-7"])])
@pytest.mark.parametrize(("hosts", "rank", "chief"), [(1, 0, "127.0.0.1"), (3, 1, "10.0.0.0")])
def test_a_container_has_a_process_a_slot(monkeypatch, visible, devices, hosts, rank, chief):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", visible)
    command = launch.in_each_slot(cluster(hosts, slots=3, rank=rank), ["train"])
    slots = [*json.loads(base64.urlsafe_b64decode(option(command, "world_info"))).values()]
    assert slots.pop(rank) == devices and slots == [[0, 1, 2]] * (hosts - 1)
    assert (option(command, "node_rank"), option(command, "master_addr")) == (str(rank), chief)
    assert str(len(devices)) in command  # workers that the pid server knows


def test_off_a_cluster_it_says_what_to_run(capsys):
    assert det.get_cluster_info() is None
    here = "deepspeed_trial.launch: not on a cluster; here run "
    for arguments, line in ([], "usage: "), (["python3", "train.py"], here):
        assert launch.main(arguments) == 2
        assert capsys.readouterr().err.startswith(line + " ".join(arguments))


@pytest.mark.soak
def test_a_trial_on_a_busy_host_ends_well(tmp_path):
    """DeepSpeed's launcher ends many seconds after its workers where 20 processes share 2 cores."""
    busy: list[subprocess.Popen] = []

    def keep_busy():
        if master.metrics("training") and not busy:
            busy.extend(subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY))

    try:
        with Master() as master:
            master.on_post = keep_busy
            run = run_container(tmp_path / "container", master, 2, {**SMALL, "max_length": {"batches": 20}})
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert busy and run.code == 0, run.stderr
    assert master.bodies("/checkpoints")[-1]["metadata"]["steps_completed"] == 20
