"""The options that all programs have which read an experiment file."""

from __future__ import annotations

import argparse
import pathlib


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
