"""One self-contained HTML page about runs of ``train.py``, side by side, and its pictures as PNG files."""

from __future__ import annotations

import base64
import io
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from classify.config.metric_table import METRICS, PREFIXES
from classify.images.decode import open_image
from classify.models import net_file
from classify.reports import figures, summary
from deepspeed_trial import redaction
from deepspeed_trial.errors import one_line, printable
from deepspeed_trial.local import metrics_log
from workbench.reports import page
from workbench.reports.finished_run import FinishedRun

TEMPLATE = pathlib.Path(__file__).with_name("report.html.jinja")
TRACKED = (*net_file.NAMES, summary.FILE, metrics_log.FILE, "run.json")


def write(folders: Sequence[pathlib.Path], target: pathlib.Path) -> None:
    """Write the page, and its pictures in the same folder.

    Args:
        folders: of the runs.
        target: the page's file.

    Raises:
        InvalidInput: if a folder is no finished run's; nothing is written then.
    """
    runs = [FinishedRun.read(folder) for folder in folders]
    curves = {name: _png(figure) for name, figure in _curves(runs).items()}
    images = {f"{target.stem}-{name}.png": png for name, png in curves.items()}
    shown = []
    for index, run in enumerate(runs):
        classified = run.classification
        confusion = _png(figures.confusion_figure(np.array(classified["confusion"]), classified["classes"]))
        suffix = f"-{index + 1}" if len(runs) > 1 else ""
        images[f"{target.stem}-confusion{suffix}.png"] = confusion
        images[f"{target.stem}-mistakes{suffix}.png"] = _png(_mistakes(classified))
        shown.append(_shown(run, confusion))
    values = {
        "title": f"Report: {', '.join(run.name for run in runs)}",
        "runs": shown,
        "curves": {name: page.inline(png) for name, png in curves.items()},
        "figures": _figures(runs),
        "per_class": _per_class(runs),
    }
    page.write(page.render(TEMPLATE, values), target)
    for name, png in images.items():
        target.with_name(name).write_bytes(png)


def tracked_files(output: pathlib.Path) -> list[pathlib.Path]:
    """Write the report of a local run; return the files for trackers, with the report if it succeeded."""
    report, files = output / "report.html", [output / name for name in TRACKED]
    try:
        write([output], report)
    except Exception as error:  # pictures, fonts or the disk: a finished training must not fail for them
        print(printable(f"note: {report}: not written ({one_line(error)})"), file=sys.stderr)
        return files
    return [report, *files]


def _shown(run: FinishedRun, confusion: bytes) -> dict[str, Any]:
    classes = run.classification["classes"]
    names = ("predicted", "label")
    mistakes = [{**each, **{k: classes[each[k]] for k in names}} for each in run.classification["mistakes"]]
    return {
        "name": run.name,
        "validation": run.summary["validation"],
        "test": run.summary.get("test") or {},
        "metric": run.metric,
        "chosen_on": run.chosen_on,
        "steps": run.summary["steps"],
        "score": _score(run, *run.last),
        "best": "" if run.best[0] == run.last[0] else _score(run, *run.best),
        "data": f"dataset {(run.described['config'].get('data') or {}).get('dataset', 'cifar10')}",
        "confusion": page.inline(confusion),
        "mistakes": mistakes,
        "command": shlex.join(redaction.command(run.described["command"])),
        "groups": run.summary.get("parameter_groups") or [],
        "config": page.as_yaml(redaction.experiment(run.described["config"])),
        "machine": page.as_yaml(run.described["machine"]),
    }


