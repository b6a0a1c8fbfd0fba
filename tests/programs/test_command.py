"""The command ``classify``: a training on a folder from anywhere, its settings, and the use of its network."""

import contextlib
import csv
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from folders import save, table
from PIL import Image
from sklearn.datasets import load_digits
from support import PROJECT, Run, overrides, run, time_limit

import checkpoint
import classify
import train
from classify import __main__ as command
from classify.config import experiment_file
from classify.images import pixels
from workbench import defaults
from workbench.defaults import Images

CLASSES = {"Bär": (0, 300), "Käse": (1, 200), "Öl": (7, 100)}  # the digit and the number of images
SMALL = ["--epochs", "6", *overrides(hyperparameters__net_args__width=16, data__image_size=16)]

SEARCHED = ["--config", "experiments/search-random.yaml"]
SEARCHED += overrides(
    searcher__max_trials=1, hyperparameters__max_length="{batches: 60}", data__dataset="digits"
)

FORKED = """
import os
from workbench import defaults

defaults.images_a_second()
if not (child := os.fork()):
    torch.set_num_threads(2)
    torch.ones(1000, 1000).mm(torch.ones(1000, 1000))
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> pathlib.Path:
    """A folder with 600 small images in three classes, and nothing else."""
    home, digits = tmp_path_factory.mktemp("home"), load_digits()
    for name, (digit, count) in CLASSES.items():
        for number in range(count):
            drawn = digits.images[digits.target == digit][number % 170] * 15
            image = Image.fromarray(drawn.astype(np.uint8)).resize((64, 48))
            save(home / "Bücher" / name / f"Größe {number}.png", image.convert("RGB"))
    (home / "Bücher/Öl/Größe 99.png").write_bytes(b"no image")
    return home


def in_folder(home: pathlib.Path, *arguments: str) -> Run:
    """Run the command in a folder; its run is the folder's newest."""
    made = run(["-m", "classify", *arguments], home, cwd=home)
    made.output = max(home.glob("runs/*"), key=lambda path: path.stat().st_mtime, default=home)
    return made


@pytest.fixture(scope="module")
def trained(home) -> Run:
    made = in_folder(home, "Bücher", *SMALL)
    assert made.code == 0, made.stderr
    return made


def test_a_folder_becomes_a_tested_network_with_a_report(home, trained):
    lines = trained.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == "images split network length folder".split()
    assert "Bücher: 600 in 3 classes (Bär 300, Käse 200, Öl 100), most about 64x48 pixels" in lines[0]
    assert (
        "431 train the network, 48 choose its best weights by accuracy_tta, 120 test it at the end"
        in lines[1]
    )
    trained_on = "431 to train, 48 to validate, 120 to test at the end, 1 unreadable and left out,"
    assert any(line.startswith("images ") and trained_on in line for line in lines)
    assert "Größe 99.png: not a readable image" in (trained.output / "unreadable.txt").read_text()
    folder = trained.output.relative_to(home)
    assert str(folder).startswith("runs/Bücher-")
    quoted = shlex.quote(str(folder))
    assert f"done: {folder}; report: classify report {quoted}" in lines
    assert trained.summary["test"]["macro_recall"] > 0.8
    assert f"test accuracy {trained.summary['test']['accuracy']:.4f}" in lines
    assert trained.summary["chosen_on"] == "validation images"
    assert "Öl" in (trained.output / "report.html").read_text()
    assert json.loads((trained.output / "run.json").read_text())["command"][0] == "classify"
    settings = experiment_file.read(str(trained.output / "experiment.yaml"))
    assert settings["hyperparameters"]["best_weights"] is True
    assert settings["hyperparameters"]["max_length"] == {"epochs": 6}
    assert settings["data"]["root"] == str(home / "Bücher")


