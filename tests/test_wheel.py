"""The wheel: its files, its dependencies, the page's trial with the wheel alone, and the command."""

import ast
import email
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from folders import save
from support import PROJECT, environment, execute, time_limit, wait_until

BUILD = "from setuptools import build_meta; build_meta.build_wheel('.')"
COPIED = """pyproject.toml LICENSE .detignore const.yaml distributed.yaml ds_config.json startup-hook.sh docs/own-trial.md
deepspeed_trial classify workbench experiments train.py search.py checkpoint.py shards.py model_def.py data.py
net.py""".split()
PROGRAMS = ("*.py", "classify/**/*.py", "workbench/**/*.py")
OPTIONAL = {"fsspec", "mlflow", "ray", "wandb"}  # stores of checkpoints, searches on Ray, trackers
RUN = "import deepspeed_trial, runpy; print(deepspeed_trial.__file__); runpy.run_path('trial.py', run_name='__main__')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, without the network."""
    folder = tmp_path_factory.mktemp("build")
    for name in COPIED:
        (folder / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, folder / name)
    built = execute([sys.executable, "-c", BUILD], folder, cwd=folder)
    assert built.code == 0, built.stderr
    (file,) = folder.glob("*.whl")
    return file


def imported(*patterns: str) -> set[str]:
    """Find the packages that files import."""
    names = set()
    for file in [file for pattern in patterns for file in PROJECT.glob(pattern)]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
    own = {path.stem for path in PROJECT.glob("*") if path.suffix in ("", ".py")}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - own


def required(described: email.message.Message) -> set[str]:
    lines = [line for line in described.get_all("Requires-Dist", []) if "extra ==" not in line]
    return {name_of(line) for line in lines}


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def test_the_wheel_has_two_packages_and_names_every_dependency(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        described = email.message_from_bytes(archive.read(metadata))
    tops = {"classify", "deepspeed_trial", metadata.partition("/")[0]}
    assert {name.partition("/")[0] for name in names} == tops
    for pattern, place in {"deepspeed_trial/**/*.py": "", "classify/**/*.py": "", **dict.fromkeys(
        ("workbench/**/*", "experiments/*", "ds_config.json", "train.py", "net.py"), "classify/project/"
    )}.items():  # fmt: skip
        files = [file for file in PROJECT.glob(pattern) if file.is_file() and file.suffix != ".pyc"]
        assert {f"{place}{file.relative_to(PROJECT)}" for file in files} <= names
    packages = importlib.metadata.packages_distributions()
    needed = {
        package: {name_of(name) for name in packages[package]}
        for package in imported("deepspeed_trial/**/*.py", *PROGRAMS) - OPTIONAL
    }
    assert not [package for package, those in needed.items() if not those & required(described)]
    pinned = {
        name_of(line) for line in (PROJECT / "requirements.txt").read_text().splitlines() if line[0] != "#"
    }
    assert pinned - {"setuptools"} <= required(described)


def test_deepspeed_trial_needs_few_packages():
    """The image classifier's packages are no part of it."""
    text = (PROJECT / "pyproject.toml").read_text()
    own = text.partition("# deepspeed_trial\n")[2].partition("# classify")[0]
    packages = importlib.metadata.packages_distributions()
    found = {package: packages[package] for package in imported("deepspeed_trial/**/*.py") - OPTIONAL}
    listed = {name_of(line) for line in re.findall(r'"(.*)"', own)}
    assert not [package for package, names in found.items() if not {*map(name_of, names)} & listed]
    assert listed - {"tensorboard"} <= {name_of(name) for names in found.values() for name in names}


def page_trial(folder: pathlib.Path) -> pathlib.Path:
    """Write the minimal trial of docs/own-trial.md into a folder."""
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (PROJECT / "docs/own-trial.md").read_text(), re.M | re.S
    )
    folder.mkdir(exist_ok=True)
    (folder / "trial.py").write_text(program)
    return folder


def weights(folder: pathlib.Path) -> list[torch.Tensor]:
    return [*torch.load(folder / "sine.pt").values()]


def test_the_trial_of_the_page_runs_with_the_wheel_alone(tmp_path, wheel):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    folder = page_trial(tmp_path / "mine")
    done = execute([sys.executable, "-c", RUN], folder, cwd=folder, PYTHONPATH=str(tmp_path / "installed"))
    assert done.code == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/installed/deepspeed_trial/")
    assert "epoch 20/20  step 320/320  validation  loss 0.0" in done.stdout
    assert len(weights(folder)) == 4


COMMAND = """
import pathlib, sys
from classify.__main__ import main
code = main(["photos", "--check"]) or main(["train", "--config", "experiments/digits.yaml", "--check"])
import net, workbench
print(net.__file__, workbench.__file__, sep="\\n")
sys.exit(code)
"""


def test_the_command_of_the_wheel_runs_in_an_empty_folder(tmp_path, wheel):
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        (scripts,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        assert "classify = classify.__main__:main" in archive.read(scripts).decode()
    home = tmp_path / "home"
    for name in ("Bär", "Öl"):
        for number in range(10):
            save(home / "photos" / name / f"{number}.png", number * 20)
    done = execute([sys.executable, "-c", COMMAND], home, cwd=home, PYTHONPATH=str(installed))
    assert done.code == 0, done.stderr
    assert "photos: 20 in 2 classes (Bär 10, Öl 10)" in done.stdout
    assert "digits: 1,437 to train" in done.stderr
    project = installed / "classify/project"
    assert done.stdout.splitlines()[-2:] == [f"{project}/net.py", f"{project}/workbench/__init__.py"]


@pytest.mark.soak
def test_a_killed_run_of_an_empty_environment_ends_with_the_same_weights(tmp_path, wheel):
    """pip installs the wheel and its dependencies, 6 GB; ``DEEPSPEED_TRIAL_PYTHON`` names a Python that has them."""
    python = os.environ.get("DEEPSPEED_TRIAL_PYTHON")
    if python is None:
        python = str(tmp_path / "venv/bin/python")
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True)
    whole, killed = page_trial(tmp_path / "whole"), page_trial(tmp_path / "killed")
    done = execute([python, "trial.py"], whole, cwd=whole, PYTHONPATH="")
    assert done.code == 0, done.stderr

    with subprocess.Popen([python, "trial.py"], cwd=killed, env=environment(PYTHONPATH="")) as program:
        metrics = killed / "runs/sine/metrics.jsonl"
        # A checkpoint is due after 32 steps
        wait_until(lambda: metrics.exists() and '"steps_completed": 48' in metrics.read_text())
        program.kill()
        assert program.wait(time_limit()) < 0
    assert not (killed / "sine.pt").exists()
    again = execute([python, "trial.py"], killed, cwd=killed, PYTHONPATH="")
    assert again.code == 0, again.stderr
    assert "epoch 1/20" not in again.stdout and "epoch 20/20" in again.stdout
    assert all(map(torch.equal, weights(whole), weights(killed)))
    if "DEEPSPEED_TRIAL_PYTHON" not in os.environ:
        shutil.rmtree(tmp_path / "venv")
