"""Uses what a run has left: takes the trained network out, classifies images with it, judges it, and reports.

    a file for plain PyTorch:  python3 checkpoint.py export RUN_OR_CHECKPOINT net.pt [--format FORMAT]
    classify images:           python3 checkpoint.py predict net.pt IMAGE_OR_FOLDER... [--json]
    validate again:            python3 checkpoint.py evaluate net.pt --config FILE [--set PATH=VALUE]
    by several views:          the last two with --tta mirror,shift=1 (test-time augmentation)
    look at runs, or a search: python3 checkpoint.py report RUN [RUN...] [--output report.html]
    decoded images kept:       python3 checkpoint.py caches [FOLDER...] [--clear]

RUN is the folder of a run of train.py; a checkpoint is a folder in its checkpoints/, or one that
`det checkpoint download` has written. It may be of any mode and any number of processes. Decoded images
are kept in hidden files of the data's folder, one for each split and size; --clear removes them.
Exit codes: 0 done, 2 a path or value that cannot be used, 1 anything else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from classify.config import command_line
from harness.errors import DISK_FULL, ErrorList, InvalidInput, one_line, print_errors, printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from classify.config.options import TestTimeAugmentation

FORMATS = ("pt", "safetensors", "onnx")
BATCH = 500  # images classified at a time


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="export|predict|evaluate|report|caches"
    )

    one = commands.add_parser("export", help="write a network that plain PyTorch loads")
    one.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=pathlib.Path)
    one.add_argument("target", metavar="FILE", type=pathlib.Path)
    one.add_argument("--format", choices=FORMATS, help="(by FILE's ending, else pt)")
    one.add_argument(
        "--checkpoint", default="latest", metavar="latest|best|UUID", help="of a run (%(default)s)"
    )

    one = commands.add_parser("predict", help="classify image files")
    one.add_argument("net", metavar="NET", type=pathlib.Path)
    one.add_argument("images", metavar="IMAGE_OR_FOLDER", nargs="+", type=pathlib.Path)
    one.add_argument(
        "--json", action="store_true", help="print a JSON list with the probability of every class"
    )

    _add_tta(one)

    one = commands.add_parser("evaluate", help="validate a network")
    one.add_argument("net", metavar="NET", type=pathlib.Path)
    _add_tta(one)
    one.add_argument(
        "--split",
        choices=("train", "val", "test"),
        help="which images (test, or val where there are no others)",
    )
    command_line.add_experiment_options(one, "const.yaml")
    one.add_argument("--json", action="store_true", help="print the validation as in summary.json")

    one = commands.add_parser("report", help="write a page about runs, or a search")
    one.add_argument("runs", metavar="RUN", nargs="+", type=pathlib.Path)
    one.add_argument(
        "--output", metavar="FILE", type=pathlib.Path, help="(report.html in the first run's folder)"
    )

    one = commands.add_parser("caches", help="list the decoded images that are kept, or remove them")
    one.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        type=pathlib.Path,
        help="data.root of a run (data, and what is kept for folders that are read-only)",
    )
    one.add_argument("--clear", action="store_true", help="remove them")
    return parser.parse_args(argv)


def _add_tta(parser: argparse.ArgumentParser) -> None:
    meaning = "average the scores of views of each image: mirrored, shifted by N pixels"
    parser.add_argument("--tta", metavar="mirror,shift=N", help=meaning)


def main(argv: Sequence[str] | None = None) -> int:
    """Does what the command line says and gives the exit code."""
    args = parse(argv)
    commands = {"export": export, "predict": predict, "evaluate": evaluate, "report": report}
    try:
        {**commands, "caches": caches}[args.command](args)
    except InvalidInput as error:
        return print_errors("checkpoint.py", error)
    except OSError as error:
        print(f"checkpoint.py: a path cannot be used ({one_line(error)}); mend that", file=sys.stderr)
        return 1 if error.errno in DISK_FULL else 2
    except KeyboardInterrupt:
        print("checkpoint.py: interrupted", file=sys.stderr)
        return 130
    return 0


def export(args: argparse.Namespace) -> None:
    """Writes a checkpoint's network as a file of its own, with its JSON file beside it."""
    from classify.models import net_file, state_dicts
    from harness.checkpoints.files import locate

    form = args.format or {".safetensors": "safetensors", ".onnx": "onnx"}.get(args.target.suffix, "pt")
    if args.target.suffix == ".json" or args.target.is_dir():
        raise InvalidInput(
            f"{args.target}: must be the name of a file that does not end in .json, e.g. net.pt"
        )
    folder = locate(args.source, args.checkpoint)
    whole = folder / net_file.NAMES[0]
    state = state_dicts.read(str(whole))
    description = net_file.read_description(whole)
    net_file.build(description, state, str(whole))  # raises where they do not go together
    digest = state_dicts.sha256(dict(sorted(state.items())))
    description["provenance"].update(checkpoint=folder.name, weights_sha256=digest)
    args.target.parent.mkdir(parents=True, exist_ok=True)
    net_file.write(args.target, state, description, form)
    steps = description["provenance"]["steps"]
    files = printable(f"{args.target}, {net_file.beside(args.target)}")
    print(f"{files}: checkpoint {folder.name}, {steps:,} steps")


