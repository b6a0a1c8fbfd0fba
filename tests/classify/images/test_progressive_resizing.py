"""Smaller images in the first part of a training."""

import torch

import data
from classify.engine.trial_config import TrialConfig

HYPER = {
    "net": "airbench",
    "net_args": {"width": 2},
    "train_batch_size": 32,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "max_length": {"batches": 10},
    "progressive_resizing": {"scale": 0.75, "until": 0.5},
}


def test_images_are_smaller_in_the_first_steps_alone():
    config = TrialConfig.resolve(HYPER, {"data": {"dataset": "digits", "image_size": [24, 32]}}, 1, "cpu")
    assert [config.input_size(step) for step in (0, 4)] == [(18, 24)] * 2
    assert [config.input_size(step) for step in (5, 9, None)] == [(24, 32)] * 3
    images = data.Images(config.data, config.source, 0, torch.device("cpu"))
    pixels = images.train.images[:4]
    full = images.inputs(pixels, False, config.input_size(5))
    assert torch.equal(full, images.inputs(pixels, False))
    smaller = images.inputs(pixels, True, config.input_size(0))
    assert smaller.shape == (4, 3, 18, 24) and smaller.is_contiguous(memory_format=torch.channels_last)
    # An image of one colour stays so, and the mean of any changes little
    grey = torch.full_like(pixels, 100)
    assert torch.allclose(images.inputs(grey, False, (18, 24)), torch.tensor(100 / 127.5 - 1), atol=1e-5)
    assert torch.allclose(smaller.mean((1, 2, 3)), full.mean((1, 2, 3)), atol=0.02)
