"""The options that all programs have which read an experiment file."""

from __future__ import annotations

import argparse
import contextlib
import gc
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from classify.config.schedules import PEAK_KEYS

# What everybody changes, by its option: the keys of its value, and the value's form. Keys that begin with
# "deepspeed" are where the experiment file has those of DeepSpeed.
SHORT_FORMS = {
    "epochs": ("hyperparameters.max_length", "{{epochs: {}}}"),
    "lr": ("deepspeed.optimizer.params.lr", "{}"),
    "batch_size": ("deepspeed.train_batch_size", "{}"),
    "net": ("hyperparameters.net", "{}"),
}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Does not look for garbage while a program imports what stays to its end, nor among that later.

    Python would look through all that has been imported again and again: a quarter of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def folder(text: str) -> pathlib.Path:
    """A folder of an option; an empty text, as of a shell's unset variable, is none."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no folder; give one, or leave the option out")
    return pathlib.Path(text)


def parser(description: str | None, config: str, what: str = "experiment file") -> argparse.ArgumentParser:
    """A parser with ``--config FILE`` and ``--set PATH=VALUE``.

    Args:
        description: the program's manual.
        config: the default file.
        what: what the program takes of the file.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_experiment_options(made, config, what)
    return made


def add_experiment_options(
    parser: argparse.ArgumentParser, config: str, what: str = "experiment file"
) -> None:
    """Adds ``--config FILE`` and ``--set PATH=VALUE``, which is kept as ``overrides``."""
    parser.add_argument("--config", default=config, metavar="FILE", help=f"{what} (%(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="replace a value of it",
    )


def add_short_forms(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``SHORT_FORMS``."""
    add = parser.add_argument
    add("--epochs", metavar="N", help="train for so many epochs")
    add("--lr", metavar="RATE", help="the learning rate, a schedule's peak")
    add("--batch-size", metavar="N", help="images in an optimizer step, of all processes")
    add("--net", metavar="NAME", help="net, a registered network, one of torchvision's, or timm/NAME")


def short_overrides(args: argparse.Namespace, hyperparameters: Any) -> list[str]:
    """What the short forms say, as ``--set`` would.

    Args:
        args: of a parser with ``add_short_forms``.
        hyperparameters: of the experiment file, whose form says where DeepSpeed's keys are.

    Raises:
        InvalidInput: with a line for each that ``--set`` says, too.
    """
    config = {"hyperparameters": hyperparameters}
    file = _at(config, "hyperparameters.deepspeed_config")[1]
    section = "hyperparameters" if file is None else "hyperparameters.overwrite_deepspeed_args"
    overrides, errors = [], []
    for name, (path, form) in SHORT_FORMS.items():
        if (value := getattr(args, name)) is None:
            continue
        paths = [re.sub("^deepspeed", section, path)]
        given = [each.partition("=")[0] for each in args.overrides]
        if twice := [each for each in given if f"{each}.".startswith(f"{paths[0]}.")]:
            option = f"--{name.replace('_', '-')}"
            errors.append(f"{option}: {value}: --set {twice[0]} is another value of it; give one of the two")
        if name == "lr":
            paths += _peak(config, f"{section}.scheduler")
        overrides += [f"{_at(config, each)[0]}={form.format(value)}" for each in paths]
    if errors:
        from deepspeed_trial.errors import InvalidInput  # here: the import takes seconds

        raise InvalidInput(errors)
    return overrides


def _peak(config: Any, scheduler: str) -> list[str]:
    """Where a schedule's peak stands, if it does: it would win over the rate."""
    kind = _at(config, f"{scheduler}.type")[1]
    path = f"{scheduler}.params.{PEAK_KEYS.get(kind) if isinstance(kind, str) else None}"
    return [] if _at(config, path)[1] is None else [path]


def _at(config: Any, path: str) -> tuple[str, Any]:
    """The keys to a value, through what is marked as constant for a cluster, and the value, or None."""
    keys = []
    for key in path.split("."):
        if isinstance(config, Mapping) and config.get("type") == "const" and "val" in config:
            keys.append("val")
            config = config["val"]
        keys.append(key)
        config = config.get(key) if isinstance(config, Mapping) else None
    return ".".join(keys), config
