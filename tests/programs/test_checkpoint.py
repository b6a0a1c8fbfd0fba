"""What a run leaves can be used: export, predict, evaluate, report."""

import html.parser
import json
import pathlib
import shutil
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from folders import save
from huggingface_hub import ModelCard
from PIL import Image
from sklearn.datasets import load_digits
from support import PROJECT, execute, overrides

import checkpoint
from classify.models import state_dicts
from net import Net

DIGITS = ["--config", str(PROJECT / "experiments/digits.yaml")]


# One process runs checkpoint.py's main for every row, for experts need a process group of their own.
MANY = """
import contextlib, io, json, sys, checkpoint
done = {}
for name, arguments in json.load(open(sys.argv[1])).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = checkpoint.main(arguments)
    done[name] = [code, out.getvalue(), err.getvalue()]
json.dump(done, open(sys.argv[2], "w"))
"""


def many(folder: pathlib.Path, rows: dict[str, list[str]]) -> dict[str, tuple[int, str, str]]:
    (folder / "rows.json").write_text(json.dumps(rows))
    command = [sys.executable, "-c", MANY, str(folder / "rows.json"), str(folder / "done.json")]
    run = execute(command, folder, PYTHONPATH=str(PROJECT))
    assert run.code == 0, run.stderr
    return {name: tuple(result) for name, result in json.loads((folder / "done.json").read_text()).items()}


def test_every_mode_exports_to_its_own_accuracy(mode_runs, tmp_path):
    """From each mode's checkpoint, made by 1 and by 2 processes, exported and evaluated in one."""
    _, _, runs = mode_runs
    rows = {}
    for mode, run in runs.items():
        net = str(tmp_path / mode / "net.pt")
        rows[f"export {mode}"] = ["export", str(run.output), net]
        rows[f"evaluate {mode}"] = ["evaluate", net, *DIGITS, "--json"]
    done = many(tmp_path, rows)
    for mode, run in runs.items():
        assert done[f"export {mode}"][0] == 0, done[f"export {mode}"]
        code, out, err = done[f"evaluate {mode}"]
        assert code == 0, f"{mode}: {err}"
        validation, expected = json.loads(out), run.summary["validation"]
        assert validation["accuracy"] == expected["accuracy"], mode
        assert validation["per_class_accuracy"] == expected["per_class_accuracy"], mode
        assert validation["loss"] == pytest.approx(expected["loss"], rel=1e-2 if "16" in mode else 1e-5), mode
        exported = state_dicts.read(str(tmp_path / mode / "net.pt"))
        assert state_dicts.sha256(dict(sorted(exported.items()))) == run.summary["weights_sha256"], mode
        described = json.loads((tmp_path / mode / "net.json").read_text())
        assert described["provenance"]["checkpoint"] == run.summary["checkpoint"], mode


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, request):
    """A short run on an image folder with 20 held-out pictures of each of 4 digits, in odd sizes: (images, run)."""
    from support import train_many

    root = tmp_path_factory.mktemp("pictures")
    digits = load_digits()
    for label in range(4):
        for index, image in enumerate(digits.images[digits.target == label][:120]):
            folder = root / ("train" if index < 100 else "test") / f"digit {label}"
            folder.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray((image * 15).astype(np.uint8)).resize((40 + index % 7, 44))
            picture.save(folder / f"{index:03}.{'png' if index % 2 else 'jpg'}")
    row = [*DIGITS, *overrides(data=json.dumps({"dataset": "imagefolder", "root": str(root)}))]
    row += overrides(hyperparameters__max_length="{batches: 60}", min_validation_period="{batches: 20}")
    folder = tmp_path_factory.mktemp("classifier")
    run = train_many(folder, {"run": row})["run"]
    assert run.code == 0, run.stderr
    return root, run


