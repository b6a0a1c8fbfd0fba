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
DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugpy")
DECORATORS = ("wrapper", "log_wrapper", "decorate_context", "wrapped_fn")
COLLECTIVES = {"distributed_c10d.py": "", "_distributed.py": "Determined's "}


def frames_of_training() -> list[traceback.FrameSummary]:
    """Those of the main thread, outermost first, without their source lines."""
    return _frames(sys._current_frames()[threading.main_thread().ident or 0])


def all_stacks() -> str:
    """The main thread's frames, and those of other threads that do something, as Python shows them."""
    names = {each.ident: each.name for each in threading.enumerate()}
    shown = [_shown(frames_of_training())]
    for ident, frame in sys._current_frames().items():
        frames = _frames(frame)
        is_ours = names.get(ident, "").startswith("harness.") or ident == threading.main_thread().ident
        if not is_ours and pathlib.Path(frames[-1].filename).name not in WAITING:
            shown.append(f"thread {names.get(ident, ident)}:\n{_shown(frames)}")
    return "\n".join(shown)


def collective(frames: list[traceback.FrameSummary]) -> str:
    """The collective of torch, DeepSpeed or Determined that the innermost frames are in; empty if none."""
    inner = [each for each in frames if pathlib.Path(each.filename).name in COLLECTIVES]
    public = [each for each in inner if not each.name.startswith("_")]
    if not public and frames and frames[-1].name == "wait" and "deepspeed" in frames[-1].filename:
        return "a collective"  # begun before
    return COLLECTIVES[pathlib.Path(public[-1].filename).name] + public[-1].name if public else ""


def is_debugged(frames: list[traceback.FrameSummary]) -> bool:
    """Whether a debugger has stopped the main thread, which then waits for its user."""
    return any(name in each.filename for each in frames for name in DEBUGGERS)


def _frames(frame: FrameType) -> list[traceback.FrameSummary]:
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return [each for each in found[::-1] if each.name not in DECORATORS]


def _short(file: str) -> str:
    return file.rpartition("site-packages/")[2].removeprefix(f"{pathlib.Path.cwd()}/")


def _shown(frames: list[traceback.FrameSummary]) -> str:
    lines = [f"  {_short(each.filename)}:{each.lineno} {each.name}: {each.line}" for each in frames[-FRAMES:]]
    return "\n".join(lines)
