"""Use a finished run: export its network, classify images, validate the network, write a report.

    a file for plain PyTorch:  python3 checkpoint.py export RUN_OR_CHECKPOINT net.pt [--format FORMAT]
    as 8-bit integers:         python3 checkpoint.py export RUN net-int8.onnx --int8 --config FILE
    for the Hugging Face Hub:  python3 checkpoint.py export RUN FOLDER --format hf
    classify images:           python3 checkpoint.py predict net.pt IMAGES... [--csv FILE] [--heat FILE]
    on a local web page:       python3 checkpoint.py serve net.pt [--port N]
    validate again:            python3 checkpoint.py evaluate net.pt --config FILE [--set PATH=VALUE]
    use several views:         predict and evaluate with --tta mirror,shift=1 (test-time augmentation)
    look at runs, or a search: python3 checkpoint.py report RUN [RUN...] [--output report.html] [--follow]
    look for wrong images:     python3 checkpoint.py audit FOLDER [--net net.pt]  (or --config FILE)
    fit a new head:            python3 checkpoint.py head net.pt new.pt --config FILE
    continue from a cluster:   python3 checkpoint.py import CHECKPOINT RUN
    stored images, shards:     python3 checkpoint.py caches [FOLDER...] [--clear]

RUN is the folder of a run of train.py. A checkpoint is a folder in RUN/checkpoints, or a folder that `det
checkpoint download` wrote; any mode and any number of processes may have saved it. caches lists the hidden
files in the data's folder that hold decoded images; --clear removes them. Exit codes: 0 done, 2 an unusable
path or value, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from classify.config import command_line
from deepspeed_trial.errors import InvalidInput, printable
from deepspeed_trial.out_of_memory import explain_out_of_memory

if TYPE_CHECKING:
    from workbench.publish.network import Classifier
    from workbench.publish.scoring import Answers

FORMATS = ("pt", "safetensors", "onnx", "hf")  # the forms in workbench/publish/forms.py
CONFIG = "const.yaml"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    return parser().parse_args(argv)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = command_line.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    path = {"type": pathlib.Path}

    command = commands.add_parser("export", help="write a network that plain PyTorch loads")
    add: Any = command.add_argument
    add("source", metavar="RUN_OR_CHECKPOINT", **path)
    add("target", metavar="FILE_OR_FOLDER", **path)
    add(
        "--format",
        choices=FORMATS,
        help="(default: by the ending, else pt); hf: a folder for the Hugging Face Hub",
    )
    meaning = (
        "the run's checkpoint; final: the weights that predict, report and serve use (default: %(default)s)"
    )
    add("--checkpoint", default="final", metavar="final|latest|best|UUID", help=meaning)
    add("--int8", action="store_true", help="write the ONNX file in 8-bit integers")
    command_line.add_experiment_options(command, CONFIG, "the training images for --int8")

    _add_commands_of_networks(commands)

    command = commands.add_parser("report", help="write an HTML page about runs, or about a search")
    add = command.add_argument
    add("runs", metavar="RUN", nargs="+", **path)
    add("--output", metavar="FILE", help="the page (default: report.html in the first run's folder)", **path)
    add("--follow", action="store_true", help="write the page again every 5 seconds while a run trains")
    _add_commands_of_images(commands)

    command = commands.add_parser("import", help="create a run from a Determined cluster's checkpoint")
    add = command.add_argument
    add("source", metavar="CHECKPOINT", help="a folder written by det checkpoint download", **path)
    add("output", metavar="RUN", help="the new run's folder", **path)
    return parser


def _add_commands_of_networks(commands: Any) -> None:
    """Add the subcommands that use a trained network."""
    path = {"type": pathlib.Path}
    command = commands.add_parser("predict", help="classify image files")
    add: Any = command.add_argument
    add("net", metavar="NET", help="the folder of a run, or a network's file", **path)
    add("images", metavar="IMAGE_OR_FOLDER", nargs="+", **path)
    add("--json", action="store_true", help="print a JSON list with the probability of every class")
    meaning = "answer unknown for an image whose highest probability is below THRESHOLD"
    meaning += " (default: the threshold that 99 %% of the validation images reach)"
    add("--unknown", nargs="?", const="", metavar="THRESHOLD", help=meaning)
    meaning = "write each image's class and the probability of every class, e.g. answers.csv"
    add("--csv", metavar="FILE", help=meaning, **path)
    add("--heat", metavar="FILE", help="write a page with the heat map of each image, e.g. heat.html", **path)
    _add_tta(command)

    command = commands.add_parser("serve", help="serve a local web page that classifies dropped images")
    add = command.add_argument
    add("net", metavar="NET", help="the folder of a run, or a network's file", **path)
    add(
        "--port",
        type=int,
        default=7860,
        metavar="N",
        help="port of 127.0.0.1 (default: %(default)s); 0: a free port",
    )

    command = commands.add_parser("evaluate", help="validate a network")
    add = command.add_argument
    add("net", metavar="NET", help="the folder of a run, or a network's file", **path)
    _add_tta(command)
    add(
        "--split",
        choices=("train", "val", "test"),
        help="the images to validate on (default: test, else val)",
    )
    file = f"experiment file (default: the settings of the run, else {CONFIG})"
    command_line.add_experiment_options(command, None, file)
    add("--json", action="store_true", help="print the validation in the form of summary.json")


def _add_commands_of_images(commands: Any) -> None:
    """Add the subcommands about an experiment's images."""
    path = {"type": pathlib.Path}
    command = commands.add_parser("audit", help="look for near-duplicates, wrong labels and outliers")
    add: Any = command.add_argument
    add("folder", metavar="FOLDER", nargs="?", help="a folder of images; not with --config", **path)
    add("--net", metavar="NET", help="the network for the features (default: whitened patches)", **path)
    add(
        "--output",
        default="runs/audit",
        metavar="FOLDER",
        help="the folder for the page and the lists (default: %(default)s)",
        **path,
    )
    command_line.add_experiment_options(command, CONFIG, "the images to audit")

    command = commands.add_parser("head", help="fit a linear head on a network's features")
    add = command.add_argument
    add("net", metavar="NET", help="the network for the features", **path)
    add("target", metavar="FILE", help="the new network, e.g. new.pt", **path)
    command_line.add_experiment_options(command, CONFIG, "the training images of the head")

    command = commands.add_parser("caches", help="list or remove decoded images and fetched shards")
    add = command.add_argument
    folders = "data.root or data.cache.folder of a run; default: data/, and the user's cache"
    add("folders", metavar="FOLDER", nargs="*", help=folders, **path)
    add("--clear", action="store_true", help="remove the listed files")