def test_predict_agrees_with_evaluate(classifier, tmp_path, capsys):
    root, run = classifier
    net = tmp_path / "net.safetensors"
    assert checkpoint.main(["export", str(run.output), str(net)]) == 0
    capsys.readouterr()
    assert checkpoint.main(["predict", str(net), str(root / "test"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 80
    right = [row["class"] == pathlib.Path(row["image"]).parent.name for row in rows]
    assert all(sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5) for row in rows)
    data = ["--set", "data.dataset=imagefolder", "--set", f"data.root={root}", "--set", "data.image_size=48"]
    assert checkpoint.main(["evaluate", str(net), *DIGITS, *data, "--json"]) == 0
    validation = json.loads(capsys.readouterr().out)
    assert validation["accuracy"] == sum(right) / 80 == run.summary["validation"]["accuracy"]
    picture = str(root / "test/digit 2/119.png")
    assert checkpoint.main(["predict", str(net), picture]) == 0
    said = capsys.readouterr().out
    assert "digit" in said and "augmentation" not in said
    views = ["--tta", "mirror,shift=2"]
    assert checkpoint.main(["predict", str(net), picture, *views]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert (
        said == "by the mean scores of several views of each image (test-time augmentation: mirror, shift 2)"
    )
    assert checkpoint.main(["predict", str(net), str(root / "test"), "--json", *views]) == 0
    rows = json.loads(capsys.readouterr().out)
    right = [row["class"] == pathlib.Path(row["image"]).parent.name for row in rows]
    assert all(row["test_time_augmentation"] == {"mirror": True, "shift": 2} for row in rows)
    assert checkpoint.main(["evaluate", str(net), *DIGITS, *data, "--json", *views]) == 0
    assert json.loads(capsys.readouterr().out) == {**validation, "accuracy_tta": sum(right) / 80}
    assert checkpoint.main(["predict", str(net), picture, "--tta", "shift=99"]) == 2
    assert capsys.readouterr().err.startswith("checkpoint.py: --tta.shift: 99: ")


def test_the_export_needs_torch_and_net_py_alone(classifier, tmp_path):
    _, run = classifier
    assert checkpoint.main(["export", str(run.output), str(tmp_path / "net.pt")]) == 0
    shutil.copy(PROJECT / "net.py", tmp_path)
    script = (
        "import sys, torch, net\nnetwork = net.Net(4)\n"
        "network.load_state_dict(torch.load('net.pt', weights_only=True))\n"
        "print(tuple(network(torch.zeros(2, 3, 32, 32)).shape))\n"
        "assert not {'deepspeed', 'determined', 'torchvision'} & sys.modules.keys()\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "(2, 4)"), run.stderr


def test_onnx_gives_the_same_scores(classifier, tmp_path):
    _, run = classifier
    assert checkpoint.main(["export", str(run.output), str(tmp_path / "net.onnx")]) == 0
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    net = Net(4)
    net.load_state_dict(state_dicts.read(str(run.output / "net.pt")))
    for count in (1, 5):
        images = torch.rand(count, 3, 32, 32)
        (logits,) = session.run(None, {"images": images.numpy()})
        assert logits == pytest.approx(net(images).detach().numpy(), abs=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"])[0] == "digit 0"


def test_the_best_checkpoint_is_found(classifier, tmp_path, capsys):
    _, run = classifier
    assert checkpoint.main(["export", str(run.output), str(tmp_path / "net.pt"), "--checkpoint", "best"]) == 0
    best = max((e for e in run.metrics if e["group"] == "validation"), key=lambda e: e["accuracy"])
    assert f"{best['steps_completed']} steps" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["latest", "best"])
def test_a_model_card_has_what_its_checkpoint_reached(which, classifier, tmp_path):
    _, run = classifier
    folder = tmp_path / "published"
    assert (
        checkpoint.main(["export", str(run.output), str(folder), "--format", "hf", "--checkpoint", which])
        == 0
    )
    steps = json.loads((folder / "config.json").read_text())["provenance"]["steps"]
    validated = [each for each in run.metrics if each["group"] == "validation"]
    (wanted,) = {each["accuracy"] for each in validated if each["steps_completed"] == steps}
    assert (steps == 60) == (which == "latest") or wanted == run.summary["validation"]["accuracy"]
    card = ModelCard.load(folder / "README.md")
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", wanted, "test")
    assert result.metric_name.startswith("accuracy of 80 test images, by which it was also validated")
    assert f"| accuracy | {wanted:.4f} |" in card.text and f"| steps | {steps}, of 32 images" in card.text


class References(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert tag != "script"
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_a_report_is_one_page_that_needs_nothing_else(classifier, tmp_path, capsys):
    _, run = classifier
    other = tmp_path / "other <run>"
    shutil.copytree(run.output, other)
    page = tmp_path / "page.html"
    assert checkpoint.main(["report", str(run.output), str(other), "--output", str(page)]) == 0
    text = page.read_text()
    references = References()
    references.feed(text)
    assert len(references.found) > 3 + 2 and all(each.startswith("data:") for each in references.found)
    assert "url(" not in text and "@import" not in text and "other <run>" not in text
    assert text.count(f"{100 * run.summary['validation']['accuracy']:.2f} %") == 2
    for name in (
        "loss",
        "accuracy",
        "learning-rate",
        "confusion-1",
        "confusion-2",
        "mistakes-1",
        "mistakes-2",
    ):
        assert Image.open(tmp_path / f"page-{name}.png").size[0] > 300
    kept = json.loads((run.output / "classification.json").read_text())
    assert sum(map(sum, kept["confusion"])) == 80
    wrong = 80 - sum(kept["confusion"][i][i] for i in range(4))
    assert len(kept["mistakes"]) == min(16, wrong)
    losses = [each["loss"] for each in kept["mistakes"]]
    assert losses == sorted(losses, reverse=True)


# Names that are no text to a terminal, to rich, to a browser, or to matplotlib.
ODD = [
    "photo[final].png",
    "a[/b]c.png",
    "[red]x[/].png",
    ":smile:.png",
    "e\x1b[31m\n\u202e.png",
    "$\\no$.png",
]


def test_names_are_text_in_predictions(classifier, tmp_path, capsys):
    _, run = classifier
    for name in ("net.pt", "net.json"):
        shutil.copy(run.output / name, tmp_path)
    described = json.loads((tmp_path / "net.json").read_text())
    described["classes"] = ["[bold]one", "[/two]", "three\x1b]0;title\x07", ":four:"]
    (tmp_path / "net.json").write_text(json.dumps(described))
    for name in ODD:
        save(tmp_path / name, 100)
    assert (
        checkpoint.main(["predict", str(tmp_path / "net.pt"), *(str(tmp_path / name) for name in ODD)]) == 0
    )
    shown = capsys.readouterr().out
    assert all(each.isprintable() for each in shown.splitlines())
    for name in [*ODD[:4], "e\\x1b[31m\\n\\u202e.png", *ODD[5:]]:
        assert f"{tmp_path}/{name} " in shown
    assert any(f" {name} " in shown for name in ("[bold]one", "[/two]", r"three\x1b]0;title\x07", ":four:"))
    assert checkpoint.main(["predict", str(tmp_path / "net.pt"), str(tmp_path / "no\x1b\n.png")]) == 2
    assert r"no\x1b\n.png: no such file" in capsys.readouterr().err


def test_names_are_text_in_a_report(classifier, tmp_path, capsys):
    _, run = classifier
    other = tmp_path / "b<i>\x1b$x$"
    shutil.copytree(run.output, other)
    names = dict(zip([f"digit {label}" for label in range(4)], [*ODD[:2], *ODD[4:]], strict=True))
    for file in ("summary.json", "classification.json", "run.json"):
        kept = (other / file).read_text()
        for name, odd in names.items():
            kept = kept.replace(json.dumps(name), json.dumps(odd))
        (other / file).write_text(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of matplotlib, for a character that no font has
        assert (
            checkpoint.main(["report", str(run.output), str(other), "--output", f"{tmp_path}/page.html"]) == 0
        )
    page = (tmp_path / "page.html").read_text()
    assert not [each for each in page if not each.isprintable() and each != "\n"]
    assert "e\\x1b[31m\n\\u202e.png" in page and "b&lt;i&gt;\\x1b$x$" in page and "$\\no$.png" in page
    assert capsys.readouterr().out == f"{tmp_path}/page.html\n"


def damaged(run, folder: pathlib.Path, damage) -> str:
    copy = folder / "copy"
    shutil.copytree(run.output, copy)
    damage(next((copy / "checkpoints").iterdir()) if len(list((copy / "checkpoints").iterdir())) == 1 else
           copy / "checkpoints" / run.summary["checkpoint"])  # fmt: skip
    return str(copy)


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


# What cannot be used, and what the line says of it.
BAD = {
    "no such folder": (lambda run, tmp: ["export", f"{tmp}/none", f"{tmp}/out.pt"], "none: no such folder;"),
    "no checkpoint": (lambda run, tmp: ["export", str(tmp), f"{tmp}/out.pt"], "holds no checkpoint;"),
    "unknown checkpoint": (
        lambda run, tmp: ["export", str(run.output), f"{tmp}/out.pt", "--checkpoint", "x"],
        "--checkpoint: x: not found in",
    ),
    "half a checkpoint": (
        lambda run, tmp: ["export", damaged(run, tmp, lambda c: (c / "net.pt").unlink()), f"{tmp}/out.pt"],
        "net.pt: is missing; export another checkpoint",
    ),
    "a truncated file": (
        lambda run, tmp: ["export", damaged(run, tmp, lambda c: truncate(c / "net.pt")), f"{tmp}/out.pt"],
        "net.pt: is truncated; export another checkpoint",
    ),
    "no net": (
        lambda run, tmp: ["predict", f"{tmp}/none.pt", str(tmp)],
        "none.pt: not a readable state_dict",
    ),
    "no such image": (
        lambda run, tmp: ["predict", f"{run.output}/net.pt", f"{tmp}/none.png"],
        "none.png: no such file",
    ),
    "an empty folder": (lambda run, tmp: ["predict", f"{run.output}/net.pt", str(tmp)], "holds no image"),
    "no image": (
        lambda run, tmp: ["predict", f"{run.output}/net.pt", f"{PROJECT}/README.md"],
        "README.md: not a readable image",
    ),
    "other classes": (
        lambda run, tmp: ["evaluate", f"{run.output}/net.pt", *DIGITS],
        "its classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9) are not those of",
    ),
    "no run": (
        lambda run, tmp: ["report", str(tmp), "--output", f"{tmp}/out.pt"],
        "is not the folder of a run",
    ),
    "no name": (
        lambda run, tmp: ["report", str(run.output), "--output", ""],
        "--output: .: must be the name of a file",
    ),
    "json": (lambda run, tmp: ["export", str(run.output), f"{tmp}/net.json"], "must be the name of a file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_said_in_one_line(case, classifier, tmp_path, capsys):
    arguments, line = BAD[case]
    assert checkpoint.main(arguments(classifier[1], tmp_path)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("checkpoint.py: ") and line in said
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".*"))


def changed_json(file: pathlib.Path, *place, value) -> None:
    """Puts a value in its place in a JSON file; all of it without a place, and away with ``None``."""
    held = json.loads(file.read_text())
    if place:
        inner = held
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        if value is None:
            del inner[place[-1]]
    file.write_text(json.dumps(held if place else value))


# What net.json may be made into by hand, and what the line says of it.
NET_JSON = {
    "nothing": ([], {}, "net.json: {}: must be a mapping with net.name, "),
    "no mapping": ([], [1], "net.json: [1]: must be a mapping with net.name, "),
    "unknown net": (
        ["net", "name"],
        "nett",
        "net.name: 'nett': is no network of net.py, torchvision or timm",
    ),
    "a list as net": (["net", "name"], ["net"], "net.name: ['net']: is no network"),
    "other net": (["net", "name"], "resnet18", "is none, but (64,) in this network"),
    "odd arguments": (["net", "net_args"], {"depth": 3}, "net_args: {'depth': 3}: net cannot be made"),
    "arguments as text": (["net", "net_args"], "x", "net.net_args: 'x': must be a mapping"),
    "fewer classes": (["classes"], ["a"], "classes: 1 names: must be one for each of net.num_classes"),
    "a class twice": (["classes"], ["a", "b", "a", "c"], "classes: 3 names: must be one for each"),
    "classes as numbers": (["classes"], [0, 1, 2, 3], "classes: [0, 1, 2, 3]: must be a list, of which each"),
    "classes as text": (["classes"], "abcd", "classes: 'abcd': must be a list"),
    "class count as text": (["net", "num_classes"], "4", "net.num_classes: '4': must be a whole number"),
    "a number type": (["dtype"], "int8", "dtype: 'int8': must be one of float32, bfloat16, float16"),
    "no type": (["dtype"], "relu", "dtype: 'relu': must be one of"),
    "height as text": (["input", "height"], "32", "input.height: '32': must be a whole number of pixels"),
    "no height": (["input", "height"], 0, "input.height: 0: must be a whole number of pixels"),
    "huge": (
        ["input", "resize"],
        [10**9, 10**9],
        "input.resize: [1000000000, 1000000000]: must be a list of 2",
    ),
    "half a size": (["input", "resize"], [32], "input.resize: [32]: must be a list of 2, of which each"),
    "small": (["input", "resize"], [32, 16], "input.resize: [32, 16]: must be at least input.height and"),
    "mean as text": (["input", "mean"], ["a", 0, 0], "input.mean: ['a', 0, 0]: must be a list of 3"),
    "mean of two": (["input", "mean"], [0, 0], "input.mean: [0, 0]: must be a list of 3"),
    "no mean": (["input", "mean"], None, "input.mean: None: must be a list of 3"),
    "no deviation": (
        ["input", "std"],
        [0, 1, 1],
        "input.std: [0, 1, 1]: must be a list of 3, of which each must be a",
    ),
    "infinite": (["input", "std"], [float("inf")] * 3, "input.std: [inf, inf, inf]: must be"),
    "no number": (["input", "mean"], [float("nan")] * 3, "input.mean: [nan, nan, nan]: must be"),
    "no origin": (["provenance"], None, "provenance.steps: None: must be a whole number"),
    "steps as text": (["provenance", "steps"], "9", "provenance.steps: '9': must be a whole number"),
}


@pytest.fixture(scope="module")
def downloaded(classifier, tmp_path_factory):
    """A checkpoint of the classifier without digests, as one from a cluster, as far as an export needs it."""
    folder = tmp_path_factory.mktemp("downloaded")
    for name in ("net.pt", "net.json"):
        shutil.copy(classifier[1].output / name, folder)
    (folder / "metadata.json").write_text('{"steps_completed": 60}')
    return folder


def refusals(folder: pathlib.Path, images: pathlib.Path, capsys) -> list[str]:
    """What predict, evaluate and export say of a network in one line each."""
    said = []
    for arguments in (
        ["predict", str(folder / "net.pt"), str(images / "test")],
        [
            "evaluate",
            str(folder / "net.pt"),
            *DIGITS,
            "--set",
            f"data={{dataset: imagefolder, root: {images}}}",
        ],
        ["export", str(folder), str(folder / "out.pt")],
    ):
        assert checkpoint.main(arguments) == 2, arguments
        said += capsys.readouterr().err.splitlines()
    assert len(said) == 3 and not list(folder.glob("out*"))
    return said


@pytest.mark.parametrize("case", NET_JSON)
def test_a_description_changed_by_hand_is_refused(case, classifier, downloaded, tmp_path, capsys):
    place, value, line = NET_JSON[case]
    shutil.copytree(downloaded, tmp_path / "net")
    changed_json(tmp_path / "net/net.json", *place, value=value)
    for said in refusals(tmp_path / "net", classifier[0], capsys):
        assert said.startswith(f"checkpoint.py: {tmp_path}/net/net.") and line in said


def test_all_that_is_wrong_is_said_at_once(downloaded, tmp_path, capsys):
    shutil.copytree(downloaded, tmp_path / "net")
    for place, value in (["dtype"], 3), (["input", "std"], 0), (["classes"], None):
        changed_json(tmp_path / "net/net.json", *place, value=value)
    assert checkpoint.main(["predict", str(tmp_path / "net/net.pt"), str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split("net.json: ")[1].split(":")[0] for line in said] == ["classes", "input.std", "dtype"]


# Weights by hand, and what the line says of them.
WEIGHTS = {
    "whole numbers": (
        lambda s: {n: v.int() for n, v in s.items()},
        "of int32, but (6,) of float32 in this network",
    ),
    "other classes": (
        lambda s: {**s, "fc3.bias": torch.zeros(3)},
        "fc3.bias is (3,), but (4,) in this network",
    ),
    "one less": (lambda s: {n: v for n, v in s.items() if n != "fc3.bias"}, "fc3.bias is none, but (4,)"),
    "nothing": (lambda s: {}, "holds no state_dict"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_of_another_form_are_refused(case, classifier, downloaded, tmp_path, capsys):
    change, line = WEIGHTS[case]
    shutil.copytree(downloaded, tmp_path / "net")
    torch.save(change(torch.load(tmp_path / "net/net.pt")), tmp_path / "net/net.pt")
    assert all(line in said for said in refusals(tmp_path / "net", classifier[0], capsys))


def test_a_missing_description_is_named(downloaded, tmp_path, capsys):
    shutil.copy(downloaded / "net.pt", tmp_path)
    assert checkpoint.main(["predict", str(tmp_path / "net.pt"), str(tmp_path)]) == 2
    assert "net.json: is missing" in capsys.readouterr().err


# What a run's file may be made into by hand, and what the line says of it.
RUN_JSON: dict[str, dict[tuple[str, ...], tuple[Any, str]]] = {
    "summary.json": {
        (): ({}, "{}: must be a mapping with validation.accuracy, "),
        ("steps",): ("9", "steps: '9': must be a whole number"),
        ("validation",): ([1], "validation.accuracy: None: must be a number"),
        ("validation", "per_class_accuracy"): (
            {"a": "b"},
            "validation.per_class_accuracy: {'a': 'b'}: must be a",
        ),
        ("peak_memory_mib",): ([], "peak_memory_mib: []: must be a list of numbers"),
    },
    "run.json": {
        (): ([], "[]: must be a mapping with config, "),
        ("config",): (None, "config: None: must be a mapping"),
        ("command",): ("train.py", "command: 'train.py': must be a list"),
        ("machine",): (5, "machine.gpus: None: must be a list"),
    },
    "classification.json": {
        (): (5, "5: must be a mapping with classes, "),
        ("confusion",): ([[1]], "confusion: must have a row and a column for each of 4 classes"),
        ("mistakes",): ([{}], "mistakes: [{}]: must be a list, of which each must have image"),
        ("classes",): ([1, 2, 3, 4], "classes: [1, 2, 3, 4]: must be a list"),
    },
}


@pytest.mark.parametrize("file", RUN_JSON)
def test_a_report_names_the_file_that_it_cannot_read(file, classifier, tmp_path, capsys):
    for number, (place, (value, line)) in enumerate(RUN_JSON[file].items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("metrics.jsonl", *RUN_JSON):
            shutil.copy(classifier[1].output / name, folder)
        changed_json(folder / file, *place, value=value)
        assert checkpoint.main(["report", str(folder)]) == 2, place
        said = capsys.readouterr().err.splitlines()[0]
        assert said.startswith(f"checkpoint.py: {folder / file}: {line}"), said
        (folder / file).write_text("{")
        assert checkpoint.main(["report", str(folder)]) == 2
        assert f"{folder / file}: cannot be read (" in capsys.readouterr().err
        assert not list(folder.glob("report*"))


def test_every_exported_file_has_its_own_description(classifier, downloaded, tmp_path, capsys):
    """So exports of one name do not describe each other; what earlier versions exported is still taken."""
    root, run = classifier
    other = tmp_path / "other"
    shutil.copytree(downloaded, other)
    changed_json(other / "net.json", "provenance", "steps", value=59)
    torch.save({name: value / 2 for name, value in torch.load(other / "net.pt").items()}, other / "net.pt")
    for name in ("x.pt", "x.onnx", "x.safetensors", "x.pth"):
        source = other if name == "x.pt" else run.output
        assert checkpoint.main(["export", str(source), str(tmp_path / name)]) == 0
    described = {
        path.name: json.loads(path.read_text())["provenance"]["steps"] for path in tmp_path.glob("*.json")
    }
    assert described == {"x.json": 59, "x.onnx.json": 60, "x.safetensors.json": 60, "x.pth.json": 60}
    capsys.readouterr()
    rows = {}
    for name in ("x.pt", "x.safetensors", "x.pth"):
        assert checkpoint.main(["predict", str(tmp_path / name), str(root / "test"), "--json"]) == 0
        rows[name] = json.loads(capsys.readouterr().out)
    assert rows["x.pth"] == rows["x.safetensors"] != rows["x.pt"]
    # Of an earlier version: x.json beside each, and of another export in its place
    (tmp_path / "x.safetensors.json").rename(tmp_path / "x.json")
    assert checkpoint.main(["predict", str(tmp_path / "x.safetensors"), str(root / "test"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows["x.safetensors"]
    assert checkpoint.main(["predict", str(tmp_path / "x.pt"), str(root / "test")]) == 2
    assert "x.pt: its weights are not those that its JSON file describes" in capsys.readouterr().err


def test_what_cannot_be_written_is_said_in_one_line(classifier, capsys):
    for arguments in (
        ["export", str(classifier[1].output), "/proc/out.pt"],
        ["report", str(classifier[1].output)],
    ):
        target = [] if arguments[0] == "export" else ["--output", "/proc/none/report.html"]
        assert checkpoint.main([*arguments, *target]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("checkpoint.py: a path cannot be used ([Errno 2]")
