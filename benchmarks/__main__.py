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

import machine
from benchmarks import costs, programs, report, steps

PARTS = ("steps", "costs", "programs")


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
    command = shlex.join(["python3", "-m", "benchmarks", *(sys.argv[1:] if argv is None else argv)])
    results: dict[str, Any] = {"command": command, "machine": machine.describe()}
    if args.only in (None, "steps"):
        results["steps"] = []
        for row in steps.measure_all(args.config, args.overrides, args.quick, args.repeats):
            results["steps"].append(row)
            print(steps.line(row), flush=True)
    if args.only in (None, "costs"):
        results["costs"] = costs.measure(args.config, args.overrides, 3 if args.quick else 3 * args.repeats)
        print("\n".join(costs.lines(results["costs"])), flush=True)
    if args.only in (None, "programs"):
        results["programs"] = programs.measure(args.overrides, 1 if args.quick else max(1, args.repeats // 2))
        print("\n".join(programs.lines(results["programs"])), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if not (args.quick or args.only):
        report.write(results, pathlib.Path(__file__).parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
