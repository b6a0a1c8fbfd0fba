"""Position of a rank in the training: phase, step and part. The training writes it, ``watch`` reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed_trial.patches.engine import follow_engine
from deepspeed_trial.patches.pipeline import follow_instructions

START, TRAINING, REPORT, VALIDATION = "setup", "training", "report", "validation"
CHECKPOINT, TEST, END = "checkpoint", "test", "end"
DATA, FORWARD, BACKWARD, STEP, GATHER = "data", "forward", "backward", "optimizer step", "gather"


@dataclass
class Place:
    """Position of a rank in the training: phase, step and part."""

    step: int = 0  # current optimizer step; outside of training, the last one
    phase: str = START
    part: str = ""  # of the phase, such as FORWARD; may be empty
    begun: int = 0  # phases and steps that the rank has begun; equal on ranks in sync
    moves: int = 0  # parts that the rank has entered since; in training, equal on ranks in sync

    def __str__(self) -> str:
        """``step 12 (backward)``, ``validation after step 12 (forward)``."""
        if self.phase == TRAINING:
            place = f"step {self.step}"
        else:
            place = self.phase if self.phase in (START, END) else f"{self.phase} after step {self.step}"
        return f"{place} ({self.part})" if self.part else place

    def enter(self, part: str) -> None:
        """Enter another part of the phase."""
        self.part = part
        self.moves += 1

    def begin(self, phase: str, step: int) -> None:
        """Begin another phase, or another step."""
        self.phase, self.step, self.part = phase, step, ""
        self.begun, self.moves = self.begun + 1, 0

    @contextlib.contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Set the phase during the block, then restore the previous one; after an error, keep the phase."""
        before = self.phase
        self.begin(phase, step)
        yield
        self.begin(before, step)


def follow(engine: Any, place: Place) -> None:
    """Record an engine's passes and optimizer steps in the place; for a pipeline, every instruction."""
    if hasattr(engine, "_INSTRUCTION_MAP"):
        # Counts no moves: each stage has another schedule, so their numbers cannot be compared
        follow_instructions(engine, lambda instruction: setattr(place, "part", instruction))
        return
    engine.register_forward_pre_hook(lambda *_: place.enter(FORWARD))
    engine.register_forward_hook(lambda *_: None if engine.training else place.enter(""))
    follow_engine(engine, lambda: place.enter(BACKWARD), lambda: place.enter(STEP))
