"""checkpoint.py: export, predict, evaluate and report of a finished run, and refusals of damaged files."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import support
import torch
from folders import save, table
from huggingface_hub import ModelCard
from PIL import Image, ImageOps
from safetensors import safe_open
from sklearn.datasets import load_digits
from support import DIGITS, LATEST, MODEL, PROJECT, overrides, train_many

import checkpoint
from classify.images.decode import decode_image
from classify.models import net_file
from workbench.publish import forms, scoring


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    """An image folder of 4 digits, each with 100 pictures to train and 20 to test, in several sizes."""
    root = tmp_path_factory.mktemp("pictures")
    digits = load_digits()
    for label in range(4):
        for index, image in enumerate(digits.images[digits.target == label][:120]):
            picture = Image.fromarray((image * 15).astype(np.uint8)).resize((40 + index % 7, 44))
            split, ending = "train" if index < 100 else "test", "png" if index % 2 else "jpg"
            save(root / split / f"digit {label}" / f"{index:03}.{ending}", picture)
    return root


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """A run of 60 steps with validations after 20, 40 and 60. The best is the first: it has the greatest loss."""
    settings = overrides(
        data=json.dumps({"dataset": "imagefolder", "root": str(root)}),
        hyperparameters__max_length="{batches: 60}",
        min_validation_period="{batches: 20}",
        searcher="{name: single, metric: loss, smaller_is_better: false}",
    )
    run = train_many(tmp_path_factory.mktemp("classifier"), {"run": [*DIGITS, *settings]})["run"]
    assert run.code == 0, run.stderr
    return run


@pytest.fixture
def main(capsys):
    """Run checkpoint.py in this process; return its output, or its lines of errors if it exits with 2."""

    def main(*arguments, code: int = 0) -> Any:
        capsys.readouterr()
        assert checkpoint.main([str(each) for each in arguments]) == code
        said = capsys.readouterr()
        return said.err.splitlines() if code else json.loads(said.out) if "--json" in arguments else said.out

    return main


def test_evaluate_has_the_settings_of_the_run(run, main, tmp_path):
    """It needs no experiment file for a run's folder or for a network in it."""
    wanted = run.summary["test" if "test" in run.summary else "validation"]["accuracy"]
    for net in (run.output, run.output / "net.pt"):
        assert main("evaluate", net, "--json")["accuracy"] == wanted


def test_predict_agrees_with_evaluate(root, run, main, tmp_path):
    net, picture = tmp_path / "net.safetensors", root / "test/digit 2/119.png"
    main("export", run.output, net)
    data = overrides(data__dataset="imagefolder", data__root=root, data__image_size=48)

    def right(rows) -> float:
        return sum(row["class"] == pathlib.Path(row["image"]).parent.name for row in rows) / 80

    rows = main("predict", net, root / "test", "--json")
    assert len(rows) == 80
    assert all(sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5) for row in rows)
    validation = main("evaluate", net, *DIGITS, *data, "--json")
    assert validation["accuracy"] == right(rows) == run.summary["validation"]["accuracy"]
    chosen = "macro_recall"  # of the experiment file
    said = main("evaluate", net, *DIGITS, *data, *overrides(searcher__metric=chosen)).splitlines()
    scores = {name: run.summary["validation"][name] for name in ("accuracy", chosen)}
    assert said[-2:] == [f"{name} {score:.4f}" for name, score in scores.items()]
    assert said[-3].startswith("loss ")
    said = main("evaluate", net, *DIGITS, *data, *overrides(searcher__metric="loss"))
    assert said.count("loss ") == 1 and said.endswith(f"\nloss {run.summary['validation']['loss']:.4f}\n")
    said = main("predict", net, picture)
    assert "digit" in said and "augmentation" not in said
    views = ["--tta", "mirror,shift=2"]
    said = main("predict", net, picture, *views).splitlines()[-1]
    assert (
        said == "scores are means over several views of each image (test-time augmentation: mirror, shift 2)"
    )
    rows = main("predict", net, root / "test", "--json", *views)
    assert all(row["test_time_augmentation"] == {"mirror": True, "shift": 2} for row in rows)
    assert main("evaluate", net, *DIGITS, *data, "--json", *views) == {
        **validation,
        "accuracy_tta": right(rows),
    }
    (said,) = main("predict", net, picture, "--tta", "shift=99", code=2)
    assert said.startswith("checkpoint.py: --tta.shift: 99: ")


