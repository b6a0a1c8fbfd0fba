"""An order cuts epochs into micro-batches, and the loaders give them."""

import itertools

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from support import error_line

import data
from classify.images.augment import Augmentation, Augmenter
from classify.images.loader import MicroBatchDataset, MicroBatchLoader, Prefetcher
from classify.images.order import MicroBatch, Order
from classify.images.pixels import ImageSet
from deepspeed_trial.errors import InvalidInput


@pytest.fixture(scope="module")
def all_values():
    """Every channel of an image has all 256 values."""
    values = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (7, 3, 4)), axis=2)
    return ImageSet(torch.from_numpy(values.reshape(7, 3, 32, 32)), torch.arange(7) * 11, ("a",))


def test_batches_are_torchvisions_bit_for_bit(all_values):
    to_tensor = torchvision.transforms.ToTensor()
    normalize = torchvision.transforms.Normalize((0.5,) * 3, (0.5,) * 3)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in all_values.images]
    wanted = torch.stack([normalize(to_tensor(picture)) for picture in pictures])
    batches, before = MicroBatchDataset(all_values), all_values.images.clone()
    chosen = torch.tensor([4, 0, 6])
    images, labels = batches.__getitems__(MicroBatch(0, chosen, chosen))
    inputs = data.as_inputs(images)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, wanted[chosen])
    assert torch.equal(labels, torch.tensor([44, 0, 66]))
    assert torch.equal(all_values.images, before)


def test_a_fetch_is_a_whole_micro_batch(all_values):
    fetching = MicroBatchLoader(all_values, Order(7, 4, 1)).get_data_loader()
    fetched = [(images.shape, images.dtype, labels.shape, labels.dtype) for images, labels in fetching]
    assert fetched == [((n, 3, 32, 32), torch.uint8, (n,), torch.int64) for n in (4, 3)]


def micro_batches(order: Order, epoch: int) -> list[list[int]]:
    return [micro_batch.indices.tolist() for micro_batch in order.micro_batches(epoch)]


def joined(parts) -> list[int]:
    return [image for part in parts for image in part]


