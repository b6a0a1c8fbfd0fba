"""The copy of a trial's code in each checkpoint of a run off a cluster."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

import determined as det

from deepspeed_trial.hooks import Code


@contextlib.contextmanager
def copying(code: Code) -> Iterator[None]:
    """Has Determined copy this code into a checkpoint instead of the working directory.

    Left out are what ``.detignore`` names, runs, which hold the checkpoints, ``code.excluded``, and what is
    neither a file nor a folder, such as a dangling link.
    """
    excluded = {path.resolve() for path in code.excluded}
    by_detignore = det.util.detignore.make_shutil_ignore(code.folder)

    def ignore(folder: str, names: list[str]) -> set[str]:
        paths = {name: pathlib.Path(folder, name) for name in names}
        more = {name for name, path in paths.items() if path.resolve() in excluded or not _is_code(path)}
        return more.union(by_detignore(folder, names))

    def write_user_code(path: pathlib.Path, is_managed: bool) -> None:
        shutil.copytree(code.folder, path / "code", ignore=ignore)

    upstream = det.util.write_user_code
    det.util.write_user_code = write_user_code
    try:
        yield
    finally:
        det.util.write_user_code = upstream


def _is_code(path: pathlib.Path) -> bool:
    is_run = (path / "run.json").exists()
    return path.is_file() or (path.is_dir() and not is_run)