@table("form, read",
    pt=("net.pt", lambda file: {}),
    safetensors=("net.safetensors", lambda file: safe_open(file, "pt").metadata()),
    onnx=("net.onnx", lambda file: {each.key: each.value for each in onnx.load(file).metadata_props}),
    hf=("published", lambda file: {}),
)  # fmt: skip
@table("which, step", latest=("latest", 60), best=("best", 20))
def test_every_export_has_the_temperature_of_its_weights(form, read, which, step, run, main, tmp_path):
    (validated,) = {
        json.dumps(each)
        for each in run.metrics
        if each["group"] == "validation" and each["steps_completed"] == step
    }
    wanted = {name: json.loads(validated)[name] for name in ("temperature", "confidence_threshold")}
    target = tmp_path / form
    main(
        "export",
        run.output,
        target,
        "--checkpoint",
        which,
        *(["--format", "hf"] if form == "published" else []),
    )
    assert net_file.read_description(target)["confidence"] == wanted
    assert json.loads(read(target).get("confidence", json.dumps(wanted))) == wanted
    assert form not in ("net.safetensors", "net.onnx") or "confidence" in read(target)
    assert form != "net.onnx" or json.loads(read(target)["classes"])[0] == "digit 0"


def test_a_resumed_run_of_no_step_keeps_the_temperature(run, main, tmp_path):
    """The weights of the best checkpoint are loaded after the last step, with their temperature."""
    copy = shutil.copytree(run.output, tmp_path / "copy")
    settings = json.loads((copy / "run.json").read_text())["command"]
    arguments = [
        *settings[settings.index("train.py") + 1 : settings.index("--output")],
        "--output",
        str(copy),
        *LATEST,
    ]
    again = support.run(["train.py", *arguments], copy)
    assert again.code == 0, again.stderr
    assert net_file.read_description(copy / "net.pt") == net_file.read_description(run.output / "net.pt")


def test_unknown_images_are_those_below_the_threshold(root, run, main, tmp_path):
    net = run.output / "net.pt"
    confidence = net_file.read_description(net)["confidence"]
    assert 0.2 < confidence["confidence_threshold"] < 1 and confidence["temperature"] != 1
    validated = main("predict", net, root / "test", "--json", "--unknown")
    assert sum(row["unknown"] for row in validated) <= 0.01 * 80 < 80
    assert all(
        (row["probability"] < confidence["confidence_threshold"] - 1e-6) <= row["unknown"]
        for row in validated
    )
    threshold = sorted(row["probability"] for row in validated)[40]
    half = main("predict", net, root / "test", "--json", f"--unknown={threshold}")
    assert sum(row["unknown"] for row in half) in (40, 41)
    plain = main("predict", net, root / "test", "--json")
    assert plain == [{key: row[key] for key in row if key != "unknown"} for row in validated]
    said = main("predict", net, root / "test/digit 2/119.png", "--unknown", "1")
    assert " unknown " in said and "unknown: 1 of 1 images; threshold 1.000" in said
    main("predict", net, root / "test/digit 2/119.png", "--unknown", "1", "--csv", tmp_path / "answers.csv")
    assert "/119.png,unknown,0." in (tmp_path / "answers.csv").read_text()
    logits = forms.read(net).classify
    images = torch.stack(
        [torch.from_numpy(decode_image(pathlib.Path(row["image"]), (32, 32))) for row in validated]
    )
    (inputs,) = scoring.inputs_of(net_file.read_description(net), images, 80)
    wanted = (logits(inputs) / confidence["temperature"]).softmax(1).amax(1)
    assert [row["probability"] for row in validated] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_predict_classifies_the_rest_of_a_folder_and_names_what_it_cannot_read(run, root, tmp_path, capsys):
    good = [
        str(save(tmp_path / name, Image.open(root / "test/digit 2/119.png"))) for name in ("a.png", "d.png")
    ]
    stray = ("notes.txt", "folder/MORE.TXT", "clip.mov", ".DS_Store")
    (tmp_path / "folder").mkdir()
    for name, content in ("b.png", b"no image"), ("c.jpg", b""), *((name, b"") for name in stray):
        (tmp_path / name).write_bytes(content)
    arguments = ["predict", str(run.output / "net.pt"), str(tmp_path)]
    capsys.readouterr()
    assert checkpoint.main([*arguments, "--json"]) == 2
    said = capsys.readouterr()
    assert [row["image"] for row in json.loads(said.out)] == good
    passed_over, *errors = said.err.splitlines()
    assert passed_over == "checkpoint.py: passed over: 2 .txt, 1 .mov"
    assert [line.partition(": not a readable image (")[0] for line in errors] == [
        f"checkpoint.py: {tmp_path}/b.png",
        f"checkpoint.py: {tmp_path}/c.jpg",
    ]
    assert checkpoint.main(arguments) == 2
    assert capsys.readouterr().out.count("digit 2") >= 2


