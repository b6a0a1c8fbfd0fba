"""Ranks that hang, end or are only slow: the rank and the phase that a run names, and how the run ends."""

import contextlib
import dataclasses
import json
import re
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from matrix import ROWS, Runs
from support import (
    DIGITS,
    PROJECT,
    Run,
    execute,
    free_port,
    launcher,
    overrides,
    run,
    started,
    time_limit,
    warm,
)

from deepspeed_trial.heartbeat import Activity, Beat, parsed
from deepspeed_trial.place import BACKWARD, DATA, FORWARD, REPORT, TRAINING, VALIDATION, Place
from deepspeed_trial.watch import find_behind, reported_after

SHORT = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 12}")]
ZERO3 = "{stage: 3, stage3_param_persistence_threshold: 0}"
BRANCH = overrides(hyperparameters__overwrite_deepspeed_args__zero_optimization=ZERO3)
IN_CHIEF = (
    "all_reduce|messages.py"  # the last message of the chief may be unread, and its store does not answer
)
FAULTS: dict[str, tuple] = {
    # fault, rank, launcher of new processes, more arguments: the place in the report, a function in its stacks
    "data that do not come": ("data", 1, "", [], "step 6 (data)", "in before_step"),
    "the chief is stopped": ("SIGSTOP", 0, "", [], "step ", IN_CHIEF),
    "a process that is stopped": ("SIGSTOP", 1, "torchrun", [], "step ", "all_reduce"),
    "a barrier of one rank": ("barrier", 0, "", [], "step 6 (data)", "in barrier"),
    "a save that is stuck": ("save", 0, "", [], "checkpoint after step 12", "in store_path"),
    "fewer batches": ("unequal", 1, "", overrides(scheduling_unit=99), "step 5", "gather"),
    "the chief with the store is stopped": ("SIGSTOP", 0, "deepspeed", [], "step ", IN_CHIEF),
    "a chief that never tells anything": ("unheard", 0, "deepspeed", [], "", f"{IN_CHIEF}|new_group"),
    "another branch under ZeRO 3": ("branch", 1, "", BRANCH, "step", "wait"),
}
CHEAP = ["data that do not come", "the chief is stopped"]
# Rank 1 is long in step 6, and moves for some seconds after it
SLOW = """
import sys, time, train
from model_def import CIFARTrial
def slow(trial, iterator, epoch, step, train_batch=CIFARTrial.train_batch):
    if trial.context.distributed.rank == 1 and step >= 5:
        time.sleep(SECONDS if step == 5 else 2)
    return train_batch(trial, iterator, epoch, step)
CIFARTrial.train_batch = slow
sys.exit(train.main(sys.argv[1:]))
"""
SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in FAULTS if name not in CHEAP]


def hang_after() -> int:
    """Seconds: 6 on an idle machine, more on a slow one."""
    return max(6, round(warm().seconds))


def words(fault, rank, output, row=SHORT, limit=0) -> tuple[list[str], dict[str, Any]]:
    """The arguments and the environment of a run with a fault."""
    row = [*row, *overrides(hyperparameters__hang_after=limit or hang_after()), "--output", str(output)]
    return ["tests/faulty.py", *row], {"FAULT": fault, "RANK_AT_FAULT": str(rank)}


def finished(program, output) -> Run:
    return Run(program.wait(time_limit()), program.stdout, program.stderr, output)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Run]:
    """The cheap runs at the same time: they mostly wait."""
    folder = tmp_path_factory.mktemp("hangs")
    wanted = {name: words(FAULTS[name][0], FAULTS[name][1], folder / name) for name in CHEAP}
    wanted["killed"] = words("SIGKILL", 1, folder / "killed")
    wanted["slow"] = words("", 1, folder / "slow", ROWS["zero0"].arguments, 2 * hang_after())
    wanted["slow"][0][:1] = ["-c", SLOW.replace("SECONDS", str(1.5 * hang_after()))]
    with contextlib.ExitStack() as stack:
        programs = {
            name: stack.enter_context(started(arguments, processes=2, **environment))
            for name, (arguments, environment) in wanted.items()
        }
        return {name: finished(program, folder / name) for name, program in programs.items()}


@pytest.mark.parametrize("name", [*CHEAP, *SOAK])
def test_a_hang_names_the_rank_that_is_behind_and_ends(request, tmp_path, name):
    fault, rank, by, more, where, stack = FAULTS[name]
    arguments, environment = words(fault, rank, tmp_path / "run", [*SHORT, *more])
    if name in CHEAP:
        hung = request.getfixturevalue("ended")[name]
    elif by:
        paths = f"{PROJECT}:{PROJECT}/tests/deepspeed_trial"
        hung = execute([*launcher(by, 2), *arguments], tmp_path, PYTHONPATH=paths, **environment)
    else:
        hung = run(arguments, tmp_path, processes=2, **environment)
    shown = hung.stderr + hung.stdout  # deepspeed joins them
    assert hung.code not in (0, 2, None), shown
    limit = rf"at {hang_after()} s the run ends \(hyperparameters.hang_after\)"
    assert re.search(rf"no rank has moved for \d+ s; {limit}", shown), shown
    state = "does not answer" if fault in ("SIGSTOP", "unheard") else "is behind"
    pattern = rf"rank (\d) \(host \S+, process \d+\) {state}, in (.*)"
    # On a busy machine the first report may know a stopped process by an older beat
    first = pattern.replace(state, f"(?:{state}|is behind)") if fault == "SIGSTOP" else pattern
    behind = re.findall(rf"^ *{first}", shown, re.MULTILINE)
    assert [int(number) for number, _ in behind] == [rank], shown
    assert where in f"in {behind[0][1]}" or fault == "SIGSTOP", shown
    stacks = shown.partition("stack of rank")[2]
    assert any(each in stacks for each in stack.split("|")), shown
    (end,) = re.findall(rf"no rank has moved for \d+ s: {pattern}; the run ends; --resume latest cont", shown)
    assert int(end[0]) == rank and where in f"in {end[1]}", end


