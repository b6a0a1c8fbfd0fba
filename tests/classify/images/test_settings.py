"""The data section, and the digits."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from support import error_line

import data
from classify.images.settings import DataSettings
from harness.errors import InvalidInput


def test_images_are_kept_as_much_larger_as_resize_says():
    assert DataSettings(image_size=32).stored_size == (32, 32)
    assert DataSettings(image_size=[32, 48], resize=40).stored_size == (40, 60)


def test_config():
    assert DataSettings.parse(None) == DataSettings.parse({}) == DataSettings("cifar10", "data", True, 32)
    section = {"dataset": "imagefolder", "root": "/x", "download": False, "image_size": 32}
    assert DataSettings.parse(section) == DataSettings("imagefolder", "/x", False, 32)


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"dataset": "mnist"}, ["data.dataset", "'mnist'", "cifar10", "digits", "imagefolder"]),
        ({"dataset": None}, ["data.dataset", "None"]),
        ({"dataset": ["digits"]}, ["data.dataset", "['digits']"]),
        ({"datset": "digits"}, ["data.datset", "'digits'", "did you mean 'dataset'"]),
        (
            {"colour": 1},
            [
                "data.colour",
                "augment, cache, dataset, decode, device, download, image_size, normalize, resize, root, sampling,"
                " split_seed, storage, test, validation, window, workers",
            ],
        ),
        ({7: 1}, ["data.7", "unknown key"]),
        ({"root": None}, ["data.root", "None"]),
        ({"root": ""}, ["data.root", "''"]),
        ({"storage": "s3"}, ["data.storage", "'s3'", "mapping"]),
        ({"storage": {"secret": "x"}}, ["data.storage.secret: holds a password", "environment"]),
        (
            {"storage": {"client_kwargs": {"aws_session_token": "x"}}},
            ["data.storage.client_kwargs.aws_session_token: "],
        ),
        ({"root": "ftp://me:x@host/photos"}, ["data.root: holds a password"]),
        ({"cache": {"folder": 1}}, ["data.cache.folder", "1", "path"]),
        ({"cache": {"place": "x"}}, ["data.cache.place", "'x'", "unknown key"]),
        ({"cache": {"limit": "much"}}, ["data.cache.limit", "'much'", "must be a size, e.g. 100MB"]),
        ({"decode": "later"}, ["data.decode", "'later'", "once or stream"]),
        ({"window": 0}, ["data.window", "0", "all or a number of shards"]),
        ({"download": "yes"}, ["data.download", "'yes'", "true or false"]),
        ({"download": 1}, ["data.download", "1"]),
        ({"image_size": 0}, ["data.image_size", "0", "whole number of pixels"]),
        ({"image_size": [32]}, ["data.image_size", "[32]", "[height, width]"]),
        ({"image_size": 64, "resize": 32}, ["data.resize", "32", "from image_size (64)"]),
        ({"normalize": "imagenett"}, ["data.normalize", "imagenet", "dataset"]),
        ({"normalize": {"mean": [0, 0, 0], "std": [1, 0, 1]}}, ["data.normalize", "std"]),
        ({"normalize": {"mean": [1.5, 0, 0], "std": [1, 1, 1]}}, ["data.normalize", "1.5", "0 to 1"]),
        ({"image_size": "32"}, ["data.image_size", "'32'"]),
        ({"image_size": 32.0}, ["data.image_size", "32.0"]),
        ({"workers": 65, "augment": {"transforms": ["RandAugment"]}}, ["data.workers", "65", "from 0 to 64"]),
        (
            {"workers": 2, "augment": {"flip": True}},
            ["data.workers", "2", "does nothing without data.augment"],
        ),
        ("digits", ["data: 'digits'", "mapping"]),
    ],
    ids=str,
)
def test_bad_config(section, parts):
    line = error_line(DataSettings.parse, section)
    assert [part for part in parts if part not in line] == []


def test_every_error_is_named_at_once():
    with pytest.raises(InvalidInput) as caught:
        DataSettings.parse({"rot": "x", "dataset": 5, "root": 5, "download": "no", "image_size": -28})
    wanted = [
        "data.rot: 'x'",
        "data.dataset: 5",
        "data.root: 5",
        "data.download: 'no'",
        "data.image_size: -28",
    ]
    assert [line[: len(start)] for line, start in zip(caught.value.errors, wanted, strict=True)] == wanted
    assert "'root'" in caught.value.errors[0]
    assert "\n" not in "".join(caught.value.errors)


@pytest.fixture(scope="module")
def digits():
    return {split: data.load(DataSettings("digits"), split) for split in ("train", "test")}


@pytest.mark.parametrize(("split", "size"), [("train", 1437), ("test", 360)])
def test_digits(digits, split, size):
    kept = digits[split]
    assert len(kept) == DataSettings("digits").open_source().count(split) == size
    assert (kept.images.shape, kept.images.dtype) == ((size, 3, 32, 32), torch.uint8)
    assert (kept.labels.shape, kept.labels.dtype) == ((size,), torch.int64)
    assert kept.classes == tuple("0123456789")
    assert (kept.images.min(), kept.images.max()) == (0, 255)
    assert (kept.images == kept.images[:, :1]).all()
    proportions = np.bincount(load_digits().target) * size / 1797
    assert np.abs(np.bincount(kept.labels) - proportions).max() <= 1


def test_digits_splits_partition_the_source(digits):
    source = load_digits()
    images = torch.cat([kept.images[:, 0].float() for kept in digits.values()])
    small = (images[:, 1::4, 1::4] + images[:, 2::4, 2::4]) / 2
    distances = torch.cdist(small.flatten(1), torch.from_numpy(source.data).float() * (255 / 16))
    origin = distances.argmin(dim=1)
    assert origin.sort().values.tolist() == list(range(1797))
    labels = torch.cat([kept.labels for kept in digits.values()])
    assert torch.equal(labels, torch.from_numpy(source.target)[origin])


def test_digits_split_is_always_the_same(digits):
    np.random.seed(5)
    torch.manual_seed(5)
    for split, kept in digits.items():
        again = data.load(DataSettings("digits"), split)
        assert torch.equal(again.images, kept.images)
        assert torch.equal(again.labels, kept.labels)