def _figures(runs: Sequence[FinishedRun]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table of numbers: a label and a cell of every run."""

    def scores(part: str, suffix: str) -> list[tuple[str, list[str]]]:
        rows = []
        for metric in METRICS.values():
            values = [(run.summary.get(part) or {}).get(metric.name) for run in runs]
            if set(values) != {None}:
                cells = ["-" if value is None else f"{value:.4f}" for value in values]
                rows.append((f"{metric.label}{suffix}", cells))
        return rows

    def row(label: str, text: Any) -> tuple[str, list[str]]:
        return label, [text(run.summary, run.described["machine"]) for run in runs]

    mfu = [run.summary.get("mfu") for run in runs]
    cells = ["-" if share is None else f"{share:.0%}" for share in mfu]
    utilisation = [("share of the GPUs' peak (MFU)", cells)] if set(mfu) != {None} else []
    return [
        *scores("test", " of the test at the end"),
        ("images of the validations, which choose", [run.chosen_on for run in runs]),
        ("best by the chosen metric", [f"{run.metric}: {' '.join(_score(run, *run.best))}" for run in runs]),
        *scores("validation", ""),
        row("epochs", lambda s, m: f"{s['epochs']}"),
        row("optimizer steps", lambda s, m: f"{s['steps']:,}"),
        row("time of training and validation", lambda s, m: f"{s['seconds']:,.1f} s"),
        row("images a second while training", lambda s, m: f"{s['images_per_second']:,.0f}"),
        row("operations a second while training", lambda s, m: _operations(s.get("flops_per_second"))),
        *utilisation,
        row("peak memory of a process", lambda s, m: f"{max(s['peak_memory_mib']):,.0f} MiB"),
        row("processes", lambda s, m: f"{s['world_size']}"),
        row("ZeRO stage", lambda s, m: f"{s['zero_stage']}"),
        row("precision", lambda s, m: s["dtype"]),
        row("processor", lambda s, m: ", ".join(m["gpus"]) or f"{m['cores']} cores, {m['processor']}"),
    ]


def _score(run: FinishedRun, value: float, step: int) -> tuple[str, str]:
    """Return a value of the run's metric, an accuracy in percent, and its step in words."""
    metric = METRICS.get(run.metric)
    in_percent = metric.in_percent if metric else run.metric.startswith(tuple(PREFIXES))
    return f"{100 * value:.2f} %" if in_percent else f"{value:.4f}", f"after {step:,} steps"


def _operations(a_second: float | None) -> str:
    return "-" if a_second is None else f"{a_second / 1e9:,.3g} GFLOP/s"


def _per_class(runs: Sequence[FinishedRun]) -> list[tuple[str, list[float | None]]]:
    accuracies = [run.summary["validation"]["per_class_accuracy"] for run in runs]
    names = list(dict.fromkeys(name for of_run in accuracies for name in of_run))
    return [(name, [of_run.get(name) for of_run in accuracies]) for name in names]


def _curves(runs: Sequence[FinishedRun]) -> dict[str, Figure]:
    """Draw loss, accuracy and learning rate over the optimizer steps, a colour for each run."""
    alone = len(runs) == 1
    curves = {}
    for title in ("loss", "accuracy", "learning rate"):
        figure = Figure(figsize=(5, 3.4), layout="constrained")
        axes = figure.subplots()
        for index, run in enumerate(runs):
            colour, name = f"C{index}", None if alone else figures.as_label(run.name)
            style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4}
            if title == "learning rate":
                axes.plot(*run.series("training", "learning_rate"), color=colour, label=name)
                continue
            if title == "loss":
                label = "training" if alone else None
                axes.plot(*run.series("training", "loss"), color=colour, alpha=0.5, label=label)
            axes.plot(*run.series("validation", title), label=name or "validation", **style)
        if title == "loss" and not alone:  # the legend tells the lines apart in any colour
            axes.plot([], [], color="grey", alpha=0.5, label="training")
            axes.plot([], [], color="grey", marker="o", markersize=4, label="validation")
        if title != "learning rate" or not alone:
            axes.legend(fontsize="small", frameon=False)
        axes.set_title(title)
        axes.set_xlabel("optimizer steps")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        curves[title.replace(" ", "-")] = figure
    return curves


def _mistakes(classified: dict[str, Any]) -> Figure:
    mistakes = classified["mistakes"]
    images = [np.asarray(open_image(io.BytesIO(base64.b64decode(each["png"])))) for each in mistakes]
    return figures.mistakes_figure(mistakes, images, classified["classes"])


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(out, dpi=130)
    return out.getvalue()