def test_a_rank_that_is_slow_is_named_and_waited_for(ended, runs: Runs):
    slow, straight = ended["slow"], runs.straight("zero0", 2)
    assert slow.code == 0, slow.stderr
    assert "is behind, in step 6 (data) for" in slow.stderr and "has moved" not in straight.stderr
    assert re.search(r"the ranks move again after \d+ s: slow, but not stuck", slow.stderr)
    assert slow.summary["weights_sha256"] == straight.summary["weights_sha256"]


def test_a_rank_that_is_killed_is_named(ended):
    assert ended["killed"].code not in (0, 2, None)
    lines = ended["killed"].stderr.splitlines()
    # A collective fails at once; a message of Determined's is waited for, and the watch ends the rank
    (line,) = [line for line in lines if re.match(r"(train.py: )?rank \d ", line)]
    where = r"(step 6 \(backward\)|report after step 5)"
    named = (
        rf"(train.py: )?rank 1 \(host \S+, process \d+\) is gone, in {where} for \d+ s.*; --resume latest .*"
    )
    assert re.fullmatch(named, line)


DIES_IN_SET_UP = """
import os, signal, sys, train
from classify.reports import overview
if os.environ["RANK"] == "1":
    overview.describe = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_rank_that_is_killed_in_set_up_is_named(tmp_path):
    """The other waits for its answer in a message, long before ``hang_after``."""
    arguments = ["-c", DIES_IN_SET_UP, *DIGITS, "--output", str(tmp_path / "run")]
    ended = run(arguments, tmp_path, processes=2, GRACE="600")
    named = r"rank 1 \(host \S+, process \d+\) is gone, in setup for \d+ s; --resume latest .*"
    assert re.search(named, ended.stderr), ended.stderr
    assert ended.code not in (0, 2, 130)


def test_ranks_that_do_not_meet_say_whom_they_wait_for(tmp_path):
    """Each of the two has another port, at which nobody answers."""
    arguments = ["train.py", *words("", 0, tmp_path / "run")[0][1:]]
    joins: dict[str, Any] = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        (silent := stack.enter_context(socket.socket())).bind(("127.0.0.1", 0))
        ports = {"0": str(free_port()), "1": str(silent.getsockname()[1])}
        ranks = [
            stack.enter_context(started(arguments, RANK=rank, LOCAL_RANK=rank, MASTER_PORT=port, **joins))
            for rank, port in ports.items()
        ]
        for program, (rank, port), whom in zip(ranks, ports.items(), ["1 other rank", "rank 0"], strict=True):
            assert program.wait(time_limit()) == 1
            said, seconds, first = program.stderr, hang_after(), reported_after(hang_after())
            assert f"rank {rank} (host " in said and "Traceback" not in said
            assert f"has waited {first:.0f} s for {whom} at 127.0.0.1:{port}: start all ranks" in said
            assert f"has waited {seconds} s for {whom}, so the run ends" in said


def test_a_place_is_compared_by_what_all_ranks_do():
    """Passes of the chief alone, as in an evaluation, do not count."""
    chief, other = Place(), Place()
    for place in (chief, other):
        place.begin(VALIDATION, 49)
    for _ in range(2000):
        chief.enter(FORWARD)
    for place in (chief, other):
        place.begin(TRAINING, 50)
        place.enter(DATA)
    other.enter(BACKWARD)
    ranks = [Beat(number, place) for number, place in enumerate((chief, other))]
    assert [beat.rank for beat in find_behind(ranks)] == [0]
    chief.begin(REPORT, 50)
    other.begin(TRAINING, 51)
    ranks = [Beat(number, place) for number, place in enumerate((chief, other))]
    assert [beat.rank for beat in find_behind(ranks)] == [0]


def test_a_heartbeat_of_another_program_is_no_heartbeat():
    """Of a dead rank, one with text for numbers would end every look at the ranks."""
    good = dataclasses.asdict(Beat(1, Place(step=3)))
    assert dataclasses.asdict(parsed(json.dumps(good).encode(), 1)) == good
    odd: tuple[Any, ...] = ([], None, float("nan"), 10**400, True)
    bad: list[Any] = [{**good, key: value} for key in good for value in odd]
    bad += [{**good, "place": {**good["place"], key: []}} for key in good["place"]]
    bad += [{**good, "rank": 0}, {**good, "ended": "is gone"}, {**good, "idle": "x"}, {}, [], 1, None, "x"]
    contents = [json.dumps(each).encode() for each in bad]
    for content in (*contents, b"", b"\xff", b"[" * 100_000):
        with pytest.raises((ValueError, TypeError, RecursionError)):
            parsed(content, 1)


def test_a_process_whose_children_work_is_at_work():
    """For example a pool that decodes images; without work the process is idle."""
    mine = Beat(0, Place())
    activity = Activity(mine)

    def works() -> bool:
        time.sleep(0.2)
        activity.tick()
        return not mine.idle

    with subprocess.Popen([sys.executable, "-c", "while True: sum(range(1000))"]) as child:
        try:
            assert all(any(works() for _ in range(50)) for _ in range(6))
        finally:
            child.kill()
    assert any(not works() for _ in range(50))
