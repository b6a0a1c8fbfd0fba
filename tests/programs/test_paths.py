"""Paths that cannot be used, in every option that takes a path, and YAML files that would take minutes to read."""

import json
import os
import pathlib

import pytest
from folders import save
from support import DIGITS, PROJECT, error_line, overrides, run

from classify.config import experiment_file
from classify.models import net_file, state_dicts
from net import Net

# Runs the main of each row's program. Without its capabilities, root may not enter a closed folder either.
MANY = """
import contextlib, ctypes, importlib, io, json, pathlib, sys, traceback
_LINUX_CAPABILITY_VERSION_3, none = 0x20080522, (ctypes.c_uint32 * 6)()
assert not ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0), none)
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

FOLDERS = [*DIGITS, *overrides(data__dataset="imagefolder")]
CIFAR = [*DIGITS, *overrides(data__dataset="cifar10", data__download="false")]
GRID = ["--config", "experiments/search-grid.yaml", *overrides(data__dataset="digits")]
CHECK = ["train", *DIGITS, "--check"]
# A program with the path in an option, and the beginning of the line that refuses it, up to the path
FILES = {
    "experiment": (["train", "--config", "{path}"], "--config: "),
    "experiment to check": (["train", "--check", "--config", "{path}"], "--config: "),
    "experiment of a search": (["search", "--config", "{path}"], "--config: "),
    "experiment of the baseline": (["baseline", "--config", "{path}"], "--config: "),
    "experiment to evaluate by": (["evaluate", "{net}", "--config", "{path}"], "--config: "),
    "DeepSpeed": ([*CHECK, "--set", "hyperparameters.deepspeed_config={path}"], "hyperparameters.deepspeed_config: "),
    "weights": ([*CHECK, "--set", "hyperparameters.weights={path}"], "hyperparameters.weights: "),
    "weights of safetensors": ([*CHECK, "--set", "hyperparameters.weights={path}.safetensors"], "hyperparameters.weights: "),
    "weights of experts": ([*CHECK, "--set=hyperparameters.moe=true", "--set", "hyperparameters.weights={path}"], "hyperparameters.weights: "),
    "weights of the baseline": (["baseline", *DIGITS, "--weights", "{path}"], "--weights: "),
    "net": (["predict", "{path}", "{image}"], ""),
    "net to evaluate": (["evaluate", "{path}", *DIGITS], ""),
    "image": (["predict", "{net}", "{path}"], ""),
}  # fmt: skip
PLACES = {
    "images": (["train", *FOLDERS, "--set", "data.root={path}", "--check"], "data.root: "),
    "images of a search": (["search", *GRID, "--set", "data.dataset=imagefolder", "--set", "data.root={path}", "--output", "{new}"], "data.root: "),
    "images of the baseline": (["baseline", *FOLDERS, "--set", "data.root={path}"], "data.root: "),
    "images to evaluate": (["evaluate", "{net}", *FOLDERS, "--set", "data.root={path}"], "data.root: "),
    "CIFAR-10": (["evaluate", "{net}", *CIFAR, "--set", "data.root={path}"], "data.root: "),
    "run": (["train", *DIGITS, "--output", "{path}"], "--output: "),
    "run to resume": (["train", *DIGITS, "--output", "{path}", "--resume", "latest"], "--output: "),
    "run of a search": (["search", *GRID, "--output", "{path}"], "--output: "),
    "run of the baseline": (["baseline", *DIGITS, "--output", "{path}"], "--output: "),
    "run to export": (["export", "{path}", "{new}"], ""),
    "file to export to": (["export", "{checkpoint}", "{path}/net.pt"], ""),
    "run to report on": (["report", "{path}", "--output", "{new}"], ""),
    "caches": (["caches", "{path}"], ""),
}  # fmt: skip
SUBCOMMANDS = ("predict", "evaluate", "export", "report", "caches")


# A path for a file and a path for a folder, both below the test's folder
BAD: dict[str, tuple[str | None, str | None]] = {
    "closed": ("closed/net.pt", "closed"),
    "inside a closed one": ("closed/train/x.pt", "closed/train"),
    "long": ("x" * 300, "x" * 300),
    "long part": ("x" * 300 + "/net.pt", "x" * 300 + "/x"),
    "pipe": ("pipe", None),
    "device": ("/dev/zero", None),
    "folder": ("", None),
    "below a file": ("image.png/x", "image.png/x"),
    "listed": (None, "listed"),
    "read-only": (None, "read-only"),
}
# Only these options refuse the path
BAD_TO = {
    "folder": [name for name in FILES if name not in ("image", "net")],  # it has images, and a net.pt
    "listed": ["images", "images of the baseline", "images to evaluate", "run to export"],
    "read-only": ["run", "run to resume", "run of a search", "run of the baseline"],
    "device": [name for name in FILES if "safetensors" not in name],
}


def write_paths(folder: pathlib.Path) -> None:
    """Write a network, a checkpoint, an image, folders with all files that programs look for, and pipes."""
    size = {"height": 32, "width": 32, "resize": [32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
    description = {"net": {"name": "net", "num_classes": 2}, "classes": ["a", "b"], "input": size}
    description |= {"dtype": "float32", "provenance": {"steps": 1}}
    (folder / "checkpoint").mkdir()
    for place in (folder, folder / "checkpoint"):
        net_file.write(place / "net.pt", state_dicts.of_module(Net(2)), description)
    (folder / "checkpoint/metadata.json").write_text('{"steps_completed": 1}')
    save(folder / "image.png", 100)
    for place in (folder / "closed", folder / "listed"):
        for split in ("train", "test"):
            for label in "ab":
                save(place / split / label / "1.png", 100)
        for name in ("net.pt", "net.safetensors", "net.pt.safetensors", "metadata.json", "metrics.jsonl"):
            (place / name).write_text("{}")
    (folder / "read-only/checkpoints").mkdir(parents=True)
    for name in ("pipe", "pipe.safetensors"):
        os.mkfifo(folder / name)


def test_a_path_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path):
    write_paths(tmp_path)
    values = {name: tmp_path / f"{name}.pt" for name in ("net", "new")}
    values |= {"image": tmp_path / "image.png", "checkpoint": tmp_path / "checkpoint"}
    rows, begins = {}, {}
    for kind, paths in BAD.items():
        for options, path in zip((FILES, PLACES), paths, strict=True):
            for option, (arguments, begin) in options.items():
                if path is not None and option in BAD_TO.get(kind, [option]):
                    filled = [each.format(path=tmp_path / path, **values) for each in arguments]
                    row = ["checkpoint", *filled] if filled[0] in SUBCOMMANDS else filled
                    rows[f"{option}: {kind}"], begins[f"{option}: {kind}"] = row, f"{row[0]}.py: {begin}"
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    modes = {"closed": 0, "listed": 0o400, "read-only/checkpoints": 0o500, "read-only": 0o500}
    try:
        for name, mode in modes.items():
            (tmp_path / name).chmod(mode)
        arguments = ["-c", MANY, str(tmp_path / "rows.json")]
        made = run(arguments, tmp_path, PYTHONPATH=str(PROJECT), XDG_CACHE_HOME=str(tmp_path / "cache"))
    finally:
        for name in reversed(modes):
            (tmp_path / name).chmod(0o700)
    assert made.code == 0, made.stderr
    done = json.loads((tmp_path / "done.json").read_text())
    wrong = {
        name: (code, out, err)
        for name, (code, out, err) in done.items()
        if (code, len(err.splitlines())) != (2, 1)
        or not err.startswith(begins[name])
        or out not in ("", "starting: importing torch, DeepSpeed and Determined\n")
    }
    assert wrong == {}
    assert len(done) > 90
    assert not (tmp_path / "new.pt").exists()


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
def test_yaml_that_would_take_minutes_is_refused(case, tmp_path):
    file = tmp_path / "evil.yaml"
    file.write_text(EVIL[case])
    line = error_line(experiment_file.read, str(file))
    assert line.startswith(f"--config: {file}: cannot be read as YAML (")
    if "\n" not in EVIL[case]:
        line = error_line(experiment_file.read, str(PROJECT / "const.yaml"), [f"name={EVIL[case]}"])
        assert line.startswith("--set name: ")
    deep = error_line(experiment_file.read, str(PROJECT / "const.yaml"), [f"{'a.' * 5_000}a=1"])
    assert "must be PATH=VALUE" in deep


def test_aliases_are_taken(tmp_path):
    file = tmp_path / "good.yaml"
    file.write_text("a: &a {x: 1}\nb: {<<: *a, y: [*a, *a]}\n")
    assert experiment_file.read(str(file))["b"] == {"x": 1, "y": [{"x": 1}, {"x": 1}]}
