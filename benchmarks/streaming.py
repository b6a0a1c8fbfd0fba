"""Images that are decoded while a training goes on, beside torchvision, webdataset and Hugging Face datasets.

    python3 -m benchmarks.streaming                        ten minutes on two cores
    python3 -m benchmarks.streaming --images 500 --many 20000

Makes JPEG files of 500x375 pixels and tar shards of them. Every contender, in a process of its own with two
workers, makes normalised inputs of 224 pixels of them, in turns. Then shards come from a web server that is
slow, and a training has many small images. Peers are measured where they are installed.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import programs, report, steps
from benchmarks.streaming_images import (
    HEIGHT,
    SIDE,
    WIDTH,
    make_padded,
    make_photos,
    make_small,
    write_shards,
)
from classify.config.project import PROJECT
from deepspeed_trial import machine

SECTION = "Streamed images"
CONTENDERS = {
    "ImageFolder": "torchvision's ImageFolder with a DataLoader",
    "webdataset": "webdataset's WebDataset with its WebLoader, shuffled in a buffer of 1,000",
    "datasets": "Hugging Face datasets with a DataLoader, streaming, shuffled in a buffer of 1,000",
    "files": "this project streams the folder and keeps nothing",
    "shards": "this project streams the shards and keeps nothing",
    "keeping": "this project streams the shards and keeps what it decodes: the first epoch",
    "kept": "the same: the third epoch",
    "mapped": "this project decodes once, before all, and maps the file: the third epoch",
}
LINK = 50_000_000  # bytes a second
FEW = 10_000
SIZE = 250_000  # bytes of a file, for the link
EXPLANATION = """\
By `python3 -m benchmarks.streaming`: {count:,} JPEG files of {width}x{height} pixels ({size:.0f} KB each, of
noise made smooth), and {shards} tar shards of them, in the order of a training, made normalised float inputs
of {side} pixels in micro-batches of 32, without a network. Each contender has two workers, and one thread in
the process that reads. Medians of {repeats} turns, in brackets the distance between the quartiles over the
median; the files were in the system's memory.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the section of RESULTS.md."""
    about, form = __doc__, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--images", type=int, default=2000, help="of 500x375 pixels (2000)")
    parser.add_argument("--many", type=int, default=1_000_000, help="small ones (1000000)")
    parser.add_argument("--repeats", type=int, default=3, help="turns (3)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        make_photos(root / "photos", args.images)
        write_shards(root / "photos", root / "shards", "5MB")
        text = explained(root, args) + "\n" + table(turns(root, args.repeats))
        text += f"\n{over_a_link(root)}\n\n{memory(root, args.many)}\n\n{machine_line()}"
    print(text)
    report.put_section(pathlib.Path(__file__).with_name("RESULTS.md"), SECTION, text)
    return 0


def turns(root: pathlib.Path, repeats: int) -> dict[str, list[float]]:
    """Images a second of each contender that is installed, one a turn."""
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name in CONTENDERS:
            is_missing = name in ("webdataset", "datasets") and not importlib.util.find_spec(name)
            if is_missing or name == "keeping":  # which is measured with what comes after it
                continue
            for cache in root.glob("shards/.images*"):
                cache.unlink()
            for measured, rate in steps.run(
                ["benchmarks.streaming_worker", name], {"root": str(root)}
            ).items():
                rates.setdefault(measured, []).append(rate)
                print(f"{measured}: {rate:,.0f} images/s", flush=True)
    return rates


def explained(root: pathlib.Path, args: argparse.Namespace) -> str:
    """What the table is of."""
    files = [each.stat().st_size for each in root.glob("photos/train/*/*.jpg")]
    shards = len(list(root.glob("shards/train-*.tar")))
    numbers = {"count": args.images, "width": WIDTH, "height": HEIGHT, "side": SIDE, "repeats": args.repeats}
    text = EXPLANATION.format(**numbers, size=statistics.mean(files) / 1000, shards=shards)
    return textwrap.fill(" ".join(text.split()), 110) + "\n"


def table(rates: dict[str, list[float]]) -> str:
    """A row for each contender, with its speed over that of the first, turn by turn."""
    lines = ["| | images a second | over ImageFolder |", "|---|---|---|"]
    for name, what in CONTENDERS.items():
        if measured := rates.get(name):
            over = statistics.median(a / b for a, b in zip(measured, rates["ImageFolder"], strict=True))
            cells = f"{statistics.median(measured):,.0f} ({steps.spread(measured):.0%}) | {over:.2f}"
            lines.append(f"| {what} | {cells} |")
    return "\n".join(lines) + "\n"


class _Limited(http.server.SimpleHTTPRequestHandler):
    """Sends files at ``LINK`` bytes a second, all connections together."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    free_at = 0.0

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Sends 64 KB at a time, each when the link is free for it."""
        while block := source.read(2**16):
            with _Limited.lock:
                begin = max(_Limited.free_at, time.perf_counter())
                _Limited.free_at = begin + len(block) / LINK
            time.sleep(max(0.0, begin - time.perf_counter()))
            outputfile.write(block)


def over_a_link(root: pathlib.Path) -> str:
    """How much of a link an epoch of shards uses, whose images take no time to decode."""
    make_padded(root / "padded", 2000, SIZE)
    write_shards(root / "padded", root / "linked", "5MB")
    handler = functools.partial(_Limited, directory=str(root / "linked"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    request = {"root": f"http://127.0.0.1:{server.server_address[1]}", "cache": str(root / "cache")}
    found = steps.run(["benchmarks.streaming_worker", "link"], request)
    server.shutdown()
    return (
        f"Over a link of {LINK / 1e6:.0f} MB/s (a web server on this machine that sends no faster),"
        f" {found['bytes'] / 1e9:.1f} GB of shards came at {found['rate'] / 1e6:.1f} MB/s:"
        f" {found['rate'] / LINK:.2f} of it."
    )


def memory(root: pathlib.Path, many: int) -> str:
    """The memory of trainings of 200 steps in two processes, from few and from many small images."""
    found = {}
    for count in (FEW, many):
        shards = root / f"small-{count}"
        make_small(shards, count)
        section = {"dataset": "webdataset", "root": str(shards), "decode": "stream", "window": 4}
        limited = {**section, "cache": {"folder": str(root / "cache"), "limit": "100MB"}}
        command, environment = steps.launched([], 2)
        command = [*command[:-1], str(PROJECT / "train.py"), "--config", "experiments/digits.yaml"]
        command += ["--output", str(root / f"run-{count}"), "--set", f"data={limited}"]
        command += ["--set", "hyperparameters.max_length={batches: 200}"]
        watched = programs.watch(command, environment, root)
        found[count] = watched.memory / 2**20
    few, large = found.values()
    return (
        f"A training of 200 steps in two processes on JPEG files of 8 pixels in shards took {few:,.0f} MiB"
        f" with {FEW:,} images and {large:,.0f} MiB with {many:,} (the largest proportional set size of all"
        f" its processes together, with the files' pages): {large - few:+,.0f} MiB."
    )


def machine_line() -> str:
    """Where it was measured."""
    described = machine.describe()
    return f"Machine: {described['cores']} cores, {described['processor']}."


if __name__ == "__main__":
    sys.exit(main())
