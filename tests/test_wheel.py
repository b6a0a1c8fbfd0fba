"""The wheel of ``deepspeed_trial``: its files, its dependencies, and the page's trial with the wheel alone."""

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
from support import PROJECT, environment, execute, time_limit, wait_until

BUILD = "from setuptools import build_meta; build_meta.build_wheel('.')"
OPTIONAL = {"mlflow", "wandb"}  # for trackers
RUN = "import deepspeed_trial, runpy; print(deepspeed_trial.__file__); runpy.run_path('trial.py', run_name='__main__')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, without the network."""
    folder = tmp_path_factory.mktemp("build")
    for name in (
        "pyproject.toml",
        "deepspeed_trial",
        "docs/own-trial.md",
        "classify/__init__.py",
        "model_def.py",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, folder / name)
    built = execute([sys.executable, "-c", BUILD], folder, cwd=folder)
    assert built.code == 0, built.stderr
    (file,) = folder.glob("*.whl")
    return file


def imported() -> set[str]:
    """Find the packages that deepspeed_trial imports."""
    names = set()
    for file in PROJECT.glob("deepspeed_trial/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"deepspeed_trial"}


def test_the_wheel_has_the_package_alone_and_names_every_dependency(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        described = email.message_from_bytes(archive.read(metadata))
    assert {name.partition("/")[0] for name in names} == {"deepspeed_trial", metadata.partition("/")[0]}
    sources = {str(file.relative_to(PROJECT)) for file in PROJECT.glob("deepspeed_trial/**/*.py")}
    assert sources | {"deepspeed_trial/py.typed"} <= {*names}
    lines = [line for line in described.get_all("Requires-Dist", []) if "extra ==" not in line]
    required = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines}
    packages = importlib.metadata.packages_distributions()
    needed = {
        package: {name.lower().replace("_", "-") for name in packages[package]}
        for package in imported() - OPTIONAL
    }
    assert not [package for package, distributions in needed.items() if not distributions & required]
    assert required - {"tensorboard"} <= set().union(*needed.values())  # torch's writer needs tensorboard


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