def test_the_folder_of_a_run_stands_for_its_network(home, trained):
    answers = home / "answers/of.csv"
    predicted = in_folder(home, "predict", str(trained.output), "Bücher/Öl", "--json", "--csv", str(answers))
    assert predicted.code == 2
    assert predicted.stderr.startswith("classify: Bücher/Öl/Größe 99.png: not a readable image")
    rows = json.loads(predicted.stdout)
    assert len(rows) == 99 and sum(row["class"] == "Öl" for row in rows) > 80
    written = list(csv.DictReader(answers.read_text().splitlines()))
    assert list(written[0]) == ["file", "class", "probability", "Bär", "Käse", "Öl"]
    for row, cells in zip(rows, written, strict=True):
        assert (cells["file"], cells["class"]) == (row["image"], row["class"])
        assert float(cells["probability"]) == row["probability"]
        assert {name: float(cells[name]) for name in row["probabilities"]} == row["probabilities"]
    assert os.listdir(answers.parent) == [answers.name]
    # Without --config the run's images are evaluated
    evaluated = in_folder(home, "evaluate", str(trained.output), "--json")
    assert evaluated.code == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["accuracy"] == trained.summary["test"]["accuracy"]


def test_a_program_predicts_as_the_command(home, trained):
    net = classify.load(trained.output)
    assert net.classes == ("Bär", "Käse", "Öl")
    (one,) = net.predict(home / "Bücher/Öl/Größe 3.png")
    assert one.image.name == "Größe 3.png" and one.probabilities[one.label] == one.probability
    assert one.probability == max(one.probabilities.values())
    assert sum(one.probabilities.values()) == pytest.approx(1)
    assert len(net.predict([home / "Bücher/Käse", home / "Bücher/Bär/Größe 0.png"])) == 201
    with pytest.raises(ValueError, match=r"Größe 99\.png"):
        net.predict([home / "Bücher/Öl"])


def test_a_run_continues_with_its_own_settings(home, trained):
    again = in_folder(home, "Bücher", "--resume", "latest", "--output", str(trained.output), "--epochs", "7")
    assert again.code == 0, again.stderr
    assert again.summary["epochs"] == 7 and "epoch 1/7" not in again.stdout
    networks = [line for line in trained.stdout.splitlines() if line.startswith("network  airbench: ")]
    assert len(networks) == 1 and networks[0] in again.stdout