def predict(args: argparse.Namespace) -> None:
    """Prints the class of every image, and how sure the network is of it."""
    import torch

    from classify.images.decode import decode_image
    from classify.images.image_folder import find_images
    from classify.images.views import view_scores
    from classify.models import net_file

    net, description = net_file.read(args.net)
    how = _views(args.tta, description)
    files, size = find_images(args.images), tuple(description["input"]["resize"])
    decoded, errors = [], ErrorList()
    for file in files:
        with errors.collecting():
            decoded.append(torch.from_numpy(decode_image(file, size).copy()))
    errors.raise_any()
    batches, classify = as_in_validation(net, description, torch.stack(decoded))
    scores = [view_scores(classify, inputs, how)[1] for inputs in batches]
    probabilities = torch.cat(scores).softmax(1)
    classes = description["classes"]
    if args.json:
        rows = [
            {
                "image": str(file),
                "class": classes[int(row.argmax())],
                "probability": float(row.max()),
                "probabilities": dict(zip(classes, row.tolist(), strict=True)),
                **({"test_time_augmentation": vars(how)} if how else {}),
            }
            for file, row in zip(files, probabilities, strict=True)
        ]
        print(json.dumps(rows, indent=2))
    else:
        _print_predictions(files, probabilities, classes)
        if how:
            print(f"by the mean scores of several views of each image (test-time augmentation: {how})")


def _print_predictions(files: Sequence[pathlib.Path], probabilities: Tensor, classes: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("image", "class", "probability", "next", box=box.SIMPLE_HEAD)
    for file, row in zip(files, probabilities, strict=True):
        (first, second), (best, next_best) = row.topk(2)
        cells = file, classes[int(best)], f"{first:.1%}", f"{classes[int(next_best)]} {second:.1%}"
        table.add_row(*map(printable, cells))
    # Names are text: [b] in one is no markup, :x: no emoji
    Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False).print(table)


