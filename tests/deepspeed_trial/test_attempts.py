"""Tried steps, in processes apart from the program: their times and their failures."""

import json
import types

import pytest
from support import run

from deepspeed_trial import attempts, machine
from deepspeed_trial.attempts import NO_MEMORY, Attempt

TRIED = """
import dataclasses, json, os, psutil, signal
from line_trial import *
from deepspeed_trial.attempts import attempt, local_ranks
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.experiment import Experiment

def trial(in_step_2_of_rank_1):
    class Trial(LineTrial):
        def train_batch(self, *arguments):
            if self.context.distributed.rank == 1 and self.context.current_train_batch() == 1:
                in_step_2_of_rank_1()
            return super().train_batch(*arguments)
    return Trial

def broken():
    raise ValueError("broken\\nfor good")

def refused(context):
    raise InvalidInput(["a: 1: must be 2", "b: 2: must be 3"])

kill, take_memory = lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: torch.empty(2**60)
for each in (LineTrial, trial(kill), trial(take_memory), trial(broken), refused):
    print(json.dumps(dataclasses.asdict(attempt(each, Experiment({}, {}), local_ranks(2), 1))))
    assert not psutil.Process().children()
"""


def test_two_ranks_are_timed_and_the_first_failure_is_the_reason(tmp_path):
    """No process of an attempt outlasts it."""
    done = run(["-c", TRIED], tmp_path)
    assert done.code == 0, done.stderr
    timed, *failed = map(json.loads, done.stdout.splitlines())
    assert not timed["reason"] and timed["peak_memory"] > 100
    assert timed["micro_batch_seconds"] > 0 and timed["last_seconds"] > 0
    refused = ["a: 1: must be 2", "b: 2: must be 3"]
    assert [(each["reason"], each["errors"]) for each in failed] == [
        (f"{NO_MEMORY} (killed)", []),
        (NO_MEMORY, []),
        ("broken for good", []),
        ("; ".join(refused), refused),
    ]
    assert not any(each["last_seconds"] for each in failed)


WITHOUT_FORKS = """
from line_trial import *
from torch._subclasses.fake_tensor import FakeTensorMode
from deepspeed_trial import attempts
from deepspeed_trial.experiment import Experiment
assert attempts._fork_has_gradients()
with FakeTensorMode():
    torch.ones((), requires_grad=True).backward()
assert not attempts._fork_has_gradients()
tried = attempts.attempt(LineTrial, Experiment({}, {}), attempts.local_ranks(1), 1)
assert not tried.reason and tried.last_seconds, tried
"""


def test_new_processes_try_steps_if_a_fork_has_no_gradients(tmp_path):
    done = run(["-c", WITHOUT_FORKS], tmp_path)
    assert done.code == 0, done.stderr


def test_the_times_are_medians_without_the_first_step(monkeypatch):
    """Each step has two micro-batches; the first step, of 0.4 seconds, makes the measurement three steps long."""
    seconds = [0.3, 0.1, 0.05, 0.15, 0.06, 0.14, 0.01, 0.2]
    begins = iter([sum(seconds[:index]) for index in range(len(seconds) + 1)])
    monkeypatch.setattr(attempts, "time", types.SimpleNamespace(perf_counter=begins.__next__))
    clock = attempts._Clock(
        types.SimpleNamespace(
            use_pipeline_parallel=False,
            accumulates=True,
            get_num_micro_batches_per_slot=lambda: 2,
            distributed=types.SimpleNamespace(broadcast=lambda value: value),
        )
    )
    for _ in seconds:
        clock.tick()
    with pytest.raises(attempts._MeasurementDone):
        clock.tick()
    assert clock.medians == pytest.approx((0.05, 0.15))
    tried = Attempt(*clock.medians)
    assert [tried.step_seconds(number) for number in (1, 2, 5)] == pytest.approx([0.15, 0.2, 0.35])


LIMITED = """
import pytest, torch
from deepspeed_trial import machine
with machine.limited_memory(300 * 2**20):
    kept = torch.ones(100 * 2**18)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.ones(250 * 2**18)
assert len(kept) and len(torch.ones(250 * 2**18))
"""


def test_allocations_fail_beyond_a_limit_and_succeed_after_it(tmp_path):
    """In a new process: this one may have room left of what other tests have freed."""
    assert run(["-c", LIMITED], tmp_path).code == 0


V2 = {"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 1500\nfile 1000\n"}
V1 = {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "2500"}
V1["memory.stat"] = "cache 1\ntotal_cache 700\n"
CGROUPS = {
    "version 2": ("0::/a/b\n", {"a/b": {**V2, "memory.max": "max"}, "a": V2}, [(3000, 1500)]),
    "version 2, in a container": ("0::/elsewhere\n", {"": V2}, [(3000, 1500)]),
    "version 1": (
        "5:memory:/a\n0::/\n",
        {"memory/a": V1, "memory": {**V1, "memory.usage_in_bytes": "0"}},
        [(3000, 1200), (3000, 3700)],
    ),
    "none": ("3:cpu:/a\n", {"cpu/a": V1}, []),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_the_free_memory_of_a_cgroup(name, tmp_path):
    groups, folders, free = CGROUPS[name]
    (tmp_path / "cgroup").write_text(groups)
    for folder, files in folders.items():
        for file, text in files.items():
            path = tmp_path / "root" / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert list(machine._control_groups(tmp_path / "cgroup", tmp_path / "root")) == free
