"""The network of the CIFAR-10 recipes: its first weights, which images give, and its training in every form."""

from typing import Any

import pytest
import torch
from modes import DEEPSPEED, FIXED, losses
from support import overrides, train_many
from torch.nn import functional as F

from classify.models import dry_run, registry
from classify.models.registry import NetSpec

AIRBENCH = {"hyperparameters__net": "airbench", "hyperparameters__net_args": "{width: 4}"}


def test_it_has_the_parameters_of_the_recipes_network_and_takes_any_size():
    net = registry.build(NetSpec("airbench", 10, (32, 32)))
    frozen = 24 * 12 + 2 * (64 + 256 + 256)  # the whitening filters, and the factors of normalization
    counts = [
        sum(each.numel() for each in net.parameters() if each.requires_grad is how) for how in (True, False)
    ]
    assert counts == [1_971_352, frozen]
    for size, depth in ((9, 1), (48, 3)):
        dry_run.check(NetSpec("airbench", 7, (size, size), {"width": 3, "depth": depth}), 2, True)


def test_its_first_convolution_whitens_the_images():
    mixed = torch.randn(400, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    images = (
        F.avg_pool2d(mixed, 3, 1) * torch.tensor([3.0, 1.0, 0.5]).view(3, 1, 1)
        + 0.2 * mixed[:, :1, 1:-1, 1:-1]
    )
    net: Any = registry.build(NetSpec("airbench", 10, (10, 10), {"width": 2}))
    net.initialize_from_images(images)
    filters = net.whiten.weight
    assert torch.equal(filters[12:], -filters[:12]) and not filters.requires_grad
    seen = F.conv2d(images, filters[:12]).transpose(0, 1).flatten(1).double()
    values = torch.linalg.eigvalsh(seen @ seen.T / seen.shape[1])
    # Of a patch's part with variance v is left v / (v + 5e-4), so nearly 1 each
    assert values.max() < 1.0001 and values.min() > 0.9


def test_its_other_filters_pass_their_channels_on():
    net: Any = registry.build(NetSpec("airbench", 10, (32, 32), {"width": 32}))
    images = torch.rand(2, 24, 8, 8)
    assert torch.allclose(F.conv2d(images, net.groups[0].convs[0].weight[:24], padding=1), images, atol=1e-6)


@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_alike_at_every_stage_and_goes_on_without_its_images(tmp_path, processes):
    """The whitened weights stay what they were; a resume takes them, and not the images, which may be others."""
    stages = (0, 1, 2, 3) if processes == 2 else (0,)
    rows = {
        f"zero{stage}": [
            *FIXED,
            *overrides(
                **AIRBENCH, data__normalize="dataset", **{f"{DEEPSPEED}zero_optimization__stage": stage}
            ),
        ]
        for stage in stages
    }
    runs = train_many(tmp_path, rows, processes)
    for name, run in runs.items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert losses(run) == pytest.approx(losses(runs["zero0"]), rel=1e-4), name
    first, *others = (torch.load(run.output / "net.pt")["whiten.weight"] for run in runs.values())
    assert first.abs().max() > 1 and all(torch.equal(each, first) for each in others)
    more = {
        name: [*row, *overrides(hyperparameters__max_length="{batches: 8}"), "--resume", "latest"]
        for name, row in rows.items()
    }
    for name, run in train_many(tmp_path, more, processes).items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert torch.equal(torch.load(run.output / "net.pt")["whiten.weight"], first), name