def test_views_are_averaged_by_their_scores(root, run, main, tmp_path):
    """The logarithm of a probability is its score minus a constant, so a softmax of means agrees."""
    picture = Image.open(root / "test/digit 2/119.png").resize((32, 32))
    files = [save(tmp_path / "a.png", picture), save(tmp_path / "b.png", ImageOps.mirror(picture))]

    def probabilities(*options):
        rows = main("predict", run.output / "net.pt", *files, "--json", *options)
        return torch.tensor([list(row["probabilities"].values()) for row in rows], dtype=torch.float64)

    alone, by_views = probabilities(), probabilities("--tta", "mirror")
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)
    assert by_views == pytest.approx(alone.log().mean(0).softmax(0).expand(2, -1), abs=1e-5)


def test_the_export_needs_torch_and_net_py_alone(run, main, tmp_path):
    main("export", run.output, tmp_path / "net.pt")
    shutil.copy(PROJECT / "net.py", tmp_path)
    script = (
        "import sys, torch, net\nnetwork = net.Net(4)\n"
        "network.load_state_dict(torch.load('net.pt', weights_only=True))\n"
        "print(tuple(network(torch.zeros(2, 3, 32, 32)).shape))\n"
        "assert not {'deepspeed', 'determined', 'torchvision'} & sys.modules.keys()\n"
    )
    python = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (python.returncode, python.stdout.strip()) == (0, "(2, 4)"), python.stderr


@pytest.mark.parametrize(("which", "steps"), [("latest", 60), ("best", 20)])
def test_a_model_card_has_the_results_of_its_checkpoint(which, steps, run, main, tmp_path):
    folder = tmp_path / "published"
    assert f", {steps} steps\n" in main("export", run.output, folder, "--format", "hf", "--checkpoint", which)
    assert json.loads((folder / "config.json").read_text())["provenance"]["steps"] == steps
    validated = [entry for entry in run.metrics if entry["group"] == "validation"]
    (wanted,) = {entry["accuracy"] for entry in validated if entry["steps_completed"] == steps}
    card = ModelCard.load(folder / "README.md")
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", wanted, "test")
    assert result.metric_name.startswith("accuracy of 80 test images, which also validated")
    assert f"| accuracy | {wanted:.4f} |" in card.text and f"| steps | {steps}, of 32 images" in card.text


def test_an_export_has_the_weights_that_the_run_reports(run, main, tmp_path):
    """The final weights; ``best_weights`` makes these the best, which an earlier checkpoint holds."""
    copy = shutil.copytree(run.output, tmp_path / "copy")
    best = support.checkpoints(run)[20].name
    for chosen, steps in ((run.summary["checkpoint"], 60), (best, 20)):
        change(copy / "summary.json", "checkpoint", value=chosen)
        assert f": checkpoint {chosen}, {steps} steps\n" in main("export", copy, tmp_path / "net.pt")
    (copy / "summary.json").unlink()  # the run trains again
    assert ", 60 steps\n" in main("export", copy, tmp_path / "net.pt")
    (copy / "summary.json").write_text("{")
    (said,) = main("export", copy, tmp_path / "net.pt", code=2)
    assert said.startswith(f"checkpoint.py: --checkpoint: final: {copy}/summary.json cannot be read (")


