"""What travels to a cluster: the upload, the startup hook, the experiment files; and the local test mode of ``det``."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from typing import Any

import pytest
from determined.common import context, util
from support import PROJECT, TIME_LIMIT, execute

FILES = sorted([*PROJECT.glob("*.yaml"), *PROJECT.glob("experiments/*.yaml")])
BIN = pathlib.Path(sys.executable).parent
LOCAL_TEST = [
    "--local",
    "--test",
    "--config",
    "entrypoint=model_def:CIFARTrial",
    "--config",
    "data.dataset=digits",
]

# Where https://docs.determined.ai/latest/reference/training/experiment-config-reference.html documents each field.
DOCUMENTED = {
    "name": "Metadata",
    "data": "Metadata",
    "entrypoint": "Entrypoint",
    "scheduling_unit": "Basic Behaviors",
    "max_restarts": "Basic Behaviors",
    "checkpoint_policy": "Checkpoint Policy",
    "min_validation_period": "Validation Policy",
    "hyperparameters": "Hyperparameters",
    "searcher.name": "Searcher",
    "searcher.metric": "Searcher",
    "searcher.smaller_is_better": "Searcher",
    "searcher.max_trials": "Searcher: random, adaptive ASHA",
    "searcher.max_concurrent_trials": "Searcher: random, grid, adaptive ASHA",
    "searcher.time_metric": "Searcher: adaptive ASHA",
    "searcher.max_time": "Searcher: adaptive ASHA",
    "searcher.max_rungs": "Searcher: adaptive ASHA",
    "searcher.divisor": "Searcher: adaptive ASHA",
    "searcher.mode": "Searcher: adaptive ASHA",
    "resources.slots_per_trial": "Resources",
    "reproducibility.experiment_seed": "Reproducibility",
}
PERIODS = ("records", "batches", "epochs")
RANGES = {
    "const": {"val"},
    "int": {"minval", "maxval", "count"},
    "double": {"minval", "maxval", "count"},
    "log": {"base", "minval", "maxval", "count"},
    "categorical": {"vals"},
}


def fields(config: dict[str, Any]) -> set[str]:
    found = set()
    for key, value in config.items():
        nested = isinstance(value, dict) and key in (
            "searcher",
            "resources",
            "reproducibility",
            "checkpoint_storage",
        )
        found |= {f"{key}.{inner}" for inner in value} if nested else {key}
    return found


def ranges(value: Any) -> list[dict[str, Any]]:
    """Every mapping with a ``type`` among hyperparameters, which the master takes for a range, whatever it is."""
    if not isinstance(value, dict):
        return []
    return [value] if "type" in value else [found for inner in value.values() for found in ranges(inner)]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_experiment_file_is_one_for_the_master(file):
    config = util.safe_load_yaml_with_exceptions(file.read_text())
    assert fields(config) <= DOCUMENTED.keys()
    assert config["entrypoint"] == "python3 -m harness.launch python3 train.py"
    assert next(iter(config["min_validation_period"])) in PERIODS
    for each in ranges(config["hyperparameters"]):
        assert each.keys() - {"type"} <= RANGES[each["type"]], f"{file}: {each}"


def test_tests_that_share_a_launch_stay_in_one_worker(request):
    """pytest-xdist renames what it groups, which it cannot with every pytest, and then says nothing."""
    assert not getattr(request.config.option, "loadgroup", False) or "@" in request.node.nodeid


def test_the_upload_is_small_and_whole(tmp_path):
    """As ``det experiment create`` builds it, from a folder in which the README's commands were run."""
    folder = tmp_path / "project"
    hidden = shutil.ignore_patterns(".git", ".venv", "runs", "data", "__pycache__", ".*_cache")
    shutil.copytree(PROJECT, folder, ignore=hidden)
    made = ["best/net.pt", "checkpoints/uuid/net.pt", "runs/mine/net.pt", "net.pt", "net.json", "net.onnx"]
    made += [
        "net.onnx.data",
        "net.safetensors",
        "net-int8.onnx.json",
        "net.pt2",
        "published/config.json",
        "report.html",
        "data/cifar/batch",
    ]
    for name in made:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(1_000_000))
    items = {item.path: item for item in context.read_v1_context(folder)}
    assert not items.keys() & set(made)
    needed = {
        "train.py",
        "model_def.py",
        "net.py",
        "data.py",
        "harness/trainer.py",
        "harness/launch.py",
        "harness/checkpoints/files.py",
        "classify/engine/trial_config.py",
        "ds_config.json",
        "startup-hook.sh",
    }
    assert needed <= items.keys()
    assert {f"experiments/{file.name}" for file in PROJECT.glob("experiments/*.yaml")} <= items.keys()
    sizes = [len(item.content or "") for item in items.values()]  # in base64
    assert max(sizes) < 40_000 and sum(sizes) < 1_500_000  # code, and no more; the master takes 95 MB
    unwanted = ("tests", "runs", "data/", ".venv", ".git/", "docs", "benchmarks")
    assert not [path for path in items if path.startswith(unwanted) or "__pycache__" in path]


