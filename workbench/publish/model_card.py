"""The model card of a published folder: the network, its scores, the code that loads it.

Source: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from classify.config.metric_table import METRICS
from classify.images.settings import DataSettings
from deepspeed_trial.errors import InvalidInput, printable
from workbench.reports.finished_run import FinishedRun

TEMPLATE = pathlib.Path(__file__).with_name("model_card.md.jinja")
TASK = "image-classification"


class Result(NamedTuple):
    """Metrics of images.

    Attributes:
        split: ``test`` or ``validation``.
        images: their description.
        metrics: their values by name.
    """

    split: str
    images: str
    metrics: dict[str, float]


def write(
    description: Mapping[str, Any], parameters: int, call: Mapping[str, Any], run: pathlib.Path | None
) -> str:
    """Return the card, Markdown with metadata in YAML.

    Args:
        description: of the network; see ``net_file.read_description``.
        parameters: their number.
        call: the code that makes the network.
        run: the folder of its run, if it is known.
    """
    provenance = description["provenance"]
    data = provenance.get("data")
    data = data if isinstance(data, dict) else {}
    dataset = str(data.get("dataset", DataSettings.dataset))
    shown = str(data.get("root", dataset)) if DataSettings(dataset).kind.of_any_size else dataset
    results = _results(run, provenance)
    title = str(provenance.get("experiment") or description["net"]["name"])
    head = ModelCardData(
        pipeline_tag=TASK,
        tags=[TASK, "deepspeed"],
        library_name="timm" if call["library"] == "timm" else "pytorch",
        model_name=printable(title),
        eval_results=[
            EvalResult(
                task_type=TASK,
                dataset_type=dataset,
                dataset_name=printable(shown),
                dataset_split=each.split,
                metric_type="accuracy",
                metric_name=f"accuracy of {each.images}",
                metric_value=each.metrics["accuracy"],
            )
            for each in results
        ]
        or None,
    )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["text"] = _text
    return environment.from_string(TEMPLATE.read_text()).render(
        head=head.to_yaml(),
        title=title,
        dataset=shown,
        results=results,
        parameters=parameters,
        call=call,
        net=description["net"],
        classes=description["classes"],
        seen=description["input"],
        dtype=description["dtype"],
        confidence=description.get("confidence"),
        provenance=provenance,
    )


def _text(value: object) -> str:
    """Escape a name for Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#&~!])", r"\\\1", printable(value))


def _results(run: pathlib.Path | None, provenance: Mapping[str, Any]) -> list[Result]:
    """Return the run's results of this checkpoint, the test's first."""
    if run is None:
        return []
    try:
        finished = FinishedRun.read(run)
    except InvalidInput:  # it has not finished, or a file is missing
        return []
    summary, images = finished.summary, finished.summary["validation"]["images"]
    chosen = finished.chosen_on
    split = "validation" if chosen.startswith("validation") else "test"
    words = f"{images:,} {chosen}"
    if split == "test":
        words += ", which also validated the training"
    if summary.get("checkpoint") == provenance.get("checkpoint"):
        tested = summary.get("test") or {}
        results = [Result(split, words, _known(summary["validation"]))]
        if "accuracy" in tested:
            words = f"{tested['images']:,} test images, which chose nothing"
            results.insert(0, Result("test", words, _known(tested)))
        return results
    of_step = [
        each
        for each in finished.metrics
        if each["group"] == "validation" and each["steps_completed"] == provenance["steps"]
    ]
    return [Result(split, words, _known(each)) for each in of_step[-1:] if "accuracy" in each]


def _known(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in METRICS if metrics.get(name) is not None}