def test_a_report_is_one_page_without_links_to_other_files(run, main, tmp_path):
    other, page = tmp_path / "other <run>", tmp_path / "page.html"
    shutil.copytree(run.output, other)
    main("report", run.output, other, "--output", page)
    text = page.read_text()
    references = re.findall(r"""\b(?:src|href)\s*=\s*["']?([^"'>\s]*)""", text)
    links = [each for each in references if not each.startswith("data:")]
    assert links and all((tmp_path / urllib.parse.unquote(each)).is_file() for each in links)  # of images
    assert not [each for each in ("http", "url(", "@import", "other <run>") if each in text]
    assert text.count(f"<b>{run.summary['validation']['loss']:.4f}</b>") == 2  # the run's metric
    assert list(tmp_path.glob("*page*")) == [page]
    kept = json.loads((run.output / "classification.json").read_text())
    assert sum(map(sum, kept["confusion"])) == 80
    wrong = 80 - sum(kept["confusion"][i][i] for i in range(4))
    assert len(kept["mistakes"]) == min(16, wrong)
    losses = [each["loss"] for each in kept["mistakes"]]
    assert losses == sorted(losses, reverse=True)
    for each in kept["mistakes"] + kept["unsure"]:
        assert pathlib.Path(each["file"]).parent.name == kept["classes"][each["label"]]
        assert (each["predicted"] == each["label"]) == (each in kept["unsure"])
    assert kept["images"] == {"train": [100] * 4, "test": [20] * 4}
    assert sum(kept["bins"][0]) == 80 and sum(kept["bins"][2]) == 80 - wrong


# Names with markup or control characters of a terminal, rich, a browser or matplotlib
ODD = [
    "photo[final].png",
    "a[/b]c.png",
    "[red]x[/].png",
    ":smile:.png",
    "e\x1b[31m\n\u202e.png",
    "$\\no$.png",
]


def test_predictions_show_names_as_text(run, main, tmp_path):
    for name in ("net.pt", "net.json"):
        shutil.copy(run.output / name, tmp_path)
    classes = ["[bold]one", "[/two]", "three\x1b]0;title\x07", ":four:"]
    change(tmp_path / "net.json", "classes", value=classes)
    shown = main("predict", tmp_path / "net.pt", *(save(tmp_path / name, 100) for name in ODD))
    assert all(each.isprintable() for each in shown.splitlines())
    for name in [*ODD[:4], "e\\x1b[31m\\n\\u202e.png", *ODD[5:]]:
        assert f"{tmp_path}/{name} " in shown
    assert any(f" {name} " in shown for name in [*classes[:2], r"three\x1b]0;title\x07", classes[3]])
    (said,) = main("predict", tmp_path / "net.pt", tmp_path / "no\x1b\n.png", code=2)
    assert r"no\x1b\n.png: no such file" in said


