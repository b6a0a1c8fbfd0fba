"""Ranks that hang, end or are only slow: who is named, with which phase, and how the run ends."""

import re
import subprocess
import sys
import time

import psutil
import pytest
from support import DIGITS, PROJECT, TIME_LIMIT, environment, execute, free_port, launcher, overrides

from harness import cluster
from harness.errors import LostRank
from harness.hangs.activity import Activity
from harness.hangs.exchange import Beat
from harness.hangs.place import BACKWARD, DATA, FORWARD, REPORT, TRAINING, VALIDATION, Place
from harness.hangs.report import Rank, find_behind

SHORT = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 12}", hyperparameters__hang_after=6)]
ZERO3 = "hyperparameters__overwrite_deepspeed_args__zero_optimization"


def run(tmp_path, fault, rank, *more, by="torchrun", **env):
    command = [*launcher(by, 2), "tests/hanging.py", *SHORT, *more, "--output", str(tmp_path / "run")]
    at_fault = {"FAULT": fault, "RANK_AT_FAULT": str(rank), "PYTHONPATH": str(PROJECT)}
    return execute(command, tmp_path / "run", **at_fault, **env)


FAULTS = {
    # fault, rank, launcher, more: what is said of the ranks, and which stack names it
    "data that do not come": ("data", 1, "torchrun", [], "step 6 (data)", "time.sleep(SECONDS)"),
    "a process that is stopped": ("SIGSTOP", 1, "torchrun", [], "step 6 (backward)", "all_reduce"),
    "a barrier of one rank": ("barrier", 0, "torchrun", [], "step 6 (data)", "barrier()"),
    "a save that is stuck": ("save", 0, "torchrun", [], "checkpoint after step 12", "write_metadata"),
    "fewer batches": ("unequal", 1, "torchrun", [], "after step 5", "gather"),
    "the chief is stopped": ("SIGSTOP", 0, "deepspeed", [], "step 6 (backward)", "all_reduce"),
    "a chief that never tells anything": ("unheard", 0, "deepspeed", [], "setup", "new_group"),
    "another branch under ZeRO 3": (
        "branch",
        1,
        "torchrun",
        overrides(**{ZERO3: "{stage: 3, stage3_param_persistence_threshold: 0}"}),
        "step",
        "wait",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_hang_names_the_rank_that_is_behind_and_ends(tmp_path, name):
    fault, rank, by, more, where, stack = FAULTS[name]
    hung = run(tmp_path, fault, rank, *more, by=by)
    shown = hung.stderr + hung.stdout  # deepspeed joins them
    assert hung.code not in (0, 2, None), shown
    assert re.search(
        r"no rank has moved for \d+ s; at 6 s the run ends \(hyperparameters.hang_after\)", shown
    )
    behind = re.findall(r"^ *rank (\d) \(host \S+, process \d+\) is behind: (.*)", shown, re.MULTILINE)
    assert [int(number) for number, _ in behind] == [rank], shown
    if fault in ("SIGSTOP", "unheard"):
        assert behind[0][1].startswith("does not answer for")
    else:
        assert where in behind[0][1]
    assert "what to look at: " in shown and stack in shown.partition("stack of rank")[2]
    (end,) = re.findall(r"no rank has moved for \d+ s: (.*); so this ends; --resume latest goes on", shown)
    assert end.startswith(f"rank {rank} ") and where in end, end


def test_a_place_is_compared_by_what_all_ranks_do():
    """Not by passes that the chief alone has made, as in an evaluation of its own."""
    chief, other = Place(), Place()
    for place in (chief, other):
        place.begin(VALIDATION, 49)
    for _ in range(2000):
        chief.enter(FORWARD)
    for place in (chief, other):
        place.begin(TRAINING, 50)
        place.enter(DATA)
    other.enter(BACKWARD)
    ranks = [rank_at(number, place) for number, place in enumerate((chief, other))]
    assert [each.beat.rank for each in find_behind(ranks, in_step=True)] == [0]
    chief.begin(REPORT, 50)
    other.begin(TRAINING, 51)
    ranks = [rank_at(number, place) for number, place in enumerate((chief, other))]
    assert [each.beat.rank for each in find_behind(ranks, in_step=False)] == [0]


def rank_at(number, place):
    where = (place.step, place.work, place.part, place.begun, place.moves)
    return Rank(Beat(number, "host", "space", number, 1, *where, idle=30.0), 0.0, False)


CHILD = "import time\nend = time.monotonic() + 4\nwhile time.monotonic() < end: sum(range(1000))"


def test_a_process_whose_children_work_is_at_work():
    """As one that decodes images in a pool; then it is idle, and its stack is known."""
    activity = Activity(Place(), psutil.Process(), shown_after=1)
    with subprocess.Popen([sys.executable, "-c", CHILD]) as child:
        while child.poll() is None:
            time.sleep(1)
            activity.note(1)
            assert child.poll() is not None or time.monotonic() - activity.moved_at < 2.5
    begun = time.monotonic()
    while not activity.stack[0]:
        assert time.monotonic() - begun < TIME_LIMIT
        time.sleep(1)
        activity.note(1)
    assert "test_a_process_whose_children_work_is_at_work" in activity.stack[0]


def test_a_lost_rank_is_no_invalid_hyperparameter(monkeypatch):
    """On a cluster its trial is to be started again."""
    monkeypatch.setattr(cluster, "on_cluster", lambda: True)
    with pytest.raises(LostRank), cluster.errors_end_the_trial():
        raise LostRank("rank 1 is gone")


def test_a_rank_that_is_slow_is_named_and_waited_for(tmp_path):
    straight = run(tmp_path / "straight", "nothing", 1)
    assert straight.code == 0 and "has moved" not in straight.stderr
    slow = run(tmp_path, "data", 1, *overrides(hyperparameters__hang_after=12), SLEEP="9")
    assert slow.code == 0, slow.stderr
    assert "is behind: step 6 (data)" in slow.stderr
    assert re.search(r"the ranks move again after \d+ s: slow, but not stuck", slow.stderr)
    assert slow.summary["weights_sha256"] == straight.summary["weights_sha256"]


def test_a_rank_that_is_killed_is_named(tmp_path):
    killed = run(tmp_path, "SIGKILL", 1)
    assert killed.code not in (0, 2, None)
    (line,) = [line for line in killed.stderr.splitlines() if line.startswith("train.py: rank")]
    assert re.fullmatch(
        r"train.py: rank 1 \(host \S+, process \d+\) is gone, in step 6 \(backward\); --resume latest .*",
        line,
    )


def test_ranks_that_do_not_meet_say_whom_they_wait_for(tmp_path):
    """One of them has the port of another run."""
    ports, ranks = [free_port(), free_port()], []
    for rank, port in enumerate(ports):
        joins = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": port,
        }
        variables = {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in joins.items()}}
        command = [sys.executable, "train.py", *SHORT, "--output", str(tmp_path / "run")]
        ranks.append(
            subprocess.Popen(
                command, cwd=PROJECT, env=environment(**variables), stderr=subprocess.PIPE, text=True
            )
        )
    said = [rank.communicate(timeout=TIME_LIMIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    for rank, whom in enumerate(["the other 1", "rank 0"]):
        assert f"rank {rank} (host " in said[rank]
        assert f"waits for {whom} at 127.0.0.1:{ports[rank]} for 2 s: all ranks have to be" in said[rank]
        assert f"has waited for {whom} for 6 s; so this ends" in said[rank]
        assert "Traceback" not in said[rank]
