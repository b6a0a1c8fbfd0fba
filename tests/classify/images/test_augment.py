"""Random changes of training images depend on the seed, the epoch and the image alone."""

import itertools
import multiprocessing
import signal

import psutil
import pytest
import torch
from folders import table
from support import error_line

from classify.images.augment import Augmentation, Augmenter
from classify.images.loader import MicroBatchLoader
from classify.images.order import Order
from classify.images.pixels import ImageSet
from classify.images.settings import DataSettings
from deepspeed_trial.errors import TrainingStopped
from deepspeed_trial.out_of_memory import explain_out_of_memory

SIZE, COUNT = 32, 64
LIST = "data.augment.transforms"


@pytest.fixture(scope="module")
def images():
    random = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (COUNT, 3, SIZE, SIZE), dtype=torch.uint8, generator=random)


def augmenter(augmentation: Augmentation, seed=5) -> Augmenter:
    return Augmenter(augmentation, COUNT, (SIZE, SIZE), (SIZE, SIZE), seed)


def augmented(images, epoch=0, **how):
    return augmenter(Augmentation(**how))(images, torch.arange(COUNT), epoch)


def loader(images, augmentation, batch=16, parts=1, workers=0):
    source, order = ImageSet(images, torch.arange(COUNT), ("a",)), Order(COUNT, batch, parts, 5)
    return MicroBatchLoader(source, order, augmenter(augmentation), workers)


