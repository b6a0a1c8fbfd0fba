"""What a run leaves can be used: export, predict, evaluate, report."""

import html.parser
import json
import pathlib
import shutil
import subprocess
import sys
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from folders import save
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
    assert checkpoint.main(["predict", str(net), str(root / "test/digit 2/119.png")]) == 0
    assert "digit" in capsys.readouterr().out


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


def test_a_net_of_another_form_is_refused(classifier, tmp_path, capsys):
    _, run = classifier
    for name in ("net.pt", "net.json"):
        shutil.copy(run.output / name, tmp_path)
    described = json.loads((tmp_path / "net.json").read_text())
    described["net"]["num_classes"], described["classes"] = 3, ["a", "b", "c"]
    (tmp_path / "net.json").write_text(json.dumps(described))
    assert checkpoint.main(["predict", str(tmp_path / "net.pt"), str(tmp_path)]) == 2
    assert "fc3.bias is (4,), but (3,)" in capsys.readouterr().err
    (tmp_path / "net.json").unlink()
    assert checkpoint.main(["predict", str(tmp_path / "net.pt"), str(tmp_path)]) == 2
    assert "net.json: is missing" in capsys.readouterr().err


def test_what_cannot_be_written_is_said_in_one_line(classifier, capsys):
    for arguments in (
        ["export", str(classifier[1].output), "/proc/out.pt"],
        ["report", str(classifier[1].output)],
    ):
        target = [] if arguments[0] == "export" else ["--output", "/proc/none/report.html"]
        assert checkpoint.main([*arguments, *target]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("checkpoint.py: a path cannot be used ([Errno 2]")
