"""Writes a folder of images as tar shards for ``data.dataset: webdataset``.

    python3 shards.py write FOLDER TARGET [--size-limit 100MB] [--seed 0]

FOLDER has the form of ``data.dataset: imagefolder``: ``train/<class>/*`` with ``test`` or ``val``, or
``<class>/*``. The command writes into the folder TARGET:

    train-000000.tar, ...  images of all classes, in an order drawn by the seed
    classes.txt            the class names
    index.npz              each image's place in the shards and position in FOLDER: a training on TARGET
                           uses the images in the same order as a training on FOLDER

Image files are copied unchanged; the same FOLDER gives the same bytes. The same command resumes after an
interruption. Exit codes: 0 done, 2 bad input, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from classify.config import command_line
from deepspeed_trial.errors import InvalidInput


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="write")
    write = commands.add_parser("write", help="write a folder of images as shards")
    write.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    write.add_argument("target", metavar="TARGET", type=pathlib.Path)
    write.add_argument(
        "--size-limit", metavar="SIZE", default="100MB", help="a shard's maximum size (default: 100MB)"
    )
    write.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of the images' order (default: 0)"
    )
    return parser.parse_args(argv)


@command_line.as_program("shards", "interrupted; the same command resumes")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = parse(argv)
    from classify.config.rules import size_in_bytes
    from classify.images.sources import tar_folders  # takes seconds

    limit = size_in_bytes("--size-limit", args.size_limit)
    if args.seed < 0:
        raise InvalidInput(f"--seed: {args.seed}: must be 0 or more")
    with command_line.usable_paths("", "correct it"):
        tar_folders.write(args.folder, args.target, limit, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
