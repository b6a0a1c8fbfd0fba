"""What is said of ranks that do not move: which are behind, where each is, and what to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepspeed_trial.hangs.exchange import Beat
from deepspeed_trial.hangs.place import CHECKPOINT, DATA, TRAINING, in_words

ADVICE = {
    "silent": "its process is stopped, its host is down, or the network between is cut; look at it there",
    "ended": "its own output says why it has ended",
    "collective": "every rank has to have as many batches, and to take the same branches: under ZeRO 3"
    " each layer waits for all ranks; TORCH_DISTRIBUTED_DEBUG=DETAIL names collectives that differ",
    DATA: "the disk or server that holds the data may be slow or gone, or a thread of the data loader stuck",
    CHECKPOINT: "the disk of the checkpoints may be slow, full or gone",
}


class Rank(NamedTuple):
    """A rank as this one sees it.

    Attributes:
        beat: its last one.
        unheard: seconds since then, 0 if it is the next that is waited for.
        silent: whether it, or its host, is not there to tell another.
    """

    beat: Beat
    unheard: float
    silent: bool

    @property
    def still(self) -> float:
        """Seconds since it last moved."""
        return self.beat.idle + self.unheard


def write(ranks: list[Rank], in_step: bool, still: float, hang_after: float) -> str:
    """The lines that name each rank's place, those that are behind, what to try, and the stacks.

    Args:
        ranks: all that were heard.
        in_step: whether ranks at the same place have as many ``moves``.
        still: seconds for which none has moved.
        hang_after: at how many the run ends.
    """
    behind = find_behind(ranks, in_step)
    subject = "no rank has moved" if len(ranks) > 1 else "nothing has moved"
    lines = [f"{subject} for {still:.0f} s; at {hang_after:g} s the run ends (hyperparameters.hang_after)"]
    for each in sorted(ranks, key=lambda rank: (rank not in behind, rank.beat.rank)):
        role = " is behind:" if each in behind and len(ranks) > 1 else ":"
        lines.append(f"  {_name(each.beat)}{role} {_state(each)}")
    lines.append(f"what to look at: {_advice(behind or ranks)}")
    stacks: dict[str, list[str]] = {}
    for each in ranks:
        if each.beat.stack and not each.silent:
            stacks.setdefault(each.beat.stack, []).append(str(each.beat.rank))
    for stack, those in stacks.items():
        lines += [f"stack of rank {', '.join(those)}:", stack]
    return "\n".join(lines)


def find_behind(ranks: list[Rank], in_step: bool) -> list[Rank]:
    """Those for which the others wait: that do not answer, else have ended, else have come least far.

    Of those at the same place they are the ones that are in no collective, where others are. None if all are.
    """
    silent = [each for each in ranks if each.silent]
    ended = [each for each in ranks if each.beat.has_ended]
    if silent or ended:
        return silent or ended
    steps_alike = in_step and {each.beat.work for each in ranks} == {TRAINING}  # or one may work alone
    place = [(*_order(each.beat), each.beat.moves if steps_alike else 0) for each in ranks]
    behind = [each for each, where in zip(ranks, place, strict=True) if where < max(place)]
    free = [each for each in ranks if not each.beat.waits_in]
    return behind or (free if len(free) < len(ranks) else [])


def name_behind(ranks: list[Rank], in_step: bool) -> str:
    """The ranks that are behind, for a line; or where all are."""
    behind = find_behind(ranks, in_step)
    furthest = max((each.beat for each in ranks), key=lambda beat: (*_order(beat), beat.moves))
    if not behind:
        return f"all are in {place_of(furthest)}"
    verb = "does not answer" if behind[0].silent else "has ended" if behind[0].beat.has_ended else "is behind"
    names = ", ".join(_name(each.beat) for each in behind)
    return f"{names} {verb}, in {_last_place(behind[0], furthest)}"


def name_lost(lost: Sequence[Beat], mine: Beat) -> str:
    """The ranks that are gone and where, which is where this one noticed if that is further on."""
    named = ", ".join(_name(each) + (" has ended" if each.has_ended else " is gone") for each in lost)
    last = max(lost, key=lambda each: each.step)
    return f"{named}, in {place_of(last if last.step >= mine.step else mine)}"


def _last_place(rank: Rank, furthest: Beat) -> str:
    """A rank's place; of one that has gone on since its last beat, where it is missing."""
    return place_of(rank.beat if rank.beat.step >= furthest.step or not rank.silent else furthest)


def _order(beat: Beat) -> tuple[float, int]:
    """What grows from one work to the next: a step comes before what is done after it."""
    return beat.step if beat.work == TRAINING else beat.step + 0.5, beat.begun


def place_of(beat: Beat) -> str:
    """Where a rank is, in words."""
    return in_words(beat.step, beat.work, beat.part)


def _name(beat: Beat) -> str:
    return f"rank {beat.rank} (host {beat.host}, process {beat.pid})"


def _state(rank: Rank) -> str:
    beat, seconds = rank.beat, f"{rank.still:.0f} s"
    if rank.silent:
        return f"does not answer for {rank.unheard:.0f} s"
    if beat.has_ended:
        return f"has ended in {place_of(beat)}"
    waits = f", waits in {beat.waits_in}" if beat.waits_in else ""
    return f"{place_of(beat)} for {seconds}{waits}"


def _advice(behind: list[Rank]) -> str:
    first = behind[0]
    if first.silent or first.beat.has_ended:
        return ADVICE["silent" if first.silent else "ended"]
    beat = first.beat
    found = ADVICE.get(beat.part) or ADVICE.get(beat.work)
    return (None if beat.waits_in else found) or ADVICE["collective"]
