"""Images train, validate and test: by a seed drawn from each class, or in separate folders."""

import numpy as np
import pytest
import torch
from folders import caches, greys, save, table
from sources import opened
from support import error_line

import data
from classify.images.order import Order
from classify.images.pixels import ImageSet
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings

CPU = torch.device("cpu")


def folder_of(root, **sizes):
    """Write a number of images for each class, every image of another grey."""
    grey = iter(range(256))
    for name, size in sizes.items():
        for index in range(size):
            save(root / name.replace("__", "/") / f"{index:02}.bmp", next(grey))
    return root


def loaded(root, split, **section):
    """A (grey, label) for each image of a split."""
    kept = opened(root, **section).load(split)
    images = kept.select(torch.arange(len(kept)))
    assert (images == images[:, :1, :1, :1]).all()
    assert len(kept) == opened(root, **section).count(split) == len(images)
    return list(zip(images[:, 0, 0, 0].tolist(), kept.labels.tolist(), strict=True))


def counts(pairs) -> list[int]:
    return np.bincount([label for _, label in pairs]).tolist()


def test_the_seed_splits_a_folder_of_classes(tmp_path):
    root = folder_of(tmp_path / "photos", cat=40, dog=10, owl=3)
    section = {"validation": 0.25}
    splits = {split: loaded(root, split, **section) for split in ("train", "val", "test")}
    assert [counts(splits[split]) for split in ("train", "val", "test")] == [[24, 6, 1], [8, 2, 1], [8, 2, 1]]
    assert sorted(pair for each in splits.values() for pair in each) == [
        (grey, 0 if grey < 40 else 1 if grey < 50 else 2) for grey in range(53)
    ]
    for each in splits.values():
        assert each == sorted(each) and len(set(each)) == len(each)
    assert splits == {split: loaded(root, split, **section) for split in splits}
    assert splits["test"] != loaded(root, "test", split_seed=1, **section)
    assert splits["test"] == loaded(root, "test")  # the share for validations leaves it alone
    assert len(loaded(root, "test", test=0.5)) == 20 + 5 + 2
    assert len(caches(root)) == 1  # of all images
    names = [opened(root, **each).names for each in (section, {})]
    assert names == [("train", "val", "test"), ("train", "test")]
    assert loaded(root, "val", validation="auto") == loaded(root, "val", validation=0.1)


def test_validation_images_are_held_out_of_the_training_images(tmp_path):
    root = folder_of(tmp_path, train__a=20, train__b=10, test__a=3, test__b=2)
    before = loaded(root, "train")
    train, val = (loaded(root, split, validation=0.2) for split in ("train", "val"))
    assert [counts(each) for each in (train, val)] == [[16, 8], [4, 2]]
    assert sorted(train + val) == sorted(before)
    splits, without = opened(root, validation=0.2), opened(root)
    assert (splits.validation, splits.has_test, splits.chosen_on) == ("val", True, "validation images")
    assert (without.validation, without.has_test, without.chosen_on) == ("test", False, "test images")
    for section, wanted in (({"validation": 0.2}, val), ({}, loaded(root, "test"))):
        images = data.Images(opened(root, **section), 0, CPU)
        kept = images.validation.select(torch.arange(len(images.validation)))
        assert kept[:, 0, 0, 0].tolist() == [grey for grey, _ in wanted]


