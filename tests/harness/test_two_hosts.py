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
from hosts import CHIEF, OTHER, entering, joined_namespaces
from master import Master
from modes import DEEPSPEED, LR, SHORT, losses
from support import (
    DIGITS,
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
def hosts():
    """What goes before the commands of two hosts, by their addresses."""
    with joined_namespaces(CHIEF):
        yield entering(CHIEF, OTHER)


MINE = {"MINE": """it's "$HOME" `id`; \\ """, "EMPTY": ""}  # of the container, and nothing for a shell


def run_on_hosts(folder, hosts, master, steps, **trial):
    """What the containers of a trial do, one on each host; gives the chief's run and the environments."""
    containers: dict[str, dict[str, Any]] = {
        address: {"files": str(folder / address), "enter": enter} for address, enter in hosts.items()
    }
    ports = {name: str(free_port()) for name in ("C10D_PORT", "DTRAIN_SSH_PORT")}
    for rank, address in enumerate(containers):
        config = {"entrypoint": "python3 -m harness.launch bash record.sh"}
        length = {"max_length": {"batches": steps}}
        place: dict[str, Any] = {"rank": rank, "addresses": tuple(hosts)}
        variables = container(
            folder / address, master, 1, {**SMALL, **length}, config=config, **place, **trial
        )
        (folder / address / "model/record.sh").write_text(f"{RECORD}\nexec python3 train.py\n")
        shared = {**variables, **ports, **MINE, "TEST_HOSTS": json.dumps(containers)}
        containers[address]["environment"] = {**shared, "HOST_OF_ITS_OWN": address}
    environments = {address: each["environment"] for address, each in containers.items()}
    other = subprocess.Popen(
        ["bash", "-c", ENTRYPOINT],
        cwd=folder / OTHER / "model",
        env=environment(**environments[OTHER]),
        start_new_session=True,
    )
    try:
        command, chief = [*hosts[CHIEF], "bash", "-c", ENTRYPOINT], folder / CHIEF
        return execute(command, chief, cwd=chief / "model", **environments[CHIEF]), environments
    finally:  # as the master does with containers that wait for the chief
        os.killpg(other.pid, signal.SIGKILL)
        other.wait()


def test_a_trial_on_two_hosts(tmp_path, hosts, train):
    """One process on each, paused and resumed: as two on one host. What a shell would read arrives as it was."""
    (tmp_path / OTHER).mkdir()
    (tmp_path / OTHER / "shared").symlink_to(tmp_path / CHIEF / "shared")
    with Master(OTHER) as master:
        run, _ = run_on_hosts(tmp_path, hosts, master, 10)
        assert run.code == 0, run.stderr
        saved = master.bodies("/checkpoints")[-1]
        again = {"latest_checkpoint": saved["uuid"], "steps_completed": 10, "trial_run_id": 2}
        rest, environments = run_on_hosts(tmp_path, hosts, master, 20, **again)
    assert rest.code == 0, rest.stderr
    assert master.bodies("/daemon") and list(master.metrics("training")) == [10, 20]
    here = train(
        *DIGITS,
        *overrides(scheduling_unit=10, hyperparameters=json.dumps({**SMALL, "max_length": {"batches": 20}})),
        processes=2,
    )
    assert master.metrics("validation")[20]["loss"] == here.summary["validation"]["loss"]
    output = run.stdout + run.stderr
    assert "identifier" not in output and "secret-token" not in output
    for rank, (address, given) in enumerate(environments.items()):
        recorded = json.loads((tmp_path / CHIEF / f"model/environment-{rank}").read_text())
        expected = {**MINE, "HOST_OF_ITS_OWN": address, "DET_SESSION_TOKEN": "secret-token"}
        assert expected.items() <= recorded.items()
        assert recorded["DET_EXPERIMENT_CONFIG"] == given["DET_EXPERIMENT_CONFIG"]


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


def srun(folder, hosts, row, **env):
    """Runs tests/many.py in two tasks on each host, as srun would; gives the run that the first has written."""
    table = folder / "rows.json"
    table.write_text(json.dumps({"job": [*row, "--output", str(folder / "job")]}))
    tasks = []
    for node, enter in enumerate(hosts.values()):
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


def test_a_slurm_job_is_requeued(tmp_path, hosts):
    """Two tasks on each of two hosts; SIGUSR1 to the last, and the same command again: as four ranks on one host."""
    row = ["--config", "experiments/zero2.yaml", *SHORT]
    row += overrides(hyperparameters__max_length="{batches: 8}", **{f"{DEEPSPEED}train_batch_size": 32})
    straight = train_many(tmp_path, {"straight": row}, 4)["straight"]
    assert straight.code == 0, straight.stderr
    job = [*row, "--resume", "auto"]
    stopped = srun(tmp_path, hosts, job, SIGTERM_AT="3", SIGNAL="SIGUSR1")
    assert stopped.code == 130, stopped.stderr
    assert min(checkpoints(stopped)) in (3, 4)
    done = srun(tmp_path, hosts, job)
    assert done.code == 0, done.stderr
    assert done.summary["world_size"] == 4
    assert done.summary["weights_sha256"] == straight.summary["weights_sha256"]


def test_the_host_that_is_left_goes_on(tmp_path, hosts):
    """torchrun on two hosts, of which one is lost: the other goes on alone, with the same images, by itself."""
    row = ["--config", "experiments/zero2.yaml", *SHORT, *LR, "--resume", "auto"]
    row += overrides(hyperparameters__max_length="{batches: 300}", min_checkpoint_period="{batches: 10}")
    row += overrides(**{f"{DEEPSPEED}train_batch_size": 32})
    # The host may be lost in a collective of Determined's, which waits for so long
    row += overrides(hyperparameters__hang_after=120)
    straight = train_many(tmp_path, {"straight": row})["straight"]
    assert straight.code == 0, straight.stderr
    run, port, agents = Run(0, "", "", tmp_path / "run"), free_port(), []
    for node, (address, enter) in enumerate(hosts.items()):
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
