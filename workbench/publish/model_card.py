"""The model card of a published folder: the network, its metrics, and the code that loads it.

Source: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from classify.images.settings import OF_ONE_SIZE, DataSettings
from deepspeed_trial.errors import printable
from workbench.reports import recorded_run

TEMPLATE = pathlib.Path(__file__).with_name("model_card.md.jinja")
TASK = "image-classification"


def write(
    description: Mapping[str, Any], parameters: int, call: Mapping[str, Any], run: pathlib.Path | None
) -> str:
    """Return the card, Markdown with metadata in YAML.

    Args:
        description: the network's description; see ``net_file.read_description``.
        parameters: the number of parameters.
        call: the code that builds the network.
        run: the folder of the network's run, if known.
    """
    provenance = description["provenance"]
    data = provenance.get("data")
    data = data if isinstance(data, dict) else {}
    dataset = str(data.get("dataset", DataSettings.dataset))
    shown = str(data.get("root", dataset)) if dataset not in OF_ONE_SIZE else dataset
    results = recorded_run.results(run, provenance) if run else []
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
        gives_several="thresholds" in description,
        provenance=provenance,
    )


def _text(value: object) -> str:
    """Escape a name for Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#&~!])", r"\\\1", printable(value))
