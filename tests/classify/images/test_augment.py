"""Random changes of training images: what they do, and that they depend on seed, epoch and image alone."""

import multiprocessing
import signal

import psutil
import pytest
import torch
from modes import LR
from support import error_line, overrides, train_many

from classify.images.augment import Augmentation, Augmenter
from classify.images.image_set import ImageSet
from classify.images.loader import MicroBatchLoader
from classify.images.sampler import MicroBatchSampler
from classify.images.settings import DataSettings
from harness.errors import TrainingStopped
from harness.out_of_memory import explain_out_of_memory

SIZE, COUNT = 32, 64
LIST = "data.augment.transforms"


@pytest.fixture(scope="module")
def images():
    return torch.randint(
        1, 256, (COUNT, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def augmented(images, epoch=0, indices=None, seed=5, **how):
    indices = torch.arange(COUNT) if indices is None else indices
    augmenter = Augmenter(Augmentation(**how), COUNT, (SIZE, SIZE), (SIZE, SIZE), seed)
    return augmenter(images.index_select(0, indices), indices, epoch)


def test_a_flip_mirrors_about_half(images):
    changed = augmented(images, flip=True)
    mirrored = [torch.equal(after, before.flip(2)) for after, before in zip(changed, images, strict=True)]
    kept = [torch.equal(after, before) for after, before in zip(changed, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 20 < sum(mirrored) < 44


def test_an_alternating_flip_mirrors_the_other_half_in_every_second_epoch(images):
    first, second, third, fourth = (augmented(images, epoch, flip="alternating") for epoch in range(4))
    assert torch.equal(first, augmented(images, flip=True))
    assert torch.equal(second, first.flip(3)) and torch.equal(third, first) and torch.equal(fourth, second)


@pytest.mark.parametrize(("edge", "mode"), [("zeros", "constant"), ("reflection", "reflect")])
def test_a_crop_shifts_by_at_most_so_much_and_fills_the_edge(images, edge, mode):
    shifts = set()
    for after, before in zip(augmented(images, crop=2, edge=edge), images, strict=True):
        padded = torch.nn.functional.pad(before.float(), (2,) * 4, mode=mode)
        found = [
            (down, right)
            for down in range(5)
            for right in range(5)
            if torch.equal(after, padded[:, down : down + SIZE, right : right + SIZE])
        ]
        assert len(found) == 1
        shifts.add(found[0])
    assert len(shifts) > 15 and {0, 4} <= {down for down, _ in shifts} & {right for _, right in shifts}


def test_a_flip_and_a_crop_cut_a_window_out_of_the_mirror_image_of_half(images):
    """Also of images larger and longer than what the network sees."""
    size, crop, seen = (20, 24), 1, set()
    augmenter = Augmenter(Augmentation(flip=True, crop=crop), COUNT, (SIZE, SIZE), size, 5)
    for after, before in zip(augmenter(images, torch.arange(COUNT), 0), images, strict=True):
        padded = torch.nn.functional.pad(before, (crop,) * 4)
        windows = [
            (way, down, right)
            for way, either in enumerate([padded, padded.flip(2)])
            for down in range(SIZE + 2 * crop - size[0] + 1)
            for right in range(SIZE + 2 * crop - size[1] + 1)
            if torch.equal(after, either[:, down : down + size[0], right : right + size[1]])
        ]
        assert len(windows) == 1
        seen.add(windows[0])
    assert len(seen) > 45 and {way for way, _, _ in seen} == {0, 1}
    assert {0, 14} <= {down for _, down, _ in seen} and {0, 10} <= {right for _, _, right in seen}


def test_a_cutout_is_a_square_of_zeros(images):
    areas = []
    for after, before in zip(augmented(images, cutout=8), images, strict=True):
        hole = (after == 0).all(0)
        assert torch.equal(after[:, ~hole], before[:, ~hole])
        rows, columns = hole.any(1).nonzero().squeeze(1), hole.any(0).nonzero().squeeze(1)
        assert hole.sum() == len(rows) * len(columns)
        assert 4 <= len(rows) <= 8 and 4 <= len(columns) <= 8  # its middle is in the image
        areas.append(int(hole.sum()))
    assert max(areas) == 64


def test_an_image_is_changed_alike_in_any_batch_and_otherwise_in_another_epoch(images):
    how = {"flip": True, "crop": 4, "cutout": 8}
    whole = augmented(images, **how)
    some = torch.tensor([40, 3, 17])
    assert torch.equal(augmented(images, indices=some, **how), whole[some])
    assert not torch.equal(augmented(images, epoch=1, **how), whole)
    assert not torch.equal(augmented(images, seed=6, **how), whole)


def test_a_loader_augments_by_the_epoch_it_is_in(images):
    source = ImageSet(images, torch.arange(COUNT), ("a",))
    sampler = MicroBatchSampler(COUNT, 16, 1, seed=5)
    augmenter = Augmenter(Augmentation(flip=True), COUNT, (SIZE, SIZE), (SIZE, SIZE), 5)
    loader = MicroBatchLoader(source, sampler, augmenter).get_data_loader()
    order = MicroBatchSampler(COUNT, 16, 1, seed=5)
    for epoch in range(2):
        wanted = augmented(images, epoch=epoch, flip=True)
        for indices, (given, _) in zip(order, loader, strict=True):
            assert torch.equal(given, wanted[indices])


@pytest.mark.parametrize(
    ("augment", "line"),
    [
        ([], "data.augment: []: must be a mapping"),
        ({"flipp": True}, "data.augment.flipp: True: unknown key; did you mean 'flip'?"),
        ({"flip": 1}, "data.augment.flip: 1: must be one of False, True, alternating"),
        ({"crop": 1, "edge": "mirror"}, "data.augment.edge: 'mirror': must be one of zeros, reflection"),
        ({"edge": "zeros"}, "data.augment.edge: 'zeros': does nothing without crop"),
        ({"crop": 32, "edge": "reflection"}, "data.augment.crop: 32: an image of 32 pixels has a reflection"),
        ({"crop": -1}, "data.augment.crop: -1: must be a whole number of pixels from 0 to 32"),
        ({"cutout": 33}, "data.augment.cutout: 33: must be a whole number of pixels from 0 to 32"),
        ({"transforms": "RandAugment"}, f"{LIST}: 'RandAugment': must be a list, e.g. [RandAugment]"),
        ({"transforms": [{}]}, f"{LIST}[0]: {{}}: must be a name, or one with its arguments"),
        (
            {"transforms": [{"RandomErasing": None, "p": 1}]},
            f"{LIST}[0]: {{'RandomErasing': None, 'p': 1}}: ",
        ),
        ({"transforms": ["RandAugment", "randaugment"]}, f"{LIST}[1]: 'randaugment': no such transform in"),
        (
            {"transforms": ["RandAugmnt"]},
            f"{LIST}[0]: 'RandAugmnt': no such transform in torchvision."
            "transforms.v2; did you mean 'RandAugment'?",
        ),
        (
            {"transforms": [{"RandAugment": {"magntude": 9}}]},
            f"{LIST}[0].RandAugment.magntude: 9: no such argument; did you mean 'magnitude'?",
        ),
        ({"transforms": [{"RandAugment": 9}]}, f"{LIST}[0].RandAugment: 9: must be a mapping"),
        (
            {"transforms": [{"RandAugment": {"magnitude": 99}}]},
            f"{LIST}[0].RandAugment: {{'magnitude': 99}}: fails on an image of 32x32 pixels (",
        ),
        (
            {"transforms": [{"RandomErasing": {"p": 2}}]},
            f"{LIST}[0].RandomErasing: {{'p': 2}}: cannot be made (",
        ),
        (
            {"transforms": [{"RandomErasing": {"value": "random"}}]},
            f"{LIST}[0].RandomErasing: {{'value': 'random'}}: its random values are for images of floats",
        ),
        ({"transforms": ["RandomPosterize"]}, f"{LIST}[0].RandomPosterize.bits: missing"),
        (
            {"transforms": [{"AutoAugment": {"policy": "cifar"}}]},
            f"{LIST}[0].AutoAugment.policy: 'cifar': must be one of imagenet, cifar10, svhn",
        ),
        (
            {"transforms": [{"Resize": {"size": 40}}]},
            f"{LIST}[0].Resize: {{'size': 40}}: makes [3, 40, 40] of an image of [3, 32, 32]",
        ),
        ({"transforms": ["RandomZoomOut"]}, f"{LIST}[0].RandomZoomOut: {{}}: makes [3, "),
        ({"transforms": ["MixUp"]}, f"{LIST}[0].MixUp: is not for single images of 0 to 255; set hyper"),
        ({"transforms": ["ToPILImage"]}, f"{LIST}[0].ToPILImage: {{}}: makes Image of an image"),
        ({"transforms": ["ToImage"]}, f"{LIST}[0].ToImage: {{}}: makes Image of an image"),
        ({"transforms": [{"FiveCrop": {"size": 32}}]}, f"{LIST}[0].FiveCrop: {{'size': 32}}: makes tuple of"),
        ({"transforms": ["PILToTensor"]}, f"{LIST}[0].PILToTensor: {{}}: does nothing to an image"),
        ({"transforms": ["RandomIoUCrop"]}, f"{LIST}[0].RandomIoUCrop: {{}}: fails on an image of 32x32"),
        (
            {"transforms": [{"RandomApply": {"transforms": ["GaussianNois"]}}]},
            f"{LIST}[0].RandomApply.transforms[0]: 'GaussianNois': no such transform",
        ),
    ],
)
def test_what_is_wrong_is_said(augment, line):
    assert error_line(DataSettings.parse, {"augment": augment}).startswith(line)


def test_resized_crops_have_the_area_that_is_asked_for_and_may_be_mirrored():
    """Of images that grow by 4 a pixel: to the right in one channel, downwards in another."""
    right = (torch.arange(32) * 4).expand(32, 32)
    images = torch.stack([right, right.T, right]).to(torch.uint8).expand(400, 3, 32, 32).contiguous()
    for least, most in ((0.5, 0.6), (0.9, 1.0)):
        augmenter = Augmenter(Augmentation(flip=True, resized_crop=(least, most)), 400, (32, 32), (32, 32), 0)
        seen = augmenter(images, torch.arange(400), 0).float()
        width, height = (
            (seen[:, 0, 16, 24] - seen[:, 0, 16, 8]) / 64,
            (seen[:, 1, 24, 16] - seen[:, 1, 8, 16]) / 64,
        )
        assert 150 < (width < 0).sum() < 250 and (height > 0).all()
        area, ratio = (width * height).abs(), (width / height).abs()
        assert least - 0.03 < area.min() and area.max() < most + 0.03
        assert ratio.min() > 0.7 and ratio.max() < 1.43
        assert area.std() > 0.02 and ratio.std() > 0.02


def test_devices():
    assert (
        error_line(DataSettings.parse, {"device": "gpu"})
        == "data.device: 'gpu': must be one of auto, cpu, cuda"
    )
    if not torch.cuda.is_available():
        assert "this machine has no GPU" in error_line(DataSettings.parse, {"device": "cuda"})


TRANSFORMS = ("RandAugment", {"ColorJitter": {"brightness": 0.2}}, {"RandomErasing": {"p": 0.5}})


def given_by_ranks(images, ranks=1, accumulated=1, workers=0, skip=0) -> dict[tuple[int, int], torch.Tensor]:
    """Every image of two epochs after so many micro-batches a rank, by (epoch, image)."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    source, parts = ImageSet(images, torch.arange(COUNT), ("a",)), ranks * accumulated
    augment = Augmentation.parse({"transforms": TRANSFORMS, "flip": True}, (SIZE, SIZE))
    for rank in range(ranks):
        augmenter = Augmenter(augment, COUNT, (SIZE, SIZE), (SIZE, SIZE), 5)
        sampler = MicroBatchSampler(COUNT, 16, parts, seed=5)
        loader = MicroBatchLoader(source, sampler, augmenter, workers)
        dealt = iter(loader.get_data_loader(repeat=True, skip=skip, num_replicas=ranks, rank=rank))
        epoch = len(sampler) // ranks
        for number in range(skip, 2 * epoch):
            changed, labels = next(dealt)
            for label, image in zip(labels.tolist(), changed, strict=True):
                seen[number // epoch, label] = image
    return seen


def test_transforms_are_drawn_for_each_image_wherever_it_is_transformed(images):
    """In this process or in workers, for one rank or two, accumulated or not, and after a resume."""
    random, children = torch.get_rng_state(), multiprocessing.active_children()
    whole = given_by_ranks(images)
    after = torch.get_rng_state()
    assert len(whole) == 2 * COUNT
    plain = {(epoch, index): images[index] for epoch, index in whole}
    changed = [not torch.equal(image, plain[place]) for place, image in whole.items()]
    assert sum(changed) > 1.9 * COUNT  # some draw nothing but identities
    assert sum(not torch.equal(whole[0, i], whole[1, i]) for i in range(COUNT)) > 0.9 * COUNT
    for how in (
        {"workers": 2},
        {"ranks": 2, "workers": 1},
        {"ranks": 2, "accumulated": 4},
        {"workers": 2, "skip": 6},
    ):
        again = given_by_ranks(images, **how)
        assert len(again) == len(whole) - 16 * how.get("skip", 0)
        assert all(torch.equal(image, whole[place]) for place, image in again.items()), how
    torch.set_rng_state(random)
    torch.empty((), dtype=torch.int64).random_()  # which torch's loader draws, whatever it gives
    assert torch.equal(torch.get_rng_state(), after)
    assert multiprocessing.active_children() == children


def test_workers_leave_signals_to_the_process_that_trains(images):
    """Which launchers send to all. They end with the loader, and one that is killed ends the training."""
    augmenter = Augmenter(Augmentation(flip=True), COUNT, (SIZE, SIZE), (SIZE, SIZE), 5)
    source = ImageSet(images, torch.arange(COUNT), ("a",))
    loader = MicroBatchLoader(source, MicroBatchSampler(COUNT, 4, 1, seed=5), augmenter, workers=1)
    dealt = iter(loader.get_data_loader(repeat=True))
    next(dealt)
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGINT, signal.SIGTERM):
        psutil.Process(worker.pid).send_signal(number)
    assert len([next(dealt) for _ in range(20)]) == 20 and worker.is_alive()
    del dealt
    assert not worker.is_alive()
    dealt = iter(loader.get_data_loader(repeat=True))
    multiprocessing.active_children()[0].kill()
    what = r"a worker process of the data loader ended in step 3 \("
    with pytest.raises(TrainingStopped, match=what), explain_out_of_memory(lambda: "in step 3", str):
        for _ in dealt:
            pass


def test_training_does_not_depend_on_processes_or_a_stop(tmp_path):
    """Three epochs with every augmentation: in one and two processes, and stopped in the second.

    By worker processes, and without them after the stop.
    """
    row = ["--config", "experiments/digits.yaml", *overrides(scheduling_unit=1), *LR]
    row += overrides(
        data__augment="{flip: true, crop: 4, cutout: 8, transforms: [TrivialAugmentWide]}",
        hyperparameters__max_length="{batches: 100}",
    )
    runs = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        runs[processes] = train_many(folder, {"run": row}, processes)["run"]
        assert runs[processes].code == 0, runs[processes].stderr
    losses = [[e["loss"] for e in run.metrics if e["group"] == "training"] for run in runs.values()]
    assert losses[0][:50] == pytest.approx(
        losses[1][:50], rel=1e-3
    )  # an epoch is 45; then Adam blows rounding up
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    assert train_many(stopped, {"run": row}, sigterm_at=60)["run"].code == 130
    rest = train_many(stopped, {"run": [*row, "--resume", "latest", *overrides(data__workers=0)]})["run"]
    assert rest.summary["weights_sha256"] == runs[1].summary["weights_sha256"]
