"""Errors that are reported in one line each, without a traceback."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed_trial import redaction

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class InvalidInput(ValueError):
    """Bad configuration or data, which the user can mend.

    Every error is one line that names the key or file, its value and what to do. Programs print the lines on
    stderr and exit with code 2; on a cluster they end the trial as an invalid hyperparameter set.

    Args:
        errors: one line, or several when more than one thing is wrong; made ``printable``.

    Attributes:
        is_every_rank_s: whether all ranks raise it, so that one of them says it for all.
    """

    is_every_rank_s = True

    def __init__(self, errors: str | Iterable[str]) -> None:
        self.errors = [printable(each) for each in ([errors] if isinstance(errors, str) else errors)]
        super().__init__("\n".join(self.errors))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


class UnreadableData(InvalidInput):
    """Data that cannot be read in the middle of a training, as one rank alone may find.

    On a cluster the trial is started again: a server may be back by then.
    """

    is_every_rank_s = False


class UnusableCheckpoint(InvalidInput, AssertionError):
    """A checkpoint from which the trial cannot go on.

    An ``AssertionError`` as well, which Determined raises where engines cannot load theirs.
    """


class TrainingStopped(RuntimeError):
    """Training cannot go on, e.g. because the disk is full or the loss is NaN.

    The message is one line that says why and what was saved. Programs print it and exit with code 1.

    Attributes:
        is_every_rank_s: as of ``InvalidInput``.
    """

    is_every_rank_s = False

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Diverged(TrainingStopped):
    """The loss or the gradients of all ranks together are not finite."""

    is_every_rank_s = True


class LostRank(TrainingStopped):
    """Another rank is gone, which is not this one's fault: on a cluster the trial is started again."""


class ErrorList:
    """Collects the errors of several checks, so that all are reported at once.

    Attributes:
        lines: the errors so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Keeps the lines of an ``InvalidInput`` that is raised inside, and goes on after the block."""
        try:
            yield
        except InvalidInput as error:
            self.lines += error.errors

    def raise_any(self) -> None:
        """Raises all errors, each once, as one ``InvalidInput``."""
        if self.lines:
            raise InvalidInput(dict.fromkeys(self.lines))


def add_new(errors: Iterable[str], more: Iterable[str]) -> list[str]:
    """The errors, and of more those whose key has not been named yet, nor one within or around it."""
    found = list(errors)
    named = [_path(each) for each in found]
    return found + [each for each in more if not any(_overlap(_path(each), other) for other in named)]


def _path(line: str) -> list[str]:
    """The path of the key that a line begins with; DeepSpeed's keys are named with and without a head."""
    key = line.split(": ")[0].removeprefix("hyperparameters.").removeprefix("overwrite_deepspeed_args.")
    return key.split(".")


def _overlap(one: list[str], other: list[str]) -> bool:
    return all(a == b for a, b in zip(one, other, strict=False))


def print_errors(program: str, error: InvalidInput) -> int:
    """Print every error as a line on stderr, once for all ranks, and return the exit code 2."""
    if is_said_here(error):
        for line in error.errors:
            print(f"{program}: {line}", file=sys.stderr)
    return 2


def is_said_here(error: InvalidInput | TrainingStopped) -> bool:
    """Whether this rank is the one to say an error: rank 0 says what every rank raises."""
    rank = os.environ.get("RANK", "0")
    return not error.is_every_rank_s or not rank.isdecimal() or int(rank) == 0


def printable(text: object) -> str:
    """Return a text as a terminal or page may show it.

    URLs lose their credentials. A character that nobody can see is written as in Python.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in redaction.text(str(text))
    )


def one_line(error: BaseException, most: int = 500) -> str:
    """Return the message of an error without line breaks; with its type if it has none, or is a key alone.

    Args:
        error: the error; foreign bytes may be part of its message.
        most: characters that are shown.
    """
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # a folder's copy: of every file
        error = OSError(error.args[0][0][2])
    text = printable(" ".join(str(error).split()))
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= most else f"{text[:most]} ..."


def why_unloadable(error: BaseException) -> str:
    """Why ``torch.load`` refuses a file, without its advice to load it all the same."""
    text = one_line(error, 5_000)  # the advice comes first
    before, after = r"(?:WeightsUnpickler error: |trusted source\. )", r"(?= Check the doc| Please use|$)"
    found = re.search(rf"{before}(?!Please|\(2\))(.*?)\.?{after}", text)
    if found:
        return found[1]
    return text if isinstance(error, (OSError, RuntimeError, ValueError)) else "no file of torch.save"


def nearest(key: object, known: Iterable[object], prefixes: Mapping[str, str] | None = None) -> str:
    """Says which of the known keys a mistyped one may be, for an error line.

    Args:
        key: the mistyped one.
        known: the keys that there are.
        prefixes: what to write before those of them that stand elsewhere.
    """
    names = sorted(str(k) for k in known)
    if close := _closest(str(key), names):
        return f"did you mean {(prefixes or {}).get(close, '') + close!r}?"
    return f"use one of {', '.join(names)}" if len(names) <= 20 else "remove it"


# Names that other programs have for keys of this one and of DeepSpeed's.
SYNONYMS = {
    "ema": "weight_average",
    "swa": "weight_average",
    "learning_rate": "lr",
    "wd": "weight_decay",
    "epochs": "max_length",
    "batches": "max_length",
    "max_epochs": "max_length",
    "max_steps": "max_length",
    "model": "net",
    "arch": "net",
    "tta": "test_time_augmentation",
    "batch_size": "train_batch_size",
    "grad_clip": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "seed": "experiment_seed",
}


def _closest(key: str, names: Sequence[str]) -> str | None:
    """Return the name that a mistyped key may be: a synonym, a typo, the same words, or one alike."""
    wanted = SYNONYMS.get(key.lower(), key)
    for name in names:
        if wanted == name.rpartition(".")[2]:
            return name
    if typo := difflib.get_close_matches(key, names, n=1, cutoff=0.9):
        return typo[0]
    same = [name for name in names if _words(key) and all(_is_among(each, name) for each in _words(key))]
    alike = difflib.get_close_matches(key, names, n=1, cutoff=0.65)
    return min(same or alike, key=lambda name: (len(_words(name)), -_likeness(key, name)), default=None)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", name.lower())


def _is_among(word: str, name: str) -> bool:
    """Whether a word is one of a name's words, begins one, or is a mistyped one."""
    return any(
        (len(word) > 2 and each.startswith(word)) or _likeness(word, each) >= 0.8 for each in _words(name)
    )


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
