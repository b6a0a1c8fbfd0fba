"""Images as inputs: mixed, and normalised."""

from typing import Any

import pytest
import torch
from support import error_line

from classify.images import mixup
from classify.images.image_set import ImageSet, places
from classify.images.settings import DataSettings
from classify.models import pretrained
from data import as_inputs, normalization


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


def test_inputs_are_normalised_by_the_statistics_of_the_dataset():
    images = torch.randint(
        0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images[:, 1] //= 2
    source = ImageSet(images, torch.zeros(50, dtype=torch.int64), ("a",))
    mean, std = normalization(DataSettings(normalize="dataset"), lambda: source)
    inputs = as_inputs(images, mean, std)
    assert inputs.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-4)
    assert inputs.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    assert pretrained.normalization("resnet18") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert pretrained.normalization("inception_v3") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_where_images_go_is_decided_by_their_sizes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 200))
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert places([60, 10], DataSettings(device="auto"), gpu) == [cpu, gpu]
    assert places([49, 30], DataSettings(device="auto"), gpu) == [
        gpu,
        cpu,
    ]  # half of what is left after the first
    assert places([60, 40], DataSettings(device="cuda"), gpu) == [gpu, gpu]
    assert (
        places([1, 1], DataSettings(device="cpu"), gpu) == places([1, 1], DataSettings(), cpu) == [cpu, cpu]
    )
    assert "data.device: 'cuda': 0 MiB of images" in error_line(
        places, [60, 41], DataSettings(device="cuda"), gpu
    )
