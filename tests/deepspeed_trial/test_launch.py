"""The launch layer of a trial on a cluster: Determined's, with the replacements of ``deepspeed_trial.launch``."""

import base64
import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import determined as det
import pytest
from containers import SMALL, run_container
from determined.launch import deepspeed
from master import Master

from deepspeed_trial import launch

BUSY = max(20, 2 * (os.cpu_count() or 1))  # processes that do nothing but compute


def cluster(hosts: int, slots: int = 2, allocation: str = "1.task.0") -> Any:
    """The part of a container's ClusterInfo that the launch layer reads."""
    read = {"container_addrs": [f"10.0.0.{host}" for host in range(hosts)], "allocation_id": allocation}
    return types.SimpleNamespace(**read, container_slot_counts=[slots] * hosts)


def layer_of(info: Any) -> Any:
    """Determined's launch layer for several hosts, replaced where ``deepspeed_trial.launch`` does."""
    layer = types.SimpleNamespace(**vars(deepspeed))
    launch.patch_for_several_hosts(layer, info)
    return layer


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    """Undo a test's changes of the environment and of files near the code."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(launch.constants, "MANAGED_TRAINING_MODEL_COPY", str(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)


def test_the_launcher_is_waited_for():
    """Determined would sleep for a grace period, then send the launcher a signal: exit code 241."""
    here = launch.on_this_host(cluster(hosts=1), ["train"])
    for command in here, layer_of(cluster(hosts=2)).create_pid_server_cmd("1.task.0", 2):
        assert command[command.index("--on-exit") + 1] == "WAIT"
        assert command[command.index("--on-fail") + 1] == "SIGTERM"  # a dead worker still ends the others


def test_the_launcher_prints_warnings_alone():
    assert "--log_level=warning" in launch.on_this_host(cluster(hosts=1), ["train"])


def test_two_trials_never_share_a_port(monkeypatch):
    def port(allocation, hosts):
        info = cluster(hosts, allocation=allocation)
        if hosts == 1:
            command = launch.on_this_host(info, ["train"])
        else:
            command = layer_of(info).create_run_command("10.0.0.0", "hostfile")
        (found,) = (each for each in command if each.startswith("--master_port="))
        assert hosts == 1 or command.index(found) < command.index("--")
        return int(found.partition("=")[2])

    ports = {port(f"1.{number}.0", hosts) for number in range(5) for hosts in (1, 2)}
    assert len(ports) == 5 and all(1024 < each < 32768 for each in ports)  # below the ports that systems lend
    monkeypatch.setitem(os.environ, "C10D_PORT", "29403")  # kept by the master for this trial alone
    assert port("1.0.0", 1) == port("1.0.0", 2) == 29403


@pytest.mark.parametrize(("visible", "devices"), [("", [0, 1, 2]), ("2,GPU-7", ["2", "GPU-7"])])
def test_one_host_has_a_process_a_slot(monkeypatch, visible, devices):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", visible)
    command = launch.on_this_host(cluster(hosts=1, slots=3), ["train"])
    (world,) = (each for each in command if each.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world.partition("=")[2])) == {"localhost": devices}
    assert str(len(devices)) in command  # workers that the pid server knows


def test_several_hosts_keep_their_environments_to_themselves(monkeypatch):
    """DeepSpeed would log the values, and quote them in a command line, where no value may hold a quote."""
    values = {"DET_SESSION_TOKEN": "secret", "MINE": "a\nb", "DET_CONFIG": '{"name": "it\'s $HOME"}'}
    for name, value in {**values, "PATH": "/bin:/usr/bin", "LD_LIBRARY_PATH": "/a b"}.items():
        monkeypatch.setitem(os.environ, name, value)
    layer = layer_of(cluster(hosts=2))
    layer.create_deepspeed_env_file()
    handed = pathlib.Path(deepspeed.runner.DEEPSPEED_ENVIRONMENT_NAME).read_text().splitlines()
    assert "PATH=/bin:/usr/bin" in handed
    assert all(line.partition("=")[0] in launch.FOR_LAUNCHER and " " not in line for line in handed)
    kept = launch._environment_file()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert values.items() <= json.loads(kept.read_text()).items()
    prefix = ["python3", "-m", "deepspeed_trial.launch", "--in-container"]
    assert layer.create_pid_client_cmd("1.task.0")[:4] == prefix


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
