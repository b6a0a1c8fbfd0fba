"""Writes a folder of images as tar shards, for ``data.dataset: webdataset``, and reads them back.

    write:  python3 shards.py write FOLDER TARGET [--size-limit 100MB] [--seed 0]
    read:   python3 shards.py read TARGET FOLDER

FOLDER is as ``data.dataset: imagefolder`` has it: ``train/<class>/*`` with ``test`` or ``val``, or
``<class>/*``. TARGET is a folder; of ``read`` also a URL. It gets ``train-000000.tar`` and so on, each with
images of all classes in an order drawn by the seed, ``classes.txt``, and ``index.npz``: what is where, and
the order that the images had in FOLDER, in which they are trained. Image files are copied as they are; the
same folder makes the same bytes. An interrupted command goes on when it is given again.
Exit codes: 0 done, 2 bad input, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from deepspeed_trial.errors import DISK_FULL, InvalidInput, one_line, print_errors


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="write|read")
    one = commands.add_parser("write", help="write a folder of images as shards")
    one.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    one.add_argument("target", metavar="TARGET", type=pathlib.Path)
    one.add_argument("--size-limit", metavar="SIZE", default="100MB", help="of a shard (100MB)")
    one.add_argument("--seed", metavar="N", type=int, default=0, help="of the order in the shards (0)")
    one = commands.add_parser("read", help="write the images of shards to a folder")
    one.add_argument("target", metavar="TARGET")
    one.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the command line says and gives the exit code."""
    args = parse(argv)
    try:
        from classify.config.rules import size_in_bytes
        from classify.images.sources import tar_folders  # which takes seconds

        if args.command == "write":
            limit = size_in_bytes("--size-limit", args.size_limit)
            if args.seed < 0:
                raise InvalidInput(f"--seed: {args.seed}: must be 0 or more")
            tar_folders.write(args.folder, args.target, limit, args.seed)
        else:
            tar_folders.read(args.target, args.folder)
    except InvalidInput as error:
        return print_errors("shards.py", error)
    except OSError as error:
        print(f"shards.py: a path cannot be used ({one_line(error)}); mend that", file=sys.stderr)
        return 1 if error.errno in DISK_FULL else 2
    except KeyboardInterrupt:
        print("shards.py: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