def _add_tta(parser: argparse.ArgumentParser) -> None:
    meaning = "average the scores of each image, its mirror image, and the image shifted by N pixels"
    parser.add_argument("--tta", metavar="mirror,shift=N", help=meaning)


@command_line.as_program("checkpoint")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args = parse(argv)
    commands = {"export": export, "predict": predict, "serve": serve, "evaluate": evaluate, "report": report}
    commands |= {"audit": audit, "head": head, "import": import_, "caches": caches}
    with (
        command_line.usable_paths(f"{args.command}: ", "repair or change the path"),
        explain_out_of_memory(lambda: f"in {args.command}", lambda: "use a machine with more memory"),
    ):
        commands[args.command](args)
    return 0


def export(args: argparse.Namespace) -> None:
    """Write a checkpoint's network and its description in the chosen format."""
    from classify.models import net_file, state_dicts
    from deepspeed_trial.checkpoints.files import locate
    from workbench.publish import forms, scoring
    from workbench.publish.network import Trained
    from workbench.reports import recorded_run

    form = args.format or forms.by_ending(args.target)
    if args.target.suffix == ".json" or (args.target.is_dir() and form != "hf"):
        what = "must be the name of a file that does not end in .json, e.g. net.pt"
        raise InvalidInput(f"{args.target}: {what}")
    if not args.format and form == "pt" and args.target.suffix not in ("", ".pt", ".pth"):
        raise InvalidInput(
            f"{args.target}: unknown ending; use .pt, .safetensors or .onnx, or add --format pt"
        )
    ending = forms.FORMS[form].ending
    if ending and args.target.suffix != ending:  # the reader chooses the format by the ending
        raise InvalidInput(f"{args.target}: must end in {ending} for --format {form}; give another name")
    if args.int8 and form != forms.OF_INT8:
        raise InvalidInput(f"--int8: does not work with {form}; give a file that ends in .onnx")
    if not args.int8 and (args.overrides or args.config != CONFIG):
        raise InvalidInput("--config, --set: are only for the images of --int8; add --int8, or remove them")
    folder = locate(args.source, args.checkpoint)
    whole = folder / net_file.NAMES[0]
    state = net_file.of_checkpoint(folder)
    description = net_file.read_description(whole)
    net_file.build(description, state, str(whole))  # raises if the weights do not fit the description
    digest = state_dicts.sha256(dict(sorted(state.items())))
    description["provenance"].update(checkpoint=folder.name, weights_sha256=digest)
    if scores := recorded_run.results(folder.resolve().parent.parent, description["provenance"]):
        accuracy = {"value": scores[0].metrics["accuracy"], "images": scores[0].images}
        description["provenance"]["accuracy"] = accuracy
    calibration = None
    if args.int8:
        images = scoring.open_images(args.config, args.overrides, "train", description, whole)
        calibration = scoring.calibration(description, images)
        description["provenance"]["int8"] = {"calibration_images": min(scoring.FOR_INT8, len(images))}
    args.target.parent.mkdir(parents=True, exist_ok=True)
    trained = Trained(state, description, calibration, folder.resolve().parent.parent)
    forms.FORMS[form].write(args.target, trained)
    steps = description["provenance"]["steps"]
    files = printable(f"{args.target}, {net_file.beside(args.target)}")
    print(f"{files}: checkpoint {folder.name}, {steps:,} steps")
    if args.int8:
        again = command_line.typed("checkpoint", "evaluate", args.target, "--config", args.config)
        print(printable(f"to measure the int8 network's accuracy: {again}"))


