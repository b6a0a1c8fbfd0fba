"""Compares the trial with its peers on this machine, in one run, and writes benchmarks/RESULTS.md.

    python3 -m benchmarks                                                  all of it: an hour on two cores
    python3 -m benchmarks --quick --set data.dataset=digits                two minutes
    python3 -m benchmarks --set data.dataset=imagefolder --set data.root=FOLDER --json results.json
    python3 -m benchmarks --only steps                                     or costs, or programs

Contenders take turns within each repeat, so that what else the machine does touches all of them alike. Figures are
medians over the repeats; the spread is the distance between the quartiles over the median. Ratios are what to go by.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import data
import experiment
import machine
import train
from benchmarks import costs, programs, report, steps
from errors import InvalidInput
from hyperparameters import is_moe

PARTS = ("steps", "costs", "programs")
# What the loops that the trial is compared with know of an experiment.
HYPERPARAMETERS = ("max_length", "deepspeed_config", "overwrite_deepspeed_args", "net", "net_args", "channels_last")
DATA = ("dataset", "root", "download", "image_size", "device")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="const.yaml", metavar="FILE", help="experiment file (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides", help="replace it")
    parser.add_argument("--quick", action="store_true", help="one process, ZeRO 0, few repeats; writes no RESULTS.md")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="steps thrice, programs half as often (5)")
    parser.add_argument("--only", choices=PARTS, help="one part; writes no RESULTS.md")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every time there, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints what was measured and writes the results."""
    args = parse(argv)
    try:
        check(args)
    except InvalidInput as error:
        for fault in error.faults:
            print(f"benchmarks: {fault}", file=sys.stderr)
        return 2
    command = shlex.join(["python3", "-m", "benchmarks", *(sys.argv[1:] if argv is None else argv)])
    results: dict[str, Any] = {"command": command, "machine": machine.describe()}

    def keep(part: str, measured: Any, lines: Sequence[str]) -> None:
        results[part] = measured
        print("\n".join(lines), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n")

    if args.only in (None, "steps"):
        rows: list[dict[str, Any]] = []
        for row in steps.measure_all(args.config, args.overrides, args.quick, args.repeats):
            rows.append(row)
            keep("steps", rows, [steps.line(row)])
    if args.only in (None, "costs"):
        found = costs.measure(args.config, args.overrides, 3 if args.quick else 3 * args.repeats)
        keep("costs", found, costs.lines(found))
    if args.only in (None, "programs"):
        images = [each for each in args.overrides if each.startswith("data.")]  # the recipes are the programs' own
        watched = programs.measure(images, 1 if args.quick else max(1, args.repeats // 2))
        keep("programs", watched, programs.lines(watched))
    if not (args.quick or args.only):
        report.write(results, pathlib.Path(__file__).parent)
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuses what would end the measurements half way, or not compare like with like; decodes the images.

    Raises:
        InvalidInput: with one line for each thing that is wrong.
    """
    if args.repeats < 1:
        raise InvalidInput(f"--repeats: {args.repeats}: must be at least 1")
    if args.json and not args.json.resolve().parent.is_dir():
        raise InvalidInput(f"--json: {args.json}: its folder is missing; make it first")
    loaded = experiment.load(args.config, args.overrides)
    train.resolved(loaded, slots=1)
    section = loaded.config.get("data") or {}
    more = {f"hyperparameters.{key}": value for key, value in loaded.hyperparameters.items()
            if key not in HYPERPARAMETERS and value is not None}  # fmt: skip
    more |= {f"data.{key}": value for key, value in section.items() if key not in DATA}
    if is_moe(loaded.hyperparameters):
        more["hyperparameters.net"] = loaded.hyperparameters.get("net", "net")
    if more and args.only != "programs":
        raise InvalidInput(
            f"{key}: {value!r}: the loops that the trial is compared with do without; leave it out"
            for key, value in more.items()
        )
    for split in ("train", "test"):
        data.load(data.DataConfig.parse(section), split)


if __name__ == "__main__":
    sys.exit(main())
