"""The options of every program that reads an experiment file."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import pathlib
import re
import select
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, ParamSpec

from classify.config.project import PROJECT
from classify.config.schedules import PEAK_KEYS

P = ParamSpec("P")
COMMAND = "classify"  # runs the programs from any folder; see classify/__main__.py
# For each short option: the path of the key that it sets, and the form of the key's value. The program
# replaces "deepspeed" at the start of a path with the section that has DeepSpeed's keys.
SHORT_FORMS = {
    "epochs": ("hyperparameters.max_length", "{{epochs: {}}}"),
    "lr": ("deepspeed.optimizer.params.lr", "{}"),
    "batch_size": ("deepspeed.train_batch_size", "{}"),
    "net": ("hyperparameters.net", "{}"),
}
MOST_FOLDS = 1000
# For each option with a number: its type, its least and its greatest value, and the remedy of an error line
_COUNT = (int, 1, 2**53 - 1, "must be a whole number of at least 1")
NUMBERS: dict[str, tuple[type[int] | type[float], float, float, str]] = {
    **dict.fromkeys(("epochs", "batch_size", "slots"), _COUNT),
    "lr": (float, sys.float_info.min, 1e6, "must be a number above 0, at most 1e6"),
    "minutes": (float, sys.float_info.min, 1e7 - 1, "must be a number above 0, e.g. 15"),
    "folds": (int, 2, MOST_FOLDS, f"must be from 2 to {MOST_FOLDS:,}"),
}
NO_FILE = "--config: {}: no such file; give a file, e.g. const.yaml"


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable the garbage collector during imports, then freeze the imported objects.

    Otherwise the collector takes a quarter of the import time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def as_program(name: str, interrupted: str = "interrupted") -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Make a program print a line, not a traceback, after an error or an interruption, and return a code.

    If the reader of the program's output, e.g. head, has ended, the program ends with code 1 and no line.

    Args:
        name: the name of the program for ``called``.
        interrupted: the line after an interruption; the text of the ``KeyboardInterrupt`` comes first.
    """

    def decorated(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            code = 1
            try:
                try:
                    code = main(*args, **kwargs)
                except KeyboardInterrupt as stop:
                    print(f"{called(name)}: {str(stop) or interrupted}", file=sys.stderr)
                    code = 130
                except Exception as error:
                    from deepspeed_trial.errors import InvalidInput, TrainingStopped, print_errors

                    if not isinstance(error, InvalidInput | TrainingStopped):
                        raise
                    code = print_errors(called(name), error)
                sys.stdout.flush()
            except BrokenPipeError:
                poll = select.poll()
                poll.register(sys.stdout, 0)
                if not poll.poll(0):
                    raise  # another pipe is broken
                # Without this, Python's flush at exit fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return code

        return run

    return decorated


@contextlib.contextmanager
def usable_paths(what: str, remedy: str) -> Iterator[None]:
    """Turn an ``OSError`` in the block into a line between two texts; a full disk has exit code 1, else 2."""
    try:
        yield
    except BrokenPipeError:
        raise  # of stdout: as_program ends the program
    except OSError as error:
        from deepspeed_trial.errors import DISK_FULL, InvalidInput, TrainingStopped, one_line

        kind = TrainingStopped if error.errno in DISK_FULL else InvalidInput
        raise kind(f"{what}a path cannot be used ({one_line(error)}); {remedy}") from error


def folder(text: str) -> pathlib.Path:
    """Return an option's folder; refuse an empty text, e.g. from an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a folder; give a folder, or leave the option out")
    return pathlib.Path(text)


def errors_in(args: argparse.Namespace) -> list[str]:
    """Return a line for each number out of its range, and for a missing ``--config``."""
    errors = []
    for name, (kind, least, most, message) in NUMBERS.items():
        if (value := getattr(args, name, None)) is None:
            continue
        try:
            is_valid = least <= kind(value) <= most
        except ValueError:
            is_valid = False
        if not is_valid:
            errors.append(f"--{name.replace('_', '-')}: {value}: {message}")
    file = args.config
    if file not in (None, "const.yaml") and not (os.path.exists(file) or os.path.exists(PROJECT / file)):
        errors.append(NO_FILE.format(file))  # a cluster may lack the default file, and does not read it
    return errors


def typed(program: str, *words: object) -> str:
    """Return a command line as a user would type it: with ``classify`` if that command started this process.

    Args:
        program: ``train`` or ``checkpoint``.
        words: the program's arguments; the function quotes them for the shell.
    """
    start = [COMMAND, *["train"] * (program == "train")]
    if called(program) != COMMAND:
        start = ["python3", f"{program}.py"]
    return shlex.join([*start, *map(str, words)])


def called(program: str) -> str:
    """Return the name at the start of this process's messages: ``classify``, or a program's file.

    Args:
        program: ``classify``, ``train``, ``checkpoint``, ``search``, ``shards`` or ``baseline``.
    """
    is_command = COMMAND in (program, pathlib.Path(sys.argv[0]).name.split(" ")[0])
    return COMMAND if is_command else f"{program}.py"


class Parser(argparse.ArgumentParser):
    """A parser that prints an error as one line; an unknown option or choice with the nearest known one."""

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with code 2."""
        from deepspeed_trial.errors import nearest, printable  # here: the import takes seconds

        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0]
        if choice := re.fullmatch(r"argument (.*): invalid choice: '(.*)' \(choose from (.*)\)", message):
            name, value, known = choice.groups()
            remedy = nearest(value, re.findall(r"[\w-]+", known))
            self.exit(2, printable(f"{self.prog}: {name}: {value!r}: unknown; {remedy}") + "\n")
        if not unknown:
            self.exit(2, printable(f"{self.prog}: {message.removeprefix('argument ')}") + "\n")
        if re.match(r"[a-z][\w.]*=", unknown):
            remedy = f"is no option; give --set {unknown}"
        else:
            commands = [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]
            parsers = [self, *(parser for each in commands for parser in each.choices.values())]
            options = {
                word: None
                for parser in parsers
                for action in parser._actions
                if action.help != argparse.SUPPRESS
                for word in action.option_strings
            }
            remedy = f"is no option; {nearest(unknown.partition('=')[0], options)}"
        self.exit(2, printable(f"{self.prog}: {unknown}: {remedy}") + "\n")


