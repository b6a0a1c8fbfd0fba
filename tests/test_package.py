"""The upload to a cluster, the startup hook, the experiment files, and the local test mode of ``det``."""

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
from support import PROJECT, execute, run, time_limit

FILES = sorted([*PROJECT.glob("[!.]*.yaml"), *PROJECT.glob("experiments/*.yaml")])
LOCAL_TEST = "--local --test --config entrypoint=model_def:CIFARTrial --config data.dataset=digits".split()
NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/nothing", "PIP_RETRIES": "0"}

# By https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/experiment-config-reference.rst
DOCUMENTED = """name data entrypoint scheduling_unit max_restarts checkpoint_policy min_validation_period hyperparameters
searcher.name searcher.metric searcher.smaller_is_better searcher.max_trials searcher.max_concurrent_trials
searcher.time_metric searcher.max_time searcher.max_rungs searcher.divisor searcher.mode resources.slots_per_trial
reproducibility.experiment_seed""".split()
SECTIONS = {"searcher", "resources", "reproducibility", "checkpoint_storage"}
BOUNDS = {"minval", "maxval", "count"}
RANGES = {
    "const": {"val"},
    "int": BOUNDS,
    "double": BOUNDS,
    "log": {"base", *BOUNDS},
    "categorical": {"vals"},
}


def ranges(value: Any) -> list[dict[str, Any]]:
    """Find the mappings with a ``type`` among hyperparameters: the master takes every one for a range."""
    if not isinstance(value, dict):
        return []
    return [value] if "type" in value else [found for inner in value.values() for found in ranges(inner)]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_experiment_file_is_one_for_the_master(file):
    config = util.safe_load_yaml_with_exceptions(file.read_text())
    fields = {f"{key}.{name}" for key in SECTIONS for name in config.get(key) or {}}
    assert fields | config.keys() - SECTIONS <= {*DOCUMENTED}
    assert config["entrypoint"] == "python3 -m deepspeed_trial.launch python3 train.py"
    assert next(iter(config["min_validation_period"])) in ("records", "batches", "epochs")
    for each in ranges(config["hyperparameters"]):
        assert each.keys() - {"type"} <= RANGES[each["type"]], f"{file}: {each}"


def test_tests_of_a_file_stay_in_one_worker(request):
    """pytest-xdist renames the tests of a group; with some releases of pytest it cannot, and says nothing."""
    assert not getattr(request.config.option, "loadgroup", False) or "@" in request.node.nodeid


MADE = """best/net.pt checkpoints/uuid/net.pt runs/mine/net.pt net.pt net.json net.onnx net.onnx.data net.safetensors
net-int8.onnx.json published/config.json report.html data/cifar/batch
build/lib/deepspeed_trial/loop.py deepspeed_trial.egg-info/PKG-INFO""".split()
NEEDED = """train.py model_def.py net.py data.py deepspeed_trial/trainer.py deepspeed_trial/launch.py deepspeed_trial/checkpoints/files.py
classify/engine/trial_config.py ds_config.json startup-hook.sh""".split()


def test_the_upload_is_small_and_whole(tmp_path):
    """``det experiment create`` builds it, after somebody ran the README's commands in the folder."""
    folder = tmp_path / "project"
    hidden = shutil.ignore_patterns(".git", ".venv", "runs", "data", "__pycache__", ".*_cache")
    shutil.copytree(PROJECT, folder, ignore=hidden)
    for name in MADE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(1_000_000))
    items = {item.path: item for item in context.read_v1_context(folder)}
    assert not items.keys() & {*MADE}
    experiments = {f"experiments/{file.name}" for file in PROJECT.glob("experiments/*.yaml")}
    assert experiments | {*NEEDED} <= items.keys()
    sizes = [len(item.content or "") for item in items.values()]  # in base64
    assert max(sizes) < 40_000 and sum(sizes) < 1_500_000  # code, and no more; the master takes 95 MB
    unwanted = ("tests", "runs", "data/", ".venv", ".git/", "docs", "benchmarks", "workbench")
    assert not [path for path in items if path.startswith(unwanted) or "__pycache__" in path]


def test_local_test_mode(tmp_path):
    det = str(pathlib.Path(sys.executable).with_name("det"))
    const = execute([det, "experiment", "create", "const.yaml", ".", *LOCAL_TEST], tmp_path)
    assert const.code == 0, const.stderr
    assert "The test experiment passed." in const.stdout + const.stderr


@pytest.mark.soak
@pytest.mark.parametrize("file", [*FILES, PROJECT / "examples/text.yaml"], ids=lambda file: file.stem)
def test_local_test_mode_of_every_file(tmp_path, file):
    """Call the entry point of ``det``."""
    if file.stem.startswith(("pipeline", "photos")):
        pytest.skip("a pipeline needs two processes, and the photographs' files download weights")
    text = ["--config", "entrypoint=examples.text:TextTrial"] * (file.stem == "text")
    create = ["experiment", "create", str(file), ".", *LOCAL_TEST, *text]
    made = run(["-c", f"from determined.cli import cli; cli.main({create!r})"], tmp_path)
    assert made.code == 0, made.stderr
    assert "The test experiment passed." in made.stdout + made.stderr
    assert not list(PROJECT.glob("None*"))  # the name that a missing path would have


def run_hook(python: pathlib.Path, **more: str) -> subprocess.CompletedProcess:
    """Source the startup hook as the master does: its bash prints the commands."""
    env = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}", "PYTHONPATH": "", **more}
    hook = "set -ex; source startup-hook.sh; set +x; python3 -c 'import attrdict; print(attrdict.__file__)'"
    shown: Any = {"capture_output": True, "text": True, "timeout": time_limit()}
    return subprocess.run(["bash", "-c", hook], cwd=PROJECT, env=env, **shown)


def test_the_startup_hook_does_nothing_where_all_is_there():
    """It says nothing, and asks no index."""
    hook = run_hook(pathlib.Path(sys.executable).parent, **NO_INDEX)
    assert (hook.returncode, hook.stderr) == (0, "+ source startup-hook.sh\n")
    assert hook.stdout.startswith(sysconfig.get_paths()["purelib"])


@pytest.mark.soak
def test_the_startup_hook_installs_what_is_missing(tmp_path):
    """A virtual environment lacks only attrdict; the hook installs it, prints nothing, and keeps the rest."""
    venv.create(tmp_path / "venv", with_pip=True)
    seen, python = tmp_path / "seen", tmp_path / "venv/bin"
    seen.mkdir()
    for path in pathlib.Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith("attrdict") and path.name not in ("pip", "__pycache__"):
            (seen / path.name).symlink_to(path)
    (own,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (own / "seen.pth").write_text(str(seen))
    before = {path.name for path in own.iterdir()}
    failed = run_hook(python, **NO_INDEX)
    assert failed.returncode == 1 and not failed.stdout
    assert "\nstartup-hook.sh: cannot install attrdict3==2.0.2; use an image" in failed.stderr
    hook = run_hook(python)
    assert (hook.returncode, hook.stderr) == (0, "+ source startup-hook.sh\n")
    assert hook.stdout == f"{own / 'attrdict/__init__.py'}\n"
    added = {path.name for path in own.iterdir()} - before - {"__pycache__"}
    assert not [name for name in added if name.startswith(("torch", "numpy", "deepspeed"))]
