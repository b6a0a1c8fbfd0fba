"""Errors that programs report in one line each, without a traceback."""

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
    """Bad configuration or data.

    Every error is one line with the key or file, its value and the remedy. Programs print the lines on stderr
    and exit with code 2. On a cluster the trial ends, and the master does not restart it.

    Args:
        errors: one line or several; ``printable`` escapes them.

    Attributes:
        is_every_rank_s: whether all ranks raise the error, so that rank 0 alone prints it.
    """

    is_every_rank_s = True

    def __init__(self, errors: str | Iterable[str]) -> None:
        self.errors = [printable(line) for line in ([errors] if isinstance(errors, str) else errors)]
        super().__init__("\n".join(self.errors))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


class UnreadableData(InvalidInput):
    """Data that this rank cannot read during a training; other ranks may be able to.

    On a cluster the master restarts the trial, because a server may answer again by then.
    """

    is_every_rank_s = False


class UnusableCheckpoint(InvalidInput, AssertionError):
    """A checkpoint that the trial cannot continue from.

    It is also an ``AssertionError``, which Determined raises if an engine cannot load a checkpoint.
    """


class TrainingStopped(RuntimeError):
    """A training that cannot continue, e.g. because the disk is full or the loss is NaN.

    The message is one line with the reason and the remedy. Programs print it and exit with code 1.

    Attributes:
        is_every_rank_s: as in ``InvalidInput``.
    """

    is_every_rank_s = False

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Diverged(TrainingStopped):
    """The loss or the gradients, combined over all ranks, are not finite."""

    is_every_rank_s = True


class LostRank(TrainingStopped):
    """Another rank is lost; on a cluster the master restarts the trial."""


class ErrorList:
    """Collect the errors of several checks, to report all together.

    Attributes:
        lines: the errors so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Catch an ``InvalidInput`` from the block, and add its lines."""
        try:
            yield
        except InvalidInput as error:
            self.lines += error.errors

    def raise_any(self) -> None:
        """Raise all errors, without duplicates, as one ``InvalidInput``."""
        if self.lines:
            raise InvalidInput(dict.fromkeys(self.lines))


def add_new(errors: Iterable[str], more: Iterable[str]) -> list[str]:
    """Return the errors and those lines of ``more`` whose key has no error yet."""
    lines = list(errors)
    paths = [_path(line) for line in lines]
    return lines + [line for line in more if not any(_overlap(_path(line), path) for path in paths)]


def _path(line: str) -> list[str]:
    """Return the path of the key at the start of a line, without the sections around DeepSpeed's keys."""
    key = line.split(": ")[0].removeprefix("hyperparameters.").removeprefix("overwrite_deepspeed_args.")
    return key.split(".")


def _overlap(one: list[str], other: list[str]) -> bool:
    return all(a == b for a, b in zip(one, other, strict=False))


def print_errors(program: str, error: InvalidInput | TrainingStopped) -> int:
    """Print an error's lines on stderr if ``is_said_here``; return exit code 2 for bad input, else 1."""
    if is_said_here(error):
        for line in str(error).splitlines():
            print(f"{program}: {line}", file=sys.stderr)
    return 2 if isinstance(error, InvalidInput) else 1


def is_said_here(error: InvalidInput | TrainingStopped) -> bool:
    """Return whether this rank prints an error: only rank 0 prints an error that every rank raises."""
    rank = os.environ.get("RANK", "0")
    return not error.is_every_rank_s or not rank.isdecimal() or int(rank) == 0


def printable(text: object) -> str:
    """Return a text that is safe to show on a terminal or a page.

    Credentials are removed from URLs. Characters that are not printable become Python escapes.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in redaction.text(str(text))
    )


def one_line(error: BaseException, most: int = 500) -> str:
    """Return the message of an error without line breaks; add its type if the message is empty or only a key.

    Args:
        error: the error; its message may contain untrusted bytes.
        most: maximum length in characters.
    """
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # of copytree: all files' errors
        error = OSError(error.args[0][0][2])
    text = printable(" ".join(str(error).split()))
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= most else f"{text[:most]} ..."


def why_unloadable(error: BaseException) -> str:
    """Return the reason why ``torch.load`` refuses a file, without torch's advice to load it unsafely."""
    text = one_line(error, 5_000)  # the advice comes first
    before, after = r"(?:WeightsUnpickler error: |trusted source\. )", r"(?= Check the doc| Please use|$)"
    found = re.search(rf"{before}(?!Please|\(2\))(.*?)\.?{after}", text)
    if found:
        return found[1]
    return text if isinstance(error, (OSError, RuntimeError, ValueError)) else "no file of torch.save"


def nearest(key: object, known: Iterable[object], prefixes: Mapping[str, str] | None = None) -> str:
    """Return the remedy for an unknown key: a similar known key, else at most 20 known keys, else removal.

    Args:
        key: the unknown key.
        known: all known keys.
        prefixes: for a known key of another section, the section's path.
    """
    names = sorted(map(str, known))
    if close := _closest(str(key), names):
        return f"did you mean {(prefixes or {}).get(close, '') + close!r}?"
    return f"use one of {', '.join(names)}" if len(names) <= 20 else "remove it"


# Other programs' names for keys of this program and of DeepSpeed
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
    """Return the known name that was probably meant: a synonym, a typo, the same words, or a similar text."""
    wanted = SYNONYMS.get(key.lower(), key)
    for name in names:
        if wanted == name.rpartition(".")[2]:
            return name
    if typo := difflib.get_close_matches(key, names, n=1, cutoff=0.9):
        return typo[0]
    same = [name for name in names if _words(key) and all(_is_among(word, name) for word in _words(key))]
    alike = difflib.get_close_matches(key, names, n=1, cutoff=0.65)
    return min(same or alike, key=lambda name: (len(_words(name)), -_likeness(key, name)), default=None)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", name.lower())


def _is_among(word: str, name: str) -> bool:
    """Return whether a word is one of a name's words, the start of one, or a typo of one."""
    return any(
        (len(word) > 2 and other.startswith(word)) or _likeness(word, other) >= 0.8 for other in _words(name)
    )


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
