"""Fixtures that tests share: the runs of the matrix, runs of train.py, small image folders and shards."""

import os
import pathlib
from typing import Any

import numpy as np
import pytest
from folders import save
from matrix import Runs
from PIL import Image
from sklearn.datasets import load_digits
from sources import CLASSES, NAMES
from support import TWO, Run, checkpoints, overrides, run, train_many

import shards


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file, or of a row of the matrix, in one worker: see --dist in pyproject.toml."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        group = parameters.get("name", "") if item.path.stem == "test_matrix" else ""
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {group}"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    """The runs of the matrix, which the workers share."""
    mine = tmp_path_factory.getbasetemp()
    folder = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "matrix"
    folder.mkdir(exist_ok=True)
    return Runs(folder)


@pytest.fixture
def train(tmp_path):
    """Run train.py in a fork: ``train("--config", FILE, processes=2)``."""
    numbers = iter(range(100))

    def train(*arguments: str, processes: int = 0, output: pathlib.Path | None = None, **env: Any) -> Run:
        output = output or tmp_path / f"run{next(numbers)}"
        return run(["train.py", *arguments, "--output", str(output)], output, processes=processes, **env)

    return train


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> pathlib.Path:
    """A real image folder: digits 0 to 3 as PNG files, 40 a class to train and 13 to test."""
    root = tmp_path_factory.mktemp("images")
    digits = load_digits()
    for label in range(4):
        images = digits.images[digits.target == label]
        for index, image in enumerate(images[:53]):
            folder = root / ("train" if index < 40 else "test") / f"digit {label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).resize((48, 40)).save(folder / f"{index:03}.png")
    return root


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> pathlib.Path:
    """Images of noise, with names of all kinds, in three classes, to train and to test."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for part, each in (("train", NAMES), ("test", NAMES[:2])):
        for label in CLASSES:
            for name in each:
                image = Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=np.uint8))
                save(root / part / label / name, image)
    return root


@pytest.fixture(scope="session")
def written(photos, tmp_path_factory) -> pathlib.Path:
    """Shards of a few of these images."""
    target = tmp_path_factory.mktemp("shards")
    assert shards.main(["write", str(photos), str(target), "--size-limit", "40KB"]) == 0
    assert len(list(target.glob("train-*.tar"))) > 2
    return target


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A run with whole checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two")
    (run,) = train_many(folder, {"run": [*TWO, *overrides(checkpoint_storage__save_trial_latest=2)]}).values()
    assert run.code == 0, run.stderr
    assert set(checkpoints(run)) == {2, 4}
    return run


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Classes a and b: greys 10, 20 and 30, 40 to train, 50 and 60 to test."""
    root = tmp_path / "folder"
    for grey, path in enumerate(
        ["train/a/1", "train/a/2", "train/b/1", "train/b/2", "test/a/1", "test/b/1"], start=1
    ):
        save(root / f"{path}.bmp", grey * 10)
    return root
