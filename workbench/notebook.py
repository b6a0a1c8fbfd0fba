"""Training and prediction from Python: ``classify.train`` and ``classify.load``."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from classify.config import command_line
from classify.images.sources.image_folder import find_images
from deepspeed_trial.errors import InvalidInput, TrainingStopped
from deepspeed_trial.local.folder import default_output
from workbench.publish import forms, scoring

Path = str | os.PathLike[str]


class Prediction(NamedTuple):
    """The class of an image.

    Attributes:
        image: the image's file.
        label: the most probable class.
        probability: the probability of ``label``, 0 to 1.
        probabilities: the probability of each class.
        labels: ``label`` alone, or for a network of several labels the labels that reach their thresholds.
    """

    image: pathlib.Path
    label: str
    probability: float
    probabilities: dict[str, float]
    labels: list[str]


class Network:
    """A trained network.

    Args:
        path: the folder of a run, or a file or folder of ``classify export``.

    Attributes:
        classes: the names of the classes, in the order of the outputs.

    Raises:
        InvalidInput: if the network is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._classifier = forms.read(pathlib.Path(path))
        self.classes: tuple[str, ...] = tuple(self._classifier.description["classes"])

    def predict(self, images: Path | Iterable[Path]) -> list[Prediction]:
        """Classify image files, and all images in folders.

        Raises:
            InvalidInput: with a line for each file that cannot be read as an image.
        """
        paths = [images] if isinstance(images, str | os.PathLike) else images
        found, _ = find_images(map(pathlib.Path, paths))
        files, answers, errors = scoring.answers(self._classifier, found)
        errors.raise_any()
        rows = [dict(zip(self.classes, row.tolist(), strict=True)) for row in answers.probabilities]
        best = [max(row, key=row.__getitem__) for row in rows]
        labels = map(self._classifier.labels, answers.probabilities)
        return [
            Prediction(file, label, row[label], row, given)
            for file, label, row, given in zip(files, best, rows, labels, strict=True)
        ]

    def __repr__(self) -> str:
        net = self._classifier.description["net"]["name"]
        return f"{type(self).__name__}({net}, {len(self.classes)} classes)"


def load(run: Path) -> Network:
    """Load the network of a run or of an exported file; see ``Network``."""
    return Network(run)


def train(
    folder: Path, *arguments: str, minutes: float | None = None, output: Path | None = None
) -> pathlib.Path:
    """Train on a folder of images with ``classify FOLDER`` in a new process, and print the output.

    Args:
        folder: a folder with ``<class>/*``, or with ``train/`` and ``val/``, ``test/`` or both.
        arguments: more options of the command, e.g. ``"--net", "resnet18"``.
        minutes: the time limit of the training.
        output: the folder of the run; by default a new one in ``runs/``.

    Returns:
        The folder of the run.

    Raises:
        InvalidInput: if the images or the arguments cannot be used.
        TrainingStopped: if the training could not continue.
        KeyboardInterrupt: after an interruption; the run has a checkpoint.
    """
    folder = pathlib.Path(folder)
    output = pathlib.Path(output) if output else default_output(folder.resolve().name)
    command = [sys.executable, "-u", "-m", "classify", os.path.join(folder, ""), "--output", str(output)]
    command += [*(["--minutes", f"{minutes:g}"] if minutes is not None else []), *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches the training once: as the signal from _print_lines
    )
    errors = _print_lines(process)
    code = process.wait()
    if code == 2:
        raise InvalidInput(errors)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise TrainingStopped(errors[-1] if errors else f"the training ended with exit code {code}")
    return output


def _print_lines(process: subprocess.Popen[str]) -> list[str]:
    """Print a process's lines, forward an interruption to it, and return its error lines."""
    assert process.stdout
    errors: list[str] = []
    while True:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                program, _, text = line.rstrip().partition(": ")
                if program == command_line.COMMAND and not text.startswith("note: "):
                    errors.append(text)
            return errors
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
