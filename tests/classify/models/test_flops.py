"""The operations of networks against published counts, and a run's own figures."""

import types
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from classify.models import flops
from classify.models.registry import NetSpec, on_meta_device
from classify.reports import utilisation

NETS = """alexnet vgg11 resnet18 resnet50 mobilenet_v2 mobilenet_v3_large efficientnet_b0 convnext_tiny vit_b_16
    swin_t regnet_y_400mf inception_v3""".split()


@pytest.mark.parametrize("name", NETS)
def test_a_forward_pass_has_the_published_operations(name):
    """Torchvision's, which count multiply-adds in units of 1e9, at the size at which they were counted."""
    weights = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"]
    size = (weights.transforms.keywords["crop_size"],) * 2
    counted = flops.forward(on_meta_device(NetSpec(name, 1000, size, None)), size)
    assert counted == pytest.approx(2e9 * weights.meta["_ops"], rel=0.02)


def test_a_backward_pass_has_two_products_for_each_and_less_for_what_is_frozen():
    """Two layers have 10 x 20 and 20 x 5 weights; the images have no gradient."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.Linear(20, 5))
    first, second = 2 * 12 * 20, 2 * 20 * 5
    assert flops.forward(net, (2, 2)) == first + second
    assert flops.training(net, (2, 2)) == 2 * first + 3 * second
    assert flops.training(net, (2, 2), ["1.weight", "1.bias"]) == first + 2 * second
    grouped = on_meta_device(NetSpec("mobilenet_v2", 10, (64, 64), None))
    forward = flops.forward(grouped, (64, 64))
    assert forward and flops.training(grouped, (64, 64)) == 3 * forward


def test_a_network_that_cannot_run_without_values_has_no_count():
    class Asks(nn.Module):
        def forward(self, images):
            torch.rand(1)
            assert images.device.type != "meta"

    before = torch.get_rng_state()
    assert flops.forward(Asks(), (2, 2)) is None and flops.training(Asks(), (2, 2)) is None
    assert torch.equal(torch.get_rng_state(), before)  # counting in the middle of a training changes nothing


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_says_how_much_it_used(runs, ranks):
    """Images a second times operations; a CPU has no peak of a data sheet."""
    made = runs.straight("zero0", ranks)
    assert "62,006 trainable, 1.3 MFLOP an image" in made.stdout
    summary = made.summary
    assert summary["flops_per_image"] == 3_204_720  # forward 1,303,440; the images have no gradient
    assert summary["flops_per_second"] == summary["images_per_second"] * summary["flops_per_image"]
    assert "mfu" not in summary


@pytest.mark.parametrize(
    ("gpu", "dtype", "expected"),
    [
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67e12),
        ("NVIDIA L40S", torch.float16, 362e12),
        ("GPU of tomorrow", torch.float16, None),
        ("", torch.float32, None),
    ],
)
def test_a_peak_is_the_data_sheets_for_the_type_that_is_computed_in(gpu, dtype, expected):
    assert utilisation.peak(gpu, dtype) == expected


def test_the_utilisation_is_of_all_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    config: Any = types.SimpleNamespace(autocasts=True, dtype=torch.float32, training_flops=10**9)
    two_ranks: Any = types.SimpleNamespace(allgather=lambda value: [value, value])
    used = utilisation.summary(config, 3120, two_ranks, torch.device("cuda", 0))
    assert used["peak_flops_per_second"] == 2 * 312e12 and used["mfu"] == pytest.approx(0.005)