def evaluate(args: argparse.Namespace) -> None:
    """Judges a network on the experiment's test images, or others of it, as the trial does."""
    import torch

    import data
    from classify.config import experiment_file
    from classify.images.settings import DataSettings
    from classify.models import net_file
    from classify.reports.metrics import ClassificationMetrics
    from classify.reports.summary import accuracies, metrics_summary

    net, description = net_file.read(args.net)
    how = _views(args.tta, description)
    settings = DataSettings.parse(experiment_file.read(args.config, args.overrides).get("data"))
    stored = tuple(description["input"]["resize"])  # whatever size the experiment file names now
    settings = dataclasses.replace(settings, image_size=stored, resize=None)
    splits = settings.open_source()
    split = args.split or splits.names[-1]
    if split not in splits.names:
        raise InvalidInput(
            f"--split: {split}: the data has {', '.join(splits.names)} alone; use one of these"
        )
    source = data.load(settings, split, splits)
    if list(source.classes) != description["classes"]:
        differ = f"its classes ({', '.join(source.classes[:12])}) are not those of {args.net}"
        raise InvalidInput(f"data: {args.config}: {differ}; give its own data")
    metrics = ClassificationMetrics(source.classes, how=how)
    images = source.images if source.rows is None else source.select(torch.arange(len(source)))
    batches, classify = as_in_validation(net, description, images)
    for inputs, labels in zip(batches, source.labels.split(BATCH), strict=True):
        metrics.classify(classify, inputs, labels)
    counted = metrics.cross_slot_reduce([metrics.per_slot_reduce()])
    validation = metrics_summary(counted, source.classes)
    if args.json:
        print(json.dumps(validation, indent=2))
        return
    for name, accuracy in validation["per_class_accuracy"].items():
        print(f"{printable(name):>20}  {accuracy:.4f}")
    print(f"loss {validation['loss']:.4f}  images {validation['images']:,}")
    print(*accuracies(validation), sep="\n")


def as_in_validation(
    net: nn.Module, description: dict[str, Any], images: Tensor
) -> tuple[Iterator[Tensor], Callable[[Tensor], Tensor]]:
    """Gives inputs (B, 3, H, W) of uint8 images (N, 3, h, w), and what makes logits (B, C) of a batch."""
    import torch
    from torchvision.transforms.v2 import functional

    from classify.models.registry import logits, prefers_channels_last
    from data import as_inputs

    seen = description["input"]
    size, dtype = [seen["height"], seen["width"]], getattr(torch, description["dtype"])
    turned = prefers_channels_last(description["net"]["name"])
    form = torch.channels_last if turned else torch.contiguous_format
    net = net.to(dtype)
    crops = (functional.center_crop(batch, size) for batch in images.split(BATCH))
    inputs = (as_inputs(crop, seen["mean"], seen["std"]).to(dtype, memory_format=form) for crop in crops)
    return inputs, torch.no_grad()(lambda each: logits(net(each)).float())


def _views(text: str | None, description: dict[str, Any]) -> TestTimeAugmentation | None:
    """What ``--tta`` asks for, of images of the described size."""
    from classify.images import views

    if text is None:
        return None
    how = views.parse(text, "--tta")
    views.check_shift("--tta", how, (description["input"]["height"], description["input"]["width"]))
    return how


def report(args: argparse.Namespace) -> None:
    """Writes one page about runs, or about a search."""
    if any((run / "search.db").is_file() for run in args.runs):
        from classify.tuning.search_page import write
    else:
        from classify.reports.html_report import write
    target = args.output or args.runs[0] / "report.html"
    write(args.runs, target)
    print(printable(target))


def caches(args: argparse.Namespace) -> None:
    """Lists the decoded images that are kept, or removes them."""
    from classify.images import cache
    from classify.images.settings import DataSettings
    from harness.host_lock import stand_in, stand_ins

    for folder in args.folders:
        if not folder.is_dir():
            raise InvalidInput(f"{folder}: no such folder; give data.root of a run")
    roots = args.folders or [pathlib.Path(DataSettings.root), *sorted(stand_ins().glob("*"))]
    found = {path: size for root in roots for path, size in cache.find(root).items()}
    for root in args.folders:
        found.update(cache.find(stand_in(root)))
    left = 0
    for path, size in found.items():
        is_gone = args.clear and cache.clear(path)
        left += 0 if is_gone else size
        outcome = ("removed" if is_gone else "is being written, left") if args.clear else ""
        print(f"{cache.in_bytes(size):>10}  {printable(path)}.raw  {outcome}".rstrip())
    freed = f", {cache.in_bytes(sum(found.values()) - left)} removed" if args.clear else ""
    print(f"{cache.in_bytes(left)} of decoded images are kept{freed}")


if __name__ == "__main__":
    sys.exit(main())
