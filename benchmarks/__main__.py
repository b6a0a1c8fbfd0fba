"""Compares the trial with its peers on this machine, in one run, and writes benchmarks/RESULTS.md.

    python3 -m benchmarks                                                  all of it
    python3 -m benchmarks --quick --set data.dataset=digits                a minute or two
    python3 -m benchmarks --set data.dataset=imagefolder --set data.root=FOLDER --json results.json

Contenders take turns within each repeat, so that what else the machine does touches all of them alike. Figures are
medians over the repeats; the spread is the distance between the quartiles over the median. Ratios are what to go by.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import joblib

import machine

PROJECT = pathlib.Path(__file__).resolve().parent.parent
CONTENDERS = {
    "pytorch": "bare PyTorch loop, float tensors in memory",
    "engine": "bare DeepSpeed loop, float tensors in memory",
    "trial": "this trial",
    "example": "Determined's example style: PIL dataset, 2 workers",
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="const.yaml", metavar="FILE", help="experiment file (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides", help="replace it")
    parser.add_argument("--quick", action="store_true", help="one process, ZeRO 0, few repeats; writes no RESULTS.md")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every time there, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes the results."""
    args = parse(argv)
    micro_batches, stages, processes = ((16, 256), (0,), (1,)) if args.quick else ((16, 256, 1024), (0, 2), (1, 2))
    repeats = 3 if args.quick else 5
    rows = []
    for count, stage, micro_batch in itertools.product(processes, stages, micro_batches):
        rows.append(measure(args, count, stage, micro_batch, repeats, seconds=1 if args.quick else 2))
        print(line(rows[-1]), flush=True)
    command = shlex.join(["python3", "-m", "benchmarks", *(sys.argv[1:] if argv is None else argv)])
    results = {"command": command, "machine": machine.describe(), "repeats": repeats, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if not args.quick:
        write(results)
    return 0


def measure(
    args: argparse.Namespace, processes: int, stage: int, micro_batch: int, repeats: int, seconds: float
) -> dict[str, Any]:
    """Times every contender at one point: seconds an optimizer step, one a repeat."""
    deepspeed = "hyperparameters.overwrite_deepspeed_args."
    overrides = [
        *args.overrides,
        f"{deepspeed}train_batch_size={micro_batch * processes}",
        f"{deepspeed}zero_optimization.stage={stage}",
    ]
    steps = max(20, int(seconds * 3000 / (micro_batch + 10)))  # about so many seconds a segment on two cores
    row: dict[str, Any] = {"processes": processes, "stage": stage, "micro_batch": micro_batch, "steps": steps}
    row["seconds_per_step"] = {}
    for contenders in (["pytorch", "engine", "trial"], ["example"]):
        request = {"config": args.config, "overrides": overrides, "contenders": contenders}
        answer = run({**request, "steps": steps, "repeats": repeats}, processes)
        row["seconds_per_step"].update(answer["seconds_per_step"])
    row["images_per_second"] = {
        name: micro_batch * processes / statistics.median(times) for name, times in row["seconds_per_step"].items()
    }
    row["spread"] = {name: spread(times) for name, times in row["seconds_per_step"].items()}
    return row


def run(request: dict[str, Any], processes: int) -> dict[str, Any]:
    """Runs the worker in so many processes and gives its answer."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = pathlib.Path(folder, "request.json"), pathlib.Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        launcher = [sys.executable, "-m", "benchmarks.worker"]
        if processes > 1:
            start = [
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={processes}",
                "-m",
                "benchmarks.worker",
            ]
            launcher = [sys.executable, "-m", *start]
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, joblib.cpu_count() // processes))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(PROJECT)}
        done = subprocess.run(
            [*launcher, str(asked), str(answer)], cwd=PROJECT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"benchmarks: a contender failed:\n{done.stderr[-3000:]}")
        return json.loads(answer.read_text())


def spread(times: Sequence[float]) -> float:
    """The distance between the quartiles over the median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def ratios(row: dict[str, Any]) -> tuple[float, float]:
    """The trial's speed over the bare engine's and over the example style's, each the median over the repeats."""
    times = row["seconds_per_step"]
    pairs = zip(times["engine"], times["trial"], strict=True)
    example = statistics.median(times["example"]) / statistics.median(times["trial"])
    return statistics.median(engine / trial for engine, trial in pairs), example


def line(row: dict[str, Any]) -> str:
    """One row of the table, as text."""
    over_engine, over_example = ratios(row)
    rates = "  ".join(f"{name} {rate:,.0f}" for name, rate in row["images_per_second"].items())
    what = f"{row['processes']} processes, ZeRO {row['stage']}, micro-batch {row['micro_batch']}"
    return f"{what}: images/s {rates}; trial/engine {over_engine:.3f}, trial/example {over_example:.2f}"


def write(results: dict[str, Any]) -> None:
    """Writes RESULTS.md and its bar chart."""
    folder = pathlib.Path(__file__).parent
    described = results["machine"]
    versions = ", ".join(f"{name} {described[name]}" for name in ("python", *machine.PACKAGES))
    gpus = f"; {', '.join(described['gpus'])}" if described["gpus"] else ""
    lines = [
        "# Results",
        "",
        f"Images a second, medians of {results['repeats']} repeats in which the contenders take turns; in brackets the",
        "distance between the quartiles over the median.",
        "",
        f"- Command: `{results['command']}`",
        f"- Machine: {described['cores']} cores, {described['processor']}, {described['memory_gib']} GiB{gpus}",
        f"- Versions: {versions}",
        *(f"- `{name}`: {what}" for name, what in CONTENDERS.items()),
        "",
        f"| processes | ZeRO | micro-batch | {' | '.join(CONTENDERS)} | trial / engine | trial / example |",
        f"|{'---|' * (len(CONTENDERS) + 5)}",
    ]
    for row in results["rows"]:
        over_engine, over_example = ratios(row)
        cells = [f"{row['images_per_second'][n]:,.0f} ({row['spread'][n]:.0%})" for n in CONTENDERS]
        where = [row["processes"], row["stage"], row["micro_batch"]]
        lines.append(f"| {' | '.join(map(str, [*where, *cells]))} | {over_engine:.3f} | {over_example:.2f} |")
    lines += ["", "![Images a second](results.png)", ""]
    (folder / "RESULTS.md").write_text("\n".join(lines))
    chart(results["rows"], folder / "results.png")


def chart(rows: Sequence[dict[str, Any]], file: pathlib.Path) -> None:
    """Draws the images a second of every contender, relative to the bare engine's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(CONTENDERS):
        places = [place + (index - 1.5) * 0.2 for place in range(len(rows))]
        relative = [row["images_per_second"][name] / row["images_per_second"]["engine"] for row in rows]
        axes.bar(places, relative, 0.2, label=CONTENDERS[name])
    labels = [f"{row['micro_batch']}\nZeRO {row['stage']}\n{row['processes']} proc." for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize="small")
    axes.set_ylabel("images a second / bare DeepSpeed loop's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=2, fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
