"""Writes RESULTS.md and its chart from the measurements of a run."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import costs, programs
from benchmarks.steps import CONTENDERS, PEERS, ratios, spread
from deepspeed_trial import machine


def write(results: dict[str, Any], folder: pathlib.Path) -> None:
    """Write RESULTS.md and results.png into a folder."""
    described = results["machine"]
    versions = ", ".join(f"{name} {described[name]}" for name in ("python", *machine.PACKAGES))
    memory = described["memory_gib"]
    gpus = f"; {', '.join(described['gpus'])}" if described["gpus"] else ""
    lines = [
        "# Results",
        "",
        "The compared programs take turns in one run. Figures are medians over the turns. A ratio is the",
        "median of the turns' ratios. Brackets hold the distance between the quartiles over the median.",
        "",
        f"- Command: `{results['command']}`",
        f"- Machine: {described['cores']} cores, {described['processor']}, {memory} GiB{gpus}",
        f"- Versions: {versions}",
        "",
        "![Images a second, and seconds to an accuracy](results.png)",
        "",
        *_steps(results["steps"]),
        *_programs(results["programs"]),
        "## Other costs",
        "",
        *(f"- {line}" for line in costs.lines(results["costs"])),
        "",
    ]
    (folder / "RESULTS.md").write_text("\n".join(lines))
    chart(results, folder / "results.png")


def _steps(rows: Sequence[dict[str, Any]]) -> list[str]:
    over = [f"trial / {peer}" for peer in PEERS]
    lines = [
        "## Images a second",
        "",
        *(f"- `{name}`: {what}" for name, what in CONTENDERS.items()),
        "",
        "The images of the bare loops have the trial's memory format: for `net` on a CPU `channels_last`, or",
        "the format that `hyperparameters.channels_last` sets. The example style has PyTorch's default.",
        "",
        f"| processes | ZeRO | micro-batch | {' | '.join((*CONTENDERS, *over))} |",
        f"|{'---|' * (3 + len(CONTENDERS) + len(over))}",
    ]
    for row in rows:
        cells = [f"{row['images_per_second'][n]:,.0f} ({row['spread'][n]:.0%})" for n in CONTENDERS]
        where = [str(row[key]) for key in ("processes", "stage", "micro_batch")]
        times = [f"{ratio:.3f}" for ratio in ratios(row).values()]
        lines.append(f"| {' | '.join((*where, *cells, *times))} |")
    return [*lines, ""]


def _programs(measured: dict[str, Any]) -> list[str]:
    runs = programs.parsed(measured)
    lines = [
        "## Whole programs",
        "",
        "Seconds of wall time from the start of the process. Memory is the largest proportional set size of",
        "all its processes together.",
        "",
        *(f"- {name}: {what}" for name, what in programs.PEERS.items()),
        "",
        "| program | seconds in all | accuracy at the end | peak memory |",
        "|---|---|---|---|",
    ]
    for name, each in runs.items():
        seconds = [one.seconds for one in each]
        memory = statistics.median(one.memory for one in each) / 2**20
        width = f" ({spread(seconds):.0%})" if len(seconds) > 1 else ""
        cells = [f"{statistics.median(seconds):.1f}{width}", f"{programs.reached_by(runs, name):.1%}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {memory:,.0f} MiB |")
    return [*lines, "", *(f"- {line}" for line in programs.lines(measured)), ""]


def chart(results: dict[str, Any], file: pathlib.Path) -> None:
    """Draw the contenders' images a second relative to the bare PyTorch loop, and accuracies over time."""
    from matplotlib.figure import Figure

    rows, runs = results["steps"], programs.parsed(results["programs"])
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    speed, accuracy = figure.subplots(2)
    for index, name in enumerate(CONTENDERS):
        places = [place + (index - 1.5) * 0.2 for place in range(len(rows))]
        relative = [row["images_per_second"][name] / row["images_per_second"]["pytorch"] for row in rows]
        speed.bar(places, relative, 0.2, label=CONTENDERS[name])
    labels = [f"{row['micro_batch']}\nZeRO {row['stage']}\n{row['processes']} proc." for row in rows]
    speed.set_xticks(range(len(rows)), labels, fontsize="small")
    speed.set_ylabel("images a second / bare PyTorch loop's")
    for name, each in runs.items():
        middle = sorted(each, key=lambda one: one.seconds)[len(each) // 2]
        times, reached = zip(*middle.reached, strict=True)
        accuracy.plot(times, reached, marker="o" if len(times) == 1 else ".", label=name)
    accuracy.set_xlabel("seconds since the start of the program")
    accuracy.set_ylabel("accuracy")
    for axes in (speed, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(ncols=2, fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(file, dpi=130)
