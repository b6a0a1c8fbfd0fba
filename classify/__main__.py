"""Train an image classifier on a folder of images, and use it.

    classify FOLDER [--minutes N] [OPTION...]         train, test, and write a report
    classify COMMAND ...                              use the network: the commands are below

FOLDER has a folder of images for each class: photos/cat/1.jpg, photos/dog/1.jpg. Instead it may have train/
with val/, test/ or both, each with a folder for each class. The images may have any common format and size.

    classify photos                                   at most 15 minutes
    classify photos --minutes 60                      larger images, a better network
    classify photos --check                           print the settings, train nothing
    classify photos --net resnet18                    another network of torchvision, timm or your net.py
    classify photos --config experiments/photos.yaml  pretrained weights, downloaded once
    classify photos --resume latest --output RUN      continue a stopped run

    classify predict RUN new.jpg more-images          the class of each image
    classify report RUN                               a page: curves, mistakes, confusion matrix
    classify serve RUN                                a web page of this machine: drop an image on it
    classify evaluate RUN                             accuracy on the test images

RUN is the folder of a run, runs/FOLDER-<time> by default. It gets net.pt (the network), report.html,
summary.json, the checkpoints, and experiment.yaml with the settings. The first lines of a run say how the
images are split, and which settings the run has chosen by the number of images, the minutes and the machine.
The run keeps and tests the weights with the best validation metric. Ctrl-C saves a checkpoint.

--config FILE, or else experiment.yaml in the working directory, replaces the chosen settings. FILE may also
be a file of this package, e.g. experiments/photos.yaml. A net.py in the working directory may add networks
with @classify.register("NAME"). Exit codes: 0 done, 2 bad input, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence

from classify import add_project
from classify.config.command_line import COMMAND, as_program

# Programs of the project, and their descriptions; every other command is a subcommand of checkpoint.py
PROGRAMS = {
    "train": "train with an experiment file, with every option of train.py",
    "search": "search for hyperparameters, with the ranges in an experiment file",
    "shards": "write a folder of images as tar shards",
}
EXPERIMENT = "experiment.yaml"  # in the folder of a run of `classify FOLDER`


@as_program(COMMAND)
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or train on a folder; return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    add_project()
    commands = {**PROGRAMS, **subcommands()}
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help"):
        print(__doc__, "commands, each with --help:", sep="\n")
        print(*(f"  {name:<10} {about}" for name, about in commands.items()), sep="\n")
        return 0
    take_net()
    if first in PROGRAMS:
        return run(first, argv[1:], f"{COMMAND} {first}")
    if first in commands:
        return run("checkpoint", argv)
    return train(first, argv[1:], commands)


def subcommands() -> dict[str, str]:
    """Return the subcommands of checkpoint.py and their descriptions."""
    parser = importlib.import_module("checkpoint").parser()
    (added,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    about = {action.dest: action.help or "" for action in added._choices_actions}
    return {name: about.get(name, "") for name in added.choices}


def run(program: str, argv: Sequence[str], name: str = COMMAND) -> int:
    """Run a program of the project, whose usage lines show ``name``; return its exit code."""
    with named(name):
        code: int = importlib.import_module(program).main(argv)
    return code


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Set this process's name in usage lines, hints and ``run.json``, e.g. ``classify train``."""
    before = sys.argv
    sys.argv = [name, *before[len(name.split()) :]]
    try:
        yield
    finally:
        sys.argv = before


def take_net() -> None:
    """Load a ``net.py`` in the working directory, which registers networks."""
    from classify.models import own_net

    file = pathlib.Path("net.py")
    if own_net.choose(file):
        print(f"net.py   {file.resolve()}: its networks and losses are registered", flush=True)


def train(folder: str, argv: Sequence[str], commands: Mapping[str, str]) -> int:
    """Train on a folder of images, and write the report; return the exit code."""
    from deepspeed_trial.errors import InvalidInput, nearest

    if os.path.isfile(folder):
        raise InvalidInput(f"{folder}: is a file; give a folder that holds a folder of images for each class")
    if not os.path.isdir(folder):
        hint = nearest(folder, commands)
        raise InvalidInput(
            f"{folder}: no such folder or command; give a folder of images, or a command: {hint}"
        )
    from classify.config.command_line import typed
    from classify.reports.summary import FILE
    from deepspeed_trial.errors import printable
    from deepspeed_trial.local.folder import shown
    from workbench import photos

    args, program = parser().parse_args(argv), importlib.import_module("train")
    if errors := program.errors_in(args):  # before images are read and a folder is made
        raise InvalidInput(errors)
    if args.keys:
        return int(program.start(args))
    written = photos.prepare(pathlib.Path(folder), args)
    with named(COMMAND):
        code: int = program.start(args)
    if args.check or code == 2:
        photos.undo(written)
    is_run = (args.output / FILE).is_file()  # --folds, --tune and --find-lr write other files
    if args.check or code or not is_run or os.environ.get("RANK", "0") != "0":
        return code
    run("checkpoint", ["report", str(args.output)])
    with named(COMMAND):
        print(f"use it: {typed('checkpoint', 'predict', printable(shown(args.output)))} IMAGES")
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options after a folder: the options of train.py, and ``--minutes``."""
    from workbench.defaults import MINUTES

    with named(COMMAND):
        program = importlib.import_module("train")
        parser: argparse.ArgumentParser = program.parser(
            None, "experiment file, in place of the chosen settings"
        )
    parser.allow_abbrev = False
    parser.usage, parser.description = "%(prog)s FOLDER [OPTION...]", "Train on a folder of images."
    meaning = f"the maximum length of the training (default: {MINUTES:g})"
    parser.add_argument("--minutes", metavar="N", help=meaning)
    return parser


if __name__ == "__main__":
    sys.exit(main())