def predict(args: argparse.Namespace) -> None:
    """Print the class of every readable image, and its probability.

    Raises:
        InvalidInput: after printing, with a line for each file that is not a readable image.
    """
    from classify.images.sources.image_folder import find_images
    from classify.reports.overview import describe_passed_over
    from workbench.publish import forms, scoring
    from workbench.reports import page

    if args.csv:
        page.check_name(args.csv, "--csv", "answers.csv")
    classifier = forms.read(args.net)
    how = scoring.views_of(args.tta, classifier.description)
    asks = args.unknown is not None
    threshold = scoring.threshold_of(classifier, args.unknown, args.net) if asks else 0.0
    images, others = find_images(args.images)
    if passed_over := describe_passed_over(others):
        print(f"{command_line.called('checkpoint')}: {passed_over}", file=sys.stderr)
    files, found, errors = scoring.answers(classifier, images, how, threshold)
    if args.heat and files:
        from workbench.publish import heat_page

        heat_page.write(classifier, files, found.probabilities, args.heat)
    classes, gives_several = classifier.description["classes"], classifier.thresholds is not None
    if args.csv:
        page.write(page.as_csv(_rows(files, found, classifier)), args.csv)
    if args.json:
        rows = [
            {
                "image": str(file),
                **(
                    {"labels": classifier.labels(row)}
                    if gives_several
                    else {"class": classes[int(row.argmax())], "probability": float(row.max())}
                ),
                "probabilities": dict(zip(classes, row.tolist(), strict=True)),
                **({"unknown": is_unknown} if asks else {}),
                **({"test_time_augmentation": vars(how)} if how else {}),
            }
            for file, row, is_unknown in zip(files, found.probabilities, found.unknown.tolist(), strict=True)
        ]
        print(json.dumps(rows, indent=2))
    elif gives_several and files:
        _print_labels(files, found, classifier)
    elif files:
        _print_predictions(files, found, classes)
        if asks:
            print(
                f"unknown: {int(found.unknown.sum()):,} of {len(files):,} images; threshold {threshold:.3f}"
            )
        if how:
            print(f"scores are means over several views of each image (test-time augmentation: {how})")
    errors.raise_any()


def serve(args: argparse.Namespace) -> None:
    """Serve a local page that classifies dropped images."""
    from workbench.publish import forms
    from workbench.publish import serve as page

    page.run(forms.read(args.net), args.net, args.port)


def _print_labels(files: Sequence[pathlib.Path], found: Answers, classifier: Classifier) -> None:
    classes, cells = classifier.description["classes"], []
    for file, row in zip(files, found.probabilities, strict=True):
        labels = classifier.labels(row)
        others = [(p, name) for p, name in zip(row.tolist(), classes, strict=True) if name not in labels]
        given = ", ".join(f"{name} {row[classes.index(name)]:.1%}" for name in labels) or "no label"
        cells.append((file, given, "{1} {0:.1%}".format(*max(others)) if others else ""))
    _print_table(("image", "labels", "next"), cells)


