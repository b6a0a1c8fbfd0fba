"""Random faults on two hosts of two ranks each, which are network namespaces; by hand, as root, for half an hour.

    PYTHONPATH=.:tests python3 tests/soak.py --faults 20 --seed 0 --folder /tmp/soak

Each run gets a fault at a random moment, is resumed, and has to end on the weights of a run without one, with no
process left and with the lost rank named.
"""

import argparse
import contextlib
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import psutil
from hosts import CHIEF, OTHER, cut, entering, joined_namespaces
from modes import DEEPSPEED, LR, SHORT
from support import PROJECT, TIME_LIMIT, Run, checkpoints, environment, free_port, overrides, train_many

STEPS, HANG_AFTER, RANKS = 240, 30, 4
LENGTH = overrides(
    hyperparameters__max_length=f"{{batches: {STEPS}}}",
    min_checkpoint_period="{batches: 20}",
    hyperparameters__hang_after=HANG_AFTER,
    **{f"{DEEPSPEED}train_batch_size": 32},
)


def row(stage: int) -> list[str]:
    zero = overrides(**{f"{DEEPSPEED}zero_optimization__stage": stage})
    return ["--config", f"experiments/zero{stage or 2}.yaml", *SHORT, *LR, *LENGTH, *zero]


def start(hosts: dict[str, list[str]], arguments: list[str], logs: pathlib.Path) -> list[subprocess.Popen]:
    port, ranks = str(free_port()), []
    for rank in range(RANKS):
        host, local = divmod(rank, 2)
        numbers = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2}
        numbers |= {"GROUP_RANK": host, "GROUP_WORLD_SIZE": 2}
        joined = {key: str(value) for key, value in numbers.items()}
        env = environment(MASTER_ADDR=CHIEF, MASTER_PORT=port, **joined)
        command = [*list(hosts.values())[host], sys.executable, "-u", "train.py", *arguments]
        with open(logs / f"{rank}.log", "w") as log:
            ranks.append(subprocess.Popen(command, cwd=PROJECT, env=env, stdout=log, stderr=log))
    return ranks


def kill(ranks: list[subprocess.Popen], which: list[int]) -> None:
    for rank in which:
        ranks[rank].kill()


def stop(ranks: list[subprocess.Popen], rank: int, seconds: float) -> None:
    ranks[rank].send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        ranks[rank].send_signal(signal.SIGCONT)


def pull(seconds: float) -> None:
    cut(CHIEF)
    time.sleep(seconds)
    cut(CHIEF, False)


def fill_disk(ranks: list[subprocess.Popen], rank: int) -> None:
    psutil.Process(ranks[rank].pid).rlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def hide(run: Run, ranks: list[subprocess.Popen]) -> None:
    """Takes the shared folder away until all ranks have ended."""
    hidden = run.output.with_name("hidden")
    run.output.rename(hidden)
    for rank in ranks:
        rank.wait(TIME_LIMIT)
    shutil.rmtree(run.output, ignore_errors=True)
    hidden.rename(run.output)


def do(fault: str, rank: int, run: Run, ranks: list[subprocess.Popen]) -> str:
    """Does it, and gives what has to be said; empty where the run goes on by itself."""
    named, first = rf"rank {rank} \(host host-{rank // 2 + 1}, process \d+\)", rank // 2 * 2
    if fault == "kill a rank":
        kill(ranks, [rank])
        return rf"{named} is gone, in "
    if fault == "kill a host":
        kill(ranks, [first, first + 1])
        return rf"rank ({first}|{first + 1}) \(host host-{rank // 2 + 1}, process \d+\).* is gone, in "
    if fault == "stop a rank":
        stop(ranks, rank, HANG_AFTER + 15)
        return rf"{named} is behind: does not answer for"
    if fault == "stop a rank for 15 s":
        stop(ranks, rank, 15)
        return ""
    if fault == "cut the link":
        pull(HANG_AFTER + 15)
        return r"rank (0|2) \(host host-\d, process \d+\) is behind: does not answer for"
    if fault == "cut the link for 5 s":
        pull(5)
        return ""
    if fault == "full disk":
        fill_disk(ranks, 0)  # which writes the largest files
        return r"cannot be written|File too large"
    hide(run, ranks)
    return r"train.py: .*"


FAULTS = ["kill a rank", "kill a host", "stop a rank", "stop a rank for 15 s", "cut the link"]
FAULTS += ["cut the link for 5 s", "full disk", "the folder is gone"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    draw, wrong = random.Random(args.seed), 0
    straight = train_many(args.folder, {f"zero{stage}": row(stage) for stage in (0, 2, 3)}, RANKS)
    with joined_namespaces(CHIEF):
        hosts = entering(CHIEF, OTHER)
        for number in range(args.faults):
            stage, fault, rank = draw.choice((0, 2, 3)), FAULTS[number % len(FAULTS)], draw.randrange(RANKS)
            logs = args.folder / f"{number}"
            logs.mkdir()
            run, begun = Run(0, "", "", logs / "run"), time.monotonic()
            arguments = [*row(stage), "--output", str(run.output), "--resume", "auto"]
            ranks = start(hosts, arguments, logs)
            while not checkpoints(run) and ranks[0].poll() is None:
                time.sleep(0.1)
            time.sleep(draw.uniform(0, 2))
            before = max(checkpoints(run))
            expected = do(fault, rank, run, ranks)
            codes = [each.wait(TIME_LIMIT) for each in ranks]
            said = "\n".join((logs / f"{each}.log").read_text() for each in range(RANKS))
            problems = [] if re.search(expected, said, re.MULTILINE) else [f"not said: {expected}"]
            problems += ["a traceback"] if "Traceback" in said else []
            if any(codes):
                (logs / "first").mkdir()
                for each in logs.glob("*.log"):
                    each.rename(logs / "first" / each.name)
                codes += [each.wait(TIME_LIMIT) for each in start(hosts, arguments, logs)]
                problems += [] if codes[-RANKS:] == [0] * RANKS else ["not resumed"]
            mine = run.summary["weights_sha256"] if (run.output / "summary.json").exists() else None
            same = mine == straight[f"zero{stage}"].summary["weights_sha256"]
            problems += [] if same else ["other weights"]
            wrong += bool(problems)
            place = f"ZeRO {stage}, rank {rank}, after step {before}"
            seconds = f"{time.monotonic() - begun:.0f} s"
            print(
                number,
                fault,
                place,
                codes,
                seconds,
                "; ".join(problems) or "same bits",
                sep=" | ",
                flush=True,
            )
    left = [
        each for each in psutil.process_iter(["cmdline"]) if str(args.folder) in str(each.info["cmdline"])
    ]
    left = [each for each in left if each.pid != os.getpid()]
    print(f"{args.faults - wrong} of {args.faults} as they should be; processes left: {len(left)}")
    return int(bool(wrong or left))


if __name__ == "__main__":
    sys.exit(main())