@table(
    "argv, line",
    no_folder=(["phtos"], "phtos: no such folder or command; give a folder of images, or a command"),
    a_typo=(["predcit"], "predcit: no such folder or command; give a folder of images, or a command: did you mean 'predict'?"),
    minutes=(["Bücher", "--minutes", "x"], "--minutes: x: must be a number above 0, e.g. 15"),
    no_minutes=(["Bücher", "--minutes", "0"], "--minutes: 0: must be a number above 0, e.g. 15"),
    nan_minutes=(["Bücher", "--minutes", "nan"], "--minutes: nan: must be a number above 0, e.g. 15"),
    past_minutes=(["Bücher", "--minutes", "-3"], "--minutes: -3: must be a number above 0, e.g. 15"),
    no_epoch=(["Bücher", "--epochs", "0"], "--epochs: 0: must be a whole number of at least 1"),
    half_an_epoch=(["Bücher", "--epochs", "1.5"], "--epochs: 1.5: must be a whole number of at least 1"),
    no_batch=(["Bücher", "--batch-size", "0"], "--batch-size: 0: must be a whole number of at least 1"),
    no_rate=(["Bücher", "--lr", "nan"], "--lr: nan: must be a number above 0, at most 1e6"),
    a_negative_rate=(["Bücher", "--lr", "-1"], "--lr: -1: must be a number above 0, at most 1e6"),
    one_fold=(["Bücher", "--folds", "1"], "--folds: 1: must be from 2 to 1,000"),
    a_text_of_folds=(["Bücher", "--folds", "x"], "--folds: invalid int value: 'x'"),
    no_slot=(["Bücher", "--slots", "0", "--check"], "--slots: 0: must be a whole number of at least 1"),
    no_port=(["serve", "Bücher", "--port", "x"], "--port: invalid int value: 'x'"),
    no_seed=(["shards", "write", "Bücher", "s", "--seed", "x"], "--seed: invalid int value: 'x'"),
    no_config=(["Bücher", "--config", "no.yaml"], "--config: no.yaml: no such file; give a file, e.g. const.yaml"),
    no_config_to_train=(["train", "--config", "no.yaml"], "--config: no.yaml: no such file; give a file"),
    no_config_to_search=(["search", "--config", "no.yaml"], "--config: no.yaml: no such file; give a file"),
    nothing=(["evaluate", "nichtda"], "nichtda: no such file or folder; give the folder of a finished run, or its net.pt"),
    nothing_to_report=(["report", "nichtda"], "nichtda: no such folder; give the folder of a run"),
    nothing_to_export=(["export", "nichtda", "x.pt"], "nichtda: no such folder; give the folder of a run or of a checkpoint"),
    a_folder_as_csv=(["predict", "Bücher", "Bücher", "--csv", "Bücher"], "--csv: Bücher: must be the name of a file, e.g. answers.csv"),
    twice=(["Bücher", "--minutes", "1", "--epochs", "2"], "--minutes: 1: --epochs sets the length, too; give one of the two"),
    no_classes=(["Bücher/Öl"], "data.root: Bücher/Öl: has no folder 'train'; it needs train/<class>/*"),
    used=(["Bücher", "--output", "used"], "--output: used/experiment.yaml: exists; give another folder"),
    unknown_key=(["Bücher", "--set", "data.imagesize=64"], "data.imagesize: '***': unknown key; did you mean 'image_size'?"),
    unknown_field=(["Bücher", "--set", "sercher.metric=accuracy"], "sercher: {'metric': '***'}: unknown key; did you mean 'searcher'?"),
    unknown_option=(["Bücher", "--minuts", "1"], "--minuts: is no option; did you mean '--minutes'?"),
    without_set=(["Bücher", "lr=0.1"], "lr=0.1: is no option; give --set lr=0.1"),
    resume=(["Bücher", "--resume", "latest"], "--resume: latest: needs --output, the folder of the run"),
    a_file=(["Bücher/Öl/Größe 1.png"], "Bücher/Öl/Größe 1.png: is a file; give a folder that holds"),
    no_run=(["predict", "Bücher", "Bücher/Öl"], "Bücher: holds no network; give the folder of a finished run, or its net.pt"),
    secret=(["Bücher", "--set", "data.storage={key: abc}"], "--set: experiment.yaml of the run would hold a credential"),
)  # fmt: skip
def test_bad_input_is_a_line(home, monkeypatch, capsys, argv, line):
    monkeypatch.chdir(home)
    (home / "used").mkdir(exist_ok=True)
    (home / "used/experiment.yaml").write_text("name: mine")
    before = sorted(home.glob("runs/*"))
    with pytest.raises(SystemExit) as ended:
        sys.exit(command.main(argv))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    program = (
        "classify shards write"
        if argv[0] == "shards"
        else "classify serve"
        if "--port" in argv
        else "classify"
    )
    assert err.startswith(f"{program}: {line}") and err.count("\n") == 1 and not out
    assert sorted(home.glob("runs/*")) == before
    assert (home / "used/experiment.yaml").read_text() == "name: mine"


@pytest.mark.parametrize("program", ["classify", "train.py"])
def test_all_wrong_options_are_told_before_anything_else(home, monkeypatch, capsys, program):
    monkeypatch.chdir(home)
    before = sorted(home.rglob("*"))
    wrong = "--folds 1 --lr -1 --epochs 0 --config no.yaml --resume latest --slots -2".split()
    main, first = (command.main, ["Bücher"]) if program == "classify" else (train.main, [])
    assert main([*first, *wrong]) == 2
    out, err = capsys.readouterr()
    options = [line.split(": ")[1:3] for line in err.splitlines()]
    assert options[:5] == [
        ["--epochs", "0"],
        ["--slots", "-2"],
        ["--lr", "-1"],
        ["--folds", "1"],
        ["--config", "no.yaml"],
    ]
    assert err.splitlines()[5].startswith(f"{program}: --folds: 1: does not work with --resume; with")
    assert not out and sorted(home.rglob("*")) == before