def test_flips_mirror_a_half_and_alternating_ones_the_other_half_in_every_second_epoch(images):
    changed = augmented(images, flip=True)
    mirrored = [torch.equal(after, before.flip(2)) for after, before in zip(changed, images, strict=True)]
    kept = [torch.equal(after, before) for after, before in zip(changed, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 20 < sum(mirrored) < 44
    first, second, third, fourth = (augmented(images, epoch, flip="alternating") for epoch in range(4))
    assert torch.equal(first, changed)
    assert torch.equal(second, first.flip(3)) and torch.equal(third, first) and torch.equal(fourth, second)


def test_a_checkpoint_older_than_a_key_has_the_identity_of_its_default():
    oldest = {"flip": False, "crop": 0, "resized_crop": None, "cutout": 0}
    assert Augmentation().identity() == oldest
    newer = Augmentation(crop=2, edge="reflection", transforms=({"RandAugment": {}},)).identity()
    assert newer == {**oldest, "crop": 2, "edge": "reflection", "transforms": [{"RandAugment": {}}]}
    assert Augmentation(resized_crop=(0.5, 1)).identity() == {**oldest, "resized_crop": [0.5, 1]}


@table(
    "edge, crop, size, flip",
    zeros=("constant", 2, (SIZE, SIZE), False),
    reflection=("reflect", 2, (SIZE, SIZE), False),
    of_larger_images=("constant", 1, (20, 24), True),
)
def test_a_crop_is_a_window_of_the_padded_image_or_of_its_mirror_image(images, edge, crop, size, flip):
    chosen = Augmentation(flip=flip, crop=crop, edge="zeros" if edge == "constant" else "reflection")
    rooms, seen = [SIZE + 2 * crop - side for side in size], set()
    changed = Augmenter(chosen, COUNT, (SIZE, SIZE), size, 5)(images, torch.arange(COUNT), 0)
    for after, before in zip(changed, images, strict=True):
        padded = torch.nn.functional.pad(before.float(), (crop,) * 4, mode=edge).byte()
        windows = [
            (way, down, right)
            for way, either in enumerate([padded, padded.flip(2)][: 1 + flip])
            for down, right in itertools.product(*(range(room + 1) for room in rooms))
            if torch.equal(after, either[:, down : down + size[0], right : right + size[1]])
        ]
        assert len(windows) == 1
        seen.add(windows[0])
    assert len(seen) > (45 if flip else 15)
    assert {way for way, _, _ in seen} == set(range(1 + flip))
    assert {0, rooms[0]} <= {down for _, down, _ in seen} and {0, rooms[1]} <= {right for _, _, right in seen}


def test_a_cutout_is_a_square_of_zeros(images):
    areas = []
    for after, before in zip(augmented(images, cutout=8), images, strict=True):
        hole = (after == 0).all(0)
        assert torch.equal(after[:, ~hole], before[:, ~hole])
        rows, columns = hole.any(1).nonzero().squeeze(1), hole.any(0).nonzero().squeeze(1)
        assert hole.sum() == len(rows) * len(columns)
        assert 4 <= len(rows) <= 8 and 4 <= len(columns) <= 8  # the image has its middle
        areas.append(int(hole.sum()))
    assert max(areas) == 64


def test_resized_crops_have_the_configured_area_and_may_be_mirrored():
    """Brightness grows by 4 a pixel: to the right in one channel, downwards in another."""
    right = (torch.arange(32) * 4).expand(32, 32)
    images = torch.stack([right, right.T, right]).to(torch.uint8).expand(400, 3, 32, 32).contiguous()
    for least, most in ((0.5, 0.6), (0.9, 1.0)):
        chosen = Augmentation(flip=True, resized_crop=(least, most))
        seen = Augmenter(chosen, 400, (32, 32), (32, 32), 0)(images, torch.arange(400), 0).float()
        width = (seen[:, 0, 16, 24] - seen[:, 0, 16, 8]) / 64
        height = (seen[:, 1, 24, 16] - seen[:, 1, 8, 16]) / 64
        assert 150 < (width < 0).sum() < 250 and (height > 0).all()
        area, ratio = (width * height).abs(), (width / height).abs()
        assert least - 0.03 < area.min() and area.max() < most + 0.03
        assert ratio.min() > 0.7 and ratio.max() < 1.43
        assert area.std() > 0.02 and ratio.std() > 0.02


@table(
    "augment, line",
    list=([], "data.augment: []: must be a mapping"),
    key=({"flipp": True}, "data.augment.flipp: True: unknown key; did you mean 'flip'?"),
    flip=({"flip": 1}, "data.augment.flip: 1: must be one of False, True, alternating"),
    edge=({"crop": 1, "edge": "mirror"}, "data.augment.edge: 'mirror': must be one of zeros, reflection"),
    edge_alone=({"edge": "zeros"}, "data.augment.edge: 'zeros': has no effect without crop"),
    reflection=({"crop": 32, "edge": "reflection"}, "data.augment.crop: 32: reflection can pad an image of 32 pixels by at most 31"),
    crop=({"crop": -1}, "data.augment.crop: -1: must be a whole number of pixels from 0 to 32"),
    cutout=({"cutout": 33}, "data.augment.cutout: 33: must be a whole number of pixels from 0 to 32"),
    text=({"transforms": "RandAugment"}, f"{LIST}: 'RandAugment': must be a list, e.g. [RandAugment]"),
    empty=({"transforms": [{}]}, f"{LIST}[0]: {{}}: must be a name, or a name with its arguments"),
    two_keys=({"transforms": [{"RandomErasing": None, "p": 1}]}, f"{LIST}[0]: {{'RandomErasing': None, 'p': 1}}: "),
    lower_case=({"transforms": ["RandAugment", "randaugment"]}, f"{LIST}[1]: 'randaugment': no such transform in"),
    name=({"transforms": ["RandAugmnt"]}, f"{LIST}[0]: 'RandAugmnt': no such transform in torchvision.transforms.v2; did you mean 'RandAugment'?"),
    argument=({"transforms": [{"RandAugment": {"magntude": 9}}]}, f"{LIST}[0].RandAugment.magntude: 9: no such argument; did you mean 'magnitude'?"),
    arguments=({"transforms": [{"RandAugment": 9}]}, f"{LIST}[0].RandAugment: 9: must be a mapping"),
    fails=({"transforms": [{"RandAugment": {"magnitude": 99}}]}, f"{LIST}[0].RandAugment: {{'magnitude': 99}}: fails on an image of 32x32 pixels ("),
    value=({"transforms": [{"RandomErasing": {"p": 2}}]}, f"{LIST}[0].RandomErasing: {{'p': 2}}: cannot be created ("),
    floats=({"transforms": [{"RandomErasing": {"value": "random"}}]}, f"{LIST}[0].RandomErasing: {{'value': 'random'}}: random values are for images of floats"),
    missing=({"transforms": ["RandomPosterize"]}, f"{LIST}[0].RandomPosterize.bits: missing"),
    policy=({"transforms": [{"AutoAugment": {"policy": "cifar"}}]}, f"{LIST}[0].AutoAugment.policy: 'cifar': must be one of imagenet, cifar10, svhn"),
    size=({"transforms": [{"Resize": {"size": 40}}]}, f"{LIST}[0].Resize: {{'size': 40}}: turns an image of shape [3, 32, 32] into [3, 40, 40]"),
    random_size=({"transforms": ["RandomZoomOut"]}, f"{LIST}[0].RandomZoomOut: {{}}: turns an image of shape [3, 32, 32] into [3, "),
    of_batches=({"transforms": ["MixUp"]}, f"{LIST}[0].MixUp: does not work on a single uint8 image; set hyper"),
    pil=({"transforms": ["ToPILImage"]}, f"{LIST}[0].ToPILImage: {{}}: turns an image, a tensor of torch.uint8, into Image"),
    five=({"transforms": [{"FiveCrop": {"size": 32}}]}, f"{LIST}[0].FiveCrop: {{'size': 32}}: turns an image, a tensor of torch.uint8, into tuple"),
    nothing=({"transforms": ["PILToTensor"]}, f"{LIST}[0].PILToTensor: {{}}: does nothing to an image"),
    boxes=({"transforms": ["RandomIoUCrop"]}, f"{LIST}[0].RandomIoUCrop: {{}}: fails on an image of 32x32"),
    nested=({"transforms": [{"RandomApply": {"transforms": ["GaussianNois"]}}]}, f"{LIST}[0].RandomApply.transforms[0]: 'GaussianNois': no such transform"),
)  # fmt: skip
def test_invalid_augmentation_is_refused(augment, line):
    assert error_line(DataSettings.parse, {"augment": augment}).startswith(line)


TRANSFORMS = ("RandAugment", {"ColorJitter": {"brightness": 0.2}}, {"RandomErasing": {"p": 0.5}})
CHANGES = {"transforms": TRANSFORMS, "flip": True, "crop": 4, "cutout": 8}
AUGMENTATION = Augmentation.parse(CHANGES, (SIZE, SIZE))


def given_by_ranks(images, ranks=1, accumulated=1, workers=0, skip=0) -> dict[tuple[int, int], torch.Tensor]:
    """Every image of two epochs by (epoch, image), without the first ``skip`` micro-batches of each rank."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(ranks):
        given = loader(images, AUGMENTATION, parts=ranks * accumulated, workers=workers)
        dealt = iter(given.get_data_loader(repeat=True, skip=skip, num_replicas=ranks, rank=rank))
        epoch = COUNT // 16 * accumulated
        for number in range(skip, 2 * epoch):
            changed, labels = next(dealt)
            for label, image in zip(labels.tolist(), changed, strict=True):
                seen[number // epoch, label] = image
    return seen


def test_an_image_draws_the_same_transforms_wherever_a_process_transforms_it(images):
    """The process trains or only loads, is one of one or two ranks, accumulates or not, and may have resumed."""
    random, children = torch.get_rng_state(), multiprocessing.active_children()
    whole = given_by_ranks(images)
    after = torch.get_rng_state()
    assert len(whole) == 2 * COUNT
    assert sum(not torch.equal(image, images[index]) for (_, index), image in whole.items()) > 1.9 * COUNT
    assert not torch.equal(augmenter(AUGMENTATION, 6)(images[:1], torch.zeros(1).long(), 0)[0], whole[0, 0])
    assert sum(not torch.equal(whole[0, i], whole[1, i]) for i in range(COUNT)) > 0.9 * COUNT
    for epoch in (0, 1):
        wanted = augmenter(AUGMENTATION)(images, torch.arange(COUNT), epoch)
        assert torch.equal(torch.stack([whole[epoch, index] for index in range(COUNT)]), wanted)
    ranks = {"ranks": 2}
    for how in (
        {"workers": 2},
        {**ranks, "workers": 1},
        {**ranks, "accumulated": 4},
        {"workers": 2, "skip": 6},
    ):
        again = given_by_ranks(images, **how)
        assert len(again) == len(whole) - 16 * how.get("skip", 0)
        assert all(torch.equal(image, whole[place]) for place, image in again.items()), how
    torch.set_rng_state(random)
    torch.empty((), dtype=torch.int64).random_()  # torch's loader draws this much
    assert torch.equal(torch.get_rng_state(), after)
    assert multiprocessing.active_children() == children


def test_workers_leave_signals_to_the_training_and_end_with_it(images):
    """A launcher sends a signal to every process. A killed worker ends the training."""
    given = loader(images, Augmentation(flip=True), batch=4, workers=1)
    dealt = iter(given.get_data_loader(repeat=True))
    next(dealt)
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGINT, signal.SIGTERM):
        psutil.Process(worker.pid).send_signal(number)
    assert len([next(dealt) for _ in range(20)]) == 20 and worker.is_alive()
    del dealt
    assert not worker.is_alive()
    dealt = iter(given.get_data_loader(repeat=True))
    multiprocessing.active_children()[0].kill()
    line = r"a worker process of the data loader ended in step 3 \("
    with pytest.raises(TrainingStopped, match=line), explain_out_of_memory(lambda: "in step 3", str):
        for _ in dealt:
            pass
