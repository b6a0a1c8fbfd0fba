"""Error lines for a training that runs out of memory."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator

from deepspeed_trial.errors import TrainingStopped, one_line
from deepspeed_trial.machine import peak_memory

ONEDNN = "could not create a primitive"  # oneDNN's whole message; for other causes it is longer


@contextlib.contextmanager
def explain_out_of_memory(when: Callable[[], str], advice: Callable[[], str]) -> Iterator[None]:
    """End the block with one line of advice when the process or a data loader's worker runs out of memory.

    Args:
        when: returns the current step as text.
        advice: returns a change that saves memory, as text.

    Raises:
        TrainingStopped: if memory runs out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if str(error).startswith("DataLoader worker"):  # torch's words for a killed worker
            what = f"a worker process of the data loader ended {when()} ({one_line(error)})"
            raise TrainingStopped(f"{what}; give it more memory or /dev/shm, or use fewer workers") from error
        if isinstance(error, TrainingStopped) or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the memory that the explanation needs
        reason = re.sub(r"^\[enforce fail[^]]*\] [^.]*\. ", "", one_line(error)).split(". ")[0]
        what = f"no memory left {when()} ({reason}), after {peak_memory():,.0f} MiB"
        raise TrainingStopped(f"{what}; {advice()}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the host has run out of memory."""
    messages = ("not enough memory", "can't allocate memory", "out of memory")
    says_so = any(text in str(error) for text in messages) or str(error) == ONEDNN
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_so)