def test_local_test_mode(tmp_path):
    """The real ``det``, once as a command, and for the other files that one process can run by its own entry point."""
    const = execute([str(BIN / "det"), "experiment", "create", "const.yaml", ".", *LOCAL_TEST], tmp_path)
    assert const.code == 0, const.stderr
    assert "The test experiment passed." in const.stdout + const.stderr
    others = [
        file
        for file in FILES
        if file.stem not in ("const", "pipeline") and not file.stem.startswith("photos")
    ]  # which download weights
    script = tmp_path / "all.py"
    script.write_text(
        "import sys\nfrom determined.cli import cli\n"
        f"for file in {[str(file.relative_to(PROJECT)) for file in others]!r}:\n"
        f"    cli.main(['experiment', 'create', file, '.', *{LOCAL_TEST!r}])\n"
        f"text = [*{LOCAL_TEST[:3]!r}, 'entrypoint=examples.text:TextTrial']\n"
        "cli.main(['experiment', 'create', 'examples/text.yaml', '.', *text])\n"
    )
    run = execute([sys.executable, str(script)], tmp_path)
    assert run.code == 0, run.stderr
    assert (run.stdout + run.stderr).count("The test experiment passed.") == len(others) + 1
    assert not list(PROJECT.glob("None*"))  # what a path that is missing would be called


def bare_environment(folder: pathlib.Path, without: str) -> pathlib.Path:
    """A virtual environment that sees this one's packages but for some, and its own ``python3``."""
    venv.create(folder, with_pip=True)
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    seen = folder / "seen"
    seen.mkdir()
    for path in site.iterdir():
        if not (without and path.name.startswith(without)) and path.name not in ("pip", "__pycache__"):
            (seen / path.name).symlink_to(path)
    own = next((folder / "lib").glob("python*")) / "site-packages"
    (own / "seen.pth").write_text(str(seen))
    return own


def run_hook(venv_folder: pathlib.Path, **environment: str) -> subprocess.CompletedProcess:
    """Sources the startup hook as the master does, which has bash print what it runs."""
    path = f"{venv_folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "", **environment}
    hook = (
        "set -ex; source startup-hook.sh; set +x; python3 -c 'import attrdict, torch; print(torch.__file__)'"
    )
    return subprocess.run(
        ["bash", "-c", hook], cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT
    )


NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/nothing", "PIP_RETRIES": "0"}


@pytest.mark.parametrize("without", ["attrdict", ""])
def test_the_startup_hook_installs_what_is_missing(tmp_path, without):
    """What is there stays, nothing is said, and where nothing is missing the index is not asked."""
    folder = tmp_path / "venv"
    own = bare_environment(folder, without)
    before = {path.name for path in own.iterdir()}
    if without:
        run = run_hook(folder, **NO_INDEX)
        assert run.returncode == 1 and not run.stdout
        assert "\nstartup-hook.sh: cannot install attrdict3==2.0.2; use an image" in run.stderr
    run = run_hook(folder, **({} if without else NO_INDEX))
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{folder / 'seen/torch/__init__.py'}\n"
    assert run.stderr == "+ source startup-hook.sh\n"
    added = {path.name for path in own.iterdir()} - before - {"__pycache__"}
    assert any(name.startswith("attrdict") for name in added) == bool(without)
    assert not [name for name in added if name.startswith(("torch", "numpy", "deepspeed"))]
