"""The network of the CIFAR-10 recipes: its first weights, which images give."""

from typing import Any

import torch
from torch.nn import functional as F

from classify.models import dry_run, registry
from classify.models.registry import NetSpec


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


def test_its_whitening_weights_stay_the_same_in_every_mode(runs):
    """test_matrix.py resumes these runs and compares their losses."""
    made = [runs.straight("recipe zero0", 1), *(runs.straight("recipe zero2", ranks) for ranks in (1, 2))]
    first, *others = (torch.load(each.output / "net.pt")["whiten.weight"] for each in made)
    assert first.abs().max() > 1 and all(torch.equal(other, first) for other in others)
