"""Every option that is a path, given one that may not be entered, is too long, or would never end; and evil files."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from folders import save
from support import PROJECT, error_line, execute

from classify.config import experiment_file
from classify.models import net_file, state_dicts
from net import Net

# Root may enter every folder, unless it has given that up; other users need no such help.
AS_ANYONE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]

# Runs each row's program in one process, for importing DeepSpeed takes seconds.
MANY = """
import contextlib, importlib, io, json, pathlib, sys, traceback
table = pathlib.Path(sys.argv[1])
done = {}
for name, (program, *arguments) in json.loads(table.read_text()).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = importlib.import_module(program).main(arguments)
        except Exception:
            traceback.print_exc()
            code = 1
    done[name] = [code, out.getvalue(), err.getvalue()]
table.with_name("done.json").write_text(json.dumps(done))
"""

DIGITS = ["--config", "experiments/digits.yaml", "--set", "data.dataset=digits"]
FOLDERS = ["--config", "experiments/digits.yaml", "--set", "data.dataset=imagefolder", "--set"]
CIFAR = [
    "--config",
    "experiments/digits.yaml",
    "--set",
    "data.dataset=cifar10",
    "--set",
    "data.download=false",
]
GRID = ["--config", "experiments/search-grid.yaml", "--set", "data.dataset=digits"]
# Every option that is a path, as it is given {path}; what the line begins with, if not with the path alone.
FILES = {
    "experiment": (["train", "--config", "{path}"], "--config: "),
    "experiment to check": (["train", "--check", "--config", "{path}"], "--config: "),
    "experiment of a search": (["search", "--config", "{path}"], "--config: "),
    "experiment of the baseline": (["baseline", "--config", "{path}"], "--config: "),
    "experiment to evaluate by": (["evaluate", "{net}", "--config", "{path}"], "--config: "),
    "DeepSpeed": (["train", *DIGITS, "--check", "--set", "hyperparameters.deepspeed_config={path}"], "hyperparameters.deepspeed_config: "),
    "weights": (["train", *DIGITS, "--check", "--set", "hyperparameters.weights={path}"], "hyperparameters.weights: "),
    "weights of safetensors": (["train", *DIGITS, "--check", "--set", "hyperparameters.weights={path}.safetensors"], "hyperparameters.weights: "),
    "weights of experts": (["train", *DIGITS, "--check", "--set", "hyperparameters.moe=true", "--set", "hyperparameters.weights={path}"], "hyperparameters.weights: "),
    "weights of the baseline": (["baseline", *DIGITS, "--weights", "{path}"], "--weights: "),
    "net": (["predict", "{path}", "{image}"], ""),
    "net to evaluate": (["evaluate", "{path}", *DIGITS], ""),
    "image": (["predict", "{net}", "{path}"], ""),
}  # fmt: skip
PLACES = {
    "images": (["train", *FOLDERS, "data.root={path}", "--check"], "data.root: "),
    "images of a search": (["search", *GRID, "--set", "data.dataset=imagefolder", "--set", "data.root={path}", "--output", "{new}"], "data.root: "),
    "images of the baseline": (["baseline", *FOLDERS, "data.root={path}"], "data.root: "),
    "images to evaluate": (["evaluate", "{net}", *FOLDERS, "data.root={path}"], "data.root: "),
    "CIFAR-10": (["evaluate", "{net}", *CIFAR, "--set", "data.root={path}"], "data.root: "),
    "run": (["train", *DIGITS, "--output", "{path}"], "--output: "),
    "run to go on with": (["train", *DIGITS, "--output", "{path}", "--resume", "latest"], "--output: "),
    "run of a search": (["search", *GRID, "--output", "{path}"], "--output: "),
    "run of the baseline": (["baseline", *DIGITS, "--output", "{path}"], "--output: "),
    "run to export": (["export", "{path}", "{new}"], ""),
    "file to export to": (["export", "{checkpoint}", "{path}/net.pt"], ""),
    "run to report on": (["report", "{path}", "--output", "{new}"], ""),
    "caches": (["caches", "{path}"], ""),
}  # fmt: skip
SUBCOMMANDS = ("predict", "evaluate", "export", "report", "caches")


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paths")
    image = save(folder / "image.png", 100)
    size = {"height": 32, "width": 32, "resize": [32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
    description = {
        "net": {"name": "net", "num_classes": 2},
        "classes": ["a", "b"],
        "input": size,
        "dtype": "float32",
        "provenance": {"steps": 1},
    }
    net_file.write(folder / "net.pt", state_dicts.of_module(Net(2)), description)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    net_file.write(checkpoint / "net.pt", state_dicts.of_module(Net(2)), description)
    (checkpoint / "metadata.json").write_text('{"steps_completed": 1}')
    # Folders that may not be entered, or only looked into, or not be written to; of another user, or of nobody
    closed, listed, read_only = folder / "closed", folder / "listed", folder / "read-only"
    for place in (closed, listed):
        for name in ("net.pt", "net.safetensors", "net.pt.safetensors", "metadata.json", "metrics.jsonl"):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text("{}")
        for split in ("train", "test"):
            for label in "ab":
                save(place / split / label / "1.png", 100)
    (read_only / "checkpoints").mkdir(parents=True)
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    os.mkfifo(folder / "pipe.safetensors")
    values = {"net": folder / "net.pt", "image": image, "new": folder / "new", "checkpoint": checkpoint}
    bad = {
        "closed": (closed / "net.pt", closed),
        "inside a closed one": (closed / "train" / "x.pt", closed / "train"),
        "long": (folder / ("x" * 300), folder / ("x" * 300)),
        "long part": (folder / ("x" * 300) / "net.pt", folder / ("x" * 300) / "x"),
        "pipe": (pipe, None),
        "device": (pathlib.Path("/dev/zero"), None),
        "folder": (folder, None),
        "below a file": (image / "x", image / "x"),
        "listed": (None, listed),
        "read-only": (None, read_only),
    }
    takes: dict[str, tuple[str, ...]] = {
        "listed": ("images", "images of the baseline", "images to evaluate", "run to export")
    }
    takes["read-only"] = ("run", "run to go on with", "run of a search", "run of the baseline")
    takes["folder"] = tuple(name for name in FILES if name != "image")
    rows, begins = {}, {}
    for kind, paths in bad.items():
        for options, path in zip((FILES, PLACES), paths, strict=True):
            for option, (arguments, begin) in options.items():
                if path is None or option not in takes.get(kind, (option,)):
                    continue
                filled = [each.format(path=path, **values) for each in arguments]
                name = f"{option}: {kind}"
                rows[name] = ["checkpoint", *filled] if filled[0] in SUBCOMMANDS else filled
                begins[name] = f"{rows[name][0]}.py: {begin}"
                if "device" in name and "safetensors" in option:
                    del rows[name], begins[name]
    table = folder / "rows.json"
    table.write_text(json.dumps(rows))
    closed.chmod(0)
    listed.chmod(0o400)
    (read_only / "checkpoints").chmod(0o500)
    read_only.chmod(0o500)
    command = [sys.executable, "-c", MANY, str(table)]
    if os.geteuid() == 0:
        if not shutil.which("setpriv") or subprocess.run([*AS_ANYONE, "true"], check=False).returncode:
            pytest.skip("root, who may enter every folder, cannot give that up here")
        command = [*AS_ANYONE, *command]
    try:
        run = execute(command, folder, PYTHONPATH=str(PROJECT), XDG_CACHE_HOME=str(folder / "cache"))
    finally:
        for place in (closed, listed, read_only, read_only / "checkpoints"):
            place.chmod(0o700)
    assert run.code == 0, run.stderr
    return json.loads((folder / "done.json").read_text()), begins, folder


def test_a_path_that_cannot_be_used_is_one_line_and_exit_code_2(refusals):
    done, begins, folder = refusals
    wrong = {
        name: result
        for name, result in done.items()
        if result[0] != 2
        or result[1] not in ("", "starting: importing torch, DeepSpeed and Determined\n")
        or len(result[2].splitlines()) != 1
        or not result[2].startswith(begins[name])
    }
    assert wrong == {}
    assert len(done) > 90
    assert not (folder / "new").exists()


TENFOLD = ",".join(["*a{0}"] * 10)
EVIL = {
    "aliases of aliases": "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{TENFOLD.format(i)}]\n" for i in range(30)),
    "merged aliases": "a0: &a0 {x: 1}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [{TENFOLD.format(i)}]}}\n" for i in range(30)),
    "a chain of aliases": "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(3000)),
    "a list in itself": "a: &a [*a]",
    "brackets": "a: " + "[" * 20_000,
    "braces": "a: " + "{b: " * 5_000,
    "dashes": "a:\n  " + "- " * 5_000,
    "no end": "a:\n" + "- 1\n" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("case", EVIL)
def test_what_would_take_minutes_to_read_is_refused(case, tmp_path):
    file = tmp_path / "evil.yaml"
    file.write_text(EVIL[case])
    assert error_line(experiment_file.read, str(file)).startswith(
        f"--config: {file}: cannot be read as YAML ("
    )
    if "\n" not in EVIL[case]:
        line = error_line(experiment_file.read, str(PROJECT / "const.yaml"), [f"name={EVIL[case]}"])
        assert line.startswith("--set name: ")
    deep = error_line(experiment_file.read, str(PROJECT / "const.yaml"), [f"{'a.' * 5_000}a=1"])
    assert "must be PATH=VALUE" in deep


def test_aliases_are_taken(tmp_path):
    file = tmp_path / "good.yaml"
    file.write_text("a: &a {x: 1}\nb: {<<: *a, y: [*a, *a]}\n")
    assert experiment_file.read(str(file))["b"] == {"x": 1, "y": [{"x": 1}, {"x": 1}]}
