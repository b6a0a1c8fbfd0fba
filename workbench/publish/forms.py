"""The formats of an exported network: their file endings, writers and readers."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from classify.models import net_file
from deepspeed_trial.errors import InvalidInput
from workbench.publish import hugging_face, network, onnx_file
from workbench.publish.network import Classifier, Trained

Save = Callable[[pathlib.Path, Trained], None]


class Form(NamedTuple):
    """A format of an exported network.

    Attributes:
        ending: the ending of the files' names; None for a folder, and for files with any other ending.
        write: a function that writes a file or folder and its description, atomically.
        read: a function that returns the classifier of a file or folder.
    """

    ending: str | None
    write: Save
    read: Callable[[pathlib.Path], Classifier]


def _described(save: Save, with_digest: bool = False) -> Save:
    """Return a function that writes a network's file and its description, a JSON file."""

    def write(path: pathlib.Path, trained: Trained) -> None:
        net_file.write_described(path, trained.description, lambda part: save(part, trained), with_digest)

    return write


FORMS = {
    "pt": Form(None, _described(network.save_pt), network.read_weights),
    "safetensors": Form(".safetensors", _described(network.save_safetensors), network.read_weights),
    "onnx": Form(".onnx", _described(onnx_file.save, with_digest=True), onnx_file.read),
    "hf": Form(None, hugging_face.write, network.read_weights),
}
OF_INT8 = "onnx"  # the only format that can store 8-bit integers


def by_ending(path: pathlib.Path) -> str:
    """Return the name of the format with a file's ending; ``pt`` for an unknown ending."""
    return next((name for name, form in FORMS.items() if path.suffix == form.ending), "pt")


def read(path: pathlib.Path) -> Classifier:
    """Read a network in any format; for the folder of a run, read its ``net.pt``.

    Raises:
        InvalidInput: if the file or its description is missing or damaged, or describes another network.
    """
    if os.path.isfile(path / net_file.NAMES[0]):
        path = path / net_file.NAMES[0]
    if not os.path.exists(path):
        raise InvalidInput(
            f"{path}: no such file or folder; give the folder of a finished run, or its net.pt"
        )
    if os.path.isdir(path) and not any((path / name).exists() for name in net_file.IN_A_FOLDER):
        raise InvalidInput(f"{path}: holds no network; give the folder of a finished run, or its net.pt")
    return FORMS["hf" if os.path.isdir(path) else by_ending(path)].read(path)
