"""The forms of a published network: their endings, writers and readers."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from classify.models import net_file
from workbench.publish import hugging_face, network, onnx_file
from workbench.publish.network import Classifier, Trained

Save = Callable[[pathlib.Path, Trained], None]


class Form(NamedTuple):
    """A form.

    Attributes:
        ending: of its files' names; None for a folder, and for the form of files with any other ending.
        write: writes a file or folder and its description, whole or not at all.
        read: returns its classifier.
    """

    ending: str | None
    write: Save
    read: Callable[[pathlib.Path], Classifier]


def _described(save: Save, with_digest: bool = False) -> Save:
    """Write the JSON file, too."""

    def write(path: pathlib.Path, trained: Trained) -> None:
        net_file.write_described(path, trained.description, lambda part: save(part, trained), with_digest)

    return write


FORMS = {
    "pt": Form(None, _described(network.save_pt), network.read_weights),
    "safetensors": Form(".safetensors", _described(network.save_safetensors), network.read_weights),
    "onnx": Form(".onnx", _described(onnx_file.save, with_digest=True), onnx_file.read),
    "hf": Form(None, hugging_face.write, network.read_weights),
}
OF_INT8 = "onnx"  # the form with integers


def by_ending(path: pathlib.Path) -> str:
    """Return the form of a file by its ending; ``pt`` for an unknown one."""
    return next((name for name, form in FORMS.items() if path.suffix == form.ending), "pt")


def read(path: pathlib.Path) -> Classifier:
    """Read a network of any form; the folder of a run stands for its ``net.pt``.

    Raises:
        InvalidInput: if the file or its description is missing, damaged or of another network.
    """
    if os.path.isfile(path / net_file.NAMES[0]):
        path = path / net_file.NAMES[0]
    return FORMS["hf" if os.path.isdir(path) else by_ending(path)].read(path)
