"""Two hosts: a trial of a cluster, a requeued job of SLURM, torchrun that loses a host, DeepSpeed over ssh."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
from containers import ENTRYPOINT, SMALL, container
from hosts import CHIEF, OTHER, SHORT, entering, joined_namespaces, processes, started_on, wait_for_step
from master import Master
from matrix import DEEPSPEED
from support import (
    DIGITS,
    LATEST,
    PROJECT,
    Run,
    execute,
    free_port,
    losses,
    overrides,
    time_limit,
    train_many,
)

from deepspeed_trial import slurm

RECORD = 'python3 -c \'import json, os; json.dump(dict(os.environ), open("environment-" + os.environ["RANK"], "w"))\''
MINE = {"MINE": """it's "$HOME" `id`; \\ """, "EMPTY": ""}  # of the container, and nothing for a shell
ROW = ["--config", "experiments/zero2.yaml", *SHORT, *overrides(**{f"{DEEPSPEED}train_batch_size": 32})]
PATHS = f"{PROJECT}:{PROJECT}/tests/deepspeed_trial"


@pytest.fixture
def hosts():
    """The words before the commands of two hosts, by their addresses."""
    with joined_namespaces(CHIEF):
        yield {address: entering(address) for address in (CHIEF, OTHER)}


def length(steps) -> list[str]:
    steps = f"{{batches: {steps}}}"
    return overrides(hyperparameters__max_length=steps, min_checkpoint_period="{batches: 10}")


def straight_run(folder, row, ranks) -> Run:
    """Train the same on one host."""
    run = train_many(folder, {"straight": row}, ranks)["straight"]
    assert run.code == 0, run.stderr
    return run


