"""The training of ``classify FOLDER``: the settings, the first lines, and the options of ``train.py``."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
from typing import Any

import joblib
import torch
from ruamel.yaml import YAML

from classify.config import command_line, experiment_fields, experiment_file
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from deepspeed_trial import redaction
from deepspeed_trial.errors import InvalidInput, printable
from deepspeed_trial.input_files import refused
from deepspeed_trial.local.folder import default_output, shown
from workbench import defaults
from workbench.defaults import Images, Settings

EXPERIMENT = "experiment.yaml"  # in the working directory, and in a run's folder
MOST_CLASSES = 6  # the number of classes that the first lines name


def prepare(folder: pathlib.Path, args: argparse.Namespace) -> pathlib.Path | None:
    """Choose the settings of a training, print the first lines, and write the experiment file.

    Args:
        folder: the folder of the images.
        args: the options after the folder, which ``train.errors_in`` has accepted. The function replaces
            ``--config``, ``--set``, ``--output`` and the short forms by the options of ``train.py``.

    Returns:
        The experiment file that was written for the run; None if the run uses an existing file.

    Raises:
        InvalidInput: if an option, the folder or ``--output`` cannot be used.
        TrainingStopped: if the system kills a process that decodes the images.
    """
    minutes = None if args.minutes is None else float(args.minutes)
    if minutes and args.epochs is not None:
        raise InvalidInput(f"--minutes: {args.minutes}: --epochs sets the length, too; give one of the two")
    args.output = args.output or default_output(folder.resolve().name or "images")
    if given := _given(args):
        length = [f"hyperparameters.max_length={{minutes: {minutes:g}}}"] if minutes else []
        args.config, args.overrides = given, [*_place(folder), *args.overrides, *length]
        return None
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InvalidInput(f"{folder}: several processes need --config, e.g. {EXPERIMENT} of an earlier run")
    images = Images.of(folder)
    settings = defaults.choose(images, minutes or defaults.MINUTES, args.net)
    config = _experiment(folder, settings, args)
    written = _write(args.output, config)
    try:
        plan = DataPlan.resolve(DataSettings.parse(config.get("data")))  # decodes the images once
    except BaseException:
        undo(written)
        raise
    print(*_first_lines(folder, images, plan, settings, args.output), sep="\n", flush=True)
    vars(args).update(dict.fromkeys(command_line.SHORT_FORMS), config=str(written), overrides=[])
    return written


def undo(written: pathlib.Path | None) -> None:
    """Remove the experiment file that ``prepare`` wrote, and the run's folder if nothing else is in it."""
    if written is None:
        return
    written.unlink(missing_ok=True)
    if written.parent.is_dir() and {*os.listdir(written.parent)} <= {".lock"}:
        shutil.rmtree(written.parent)


def _given(args: argparse.Namespace) -> str | None:
    """Return the experiment file that replaces chosen settings; None without a file.

    The file of the run to resume comes first, then ``--config``, then the file in the working directory.
    """
    if args.resume and (args.output / EXPERIMENT).is_file():
        return str(args.output / EXPERIMENT)
    if args.config:
        return str(args.config)
    return EXPERIMENT if os.path.isfile(EXPERIMENT) else None


def _place(folder: pathlib.Path) -> list[str]:
    """Return the overrides that name a folder of images."""
    return [
        "data.dataset=imagefolder",
        f"data.root={json.dumps(os.path.abspath(folder), ensure_ascii=False)}",
    ]


def _experiment(folder: pathlib.Path, settings: Settings, args: argparse.Namespace) -> dict[str, Any]:
    """Return the experiment with the chosen settings and the given overrides."""
    args.net = None  # the chosen settings already name the network
    config = experiment_file.read(
        settings.file,
        [*settings.overrides, *_place(folder), *args.overrides],
        lambda hyperparameters: command_line.short_overrides(args, hyperparameters),
    )
    if redaction.experiment(config) != config:
        experiment_fields.check(config)  # redaction hides the values of unknown keys, too
        DataSettings.parse(config.get("data"))
        raise InvalidInput(
            f"--set: {EXPERIMENT} of the run would hold a credential; write your own file, and give --config"
        )
    return config


def _write(output: pathlib.Path, config: dict[str, Any]) -> pathlib.Path:
    """Write the experiment file into the folder of a new run."""
    path = output / EXPERIMENT
    with refused(f"--output: {output}"):
        output.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "x") as file:
                yaml = YAML()
                yaml.default_flow_style = None
                yaml.dump(config, file)
        except FileExistsError:
            remedy = "give another folder, or continue its run: --resume latest"
            raise InvalidInput(f"--output: {path}: exists; {remedy}") from None
    return path


def _first_lines(
    folder: pathlib.Path, images: Images, plan: DataPlan, settings: Settings, output: pathlib.Path
) -> list[str]:
    """Describe the images, their split, the network, the length and the files of a run."""
    counts = images.counts
    ranked = sorted(counts, key=lambda name: -counts[name])
    named = [f"{name} {counts[name]:,}" for name in ranked[:MOST_CLASSES]]
    more = f" ... {ranked[-1]} {counts[ranked[-1]]:,}" if len(ranked) > MOST_CLASSES else ""
    tested = f", {plan.count('test'):,} test it at the end" if plan.has_test else ""
    machine = "the GPU" if torch.cuda.is_available() else f"{joblib.cpu_count()} cores"
    pixels = f"{settings.side}x{settings.side} pixels"
    minutes = f"{settings.minutes:g} minute{'s' * (settings.minutes != 1)}"
    lines = {
        "images": f"{folder}: {sum(counts.values()):,} in {len(counts)} classes ({', '.join(named)}{more}),"
        f" most about {images.size[0]}x{images.size[1]} pixels",
        "split": f"{plan.count('train'):,} train the network, {plan.count(plan.validation):,} choose its best"
        f" weights by {settings.metric}{tested}",
        "network": f"{settings.net} from random weights, on {pixels}, {settings.batch:,} images a step",
        "length": f"at most {minutes}: on {machine} about {settings.passes:,.3g} passes"
        " over the training images",
        "folder": f"{shown(output)}; its {EXPERIMENT} has the settings",
    }
    return [printable(f"{name:<8} {text}") for name, text in lines.items()]
