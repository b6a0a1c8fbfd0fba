"""Changes of mode at a resume: another ZeRO stage, other processes, other places of experts and layers.

The matrix changes each mode once (``onward``). Here are the refusals and, in the soak, every pair of modes.
"""

import itertools

import pytest
from matrix import ADAMW, RISING_SCALE, ROWS, SGD, row
from test_matrix import test_a_stopped_run_goes_on_in_another_mode as check


def test_another_precision_is_refused(runs):
    refused = runs.onward("bf16", "zero1", 1)
    assert refused.code == 2 and "precision: 'float32': checkpoint" in refused.stderr, refused.stderr


MORE = {
    "sgd zero2": row("digits", 2, ds_optimizer=SGD, ds_scheduler="null"),
    "adamw zero3": row("digits", 3, ds_optimizer=ADAMW),
    "bf16 zero0": row("bf16", 0),
    "bf16 zero2": row("bf16", 2),
    "fp16 zero3": row("fp16", 3, **RISING_SCALE),
    "moe zero0": row("moe", 0),
    "moe zero2": row("moe", 2),
    "experts zero0": row("moe", 0, ep_world_size=2),
}
STAGES = [f"zero{stage}" for stage in range(4)]
# Modes with one precision and one optimizer: a run of any may resume as any other
FAMILIES = [
    [
        *STAGES,
        "offload",
        "accumulate",
        "accumulate zero2",
        "pipeline",
        "pipeline zero0",
        "pipeline of layers",
    ],
    ["sgd", "sgd zero2", "sgd zero3"],
    ["adamw", "adamw zero1", "adamw zero3"],
    ["bf16 zero0", "bf16", "bf16 zero2", "bf16 zero3"],
    ["fp16", "fp16 zero2", "fp16 zero3"],
    ["groups", "groups zero1", "groups zero2", "groups zero3", "groups pipeline"],
    ["muon", "muon zero1", "muon zero2", "muon zero3"],
    ["resnet18", "resnet18 zero3"],
    ["moe zero0", "moe", "moe zero2", "experts zero0", "experts"],
]
CHANGES = [(*pair, 2) for family in FAMILIES for pair in itertools.permutations(family, 2)]
CHANGES += [(*pair, ranks) for pair in itertools.product(STAGES, STAGES) for ranks in (1, 3)]
# Not with batch norm, whose statistics are a rank's
CHANGES += [
    (before, family[0], 1) for family in FAMILIES[1:] if "resnet18" not in family for before in family
]


@pytest.mark.soak
@pytest.mark.parametrize(("before", "after", "ranks"), CHANGES)
def test_every_change_of_mode(runs, monkeypatch, before, after, ranks):
    """Two ranks begin, and the losses differ by rounding only from a run without the change."""
    for name, each in MORE.items():
        monkeypatch.setitem(ROWS, name, each)
    check(runs, before, after, ranks)
