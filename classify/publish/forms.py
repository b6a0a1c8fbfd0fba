"""Every form that a trained network may be published in: by which endings it is known, written and read."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from classify.models import net_file
from classify.publish import hugging_face, onnx_file, weights
from classify.publish.network import Classifier, Trained

Save = Callable[[pathlib.Path, Trained], None]


class Form(NamedTuple):
    """A form.

    Attributes:
        ending: of its files' names; none for a folder, and for those that are known by no other.
        write: writes a file or folder of this name, and what describes it, whole or not at all.
        read: makes a classifier of it.
    """

    ending: str | None
    write: Save
    read: Callable[[pathlib.Path], Classifier]


def _described(save: Save, with_digest: bool = False) -> Save:
    """Has a file be written with the JSON file beside it."""

    def write(path: pathlib.Path, trained: Trained) -> None:
        net_file.write_described(path, trained.description, lambda part: save(part, trained), with_digest)

    return write


FORMS = {
    "pt": Form(None, _described(weights.save_pt), weights.read),
    "safetensors": Form(".safetensors", _described(weights.save_safetensors), weights.read),
    "onnx": Form(".onnx", _described(onnx_file.save, with_digest=True), onnx_file.read),
    "hf": Form(None, hugging_face.write, weights.read),
}
OF_INT8 = "onnx"  # the only one that has a form in integers


def by_ending(path: pathlib.Path) -> str:
    """The form of a file's name; ``pt`` where the ending is of no other."""
    return next((name for name, form in FORMS.items() if path.suffix == form.ending), "pt")


def read(path: pathlib.Path) -> Classifier:
    """Reads a network of any form, ready to classify.

    Raises:
        InvalidInput: if the file or its description is missing, damaged or of another network.
    """
    return FORMS["hf" if os.path.isdir(path) else by_ending(path)].read(path)