def _print_predictions(files: Sequence[pathlib.Path], found: Answers, classes: Sequence[str]) -> None:
    rows = []
    for file, row, is_unknown in zip(files, *found, strict=True):
        (first, second), (best, next_best) = row.topk(2)
        named, following = (f"{classes[int(each)]}" for each in (best, next_best))
        nearest = f"{named} {first:.1%}, " if is_unknown else ""
        answer = "unknown" if is_unknown else named
        rows.append((file, answer, f"{first:.1%}", f"{nearest}{following} {second:.1%}"))
    _print_table(("image", "class", "probability", "next"), rows)


def _rows(files: Sequence[pathlib.Path], found: Answers, classifier: Classifier) -> list[list[object]]:
    """Return the rows of a CSV file: the heading, and a row for each image."""
    classes, gives_several = classifier.description["classes"], classifier.thresholds is not None
    rows: list[list[object]] = [
        ["file", *(["labels"] if gives_several else ["class", "probability"]), *classes]
    ]
    for file, row, is_unknown in zip(files, *found, strict=True):
        named = "unknown" if is_unknown else classes[int(row.argmax())]
        answer = [", ".join(classifier.labels(row))] if gives_several else [named, float(row.max())]
        rows.append([file, *answer, *row.tolist()])
    return rows


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(printable, row))
    # Names are plain text: [b] in a name is not markup, and :x: is not an emoji
    Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False).print(table)


def evaluate(args: argparse.Namespace) -> None:
    """Validate a network as the trial does, on the test images or another split."""
    from classify.config import experiment_file
    from classify.reports.summary import scores
    from workbench.publish import forms, scoring

    classifier = forms.read(args.net)
    how = scoring.views_of(args.tta, classifier.description)
    if how and classifier.thresholds is not None:
        raise InvalidInput(f"--tta: {args.tta}: does not work with several labels an image; remove it")
    record = (args.net if args.net.is_dir() else args.net.parent) / experiment_file.RECORD
    config = args.config or (str(record) if record.is_file() else CONFIG)
    images = scoring.open_images(config, args.overrides, args.split, classifier.description, args.net)
    validation = scoring.validation(classifier, images, how)
    if args.json:
        print(json.dumps(validation, indent=2))
        return
    for name, accuracy in validation["per_class_accuracy"].items():
        print(f"{printable(name):>20}  {accuracy:.4f}")
    before, after = validation["calibration_error"], validation.get("calibration_error_scaled")
    scaled = "" if after is None else f"; {after:.4f} at temperature {classifier.temperature:.3f}"
    print(f"calibration error {before:.4f}{scaled}")
    searcher = experiment_file.read(config, args.overrides).get("searcher")
    chosen = searcher.get("metric") if isinstance(searcher, dict) else None
    loss = "" if chosen == "loss" else f"loss {validation['loss']:.4f}  "  # else it is the last line
    print(f"{loss}images {validation['images']:,}")
    print(*scores(validation, str(chosen or "")), sep="\n")


def report(args: argparse.Namespace) -> None:
    """Write a page about runs, or about a search."""
    target = args.output or args.runs[0] / "report.html"
    if any((run / "search.db").is_file() for run in args.runs):
        from workbench.search import search_page

        search_page.write(args.runs, target)
    else:
        from workbench.reports import html_report

        html_report.write(args.runs, target, html_report.REFRESH if args.follow else 0)
    print(printable(target), flush=True)
    if args.follow:
        html_report.follow(args.runs, target)


def audit(args: argparse.Namespace) -> None:
    """Write a page about images that are probably wrong, and a list of them; change no image."""
    from workbench.audit import audit as auditing

    dataset, vectors, name, _ = _features(args)
    result = auditing.audit(dataset, vectors)
    auditing.write(result, name, args.output)
    print(*auditing.summary(result), sep="\n")
    print(f"page      {printable(args.output / auditing.PAGE)}, with {auditing.TABLE} and {auditing.LIST}")