def test_a_report_shows_names_as_text(run, main, tmp_path):
    other = tmp_path / "b<i>\x1b$x$"
    shutil.copytree(run.output, other)
    names = dict(zip([f"digit {label}" for label in range(4)], [*ODD[:2], *ODD[4:]], strict=True))
    for file in ("summary.json", "classification.json", "run.json"):
        kept = (other / file).read_text()
        for name, odd in names.items():
            kept = kept.replace(json.dumps(name), json.dumps(odd))
        (other / file).write_text(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of a character without a glyph
        said = main("report", run.output, other, "--output", f"{tmp_path}/page.html")
    page = (tmp_path / "page.html").read_text()
    assert not [each for each in page if not each.isprintable() and each != "\n"]
    assert "e\\x1b[31m\n\\u202e.png" in page and "b&lt;i&gt;\\x1b$x$" in page and "$\\no$.png" in page
    assert said == f"{tmp_path}/page.html\n"


@table(
    "arguments, line",
    command=(["predct", "x"], ": COMMAND: 'predct': unknown; did you mean 'predict'?\n"),
    choice=(["evaluate", "x", "--split", "trian"], " evaluate: --split: 'trian': unknown; did you mean 'train'?\n"),
)  # fmt: skip
def test_an_unknown_choice_is_one_line_with_the_nearest_one(arguments, line, capsys):
    with pytest.raises(SystemExit, match="2"):
        checkpoint.main(arguments)
    assert capsys.readouterr().err.endswith(line)


@table(
    "arguments, line",
    no_such_folder=(["export", "{tmp}/none", "{tmp}/out.pt"], "none: no such folder;"),
    no_checkpoint=(["export", "{tmp}", "{tmp}/out.pt"], "holds no checkpoint;"),
    unknown_checkpoint=(["export", "{run}", "{tmp}/out.pt", "--checkpoint", "x"], "--checkpoint: x: not found in"),
    no_net=(["predict", "{tmp}/none.pt", "{tmp}"], "none.pt: no such file or folder; give the folder of a finished run"),
    no_such_image=(["predict", "{run}/net.pt", "{tmp}/none.png"], "none.png: no such file"),
    a_threshold_of_two=(["predict", "{run}/net.pt", "{tmp}", "--unknown", "2"], "--unknown: 2: must be a probability"),
    no_threshold=(["predict", "{run}/net.pt", "{tmp}", "--unknown", "{tmp}"], "must be a probability from 0 to 1; write"),
    an_empty_folder=(["predict", "{run}/net.pt", "{tmp}"], "holds no image"),
    no_image=(["predict", "{run}/net.pt", f"{PROJECT}/README.md"], "README.md: not a readable image"),
    other_classes=(["evaluate", "{run}/net.pt", *DIGITS], "its classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9) differ from the classes of"),
    no_run=(["report", "{tmp}", "--output", "{tmp}/out.pt"], "is not the folder of a run"),
    no_name=(["report", "{run}", "--output", ""], "--output: .: must be the name of a file"),
    json=(["export", "{run}", "{tmp}/net.json"], "must be the name of a file"),
    unwritable_file=(["export", "{run}", "/proc/out.pt"], "a path cannot be used ([Errno 2]"),
    unwritable_folder=(["report", "{run}", "--output", "/proc/none/x.html"], "a path cannot be used ([Errno 2]"),
)  # fmt: skip
def test_a_refusal_is_one_line(arguments, line, run, main, tmp_path):
    (said,) = main(*(each.format(run=run.output, tmp=tmp_path) for each in arguments), code=2)
    assert said.startswith("checkpoint.py: ") and line in said
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_refused(run, main, tmp_path):
    copy = shutil.copytree(run.output, tmp_path / "copy")
    file = copy / "checkpoints" / run.summary["checkpoint"] / MODEL
    for damage, kind in (lambda: os.truncate(file, 1000), "truncated"), (file.unlink, "missing"):
        damage()
        (said,) = main("export", copy, tmp_path / "out.pt", code=2)
        assert said.startswith("checkpoint.py: ") and f"{MODEL}: is {kind}; use another checkpoint" in said
    assert not list(tmp_path.glob("out*"))


def change(file: pathlib.Path, *place, value) -> None:
    """Change a value in a JSON file; without a place the whole file. None removes the value."""
    held = json.loads(file.read_text())
    if place:
        inner = held
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        if value is None:
            del inner[place[-1]]
    file.write_text(json.dumps(held if place else value))


@pytest.fixture
def copy(run, tmp_path) -> pathlib.Path:
    """The files of a checkpoint that an export needs, without digests, as from a cluster."""
    folder = tmp_path / "net"
    folder.mkdir()
    for name in ("net.pt", "net.json"):
        shutil.copy(run.output / name, folder)
    (folder / "metadata.json").write_text('{"steps_completed": 60}')
    return folder


def refusals(main, folder: pathlib.Path, images: pathlib.Path) -> list[str]:
    """Refusals of a network by predict, evaluate and export, a line each."""
    net, data = folder / "net.pt", overrides(data=f"{{dataset: imagefolder, root: {images}}}")
    commands = (
        ["predict", net, images / "test"],
        ["evaluate", net, *DIGITS, *data],
        ["export", folder, folder / "out.pt"],
    )
    said = [line for arguments in commands for line in main(*arguments, code=2)]
    assert len(said) == 3 and not list(folder.glob("out*"))
    return said


HUGE = {"hidden_dim": 60000, "num_heads": 1, "mlp_dim": 60000}  # 690 GB


@table(
    "place, value, line",
    nothing=("", {}, "net.json: {}: must be a mapping with net.name, "),
    no_mapping=("", [1], "net.json: [1]: must be a mapping with net.name, "),
    unknown_net=("net name", "nett", "net.name: 'nett': is not a network of net.py, torchvision or timm"),
    a_list_as_net=("net name", ["net"], "net.name: ['net']: is not a network"),
    other_net=("net name", "resnet18", "is none, but (64,) in this network"),
    odd_arguments=("net net_args", {"depth": 3}, "net_args: {'depth': 3}: net cannot be built"),
    arguments_as_text=("net net_args", "x", "net.net_args: 'x': must be a mapping"),
    fewer_classes=("classes", ["a"], "classes: 1 different names: must be as many as net.num_classes, each once"),
    a_class_twice=("classes", ["a", "b", "a", "c"], "classes: 3 different names: must be as many as net.num_classes, each once"),
    classes_as_numbers=("classes", [0, 1, 2, 3], "classes: [0, 1, 2, 3]: must be a list; each value"),
    classes_as_text=("classes", "abcd", "classes: 'abcd': must be a list"),
    class_count_as_text=("net num_classes", "4", "net.num_classes: '4': must be a whole number"),
    a_number_type=("dtype", "int8", "dtype: 'int8': must be one of float32, bfloat16, float16"),
    no_type=("dtype", "relu", "dtype: 'relu': must be one of"),
    height_as_text=("input height", "32", "input.height: '32': must be a whole number of pixels"),
    no_height=("input height", 0, "input.height: 0: must be a whole number of pixels"),
    huge=("input resize", [10**9, 10**9], "input.resize: [1000000000, 1000000000]: must be a list of 2"),
    half_a_size=("input resize", [32], "input.resize: [32]: must be a list of 2 values; each value"),
    small=("input resize", [32, 16], "input.resize: [32, 16]: must be at least input.height and"),
    other_height=("input height", 16, "input: 16x32: net fails on such images (mat1 and mat2 shapes"),
    other_size=("input", {"height": 64, "width": 64, "resize": [64, 64], "mean": [0] * 3, "std": [1] * 3}, "input: 64x64:"),
    huge_arguments=("net net_args", {"width": 10**9}, "net.net_args: {'width': 1000000000}: must be a mapping with"),
    endless_arguments=("net net_args", {"w": float("nan")}, "net.net_args: {'w': nan}: must be a mapping with"),
    huge_network=("net", {"name": "vit_b_16", "num_classes": 4, "net_args": HUGE}, "in this network, and "),
    endless_network=("net", {"name": "timm/vit_tiny_patch16_224", "num_classes": 4, "net_args": {"depth": 20000, "embed_dim": 3}}, "net.net_args: a network with far more weights than the 10 in its file; export the network again"),
    mean_as_text=("input mean", ["a", 0, 0], "input.mean: ['a', 0, 0]: must be a list of 3"),
    mean_of_two=("input mean", [0, 0], "input.mean: [0, 0]: must be a list of 3"),
    no_mean=("input mean", None, "input.mean: None: must be a list of 3"),
    no_deviation=("input std", [0, 1, 1], "input.std: [0, 1, 1]: must be a list of 3 values; each value must be a"),
    infinite=("input std", [float("inf")] * 3, "input.std: [inf, inf, inf]: must be"),
    no_number=("input mean", [float("nan")] * 3, "input.mean: [nan, nan, nan]: must be"),
    no_temperature=("confidence temperature", 0, "must be a mapping with a temperature above 0"),
    no_confidence=("confidence", [1], "confidence: [1]: must be a mapping with a temperature above 0"),
    a_large_threshold=("confidence confidence_threshold", 1e9, "must be a mapping with a temperature"),
    no_origin=("provenance", None, "provenance.steps: None: must be a whole number"),
    steps_as_text=("provenance steps", "9", "provenance.steps: '9': must be a whole number"),
)  # fmt: skip
def test_a_wrong_description_is_refused(place, value, line, root, copy, main):
    change(copy / "net.json", *place.split(), value=value)
    for said in refusals(main, copy, root):
        assert said.startswith(f"checkpoint.py: {copy}/net.") and line in said


def test_a_network_without_a_threshold_needs_one(copy, main, tmp_path):
    change(copy / "net.json", "confidence", value=None)
    picture = save(tmp_path / "picture.png", 1)
    (said,) = main("predict", copy / "net.pt", picture, "--unknown", code=2)
    assert said.startswith(f"checkpoint.py: --unknown: {copy}/net.pt has no threshold")
    assert main("predict", copy / "net.pt", picture, "--unknown=1", "--json")[0]["unknown"]


def test_all_errors_of_a_description_are_printed(copy, main, tmp_path):
    for place, value in (["dtype"], 3), (["input", "std"], 0), (["classes"], None):
        change(copy / "net.json", *place, value=value)
    said = main("predict", copy / "net.pt", tmp_path, code=2)
    assert [line.split("net.json: ")[1].split(":")[0] for line in said] == ["classes", "input.std", "dtype"]
    (copy / "net.json").unlink()
    (said,) = main("predict", copy / "net.pt", tmp_path, code=2)
    assert "net.json: is missing" in said


@table(
    "change, line",
    integers=(lambda s: {n: v.int() for n, v in s.items()}, "of int32, but (6,) of float32 in this network"),
    other_classes=(lambda s: {**s, "fc3.bias": torch.zeros(3)}, "fc3.bias is (3,), but (4,) in this network"),
    one_less=(lambda s: {n: v for n, v in s.items() if n != "fc3.bias"}, "fc3.bias is none, but (4,)"),
    nothing=(lambda s: {}, "holds no state_dict"),
)
def test_weights_of_another_form_are_refused(change, line, root, copy, main):
    torch.save(change(torch.load(copy / "net.pt")), copy / "net.pt")
    assert all(line in said for said in refusals(main, copy, root))


@table(
    "file, place, value, line",
    summary=("summary.json", "", {}, "{}: must be a mapping with validation.accuracy, "),
    steps=("summary.json", "steps", "9", "steps: '9': must be a whole number"),
    validation=("summary.json", "validation", [1], "validation.accuracy: None: must be a number"),
    each_class=("summary.json", "validation per_class_accuracy", {"a": "b"}, "validation.per_class_accuracy: {'a': 'b'}: must be a"),
    memory=("summary.json", "peak_memory_mib", [], "peak_memory_mib: []: must be a list of numbers"),
    run=("run.json", "", [], "[]: must be a mapping with config, "),
    config=("run.json", "config", None, "config: None: must be a mapping"),
    command=("run.json", "command", "train.py", "command: 'train.py': must be a list"),
    machine=("run.json", "machine", 5, "machine.gpus: None: must be a list"),
    classification=("classification.json", "", 5, "5: must be a mapping with classes, "),
    confusion=("classification.json", "confusion", [[1]], "confusion: must have a row and a column for each of 4 classes"),
    mistakes=("classification.json", "mistakes", [{}], "mistakes: [{}]: must be a list; each value must have image, predicted, label, loss and picture"),
    classes=("classification.json", "classes", [1, 2, 3, 4], "classes: [1, 2, 3, 4]: must be a list"),
)  # fmt: skip
def test_a_report_names_the_unreadable_file(file, place, value, line, run, main, tmp_path):
    for name in ("metrics.jsonl", "summary.json", "run.json", "classification.json"):
        shutil.copy(run.output / name, tmp_path)
    change(tmp_path / file, *place.split(), value=value)
    said = main("report", tmp_path, code=2)[0]
    assert said.startswith(f"checkpoint.py: {tmp_path / file}: {line}")
    (tmp_path / file).write_text("{")
    assert f"{tmp_path / file}: cannot be read (" in main("report", tmp_path, code=2)[0]
    assert not list(tmp_path.glob("report*"))


def test_every_exported_file_has_its_own_description(root, run, copy, main, tmp_path):
    """Exports of one name do not describe each other. Files of earlier versions still work."""
    change(copy / "net.json", "provenance", "steps", value=59)
    torch.save({name: value / 2 for name, value in torch.load(copy / "net.pt").items()}, copy / "net.pt")
    for name in ("x.pt", "x.onnx", "x.safetensors", "x.pth"):
        main("export", copy if name == "x.pt" else run.output, tmp_path / name)
    described = {
        file.name: json.loads(file.read_text())["provenance"]["steps"] for file in tmp_path.glob("*.json")
    }
    assert described == {"x.json": 59, "x.onnx.json": 60, "x.safetensors.json": 60, "x.pth.json": 60}
    names = ("x.pt", "x.safetensors", "x.pth")
    one, other, third = (main("predict", tmp_path / name, root / "test", "--json") for name in names)
    assert third == other != one
    # An earlier version wrote x.json for each, so that one export replaced the description of another
    (tmp_path / "x.safetensors.json").rename(tmp_path / "x.json")
    assert main("predict", tmp_path / "x.safetensors", root / "test", "--json") == other
    (said,) = main("predict", tmp_path / "x.pt", root / "test", code=2)
    assert "x.pt: the weights differ from the weights that the JSON file describes" in said
