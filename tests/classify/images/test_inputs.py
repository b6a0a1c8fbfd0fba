"""Images as inputs of the network: mixed, normalised, resized, and on the GPU if they fit."""

from typing import Any

import pytest
import torch
from support import error_line

import data
from classify.engine.trial_config import TrialConfig
from classify.images import mixup
from classify.images.pixels import ImageSet
from classify.images.plan import devices
from classify.images.settings import DataSettings
from classify.models import pretrained
from data import as_inputs, statistics


def test_mixing_depends_on_its_place_alone():
    mixer: Any = mixup.make_mixup(0.2, 1.0, 4)
    inputs, labels = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    first, soft = mixup.apply_mixup(mixer, inputs, labels, (0, 3, 1, 0))
    torch.rand(5)
    again, _ = mixup.apply_mixup(mixer, inputs, labels, (0, 3, 1, 0))
    other, _ = mixup.apply_mixup(mixer, inputs, labels, (0, 4, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, inputs)
    assert soft.shape == (8, 4) and torch.allclose(soft.sum(1), torch.ones(8))
    assert mixup.make_mixup(None, 0, 4) is None


@pytest.mark.parametrize(("alpha", "cut"), [(1.0, None), (None, 1.0), (1.0, 1.0)])
def test_labels_are_mixed_by_the_shares_of_the_pixels(alpha, cut):
    """The pixels of an image are its label."""
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    inputs = labels.float()[:, None, None, None].expand(6, 3, 16, 16)
    mixer: Any = mixup.make_mixup(alpha, cut, 2)
    shares = set()
    for step in range(8):
        mixed, soft = mixup.apply_mixup(mixer, inputs, labels, (0, step, 0, 0))
        assert torch.allclose(soft[:, 1], mixed.mean((1, 2, 3)), atol=1e-5)
        shares |= set(soft[:, 1].tolist())
    assert len(shares) > 8


def test_inputs_are_normalised_by_the_statistics_of_the_dataset():
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=random)
    images[:, 1] //= 2
    source = ImageSet(images, torch.zeros(50, dtype=torch.int64), ("a",))
    mean, std = statistics(source, torch.arange(50))
    inputs = as_inputs(images, mean, std)
    assert inputs.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-4)
    assert inputs.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    assert pretrained.normalization("resnet18") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert pretrained.normalization("inception_v3") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_a_gpu_keeps_images_that_fit(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 200))
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert devices([60, 10], DataSettings(device="auto"), gpu) == [cpu, gpu]
    assert devices([49, 30], DataSettings(device="auto"), gpu) == [gpu, cpu]  # each gets half of the rest
    assert devices([60, 40], DataSettings(device="cuda"), gpu) == [gpu, gpu]
    host = (gpu, DataSettings(device="cpu")), (cpu, DataSettings()), (torch.device("mps"), DataSettings())
    for device, settings in host:
        assert devices([1, 1], settings, device) == [cpu, cpu]
    line = error_line(devices, [60, 41], DataSettings(device="cuda"), gpu)
    assert "data.device: 'cuda': 0 MiB of images" in line


def test_progressive_resizing_makes_images_smaller_in_the_first_steps_alone():
    hyper = {
        "net": "airbench",
        "net_args": {"width": 2},
        "train_batch_size": 32,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "max_length": {"batches": 10},
        "progressive_resizing": {"scale": 0.75, "until": 0.5},
    }
    config = TrialConfig.resolve(hyper, {"data": {"dataset": "digits", "image_size": [24, 32]}}, 1, "cpu")
    assert [config.input_size(step) for step in (0, 4)] == [(18, 24)] * 2
    assert [config.input_size(step) for step in (5, 9, None)] == [(24, 32)] * 3
    images = data.Images(config.source, 0, torch.device("cpu"))
    pixels = images.train.images[:4]
    full = images.inputs(pixels, False, config.input_size(5))
    assert torch.equal(full, images.inputs(pixels, False))
    smaller = images.inputs(pixels, True, config.input_size(0))
    assert smaller.shape == (4, 3, 18, 24) and smaller.is_contiguous(memory_format=torch.channels_last)
    # An image of one colour keeps it, and the mean of any image changes little
    grey = torch.full_like(pixels, 100)
    assert torch.allclose(images.inputs(grey, False, (18, 24)), torch.tensor(100 / 127.5 - 1), atol=1e-5)
    assert torch.allclose(smaller.mean((1, 2, 3)), full.mean((1, 2, 3)), atol=0.02)