def head(args: argparse.Namespace) -> None:
    """Write a network with the given network's layers and a new head for an experiment's classes."""
    from classify.models import net_file
    from workbench.audit import linear

    if args.target.suffix != ".pt" or args.target.is_dir():
        raise InvalidInput(f"{args.target}: must be the name of a file that ends in .pt; rename it")
    dataset, vectors, _, network = _features(args)
    fitted = linear.fit(network, dataset, vectors)
    args.target.parent.mkdir(parents=True, exist_ok=True)
    net_file.write(args.target, fitted.weights, fitted.description)
    print(f"head      {len(dataset.classes)} classes, {fitted.seconds:.1f} s")
    print(f"accuracy  {fitted.accuracy:.4f} on {fitted.split}")
    print(printable(f"{args.target}, {net_file.beside(args.target)}"))


def _features(args: argparse.Namespace) -> tuple[Any, Any, str, Any]:
    """Return an experiment's images, their features, the features' name, and the network or None."""
    from workbench.audit import audit, features
    from workbench.audit.dataset import Dataset

    extractor, network = features.of_network(args.net) if args.net else (None, None)
    dataset = Dataset.open(_data_section(args), network.size if network else None)
    extractor = extractor or features.of_patches(dataset)
    print(f"images    {printable(audit.describe(dataset.plan))}", flush=True)
    print("".join(f"left out  {printable(line)}\n" for line in dataset.plan.left_out), end="", flush=True)
    vectors = features.kept(extractor, dataset)
    print(f"features  {printable(extractor.name)}: {vectors}", flush=True)
    return dataset, vectors.values, extractor.name, network


def _data_section(args: argparse.Namespace) -> dict[str, Any]:
    """Return the data section for ``audit`` and ``head``, from a folder or an experiment file."""
    from classify.config import experiment_file

    folder = getattr(args, "folder", None)
    if folder is None:
        return dict(experiment_file.read(args.config, args.overrides).get("data") or {})
    if args.config != CONFIG:
        raise InvalidInput(f"--config: {args.config}: {folder} also names images; remove one of the two")
    section = {"dataset": "imagefolder", "root": str(folder), "image_size": 64, "unreadable": "skip"}
    images = [f"data={json.dumps(section)}"]
    return dict(experiment_file.read(args.config, [*images, *args.overrides])["data"])


def import_(args: argparse.Namespace) -> None:
    """Create a run's folder from a checkpoint of a Determined cluster."""
    from workbench.imported import import_checkpoint

    steps, output = import_checkpoint(args.source, args.output), printable(args.output)
    again = command_line.typed("train", "--config", "FILE", "--output", output, "--resume", "latest")
    print(f"{output}: {steps:,} steps; to continue: {again}")


def caches(args: argparse.Namespace) -> None:
    """List or remove stored decoded images and fetched shards."""
    from classify.images import pixel_files
    from classify.images.settings import DataSettings
    from classify.images.sources import remote
    from deepspeed_trial.host_lock import stand_in, stand_ins

    for folder in args.folders:
        if not folder.is_dir():
            raise InvalidInput(f"{folder}: no such folder; give data.root of a run")
    roots = args.folders or [pathlib.Path(DataSettings.root), *sorted(stand_ins().glob("*"))]
    found = {path: size for root in roots for path, size in pixel_files.find(root).items()}
    for root in args.folders:
        found.update(pixel_files.find(stand_in(root)))

    def say(size: int, what: str, outcome: str) -> None:
        print(f"{pixel_files.in_bytes(size):>10}  {what}" + f"  {outcome}" * args.clear)

    left = 0
    for path, size in found.items():
        is_gone = args.clear and pixel_files.clear(path)
        left += 0 if is_gone else size
        say(size, f"{printable(path)}.raw", "removed" if is_gone else "a process is writing it; not removed")
    freed = f", {pixel_files.in_bytes(sum(found.values()) - left)} removed" if args.clear else ""
    print(f"{pixel_files.in_bytes(left)} of decoded images are stored{freed}")
    for folder, (count, size) in remote.find_fetched(roots).items():
        if args.clear:
            remote.clear_fetched(folder)
        say(size, f"{printable(folder)}: {count:,} fetched shards", "removed, except shards in transfer")
    features = [] if args.folders else sorted((stand_ins() / "features").glob("*.npy"))
    if features:
        size = sum(file.stat().st_size for file in features)
        for file in features if args.clear else ():
            file.unlink(missing_ok=True)
        what = f"{printable(features[0].parent)}: features of {len(features):,} networks and datasets"
        say(size, what, "removed")


if __name__ == "__main__":
    sys.exit(main())