def parser(
    description: str | None, config: str | None, what: str = "experiment file"
) -> argparse.ArgumentParser:
    """Return a parser with ``--config FILE`` and ``--set PATH=VALUE``.

    Args:
        description: the program's manual.
        config: the default file; None if the program chooses the file.
        what: the help text of ``--config``.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_experiment_options(parser, config, what)
    return parser


def add_experiment_options(
    parser: argparse.ArgumentParser, config: str | None, what: str = "experiment file"
) -> None:
    """Add ``--config FILE`` and ``--set PATH=VALUE``; the texts of ``--set`` become ``overrides``."""
    parser.add_argument(
        "--config", default=config, metavar="FILE", help=what + " (default: %(default)s)" * bool(config)
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="replace or add a value of the file",
    )


def add_short_forms(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``SHORT_FORMS``."""
    add = parser.add_argument
    add("--epochs", metavar="N", help="the length of the training in epochs")
    add("--lr", metavar="RATE", help="the learning rate, or a schedule's peak")
    add("--batch-size", metavar="N", help="images in an optimizer step, over all processes")
    add("--net", metavar="NAME", help="net, a registered network, a classifier of torchvision, or timm/NAME")


def short_overrides(args: argparse.Namespace, hyperparameters: Any) -> list[str]:
    """Return the overrides, ``PATH=VALUE``, of the short forms.

    Args:
        args: parsed arguments of a parser with ``add_short_forms``.
        hyperparameters: the experiment file's hyperparameters; they show where the file has DeepSpeed's keys.

    Raises:
        InvalidInput: with a line for each value that ``--set`` also sets.
    """
    config = {"hyperparameters": hyperparameters}
    file = _at(config, "hyperparameters.deepspeed_config")[1]
    section = "hyperparameters" if file is None else "hyperparameters.overwrite_deepspeed_args"
    overrides, errors = [], []
    for name, (path, form) in SHORT_FORMS.items():
        if (value := getattr(args, name)) is None:
            continue
        paths = [re.sub("^deepspeed", section, path)]
        given = [override.partition("=")[0] for override in args.overrides]
        if twice := [other for other in given if f"{other}.".startswith(f"{paths[0]}.")]:
            option = f"--{name.replace('_', '-')}"
            errors.append(f"{option}: {value}: --set {twice[0]} sets the same key; give one of the two")
        if name == "lr":  # a schedule's peak overrides the learning rate
            kind = _at(config, f"{section}.scheduler.type")[1]
            peak = f"{section}.scheduler.params.{PEAK_KEYS.get(kind) if isinstance(kind, str) else None}"
            paths += [] if _at(config, peak)[1] is None else [peak]
        overrides += [f"{_at(config, key)[0]}={form.format(value)}" for key in paths]
    if errors:
        from deepspeed_trial.errors import InvalidInput  # here: the import takes seconds

        raise InvalidInput(errors)
    return overrides


def _at(config: Any, path: str) -> tuple[str, Any]:
    """Return the full path of a value, and the value: None if it is missing.

    The full path includes ``val`` for each ``{type: const, val: VALUE}`` on it.
    """
    keys = []
    for key in path.split("."):
        if isinstance(config, Mapping) and config.get("type") == "const" and "val" in config:
            keys.append("val")
            config = config["val"]
        keys.append(key)
        config = config.get(key) if isinstance(config, Mapping) else None
    return ".".join(keys), config