def test_srun_gives_a_task_its_rank():
    """`man srun` names the variables; a batch script's process, and ranks of torchrun, stay as they are."""
    assert slurm.first_node("a[01-03,7],b") == "a01" and slurm.first_node("b,a[1-2]") == "b"
    assert slurm.first_node("rack[2-3]n[1,4]") == "rack2n1" and slurm.first_node("10.0.0.1") == "10.0.0.1"
    assert slurm.tasks_per_node("2(x3),1") == [2, 2, 2, 1] and slurm.tasks_per_node("8") == [8]
    task = srun_variables(["n[1-2]", "n2"], 1, 1, 7)
    for more in {"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}, {"DET_CLUSTER_ID": "x"}:
        started = {**task, **more}
        slurm.take_ranks(started)
        assert started == {**task, **more}
    slurm.take_ranks(task)
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert {**ranks, "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "GROUP_WORLD_SIZE": "2"}.items() <= task.items()


def srun_variables(nodes, node, local, job) -> dict[str, str]:
    """The variables that srun sets for a task of two on each of two nodes."""
    task = {"JOB_ID": job, "STEP_ID": 0, "PROCID": 2 * node + local, "NODEID": node, "LOCALID": local}
    step = {"NUM_TASKS": 4, "NUM_NODES": 2, "TASKS_PER_NODE": "2(x2)", "NODELIST": ",".join(nodes)}
    task |= {f"STEP_{name}": value for name, value in step.items()}
    return {f"SLURM_{name}": str(value) for name, value in task.items()}


@pytest.mark.soak
def test_a_slurm_job_is_requeued(tmp_path, hosts):
    """Two tasks on each of two hosts; SIGUSR1 to the last, and the same command again."""
    row, made = [*ROW, *length(8)], Run(0, "", "", tmp_path / "job")
    program = [sys.executable, "tests/faulty.py", *row, "--resume", "auto", "--output", str(made.output)]
    for fault, code in ("SIGUSR1", 130), ("none", 0):
        env = {"FAULT": fault, "RANK_AT_FAULT": "3", "STEP": "3", "PYTHONPATH": PATHS}
        tasks = [
            ([*enter, *program], {**env, **srun_variables([CHIEF, OTHER], node, local, 41)})
            for node, enter in enumerate(hosts.values())
            for local in range(2)
        ]
        with processes(tmp_path, *tasks) as started:
            codes = [task.wait(2 * time_limit()) for task in started]
        assert codes == [code] * 4, (tmp_path / "0.log").read_text()
        assert code == 0 or len(losses(made)) in (3, 4)
    assert made.summary["world_size"] == 4
    assert made.summary["weights_sha256"] == straight_run(tmp_path, row, 4).summary["weights_sha256"]


def run_on_hosts(folder, hosts, master, steps, **trial):
    """Run the containers of a trial, one on each host; give the logs and the environments."""
    port, commands, environments = str(free_port()), [], {}
    trial["config"] = {"entrypoint": "python3 -m deepspeed_trial.launch bash record.sh"}
    for rank, address in enumerate(hosts):
        hparams, place = {**SMALL, "max_length": {"batches": steps}}, folder / address
        variables = container(place, master, 1, hparams, rank=rank, addresses=tuple(hosts), **trial)
        (place / "model/record.sh").write_text(f"{RECORD}\nexec python3 train.py\n")
        environments[address] = {**variables, **MINE, "C10D_PORT": port, "HOST_OF_ITS_OWN": address}
        command = [*hosts[address], "bash", "-c", f"cd {place}/model; {ENTRYPOINT}"]
        commands.append((command, environments[address]))
    with processes(folder, *commands) as containers:
        codes = [each.wait(2 * time_limit()) for each in containers]
    logs = [(folder / f"{rank}.log").read_text() for rank in range(len(codes))]
    assert codes == [0, 0], logs
    return "".join(logs), environments


@pytest.mark.soak
def test_a_trial_on_two_hosts(tmp_path, hosts):
    """One process on each, paused and resumed."""
    (tmp_path / OTHER).mkdir()
    (tmp_path / OTHER / "shared").symlink_to(tmp_path / CHIEF / "shared")
    with Master(OTHER) as master:
        run_on_hosts(tmp_path, hosts, master, 10)
        saved = master.bodies("/checkpoints")[-1]
        said, environments = run_on_hosts(tmp_path, hosts, master, 20, again=(saved["uuid"], 10))
    assert list(master.metrics("training")) == [10, 20]
    hparams = json.dumps({**SMALL, "max_length": {"batches": 20}})
    here = straight_run(tmp_path, [*DIGITS, *overrides(scheduling_unit=10, hyperparameters=hparams)], 2)
    assert master.metrics("validation")[20]["loss"] == here.summary["validation"]["loss"]
    assert "secret-token" not in said
    for rank, (address, given) in enumerate(environments.items()):
        recorded = json.loads((tmp_path / address / f"model/environment-{rank}").read_text())
        expected = {**MINE, "HOST_OF_ITS_OWN": address, "DET_SESSION_TOKEN": "secret-token"}
        assert expected.items() <= recorded.items()
        assert recorded["DET_EXPERIMENT_CONFIG"] == given["DET_EXPERIMENT_CONFIG"]


@pytest.mark.soak
def test_hosts_listen_for_stores_and_gloo_alone(tmp_path):
    """Messages that arrive there are plain data: nobody unpickles them."""
    found, program = str(tmp_path / "found"), ["tests/listening.py", *ROW, "--output", str(tmp_path / "run")]
    with joined_namespaces(CHIEF), started_on([CHIEF, OTHER], program, FOUND=found) as ranks:
        assert [rank.wait(time_limit()) for rank in ranks] == [0, 0], ranks[0].stderr
    chief, other = (json.loads((tmp_path / f"found{rank}").read_text())["listening"] for rank in (0, 1))
    assert {host for host, _ in chief} == {"::", CHIEF} and ["::", 29500] in chief
    # Where ranks meet, for messages, and for the vote on the last step
    assert len([host for host, _ in chief if host == "::"]) == 3
    assert {host for host, _ in other} == {OTHER}


@pytest.mark.soak
def test_torchrun_continues_without_a_lost_host(tmp_path, hosts):
    """torchrun on two hosts loses one: the other's agent starts its rank again, alone, with the same images."""
    # The host may be lost in a collective of Determined's, which waits as long
    row = [*ROW, *length(300), *overrides(hyperparameters__hang_after=120)]
    straight = straight_run(tmp_path, row, 1)
    made, agents = Run(0, "", "", tmp_path / "run"), []
    for node, (address, enter) in enumerate(hosts.items()):
        meeting = [f"--rdzv-endpoint={CHIEF}:29400", "--rdzv-backend=c10d", f"--local-addr={address}"]
        meeting += [
            f"--rdzv-conf=is_host={1 - node},last_call_timeout=20",
            "--nnodes=1:2",
            "--max-restarts=3",
        ]
        program = ["train.py", *row, "--resume", "auto", "--output", str(made.output)]
        command = [*enter, sys.executable, "-m", "torch.distributed.run", *meeting, *program]
        agents.append((command, dict[str, Any]()))
    with processes(tmp_path, *agents) as (left, lost):
        wait_for_step(15, made.output, [left, lost])
        for process in [lost, *lost.children(recursive=True)]:
            process.kill()
        assert left.wait(2 * time_limit()) == 0, (tmp_path / "0.log").read_text()
    assert made.summary["world_size"] == 1
    assert len(losses(made)) == 300
    assert losses(made)[:100] == pytest.approx(losses(straight)[:100], rel=1e-3)  # rounding grows


SSH = """#!/bin/sh
exec /usr/bin/ssh -i {key} -p {port} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q "$@"
"""
SSHD = """/usr/sbin/sshd -D -f /dev/null -p {port} -h {key} -o AuthorizedKeysFile={key}.pub -o PidFile=none
-o StrictModes=no -o UsePAM=no -o PermitRootLogin=yes -o SetEnv=OMP_NUM_THREADS=1"""


@contextlib.contextmanager
def reached_by_ssh(hosts, folder):
    """Run sshd on every host; give an environment whose ssh needs neither password nor port."""
    if not (pathlib.Path("/usr/sbin/sshd").exists() and shutil.which("pdsh")):
        pytest.skip("needs sshd and pdsh: apt-get install openssh-server pdsh")
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs it
    names = {"key": folder / "key", "port": free_port()}
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", names["key"]], check=True)
    (folder / "ssh").write_text(SSH.format(**names))
    (folder / "ssh").chmod(0o755)
    with processes(folder, *(([*hosts[each], *SSHD.format(**names).split()], {}) for each in hosts)):
        yield {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.soak
def test_deepspeed_with_a_hostfile(tmp_path, hosts):
    """pdsh starts by ssh one process on each of two hosts; the run is stopped and resumed."""
    output, hostfile = tmp_path / "run", tmp_path / "hostfile"
    hostfile.write_text(f"{CHIEF} slots=1\n{OTHER} slots=1\n")
    launch = [*hosts[CHIEF], sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={hostfile}"]
    with reached_by_ssh(hosts, tmp_path) as env:
        for steps, more in (4, []), (8, LATEST):
            program = ["train.py", *ROW, *length(steps), *more, "--output", str(output)]
            done = execute([*launch, *program], output, **env)
            assert done.code == 0, done.stderr + done.stdout
    straight = straight_run(tmp_path, [*ROW, *length(8)], 2)
    assert done.summary["world_size"] == 2
    assert losses(done) == losses(straight)
    assert done.summary["weights_sha256"] == straight.summary["weights_sha256"]
