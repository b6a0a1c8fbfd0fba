"""The planted bugs: each patch fits the code, so that the soak can plant it."""

import pathlib
import subprocess

import pytest
from support import PROJECT


@pytest.mark.parametrize("patch", sorted(PROJECT.glob("tests/planted/*.patch")), ids=lambda path: path.stem)
def test_a_planted_bug_fits_the_code(patch: pathlib.Path):
    run = subprocess.run(["git", "apply", "--check", patch], cwd=PROJECT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