@pytest.mark.parametrize("parts", [("train", "val", "test"), ("train", "val")])
def test_validations_use_the_folder_val(tmp_path, parts):
    root = folder_of(tmp_path, **{f"{part}__{name}": 3 for part in parts for name in "ab"})
    splits = opened(root, validation="auto")
    assert splits.names == opened(root).names == parts and splits.validation == "val"
    assert splits.has_test == ("test" in parts)
    assert [greys(DataPlan.resolve(DataSettings("imagefolder", str(root))).load(part)) for part in parts] == [
        [(6 * index + grey, grey // 3) for grey in range(6)] for index in range(len(parts))
    ]


@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
def test_any_dataset_can_hold_images_out(dataset):
    settings = DataSettings.parse({"dataset": dataset, "validation": 0.1})
    splits, whole = DataPlan.resolve(settings), DataPlan.resolve(DataSettings.parse({"dataset": dataset}))
    assert splits.count("train") + splits.count("val") == whole.count("train")
    assert abs(splits.count("val") - 0.1 * whole.count("train")) <= 5
    if dataset == "digits":
        train, val = (DataPlan.resolve(settings).load(split) for split in ("train", "val"))
        everything = DataPlan.resolve(DataSettings("digits")).load("train")
        assert train.rows is not None and val.rows is not None
        rows = torch.cat([train.rows, val.rows])
        assert torch.equal(rows.sort().values, torch.arange(len(everything)))
        assert torch.equal(everything.labels[val.rows], val.labels)
        assert torch.equal(val.to(CPU).images, everything.images[val.rows])


@table(
    "sizes, section, line",
    small=({"a": 9, "b": 2}, {"validation": 0.1}, "data.root: the class 'b' has 2 images, too few for 3 spl"),
    test_twice=({"train__a": 2, "train__b": 2, "test__a": 2, "test__b": 2}, {"test": 0.5}, "data.test: 0.5: the dataset already has a part test; remove this key"),
    val_twice=({"train__a": 2, "train__b": 2, "val__a": 2, "val__b": 2}, {"validation": 0.5}, "data.validation: 0.5: the dataset already has a part val; use auto, or rem"),
    only_train=({"train__a": 2, "train__b": 2}, {}, "has no folder 'test' nor 'val'; it needs train/<class>"),
    no_train=({"test__a": 2, "test__b": 2}, {}, "has no folder 'train'; it needs train/<class>/* with"),
    named_otherwise=({"Train__a": 2, "valid__a": 2}, {}, "holds the folder 'Train'; rename it to train, val"),
    one_class=({"cats": 5}, {}, "holds only the class 'cats'; it needs a folder for each class, and at least two classes"),
    other_classes=({"train__a": 2, "train__b": 2, "val__a": 2, "val__c": 2}, {}, "val and train have different classes (only in train: b; only in val: c); make them the same"),
)  # fmt: skip
def test_a_folder_that_cannot_be_split_is_refused(tmp_path, sizes, section, line):
    root = folder_of(tmp_path, **sizes)
    assert line in error_line(lambda: [opened(root, **section).count("train")])
    assert caches(root) == {}


LABELS = torch.tensor([0] * 100 + [1] * 7 + [2])


def test_balanced_epochs_have_equally_many_images_of_each_class():
    balanced = Order(108, 12, 2, seed=5, labels=LABELS)
    orders = [balanced.rows(epoch) for epoch in range(3)]
    for order in orders:
        assert torch.bincount(LABELS[order]).tolist() == [36, 36, 36]
        times = torch.bincount(order, minlength=108)
        assert set(times[:100].tolist()) == {0, 1} and set(times[100:107].tolist()) <= {5, 6}
    assert not torch.equal(*orders[:2])
    assert torch.equal(Order(108, 36, 1, seed=5, labels=LABELS).rows(2), orders[2])
    uneven = Order(107, 12, 1, seed=5, labels=LABELS[:107]).rows(0)
    assert sorted(torch.bincount(LABELS[uneven]).tolist()) == [53, 54]


def test_a_repeated_image_is_augmented_differently_each_time():
    settings = DataSettings.parse({"dataset": "digits", "sampling": "balanced", "augment": {"crop": 4}})
    images = data.Images(DataPlan.resolve(settings), 3, CPU)
    kept = images.train
    skewed = torch.cat([torch.nonzero(kept.labels == 0)[:1, 0], torch.nonzero(kept.labels == 1)[:, 0]])
    images.__dict__["train"] = ImageSet(kept.images[skewed], kept.labels[skewed], kept.classes)
    count = len(skewed)

    def epoch(parts):
        order = Order(count, count, parts, seed=3, labels=kept.labels[skewed])
        loader = images.training_loader(order)
        return list(loader.get_data_loader(repeat=False, skip=0, num_replicas=1, rank=0))

    ((pictures, labels),) = epoch(1)
    zeros = pictures[labels == 0]
    assert len(zeros) in (count // 2, count // 2 + 1)
    assert len(zeros.flatten(1).unique(dim=0)) > 20  # of one image
    parts = torch.cat([part for part, _ in epoch(3)])
    assert torch.equal(parts, pictures)  # each place in the epoch has its draws
