"""The audit of an experiment's images: a page with thumbnails, a table, and a list for ``data.exclude``."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from classify.images.plan import DataPlan
from deepspeed_trial.errors import InvalidInput, printable
from deepspeed_trial.input_files import refused
from workbench.audit import findings, head
from workbench.audit.dataset import Dataset
from workbench.audit.findings import COPY, LABEL, LEAK, OUTLIER, ClassRow, Finding
from workbench.reports import page

TEMPLATE = pathlib.Path(__file__).with_name("audit.html.jinja")
PAGE, TABLE, LIST = "audit.html", "audit.csv", "exclude.txt"
SHOWN = 100  # the maximum number of findings of each kind on the page
_SECTIONS = {
    LEAK: (
        "Near-duplicates across splits",
        "A network that trained on one image of a pair has a misleading score on the other.",
    ),
    LABEL: (
        "Labels to look at",
        "A classifier fitted without the image predicts another class. The most probable errors are first.",
    ),
    COPY: ("Near-duplicates in a split", "Training and scores count these images twice."),
    OUTLIER: ("Outliers", "These images are the least similar to their ten nearest neighbours."),
}


@dataclass(frozen=True)
class Audit:
    """The results of an audit.

    Attributes:
        dataset: the images.
        rows: the findings, the most important first.
        classes: the counts and the accuracy of every class.
        accuracy: the held-out accuracy over all images, 0 to 1.
        estimated_wrong: an estimate of the number of wrong labels.
    """

    dataset: Dataset
    rows: list[Finding]
    classes: list[ClassRow]
    accuracy: float
    estimated_wrong: int

    def count(self, kind: str) -> int:
        """Return the number of findings of a kind."""
        return sum(row.kind == kind for row in self.rows)


def describe(plan: DataPlan) -> str:
    """Return a description of a plan's images."""
    counts = ", ".join(f"{plan.count(split):,} {split}" for split in plan.names)
    return f"{plan.settings.dataset} {plan.settings.root}: {counts}, {len(plan.classes)} classes"


def audit(dataset: Dataset, features: np.ndarray) -> Audit:
    """Look for near-duplicates, wrong labels and outliers.

    Args:
        dataset: the images.
        features: the images' features, float32 (N, D).

    Raises:
        InvalidInput: if a class has fewer than two images.
    """
    counts = np.bincount(dataset.labels, minlength=len(dataset.classes)).tolist()
    small = [
        f"data.root: the class {name!r} has {count} images; add some, or leave the class out"
        for name, count in zip(dataset.classes, counts, strict=True)
        if count < 2
    ]
    if small:
        raise InvalidInput(small)
    probabilities, _ = head.held_out(features.astype(np.float64), dataset.labels)
    pairs = findings.near_duplicates(dataset)
    rows = [row for row in pairs if row.kind == LEAK]
    rows += findings.wrong_labels(dataset, probabilities)
    rows += [row for row in pairs if row.kind == COPY]
    rows += findings.outliers(dataset, features)
    accuracy = float((probabilities.argmax(1) == dataset.labels).mean())
    wrong = findings.estimated_wrong(dataset.labels, probabilities)
    return Audit(dataset, rows, findings.classes(dataset, probabilities), accuracy, wrong)


def write(result: Audit, features: str, output: pathlib.Path) -> None:
    """Write ``audit.html``, ``audit.csv`` and ``exclude.txt`` into a folder.

    Args:
        result: the result of ``audit``.
        features: a description of the features.
        output: the folder, which is created if it is missing.

    Raises:
        InvalidInput: if the folder cannot be created.
    """
    with refused(f"--output: {output}"):
        output.mkdir(parents=True, exist_ok=True)
    page.write(page.render(TEMPLATE, _values(result, features)), output / PAGE)
    page.write(_table(result), output / TABLE)
    page.write(_list(result), output / LIST)


def _values(result: Audit, features: str) -> dict[str, Any]:
    dataset = result.dataset
    sections = []
    for kind, (title, text) in _SECTIONS.items():
        numbered = [(number, row) for number, row in enumerate(result.rows, 1) if row.kind == kind]
        rows = [
            {
                "number": number,
                "note": row.note,
                "images": [
                    {
                        "name": dataset.names[index],
                        "link": dataset.link(index),
                        "picture": dataset.picture(index),
                    }
                    for index in row.images
                ],
            }
            for number, row in numbered[:SHOWN]
        ]
        more = max(0, len(numbered) - SHOWN)
        pairs = kind in (LEAK, COPY)
        sections.append({"title": title, "text": text, "rows": rows, "more": more, "pairs": pairs})
    cards = [
        ("across splits", result.count(LEAK), "pairs of near-duplicates"),
        (
            "labels",
            result.estimated_wrong,
            f"probably wrong; held-out accuracy {100 * result.accuracy:.1f} %",
        ),
        ("in a split", result.count(COPY), "pairs of near-duplicates"),
        ("small classes", sum(row.is_small for row in result.classes), "with few images in a split"),
    ]
    return {
        "title": "Audit of the images",
        "data": describe(dataset.plan),
        "features": features,
        "cards": cards,
        "sections": sections,
        "splits": list(dataset.sets),
        "classes": result.classes,
        "few": findings.FEW,
    }


def _table(result: Audit) -> str:
    rows = [["row", "kind", "score", "image", "other image", "split", "label", "note"]]
    for number, row in enumerate(result.rows, 1):
        first, *others = row.images
        names = [result.dataset.names[index] for index in (first, *others)]
        place = result.dataset.splits[first], result.dataset.classes[result.dataset.labels[first]]
        score, other = f"{row.score:.4f}", "".join(names[1:])
        rows.append([str(number), row.kind, score, names[0], other, *place, row.note])
    return page.as_csv(rows)


def _list(result: Audit) -> str:
    """Return the text of ``exclude.txt``: near-duplicates as names, other findings as comments."""
    lines = [
        "# Images to leave out: data.exclude takes this file.",
        "# Near-duplicates: one image of each pair.",
    ]
    names = result.dataset.names
    copies = [row for row in result.rows if row.kind in (LEAK, COPY)]
    lines += dict.fromkeys(_line(names[row.images[0]]) for row in copies)
    lines.append(
        "# Labels to check, the most probable errors first: remove the # before each image to leave out."
    )
    lines += [f"#{_line(names[row.images[0]])}" for row in result.rows if row.kind == LABEL]
    lines.append("# Outliers.")
    lines += [f"#{_line(names[row.images[0]])}" for row in result.rows if row.kind == OUTLIER]
    return "\n".join(lines) + "\n"


def _line(name: str) -> str:
    """Return the list's line for an image; a comment if the image's name has a line break."""
    if "\n" in name or "\r" in name:
        return f"# not listed, as its name has a line break: {printable(name)}"
    return f"./{_text(name)}" if name.startswith("#") else _text(name)


def _text(name: str) -> str:
    """Return a file's name as valid UTF-8."""
    return name.encode(errors="backslashreplace").decode()


def summary(result: Audit) -> Sequence[str]:
    """Return the lines that the command prints."""
    counts = (
        f"{result.count(LEAK):,} near-duplicates across splits, {result.count(COPY):,} in a split",
        f"about {result.estimated_wrong:,} wrong labels, {result.count(OUTLIER):,} outliers",
    )
    return [
        f"labels    held-out accuracy {100 * result.accuracy:.1f} %",
        f"found     {', '.join(counts)}",
    ]
