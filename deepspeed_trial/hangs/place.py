"""Where in its work a rank is: what the training's thread writes down as it goes, for others to read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed_trial.patches.engine import follow_engine
from deepspeed_trial.patches.pipeline import follow_instructions

START, TRAINING, REPORT, VALIDATION, CHECKPOINT, TEST, END = (
    "setup",
    "training",
    "report",
    "validation",
    "checkpoint",
    "test",
    "end",
)
DATA, FORWARD, BACKWARD, STEP, GATHER = "data", "forward", "backward", "optimizer step", "gather"


@dataclass
class Place:
    """Where a rank is.

    Attributes:
        step: the optimizer step that is being done, or outside of training the last one.
        work: what it does: ``TRAINING`` or another of this module's.
        part: which part of it, such as ``FORWARD``; empty where there are none.
        begun: how many works and steps it has begun; ranks at the same place have begun as many.
        moves: how often it has gone on to another part since.
        in_step: whether ranks at the same place have as many moves: not the stages of a pipeline.
        is_leaving: whether an error ends the work.
    """

    step: int = 0
    work: str = START
    part: str = ""
    begun: int = 0
    moves: int = 0
    in_step: bool = True
    is_leaving: bool = False

    def enter(self, part: str) -> None:
        """Goes on to another part of the work."""
        self.part = part
        self.moves += 1

    def begin(self, work: str, step: int) -> None:
        """Goes on to another work."""
        self.work, self.step, self.part = work, step, ""
        self.begun, self.moves = self.begun + 1, 0

    @contextlib.contextmanager
    def during(self, work: str, step: int) -> Iterator[None]:
        """Does another work, then goes on with the one before; after an error the place stays."""
        before = self.work
        self.begin(work, step)
        yield
        self.begin(before, step)


def in_words(step: int, work: str, part: str) -> str:
    """A place as it is shown: ``step 12 (backward)``, ``validation after step 12 (forward)``."""
    if work == TRAINING:
        place = f"step {step}"
    else:
        place = work if work in (START, END) else f"{work} after step {step}"
    return f"{place} ({part})" if part else place


def follow(engine: Any, place: Place) -> None:
    """Has an engine write its forward and backward passes and optimizer steps into the place.

    A pipeline's engine writes each instruction of its schedule.
    """
    if hasattr(engine, "_INSTRUCTION_MAP"):
        place.in_step = False
        follow_instructions(engine, lambda instruction: place.enter(_part(instruction)))
        return
    engine.register_forward_pre_hook(lambda *_: place.enter(FORWARD))
    engine.register_forward_hook(lambda *_: None if engine.training else place.enter(""))
    follow_engine(engine, lambda: place.enter(BACKWARD), lambda: place.enter(STEP))


def _part(instruction: str) -> str:
    """``forward`` of ``ForwardPass``, ``send activation`` of ``SendActivation``."""
    known = {"LoadMicroBatch": DATA, "ForwardPass": FORWARD, "BackwardPass": BACKWARD, "OptimizerStep": STEP}
    return known.get(instruction) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", instruction).lower()
