"""Files at the end of a run: ``summary.json``, and on a cluster the network for trackers."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from classify.config.metric_table import LABEL_THRESHOLD, MAP_METRIC, METRICS, OF_LABELS, TTA_METRIC
from classify.models import net_file
from deepspeed_trial.errors import one_line, printable
from deepspeed_trial.output_files import replacing

FILE, CLASSIFICATION = "summary.json", "classification.json"
RUN_FILES = (*net_file.NAMES, CLASSIFICATION)  # in addition to the files of any `DeepSpeedTrial`


def metrics_summary(metrics: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return the entry ``validation`` or ``test`` of a summary, from the metrics of a validation or test."""
    return {
        **{name: metrics[name] for name in METRICS if name in metrics},
        "per_class_accuracy": {name: metrics[f"accuracy/{name}"] for name in classes},
        "per_class_precision": {name: metrics[f"precision/{name}"] for name in classes},
        **{
            f"per_class_{prefix[:-1]}": {name: metrics[f"{prefix}{name}"] for name in classes}
            for prefix in (*OF_LABELS, LABEL_THRESHOLD)
            if MAP_METRIC in metrics
        },
        "images": metrics["images"],
    }


def write(output: pathlib.Path, summary: Mapping[str, Any], chosen: str = "accuracy") -> None:
    """Write a run's summary atomically, and print its scores, the scores of the test first.

    Args:
        output: the run's folder.
        summary: the summary.
        chosen: the metric that compares checkpoints; its line is last.
    """
    with replacing(output / FILE) as partial:
        partial.write_text(json.dumps(summary, indent=2) + "\n")
    tested = scores(summary["test"], chosen, "test ") if "test" in summary else []
    validated = scores(summary["validation"], chosen, "validation " if tested else "")
    print(*tested, *validated, sep="\n")


def value_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric by name from the entry ``validation`` or ``test``; None if it is missing."""
    kind, _, of_class = name.partition("/")
    return metrics.get(f"per_class_{kind}", {}).get(of_class) if of_class else metrics.get(name)


def scores(metrics: Mapping[str, Any], chosen: str = "accuracy", which: str = "") -> list[str]:
    """Return a line for each accuracy; the last line is the chosen metric."""
    names = [name for name in (TTA_METRIC, MAP_METRIC, "accuracy") if name != chosen]
    values = {name: value_of(metrics, name) for name in (*names, chosen)}
    return [
        f"{which}{printable(name)} {value:.4f}" for name, value in values.items() if isinstance(value, float)
    ]


def network_file(write_network: Callable[[pathlib.Path], Any], is_chief: bool) -> list[pathlib.Path]:
    """Write a trial's network into a temporary folder, for trackers; every rank calls it.

    Args:
        write_network: a function that writes the network on the chief.
        is_chief: whether this rank is the chief.

    Returns:
        The files of the weights and of the description; empty if they cannot be written.
    """
    folder = tempfile.mkdtemp() if is_chief else ""  # the tracker sends its files later
    net = pathlib.Path(folder) / net_file.NAMES[0]
    try:
        write_network(net)
    except OSError as error:
        print(printable(f"note: {net}: not written ({one_line(error)})"), file=sys.stderr)
        return []
    return [net, net_file.beside(net)]
