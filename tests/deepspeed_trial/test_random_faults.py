"""Faults at random moments on three hosts of two ranks each: one of every kind, or ``FAULTS`` of them.

A run with a fault names the lost rank, leaves no process, and is resumed to the weights of a run without a fault.
``SEED`` repeats a draw.
"""

import os
import random
import re
import resource
import shutil
import signal
import time

import psutil
import pytest
from hosts import CHIEF, OTHER, SHORT, THIRD, cut, joined_namespaces, processes_on, started_on, wait_for_step
from matrix import DEEPSPEED, ROWS, Runs
from support import LATEST, Run, overrides, run, started, time_limit, train_many, wait_until

HOSTS, SEED = [CHIEF, OTHER, THIRD], os.environ.get("SEED") or str(random.SystemRandom().randrange(10**6))
SILENT = r"rank {} \(host host-{}, process \d+\) does not answer, in "
KINDS = {  # the message about a rank and its host; none if the run needs no resume
    "kill a rank": r"rank {0} \(host host-{1}, process \d+\) is gone, in ",
    "kill a host": r"rank \d \(host host-{1}, process \d+\) (is gone|does not answer), in ",
    "stop a rank": SILENT,
    "stop a rank for 15 s": "",
    "cut the link": SILENT,
    "cut the link for 5 s": "",
    "fill the disk": "cannot be written|File too large",
    "hide the folder": "train.py: ",
}


def test_a_run_resumes_when_its_lost_folder_is_back(runs: Runs, tmp_path):
    straight, output, away = runs.straight("zero0", 1), tmp_path / "run", tmp_path / "away"
    row = [*ROWS["zero0"].arguments, *overrides(min_checkpoint_period="{batches: 2}")]
    row += ["--output", str(output)]
    with started(["tests/faulty.py", *row], FAULT="SIGSTOP", RANK_AT_FAULT="0", STEP="4") as program:
        wait_until(lambda: psutil.Process(program.pid).status() == psutil.STATUS_STOPPED, program)
        output.rename(away)
        program.send_signal(signal.SIGCONT)
        assert program.wait(time_limit()) == 1
        said = program.stderr
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("train.py: ") and "note" not in line]
    assert "No such file or directory" in line
    assert line.endswith("; bring the folder back, then --resume latest continues")
    shutil.rmtree(output, ignore_errors=True)
    away.rename(output)
    done = run(["train.py", *row, *LATEST], output)
    assert done.code == 0, done.stderr
    assert done.summary["weights_sha256"] == straight.summary["weights_sha256"]


def row(stage: int) -> list[str]:
    deepspeed = {f"{DEEPSPEED}zero_optimization__stage": stage, f"{DEEPSPEED}train_batch_size": 48}
    changes = overrides(**deepspeed, hyperparameters__hang_after=round(time_limit() / 7))
    changes += overrides(hyperparameters__max_length="{batches: 200}", min_checkpoint_period="{batches: 20}")
    return ["--config", f"experiments/zero{stage or 2}.yaml", *SHORT, *changes]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, Run]:
    """Runs without a fault, by their ZeRO stage."""
    return train_many(tmp_path_factory.mktemp("straight"), {str(stage): row(stage) for stage in (0, 2, 3)}, 6)


def wait(ranks) -> list[int]:
    return [rank.wait(2 * time_limit()) for rank in ranks]


def do(kind: str, rank: int, output, ranks) -> None:
    host = rank // 2
    if kind.startswith("kill"):
        for each in ranks[2 * host : 2 * host + 2] if kind == "kill a host" else [ranks[rank]]:
            each.send_signal(signal.SIGKILL)
    elif kind.startswith("stop"):
        ranks[rank].send_signal(signal.SIGSTOP)
        time.sleep(15) if "15 s" in kind else wait(ranks[:rank] + ranks[rank + 1 :])
        ranks[rank].send_signal(signal.SIGCONT)
    elif kind.startswith("cut"):
        cut(HOSTS[host])
        try:
            time.sleep(5) if "5 s" in kind else wait(ranks)
        finally:
            cut(HOSTS[host], False)
    elif kind == "fill the disk":  # of rank 0, which writes the largest files
        psutil.Process(ranks[0].pid).rlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    else:
        hidden = output.rename(output.with_name("hidden"))
        wait(ranks)
        shutil.rmtree(output, ignore_errors=True)
        hidden.rename(output)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(int(os.environ.get("FAULTS", len(KINDS)))))
def test_a_run_with_a_fault_ends_on_the_same_bits(straight, tmp_path, number):
    draw, kind = random.Random(f"{SEED} {number}"), [*KINDS][number % len(KINDS)]
    # The second host is this one, which has no cable
    stage, rank = draw.choice("023"), draw.choice((0, 4) if "cut" in kind else range(6))
    step, seconds = draw.randrange(21, 140), draw.random() / 10
    print(f"SEED={SEED}, fault {number}: {kind}, ZeRO {stage}, rank {rank}, {seconds} s after step {step}")
    made = Run(0, "", "", tmp_path / "run")
    program = ["train.py", *row(int(stage)), "--output", str(made.output), "--resume", "auto"]
    with joined_namespaces(CHIEF, THIRD):
        with started_on(HOSTS, program, each=2) as ranks:
            wait_for_step(step, made.output, ranks)
            time.sleep(seconds)
            do(kind, rank, made.output, ranks)
            codes, said = wait(ranks), [each.stderr for each in ranks]
            assert not processes_on(CHIEF) + processes_on(THIRD)
        assert "Traceback" not in "".join(said)
        if kind == "cut the link":  # the two sides name each other
            there = "".join(said.pop(rank) + said.pop(rank))
            assert re.search(SILENT.format(*((0, 1) if rank else (2, 2))), there), there
        assert re.search(KINDS[kind].format(rank, rank // 2 + 1), "\n".join(said)), said
        assert any(codes) == bool(KINDS[kind]), codes
        if any(codes):
            with started_on(HOSTS, program, each=2) as ranks:
                assert not any(wait(ranks)), ranks[0].stderr
    assert made.summary["weights_sha256"] == straight[stage].summary["weights_sha256"]
