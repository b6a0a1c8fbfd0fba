"""Compare the trial with bare loops and with other programs, and write benchmarks/RESULTS.md.

    python3 -m benchmarks                                                  all parts: an hour on two cores
    python3 -m benchmarks --quick --set data.dataset=digits                two minutes
    python3 -m benchmarks --set data.dataset=imagefolder --set data.root=FOLDER --json results.json
    python3 -m benchmarks --only steps                                     or costs, or programs

The compared programs take turns in every repeat, so that other load on the machine affects them equally.
Figures are medians over the repeats. The spread is the interquartile range divided by the median. Ratios are
more reliable than absolute figures.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import costs, programs, report, steps
from classify.config import command_line, experiment_file
from classify.engine.trial_config import TrialConfig
from deepspeed_trial import machine
from deepspeed_trial.errors import InvalidInput, print_errors
from deepspeed_trial.processes import device_type

PARTS = ("steps", "costs", "programs")
# The hyperparameters and the keys of the section data that the bare loops support
HYPERPARAMETERS = (
    """max_length deepspeed_config overwrite_deepspeed_args net net_args channels_last""".split()
)
DATA = ("dataset", "root", "download", "image_size", "device")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line.parser(__doc__, "const.yaml")
    add = parser.add_argument
    add("--quick", action="store_true", help="one process, ZeRO 0, few repeats; write no RESULTS.md")
    add(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="3 N repeats of steps and costs, N / 2 of programs (%(default)s)",
    )
    add("--only", choices=PARTS, help="measure one part; write no RESULTS.md")
    add("--json", type=pathlib.Path, metavar="FILE", help="also write all measured times to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the results; return the exit code."""
    args = parse(argv)
    try:
        check(args)
    except InvalidInput as error:
        return print_errors("benchmarks", error)
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
        # The programs have their own recipes, but use the given images
        images = [each for each in args.overrides if each.startswith("data.")]
        watched = programs.measure(images, 1 if args.quick else max(1, args.repeats // 2))
        keep("programs", watched, programs.lines(watched))
    if not (args.quick or args.only):
        report.write(results, pathlib.Path(__file__).parent)
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse an experiment that would fail later, or that the bare loops do not support; decode the images.

    Raises:
        InvalidInput: with a line for each error.
    """
    if args.repeats < 1:
        raise InvalidInput(f"--repeats: {args.repeats}: must be at least 1")
    if args.json and not args.json.resolve().parent.is_dir():
        raise InvalidInput(f"--json: {args.json}: its folder is missing; make it first")
    experiment = experiment_file.load(args.config, args.overrides)
    hyperparameters, section = experiment.hyperparameters, experiment.config.get("data") or {}
    config = TrialConfig.resolve(hyperparameters, experiment.config, 1, device_type())
    more = {
        f"hyperparameters.{key}": value
        for key, value in hyperparameters.items()
        if key not in HYPERPARAMETERS and value is not None
    }
    more |= {f"data.{key}": value for key, value in section.items() if key not in DATA}
    if config.hyper.has_experts:
        more["hyperparameters.net"] = config.hyper.net
    if more and args.only != "programs":
        raise InvalidInput(
            f"{key}: {value!r}: the bare loops do not support it; remove it" for key, value in more.items()
        )
    for split in ("train", "test"):
        config.source.load(split)


if __name__ == "__main__":
    sys.exit(main())
