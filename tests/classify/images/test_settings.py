"""The data section, and the digits."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from support import error_line

from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from deepspeed_trial.errors import InvalidInput


def test_defaults_and_sizes():
    assert DataSettings.parse(None) == DataSettings.parse({}) == DataSettings("cifar10", "data", True, 32)
    section = {"dataset": "imagefolder", "root": "/x", "download": False, "image_size": 32}
    assert DataSettings.parse(section) == DataSettings("imagefolder", "/x", False, 32)
    assert DataSettings(image_size=32).stored_size == (32, 32)
    assert DataSettings(image_size=[32, 48], resize=40).stored_size == (40, 60)


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ("digits", ["data: 'digits'", "mapping"]),
        ({"zzz": 1}, ["data.zzz: ", "unknown key; remove it"]),
        ({7: 1}, ["data.7", "unknown key"]),
        ({"dataset": "mnist"}, ["data.dataset", "'mnist'", "cifar10", "digits", "imagefolder"]),
        ({"dataset": None}, ["data.dataset", "None"]),
        ({"dataset": ["digits"]}, ["data.dataset", "['digits']"]),
        ({"datset": "digits"}, ["data.datset: '***': ", "did you mean 'dataset'"]),
        ({"root": None}, ["data.root", "None"]),
        ({"root": ""}, ["data.root", "''"]),
        ({"root": "ftp://***@host/photos"}, ["data.root: 'ftp://***@host/photos': *** stands for a secret; give the secret by --set data.root=VALUE"]),
        ({"storage": "s3"}, ["data.storage: '***': must be a mapping"]),
        ({"storage": {"secret": "***"}}, ["data.storage.secret: '***': ", "--set data.storage.secret=VALUE"]),
        ({"cache": {"folder": 1}}, ["data.cache.folder", "1", "path"]),
        ({"cache": {"place": "x"}}, ["data.cache.place", "'x'", "unknown key"]),
        ({"cache": {"limit": "much"}}, ["data.cache.limit", "'much'", "must be a size, e.g. 100MB"]),
        ({"unreadable": "ignore"}, ["data.unreadable", "'ignore'", "fail or skip"]),
        ({"decode": "later"}, ["data.decode", "'later'", "once or stream"]),
        ({"window": 0}, ["data.window", "0", "all or a number of shards"]),
        ({"download": "yes"}, ["data.download", "'yes'", "true or false"]),
        ({"download": 1}, ["data.download", "1"]),
        ({"image_size": 0}, ["data.image_size", "0", "whole number of pixels"]),
        ({"image_size": [32]}, ["data.image_size", "[32]", "[height, width]"]),
        ({"image_size": "32"}, ["data.image_size", "'32'"]),
        ({"image_size": 32.0}, ["data.image_size", "32.0"]),
        ({"image_size": 64, "resize": 32}, ["data.resize", "32", "from 64, as in image_size, to"]),
        ({"normalize": "imagenett"}, ["data.normalize", "imagenet", "dataset"]),
        ({"normalize": {"mean": [0, 0, 0], "std": [1, 0, 1]}}, ["data.normalize", "std"]),
        ({"normalize": {"mean": [1.5, 0, 0], "std": [1, 1, 1]}}, ["data.normalize", "1.5", "0 to 1"]),
        ({"device": "gpu"}, ["data.device: 'gpu': must be one of auto, cpu, cuda"]),
        ({"device": "cuda"}, ["data.device: 'cuda': this machine has no GPU"]),
        ({"workers": 65, "augment": {"transforms": ["RandAugment"]}}, ["data.workers", "65", "from 0 to 64"]),
        ({"workers": 2, "augment": {"flip": True}}, ["data.workers", "2", "has no effect without data.augment"]),
        ({"validation": 1}, ["data.validation: 1: must be auto or a share between 0 and 1"]),
        ({"test": "some"}, ["data.test: 'some': must be a share between 0 and 1"]),
        ({"split_seed": -1}, ["data.split_seed: -1: must be a whole number"]),
        ({"sampling": "even"}, ["data.sampling: 'even': must be one of shuffle, balanc"]),
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_value_is_refused(section, parts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = error_line(DataSettings.parse, section)
    assert [part for part in parts if part not in line] == []


def test_every_error_is_named_at_once():
    section = {"rot": "x", "dataset": 5, "root": 5, "download": "no", "sampling": "x", "image_size": -28}
    with pytest.raises(InvalidInput) as caught:
        DataSettings.parse(section)
    wanted = [f"data.{key}: {value!r}" for key, value in {**section, "rot": "***"}.items()]
    assert [line[: len(start)] for line, start in zip(caught.value.errors, wanted, strict=True)] == wanted
    assert "'root'" in caught.value.errors[0]
    assert "\n" not in "".join(caught.value.errors)


@pytest.fixture(scope="module")
def digits():
    return {split: DataPlan.resolve(DataSettings("digits")).load(split) for split in ("train", "test")}


@pytest.mark.parametrize(("split", "size"), [("train", 1437), ("test", 360)])
def test_digits(digits, split, size):
    kept = digits[split]
    assert len(kept) == DataPlan.resolve(DataSettings("digits")).count(split) == size
    assert (kept.images.shape, kept.images.dtype) == ((size, 3, 32, 32), torch.uint8)
    assert (kept.labels.shape, kept.labels.dtype) == ((size,), torch.int64)
    assert kept.classes == tuple("0123456789")
    assert (kept.images.min(), kept.images.max()) == (0, 255)
    assert (kept.images == kept.images[:, :1]).all()
    proportions = np.bincount(load_digits().target) * size / 1797
    assert np.abs(np.bincount(kept.labels) - proportions).max() <= 1


def test_splits_of_the_digits_partition_the_source_always_alike(digits):
    source = load_digits()
    images = torch.cat([kept.images[:, 0].float() for kept in digits.values()])
    small = (images[:, 1::4, 1::4] + images[:, 2::4, 2::4]) / 2
    distances = torch.cdist(small.flatten(1), torch.from_numpy(source.data).float() * (255 / 16))
    origin = distances.argmin(dim=1)
    assert origin.sort().values.tolist() == list(range(1797))
    labels = torch.cat([kept.labels for kept in digits.values()])
    assert torch.equal(labels, torch.from_numpy(source.target)[origin])
    np.random.seed(5)
    torch.manual_seed(5)
    for split, kept in digits.items():
        again = DataPlan.resolve(DataSettings("digits")).load(split)
        assert torch.equal(again.images, kept.images)
        assert torch.equal(again.labels, kept.labels)
