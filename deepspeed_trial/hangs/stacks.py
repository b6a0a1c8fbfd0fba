"""Where the Python threads of this process are."""

from __future__ import annotations

import pathlib
import sys
import threading
import traceback
from types import FrameType

FRAMES = 12  # innermost ones that are shown
WAITING = (
    "threading.py",
    "queue.py",
    "selectors.py",
    "_asyncio",
    "thread.py",
)  # of a thread with nothing to do
# A debugger waits for its user; Determined's session asks a master that is down again, for half an hour
EXCUSED = ("pdb.py", "bdb.py", "pydevd.py", "debugpy", "determined/common/api/_session.py")
DECORATORS = ("wrapper", "log_wrapper", "decorate_context", "wrapped_fn")
COLLECTIVES = {"distributed_c10d.py": "", "messages.py": "Determined's "}


def frames_of_training() -> list[traceback.FrameSummary]:
    """Those of the main thread, outermost first, without their source lines."""
    return _frames(sys._current_frames()[threading.main_thread().ident or 0])


def all_stacks() -> str:
    """The main thread's frames, and those of other threads that do something, with their lines.

    Without the lines where they cannot be read in a second, as from a file server that does not answer.
    """
    stacks, found = _all_frames(), []
    reader = threading.Thread(
        target=lambda: found.append(_shown(stacks, True)), daemon=True, name="deepspeed_trial.reader"
    )
    reader.start()
    reader.join(1)
    return found[0] if found else _shown(stacks, False)


def _all_frames() -> dict[str, list[traceback.FrameSummary]]:
    names = {each.ident: each.name for each in threading.enumerate()}
    stacks = {"": frames_of_training()}
    for ident, frame in sys._current_frames().items():
        frames, name = _frames(frame), names.get(ident, str(ident))
        is_ours = name.startswith("deepspeed_trial.") or ident == threading.main_thread().ident
        if frames and not is_ours and pathlib.Path(frames[-1].filename).name not in WAITING:
            stacks[name] = frames
    return stacks


def collective(frames: list[traceback.FrameSummary]) -> str:
    """The collective of torch, DeepSpeed or Determined that the innermost frames are in; empty if none."""
    inner = [each for each in frames if pathlib.Path(each.filename).name in COLLECTIVES]
    public = [each for each in inner if not each.name.startswith("_")]
    if not public and frames and frames[-1].name == "wait" and "deepspeed" in frames[-1].filename:
        return "a collective"  # begun before
    return COLLECTIVES[pathlib.Path(public[-1].filename).name] + public[-1].name if public else ""


def is_excused(frames: list[traceback.FrameSummary]) -> bool:
    """Whether the main thread waits for what is no other rank and no disk."""
    return any(name in each.filename for each in frames for name in EXCUSED)


def _frames(frame: FrameType) -> list[traceback.FrameSummary]:
    # Not StackSummary.extract, which looks at every source file
    found = [
        traceback.FrameSummary(each.f_code.co_filename, line, each.f_code.co_name, lookup_line=False)
        for each, line in traceback.walk_stack(frame)
    ]
    return [each for each in found[::-1] if each.name not in DECORATORS]


def _short(file: str) -> str:
    return file.rpartition("site-packages/")[2].removeprefix(f"{pathlib.Path.cwd()}/")


def _shown(stacks: dict[str, list[traceback.FrameSummary]], with_lines: bool) -> str:
    lines = []
    for name, frames in stacks.items():
        lines += [f"thread {name}:"] if name else []
        for each in frames[-FRAMES:]:
            source = f": {each.line}" if with_lines else ""
            lines.append(f"  {_short(each.filename)}:{each.lineno} {each.name}{source}")
    return "\n".join(lines)
