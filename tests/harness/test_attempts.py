"""Steps that are tried in processes of their own: how long they take, and how they fail."""

import multiprocessing
import os
import signal

import psutil
import pytest
import torch
from line_trial import LineTrial
from support import fork
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import attempts, machine
from harness.attempts import NO_MEMORY, attempt, local_ranks
from harness.errors import InvalidInput
from harness.experiment import Experiment


def on_rank_1(trial) -> bool:
    return trial.context.distributed.rank == 1 and trial.context.current_train_batch() == 1


class Killed(LineTrial):
    def train_batch(self, *arguments):
        if on_rank_1(self):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(*arguments)


class WithoutMemory(LineTrial):
    def train_batch(self, *arguments):
        if on_rank_1(self):
            torch.empty(2**60)
        return super().train_batch(*arguments)


class Refused(LineTrial):
    def __init__(self, context):
        raise InvalidInput(["a: 1: must be 2", "b: 2: must be 3"])


class Broken(LineTrial):
    def train_batch(self, *arguments):
        raise ValueError("broken\nfor good")


def test_micro_batches_and_whole_steps_are_timed_over_two_ranks():
    tried = attempt(LineTrial, Experiment({}, {}), local_ranks(2), 1)
    assert not tried.reason and tried.peak_memory > 100
    assert 0 < tried.micro_batch_seconds < tried.last_seconds  # which steps the optimizer as well
    assert tried.step_seconds(1) == tried.last_seconds
    assert tried.step_seconds(5) == 4 * tried.micro_batch_seconds + tried.last_seconds


def without_gradients_in_forks():
    with FakeTensorMode():
        torch.ones((), requires_grad=True).backward()
    assert not attempts._fork_has_gradients()
    tried = attempt(LineTrial, Experiment({}, {}), local_ranks(2), 1)
    assert not tried.reason and tried.last_seconds


def test_processes_are_started_anew_where_a_fork_would_have_no_gradients():
    process = multiprocessing.get_context("spawn").Process(target=without_gradients_in_forks)
    process.start()
    process.join(300)
    assert process.exitcode == 0


FAILURES: dict[type, tuple[str, tuple[str, ...]]] = {
    Killed: (f"{NO_MEMORY} (killed)", ()),
    WithoutMemory: (NO_MEMORY, ()),
    Refused: ("a: 1: must be 2; b: 2: must be 3", ("a: 1: must be 2", "b: 2: must be 3")),
    Broken: ("broken for good", ()),
}


@pytest.mark.parametrize("trial", FAILURES)
def test_the_first_rank_that_fails_says_why_and_none_is_left(trial):
    before = set(psutil.Process().children(recursive=True))
    tried = attempt(trial, Experiment({}, {}), local_ranks(2), 1)
    reason, errors = FAILURES[trial]
    assert reason in tried.reason and tried.errors == errors
    assert not tried.last_seconds
    assert set(psutil.Process().children(recursive=True)) == before


def test_allocations_beyond_a_limit_fail_and_those_after_it_do_not():
    def limited():
        with machine.limited_memory(300 * 2**20):
            kept = torch.ones(100 * 2**18)
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                torch.ones(250 * 2**18)
        assert len(kept) and len(torch.ones(250 * 2**18))

    (process,) = fork(limited)
    process.join(60)
    assert process.exitcode == 0


V2 = {"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 1500\nfile 1000\n"}
V1 = {
    "memory.limit_in_bytes": "3000",
    "memory.usage_in_bytes": "2500",
    "memory.stat": "cache 1\ntotal_cache 700\n",
}
CGROUPS = {
    "version 2": ("0::/a/b\n", {"a/b": {**V2, "memory.max": "max"}, "a": V2}, [(3000, 1500)]),
    "version 2, as a container sees it": ("0::/elsewhere\n", {"": V2}, [(3000, 1500)]),
    "version 1": (
        "5:memory:/a\n0::/\n",
        {"memory/a": V1, "memory": {**V1, "memory.usage_in_bytes": "0"}},
        [(3000, 1200), (3000, 3700)],
    ),
    "none": ("3:cpu:/a\n", {"cpu/a": V1}, []),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_what_is_free_in_a_cgroup(name, tmp_path):
    groups, folders, free = CGROUPS[name]
    (tmp_path / "cgroup").write_text(groups)
    for folder, files in folders.items():
        for file, text in files.items():
            path = tmp_path / "root" / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert list(machine._control_groups(tmp_path / "cgroup", tmp_path / "root")) == free
