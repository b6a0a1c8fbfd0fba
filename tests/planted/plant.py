"""Plant each bug of this folder in a copy of the project, and run the tests that have to catch it.

The head of a patch has a line ``Bug:``, the effect for a user, and a line ``Tests:``, the arguments of pytest. A
failed test kills the bug; tests that cannot be collected kill nothing. The exit code is 1 if a bug survives.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
PASSED, FAILED = 0, 1  # exit codes of pytest; all others say that it did not run the tests


class Unusable(Exception):
    """A patch that cannot be planted, or whose tests do not run."""


def main() -> int:
    """Plant the bugs, print a line for each, and return the exit code."""
    known = {path.stem: path for path in sorted(HERE.glob("*.patch"))}
    parser = argparse.ArgumentParser(description="Shows which of the planted bugs the tests catch.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a patch, without .patch; all by default")
    names = parser.parse_args().names or [*known]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such patch: {', '.join(unknown)}")
    killed = 0
    for name in names:
        started = time.monotonic()
        try:
            failed = first_failure(known[name])
        except Unusable as error:
            result = f"ERROR: {error}"
        else:
            killed += bool(failed)
            result = f"killed by {failed}" if failed else "SURVIVED"
        print(f"{name}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{killed} of {len(names)} killed")
    return 0 if killed == len(names) else 1


def first_failure(patch: pathlib.Path) -> str | None:
    """Return the id of the first test that fails with the bug, or None."""
    arguments = tests_of(patch)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = pathlib.Path(folder) / PROJECT.name
        copy_project(copy)
        plant(patch, copy)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        run = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode == PASSED:
        return None
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    named = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
    if run.returncode != FAILED or not named:
        raise Unusable(f"pytest ends with {run.returncode}: {lines[-1] if lines else 'it says nothing'}")
    first = named[0].split(" - ")[0]
    if "::" not in first:  # pytest ends with 1 there, too, because of -x
        raise Unusable(f"pytest cannot collect {first}")
    return first


def tests_of(patch: pathlib.Path) -> list[str]:
    """Return the arguments of pytest in the head of a patch."""
    head = patch.read_text().split("diff --git", 1)[0].splitlines()
    tests = [line.removeprefix("Tests:").strip() for line in head if line.startswith("Tests:")]
    if len(tests) != 1 or tests[0] in ("", "TODO"):
        raise Unusable("the head of the patch names no tests")
    return shlex.split(tests[0])


def copy_project(copy: pathlib.Path) -> None:
    """Copy all files except ignored ones."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (PROJECT / name).is_file():  # a file that is deleted stays in the list until the commit
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, copy / name)


def plant(patch: pathlib.Path, copy: pathlib.Path) -> None:
    """Apply a patch to a copy.

    Raises:
        Unusable: if the patch changes no file, or a changed file does not compile.
    """
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}  # git looks for no repository
    run = subprocess.run(["git", "apply", patch], cwd=copy, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise Unusable(f"the patch does not apply: {run.stderr.strip()}")
    changed = [line[6:] for line in patch.read_text().splitlines() if line.startswith("+++ b/")]
    for name in changed:
        if (copy / name).read_bytes() == (PROJECT / name).read_bytes():
            raise Unusable(f"the patch does not change {name}")
        if name.endswith(".py"):
            try:
                compile((copy / name).read_bytes(), name, "exec")
            except SyntaxError as error:
                raise Unusable(f"{name} does not compile: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