def test_a_check_prints_no_warning(home):
    """Every line on stderr is the command's; torch's tracker of memory warned of a network with frozen weights."""
    made = in_folder(home, "Bücher", "--check")
    said = [line for line in made.stderr.splitlines() if " are stored decoded in " not in line]
    assert made.code == 0 and all(line.startswith("classify: ") for line in said), made.stderr
    assert any(": base 820, weights " in line and ", activations " in line for line in said)


@pytest.mark.parametrize(
    "command",
    (
        ["-m", "classify", "--help"],
        ["train.py", "--keys"],
        ["shards.py", "write", "HOME/Bücher", "TMP/shards"],
        ["search.py", *SEARCHED, "--output", "TMP/search"],
        ["baseline.py", *overrides(data__dataset="digits"), "--max-steps", "1", "--output", "TMP/run"],
    ),
)
def test_a_closed_pipe_ends_a_program_without_a_traceback(home, tmp_path, command):
    command = [word.replace("HOME", str(home)).replace("TMP", str(tmp_path)) for word in command]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        made = subprocess.run(
            [sys.executable, *command], cwd=PROJECT, stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert (made.returncode, made.stderr) == (1, b"")


def test_a_refused_training_leaves_no_folder(home):
    before = sorted(home.glob("runs/*"))
    refused = {
        "hyperparameters.net: 'nonet': no such network": ["--net", "nonet"],
        "data.validation: 2: ": ["--set", "data.validation=2"],
    }
    for line, options in refused.items():
        made = in_folder(home, "Bücher", *options)
        assert made.code == 2
        assert made.stderr.splitlines()[-1].startswith(f"classify: {line}")
        assert sorted(home.glob("runs/*")) == before


@pytest.mark.parametrize(
    "number, code, said",
    [
        (signal.SIGKILL, 1, "classify: data.root: a process that decoded the images of all was killed"),
        (signal.SIGINT, 130, "classify: interrupted"),
    ],
)
def test_a_decoding_that_is_ended_leaves_no_folder(home, tmp_path, monkeypatch, capsys, number, code, said):
    """A signal to a decoder, as the system sends when memory runs out, or to the command."""
    process, decode = os.getpid(), pixels.decode
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it

    def ended(*args: Any) -> Any:
        with contextlib.suppress(FileExistsError):  # one signal, not one for each image
            (tmp_path / "sent").touch(exist_ok=False)
            os.kill(process if number == signal.SIGINT else os.getpid(), number)
        return decode(*args)

    monkeypatch.setattr(pixels, "decode", ended)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(home / "Bücher", "photos", ignore=shutil.ignore_patterns(".*"))
    assert command.main(["photos"]) == code
    assert capsys.readouterr().err.startswith(said) and not [*tmp_path.glob("runs/*")]


def test_a_fork_computes_after_the_speed_is_measured(tmp_path):
    """A fork lacks OpenMP's threads, and the benchmark runs for ``train_micro_batch_size_per_gpu: auto`` are forks."""
    made = run(["-c", FORKED], tmp_path)
    assert made.code == 0, made.stderr


def test_every_subcommand_of_checkpoint_is_a_command(capsys):
    assert command.main(["--help"]) == 0
    page = capsys.readouterr().out
    for name in ("train", "search", "shards", "predict", "serve", "caches"):
        assert f"\n  {name} " in page
    with pytest.raises(SystemExit):
        checkpoint.parse(["--help"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in command.subcommands())
    before = list(sys.argv)
    with pytest.raises(SystemExit):
        command.main(["report", "--help"])
    assert capsys.readouterr().out.startswith("usage: classify report ") and sys.argv == before


OWN = """
from torch import nn
from classify import register

@register("mine")
def mine(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, num_classes))
"""


@table(
    "text, code, said",
    registers=(OWN, 0, "net.py: its networks and losses are registered"),
    registers_twice=((PROJECT / "net.py").read_text() + OWN.replace("from classify import register", ""), 0, "net.py: its networks and losses are registered"),
    other_program=(OWN.replace("@register", "print(1 / 0)\n@lru_cache"), 2, "hyperparameters.net: 'mine': no such network"),
    broken=(OWN + "print(1 / 0)", 2, "net.py: cannot be imported (ZeroDivisionError: division by zero); correct it"),
)  # fmt: skip
def test_a_net_of_the_working_directory(home, tmp_path, text, code, said):
    (tmp_path / "net.py").write_text(text)
    size = overrides(data__image_size=16)
    made = in_folder(tmp_path, str(home / "Bücher"), "--check", "--net", "mine", *size)
    assert made.code == code, made.stderr
    assert said in made.stdout + made.stderr
    assert "Traceback" not in made.stderr


def test_an_experiment_file_replaces_the_settings(home, tmp_path):
    """The file is in the working directory; the option names one of the project."""
    (tmp_path / "experiment.yaml").write_text((PROJECT / "experiments/digits.yaml").read_text())
    folder = str(home / "Bücher")
    size = overrides(data__image_size=32)
    mine = in_folder(tmp_path, folder, "--check", *size)
    named = in_folder(
        tmp_path, folder, "--check", "--config", "experiments/zero1.yaml", "--minutes", "3", *size
    )
    alone = in_folder(tmp_path, "train", "--check", "--config", "experiments/digits.yaml")
    for made, images, length in ((mine, "480 to train", None), (named, "480 to train", "3 minutes"), (alone, "1,437 to train", None)):  # fmt: skip
        assert made.code == 0, made.stderr
        assert f"{images}," in made.stderr
        assert length is None or f"length {length}," in made.stderr
    assert json.loads(named.stdout)["zero_optimization"]["stage"] == 1
    assert not list(tmp_path.glob("runs/*"))


@table(
    "train, size, minutes, side, batch, passes, metric",
    few_photos=(432, (640, 480), 15, 64, 48, 197, "accuracy_tta"),
    few_photos_an_hour=(432, (640, 480), 60, 128, 48, 274, "accuracy_tta"),
    thumbnails=(1440, (32, 32), 5, 32, 60, 43.2, "accuracy_tta"),
    many=(45_000, (32, 32), 15, 32, 1875, 11.4, "accuracy_tta"),
    many_in_a_minute=(45_000, (400, 300), 1, 32, 1875, 0.909, "accuracy_tta"),
    thumbnails_an_hour=(1440, (32, 32), 60, 32, 60, 100, "accuracy_tta"),
    a_dozen=(12, (16, 16), 15, 32, 12, 300, "accuracy_tta"),
)
def test_settings_by_images_and_minutes(monkeypatch, train, size, minutes, side, batch, passes, metric):
    monkeypatch.setattr(defaults, "images_a_second", lambda: 420)
    images = Images({"a": train // 2, "b": train // 2}, {"train": train, "val": 10}, size)
    chosen = defaults.choose(images, minutes)
    assert (chosen.side, chosen.batch, chosen.metric) == (side, batch, metric)
    assert chosen.passes == pytest.approx(passes, rel=0.01) and chosen.minutes <= minutes
    skewed = Images({"a": train, "b": train // 4}, images.splits, size)
    assert defaults.choose(skewed, minutes).metric == "macro_recall"


@pytest.mark.soak
def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(PROJECT))  # in the place of an installation
    book = nbformat.read(PROJECT / "examples/photos.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=int(2 * time_limit()), kernel_name="python3", resources=resources).execute()
    outputs = [each for cell in book.cells for each in cell.get("outputs", [])]
    said = "".join(each.get("text", "") + each.get("data", {}).get("text/plain", "") for each in outputs)
    assert "accuracy_tta" in said and "Prediction(" in said