def steps(order: Order, epoch: int) -> list[list[list[int]]]:
    dealt, parts = micro_batches(order, epoch), order.micro_batches_per_step
    return [dealt[i : i + parts] for i in range(0, len(dealt), parts)]


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize(
    ("size", "batch_size", "parts"),
    [
        (1437, 16, 1),
        (1437, 32, 4),
        (100, 16, 4),  # the rest gives every micro-batch just one image
        (17, 8, 4),  # the rest is too small for another step
        (360, 4, 4),  # no rest
        (7, 16, 4),  # a rest alone
        (4, 16, 4),
    ],
)
def test_an_epoch_is_cut_into_even_micro_batches_of_each_image_once(size, batch_size, parts, seed):
    order = Order(size, batch_size, parts, seed=seed)
    for number in range(3):
        epoch = steps(order, number)
        assert len(order) == len(epoch) * parts
        assert sorted(joined(joined(epoch))) == list(range(size))
        for step in epoch:
            lengths = [len(part) for part in step]
            assert len(lengths) == parts
            assert 1 <= min(lengths) <= max(lengths) <= min(min(lengths) + 1, batch_size // parts)
        is_shared = 0 < size % batch_size < parts  # the rest is too small for another step
        full = [len(joined(step)) for step in epoch[: size // batch_size - is_shared]]
        assert full == [batch_size] * len(full)
        assert len(epoch) == -(-size // batch_size)


@pytest.mark.parametrize(("size", "batch_size", "parts"), [(5, 2, 2), (11, 4, 4)])
def test_a_rest_too_small_for_all_micro_batches_is_left_out(size, batch_size, parts):
    order = Order(size, batch_size, parts, seed=0)
    seen: set[int] = set()
    for number in range(20):
        epoch = joined(micro_batches(order, number))
        assert len(set(epoch)) == len(epoch)
        assert 0 < size - len(epoch) < parts
        seen.update(epoch)
    assert seen == set(range(size))


@pytest.mark.parametrize(("size", "parts"), [(3, 4), (0, 1)])
def test_fewer_images_than_micro_batches_are_refused(size, parts):
    line = error_line(Order, size, 8, parts)
    for part in ("train_batch_size: 8", f"{parts} micro-batches", f"only {size} images"):
        assert part in line


def test_the_order_is_a_function_of_seed_and_epoch():
    def epochs(seed, count=4):
        order = Order(100, 16, 2, seed)
        torch.manual_seed(count)
        np.random.seed(count)
        return [micro_batches(order, epoch) for epoch in range(count)]

    first = epochs(7)
    assert epochs(7, 5)[:4] == first
    assert all(a != b for a, b in itertools.combinations([*first, *epochs(8)], 2))
    order = Order(100, 16, 2, 7)
    assert [micro_batches(order, 3) for _ in range(2)] == [first[3]] * 2  # iterating changes nothing
    assert [joined(epoch) for epoch in epochs(None, 2)] == [list(range(100))] * 2


@pytest.mark.parametrize(("size", "batch_size"), [(100, 16), (64, 8)])
def test_steps_are_the_same_for_any_parts(size, batch_size):
    def images(parts):
        order = Order(size, batch_size, parts, seed=1)
        return [[sorted(joined(step)) for step in steps(order, epoch)] for epoch in range(2)]

    assert images(1) == images(2) == images(4)


def dealt(micro_batches=None, size=91, batch_size=24, parts=6, **how) -> list[list[int]]:
    """The images from Determined's loader; the pixels and the label of each are its number."""
    numbers = torch.arange(size)
    source = ImageSet(numbers.to(torch.uint8)[:, None, None, None].expand(-1, 3, 32, 32), numbers, ("a",))
    fetching = MicroBatchLoader(source, Order(size, batch_size, parts, seed=2)).get_data_loader(**how)
    given = []
    for images, labels in itertools.islice(fetching, micro_batches):
        assert torch.equal(images.long(), labels[:, None, None, None].expand(-1, 3, 32, 32))
        given.append(labels.tolist())
    return given


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ranks_share_an_epoch_and_resume_at_any_micro_batch(replicas):
    accumulated = 6 // replicas
    epoch = 4 * accumulated
    shards = [dealt(num_replicas=replicas, rank=rank) for rank in range(replicas)]
    assert {len(shard) for shard in shards} == {epoch}
    assert sorted(joined(joined(shards))) == list(range(91))
    for step, wanted in enumerate(steps(Order(91, 24, 6, seed=2), 0)):
        mine = [part for shard in shards for part in shard[step * accumulated : (step + 1) * accumulated]]
        assert sorted(mine) == sorted(wanted)
    for rank in range(replicas):
        how = {"repeat": True, "num_replicas": replicas, "rank": rank}
        whole = dealt(3 * epoch, **how)
        assert len(whole) == 3 * epoch
        assert whole[:epoch] != whole[epoch : 2 * epoch] != whole[2 * epoch :]
        for skip in (1, epoch - 1, epoch, epoch + 2):
            assert dealt(len(whole) - skip, skip=skip, **how) == whole[skip:]


def test_a_thread_fetches_the_next_images_of_the_loader():
    """The prefetcher gives the augmented images of the loader."""
    torch.manual_seed(0)
    source = ImageSet(torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8), torch.arange(50), ("one",))

    def epochs():
        augmenter = Augmenter(Augmentation(flip=True, crop=2), 50, (8, 8), (8, 8), 3)
        loader = MicroBatchLoader(source, Order(50, 16, 1, seed=3), augmenter)
        return loader.get_data_loader(repeat=True, skip=2, num_replicas=1, rank=0)

    plain, ahead = epochs(), Prefetcher(epochs())
    assert len(ahead) == len(plain)
    for (images, labels), (expected, order), _ in zip(ahead, plain, range(12), strict=False):
        torch.testing.assert_close(images, expected, rtol=0, atol=0)
        assert labels.tolist() == order.tolist()


def test_the_thread_passes_errors_on():
    def micro_batches():
        yield 1
        yield 2
        raise InvalidInput("damaged")

    got = []
    with pytest.raises(InvalidInput, match="damaged"):
        for each in Prefetcher(micro_batches()):
            got.append(each)
    assert got == [1, 2]
    assert list(Prefetcher(range(3))) == [0, 1, 2]
