"""On two hosts: a trial of a cluster, and a job of SLURM, which is stopped and requeued."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
from containers import ENTRYPOINT, SMALL, container
from hosts import CHIEF, OTHER, entering, joined_namespace
from master import Master
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

from harness import slurm

RECORD = 'python3 -c \'import json, os; json.dump(dict(os.environ), open("environment-" + os.environ["RANK"], "w"))\''


@pytest.fixture
def namespace():
    with joined_namespace() as name:
        yield name


def test_a_trial_on_two_hosts(tmp_path, namespace):
    """One process on each; ssh's command line holds no secret, and what a shell would read arrives as it was."""
    hosts: dict[str, dict[str, Any]] = {
        address: {"files": str(tmp_path / address), "enter": enter}
        for address, enter in entering(namespace).items()
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


def test_what_srun_says():
    """As `man srun` has it; a batch script's own process, and what torchrun started, are left alone."""
    assert slurm.first_node("a[01-03,7],b") == "a01" and slurm.first_node("b,a[1-2]") == "b"
    assert slurm.first_node("rack[2-3]n[1,4]") == "rack2n1" and slurm.first_node("10.0.0.1") == "10.0.0.1"
    assert slurm.tasks_per_node("2(x3),1") == [2, 2, 2, 1] and slurm.tasks_per_node("8") == [8]
    task = srun_variables(["n[1-2]", "n2"], 1, 1, 7)
    for more in {"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}, {"DET_CLUSTER_ID": "x"}:
        started = {**task, **more}
        slurm.take_ranks(started)
        assert started == {**task, **more}
    slurm.take_ranks(task)
    assert (task["RANK"], task["LOCAL_RANK"], task["LOCAL_WORLD_SIZE"], task["GROUP_RANK"]) == (
        "3",
        "1",
        "2",
        "1",
    )
    assert (task["WORLD_SIZE"], task["MASTER_ADDR"], task["GROUP_WORLD_SIZE"]) == ("4", "n1", "2")


def srun_variables(nodes, node, local, job):
    """What srun sets for a task of two on each of two nodes."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(2 * node + local),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": ",".join(nodes),
    }


def srun(folder, namespace, row, **env):
    """Runs tests/many.py in two tasks on each host, as srun would; gives the run that the first has written."""
    table = folder / "rows.json"
    table.write_text(json.dumps({"job": [*row, "--output", str(folder / "job")]}))
    tasks = []
    for node, enter in enumerate(entering(namespace).values()):
        for local in range(2):
            variables = {**srun_variables([CHIEF, OTHER], node, local, 41), "PYTHONPATH": str(PROJECT), **env}
            command = [*enter, sys.executable, "-u", "tests/many.py", str(table)]
            tasks.append(
                subprocess.Popen(command, cwd=PROJECT, env=environment(**variables), start_new_session=True)
            )
    try:
        codes = [task.wait(TIME_LIMIT) for task in tasks]
    finally:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, signal.SIGKILL)
    assert codes == [0] * 4
    done = json.loads((folder / "job.done.json").read_text())
    return Run(done["code"], done["stdout"], done["stderr"], folder / "job")


def test_a_slurm_job_is_requeued(tmp_path, namespace):
    """Two tasks on each of two hosts; SIGUSR1 to the last, and the same command again: as four ranks on one host."""
    row = ["--config", "experiments/zero2.yaml", *SHORT]
    row += overrides(hyperparameters__max_length="{batches: 8}", **{f"{DEEPSPEED}train_batch_size": 32})
    straight = train_many(tmp_path, {"straight": row}, 4)["straight"]
    assert straight.code == 0, straight.stderr
    job = [*row, "--resume", "auto"]
    stopped = srun(tmp_path, namespace, job, SIGTERM_AT="3", SIGNAL="SIGUSR1")
    assert stopped.code == 130, stopped.stderr
    assert min(checkpoints(stopped)) in (3, 4)
    done = srun(tmp_path, namespace, job)
    assert done.code == 0, done.stderr
    assert done.summary["world_size"] == 4
    assert done.summary["weights_sha256"] == straight.summary["weights_sha256"]


def test_the_host_that_is_left_goes_on(tmp_path, namespace):
    """torchrun on two hosts, of which one is lost: the other goes on alone, with the same images, by itself."""
    row = ["--config", "experiments/zero2.yaml", *SHORT, *LR, "--resume", "auto"]
    row += overrides(hyperparameters__max_length="{batches: 300}", min_checkpoint_period="{batches: 10}")
    row += overrides(**{f"{DEEPSPEED}train_batch_size": 32})
    straight = train_many(tmp_path, {"straight": row})["straight"]
    assert straight.code == 0, straight.stderr
    run, port, agents = Run(0, "", "", tmp_path / "run"), free_port(), []
    for node, (address, enter) in enumerate(entering(namespace).items()):
        meeting = [f"--rdzv-endpoint={CHIEF}:{port}", "--rdzv-backend=c10d", f"--local-addr={address}"]
        meeting += [f"--rdzv-conf=is_host={1 - node},last_call_timeout=20"]
        launch = [*enter, sys.executable, "-m", "torch.distributed.run", *meeting]
        command = [*launch, "--nnodes=1:2", "--max-restarts=3", "train.py", *row, "--output", str(run.output)]
        with open(tmp_path / f"{node}.log", "w") as log:
            agents.append(
                subprocess.Popen(
                    command, cwd=PROJECT, env=environment(), stdout=log, stderr=log, start_new_session=True
                )
            )
    try:
        deadline = time.monotonic() + TIME_LIMIT
        while not checkpoints(run):
            assert time.monotonic() < deadline and agents[0].poll() is None, (tmp_path / "0.log").read_text()
            time.sleep(0.1)
        for process in [agents[1].pid, *(each.pid for each in psutil.Process(agents[1].pid).children(True))]:
            os.kill(process, signal.SIGKILL)
        assert agents[0].wait(TIME_LIMIT) == 0, (tmp_path / "0.log").read_text()
    finally:
        for agent in agents:
            for process in [*psutil.Process(agent.pid).children(True)] if agent.poll() is None else []:
                process.kill()
            agent.kill()
            agent.wait()
    assert run.summary["world_size"] == 1
    assert len(losses(run)) == 300
    assert losses(run)[:100] == pytest.approx(losses(straight)[:100], rel=1e-3)  # rounding grows
