"""Three hosts, a host that is lost, a cut link, and DeepSpeed's launcher over ssh: real processes in namespaces."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from hosts import CHIEF, OTHER, THIRD, cut, entering, joined_namespaces
from modes import DEEPSPEED, LR, SHORT, losses
from support import (
    PROJECT,
    TIME_LIMIT,
    Run,
    checkpoints,
    environment,
    execute,
    free_port,
    overrides,
    train_many,
)

ROW = ["--config", "experiments/zero2.yaml", *SHORT, *LR, *overrides(**{f"{DEEPSPEED}train_batch_size": 48})]


@contextlib.contextmanager
def one_rank_on_each(hosts, row, logs, **env):
    """Starts train.py by hand on every host, by torch's variables; gives the processes and kills what is left."""
    meeting = {"MASTER_ADDR": CHIEF, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(hosts)), **env}
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": str(len(hosts))}
    ranks = []
    for rank, enter in enumerate(hosts.values()):
        joined = environment(RANK=str(rank), GROUP_RANK=str(rank), **meeting, **alone)
        command = [*enter, sys.executable, "-u", "train.py", *row]
        with open(logs / f"{rank}.log", "w") as log:
            ranks.append(
                subprocess.Popen(
                    command, cwd=PROJECT, env=joined, stdout=log, stderr=log, start_new_session=True
                )
            )
    try:
        yield ranks
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def wait_for_more_checkpoints(run, ranks, logs):
    before, deadline = max(checkpoints(run), default=0), time.monotonic() + TIME_LIMIT
    while max(checkpoints(run), default=0) <= before:
        said = [log.read_text() for log in sorted(logs.glob("*.log"))]
        assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks), said
        time.sleep(0.1)


def test_three_hosts_one_is_cut_off_and_all_go_on_to_the_same_bits(tmp_path):
    """For five seconds, which is waited out; for good, which ends all three with the right names."""
    row = [
        *ROW,
        *overrides(hyperparameters__max_length="{batches: 300}", min_checkpoint_period="{batches: 20}"),
    ]
    straight = train_many(tmp_path, {"straight": row}, 3)["straight"]
    assert straight.code == 0, straight.stderr
    run = Run(0, "", "", tmp_path / "run")
    row += [*overrides(hyperparameters__hang_after=24), "--output", str(run.output), "--resume", "auto"]
    with joined_namespaces(CHIEF, THIRD):
        hosts = entering(CHIEF, OTHER, THIRD)
        with one_rank_on_each(hosts, row, tmp_path) as ranks:
            wait_for_more_checkpoints(run, ranks, tmp_path)
            cut(THIRD)
            time.sleep(5)
            cut(THIRD, False)
            wait_for_more_checkpoints(run, ranks, tmp_path)
            cut(THIRD)
            try:
                codes = [rank.wait(120) for rank in ranks]
            finally:
                cut(THIRD, False)
        said = [(tmp_path / f"{rank}.log").read_text() for rank in range(3)]
        assert codes == [1, 1, 1], said
        assert "rank 2 (host host-3, process" in said[0] and "is behind: does not answer for" in said[0]
        assert "so this ends; --resume latest goes on" in said[0]
        assert "rank 0 (host host-1, process" in said[2] and "is behind: does not answer for" in said[2]
        assert "Traceback" not in "".join(said)
        assert 0 < max(checkpoints(run)) < 300
        with one_rank_on_each(hosts, row, tmp_path) as ranks:
            codes = [rank.wait(TIME_LIMIT) for rank in ranks]
        assert codes == [0, 0, 0], [log.read_text() for log in tmp_path.glob("*.log")]
    assert run.summary["weights_sha256"] == straight.summary["weights_sha256"]


SSHD = """
Port {port}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
SetEnv OMP_NUM_THREADS=1
"""
SSH = """#!/bin/sh
exec /usr/bin/ssh -i {folder}/key -p {port} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q "$@"
"""


@contextlib.contextmanager
def reached_by_ssh(hosts, folder):
    """Runs sshd on every host; gives the environment in which ssh needs neither password nor port."""
    if not (pathlib.Path("/usr/sbin/sshd").exists() and shutil.which("pdsh") and shutil.which("ssh")):
        pytest.skip("needs sshd, ssh and pdsh: apt-get install openssh-server pdsh")
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # which sshd asks for
    names = {"folder": folder, "port": free_port()}
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "sshd_config").write_text(SSHD.format(**names))
    (folder / "ssh").write_text(SSH.format(**names))
    (folder / "ssh").chmod(0o755)
    command = ["/usr/sbin/sshd", "-D", "-f", str(folder / "sshd_config")]
    servers = [subprocess.Popen([*enter, *command], start_new_session=True) for enter in hosts.values()]
    try:
        yield {"PATH": f"{folder}:{os.environ['PATH']}"}
    finally:
        for server in servers:
            for each in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
                each.kill()
            server.wait()


def test_deepspeed_with_a_hostfile(tmp_path):
    """By pdsh over ssh, one process on each of two hosts, stopped and resumed: as two processes on one."""
    long = [*ROW, *overrides(hyperparameters__max_length="{batches: 8}")]
    straight = train_many(tmp_path, {"straight": long}, 2)["straight"]
    assert straight.code == 0, straight.stderr
    run = tmp_path / "run"
    (tmp_path / "hostfile").write_text(f"{CHIEF} slots=1\n{OTHER} slots=1\n")
    with joined_namespaces(CHIEF), reached_by_ssh(hosts := entering(CHIEF, OTHER), tmp_path) as env:
        for steps, more in (4, []), (8, ["--resume", "latest"]):
            launch = [*hosts[CHIEF], sys.executable, "-m", "deepspeed.launcher.runner"]
            launch += ["--hostfile", str(tmp_path / "hostfile"), f"--master_port={free_port()}"]
            row = [*ROW, *overrides(hyperparameters__max_length=f"{{batches: {steps}}}"), *more]
            done = execute([*launch, "train.py", *row, "--output", str(run)], run, **env)
            assert done.code == 0, done.stderr + done.stdout
    assert done.summary["world_size"] == 2
    assert losses(done) == losses(straight)
    assert done.summary["weights_sha256"] == straight.summary["weights_sha256"]


def test_a_folder_that_is_gone_is_one_line_and_the_run_goes_on_when_it_is_back(tmp_path):
    row = [
        *ROW,
        *overrides(hyperparameters__max_length="{batches: 400}", min_checkpoint_period="{batches: 20}"),
    ]
    straight = train_many(tmp_path, {"straight": row})["straight"]
    run = Run(0, "", "", tmp_path / "run")
    command = [sys.executable, "train.py", *row, "--output", str(run.output)]
    process = subprocess.Popen(
        command, cwd=PROJECT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_more_checkpoints(run, [process], tmp_path)
    run.output.rename(tmp_path / "away")
    said = process.communicate(timeout=TIME_LIMIT)[1]
    assert process.returncode == 1 and "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("train.py: ") and "note" not in line]
    assert "No such file or directory" in line and line.endswith(
        "; bring the folder back, then --resume latest goes on"
    )
    shutil.rmtree(run.output, ignore_errors=True)
    (tmp_path / "away").rename(run.output)
    done = execute([*command, "--resume", "latest"], run.output)
    assert done.code == 0, done.stderr
    assert done.summary["weights_sha256"] == straight.summary["weights_sha256"]
