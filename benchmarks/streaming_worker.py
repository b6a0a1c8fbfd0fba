"""Measures one contender of ``benchmarks.streaming``, which starts it."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import data
from benchmarks.streaming_images import BATCH, SIDE, WORKERS
from classify.images.settings import DataSettings

IMAGENET = data.IMAGENET
_transform = transforms.Compose(
    [
        transforms.Resize(SIDE),
        transforms.CenterCrop(SIDE),
        transforms.ToTensor(),
        transforms.Normalize(*IMAGENET),
    ]
)


def main() -> None:
    """Measures, and writes the images a second by what they are of."""
    name, asked, answer = sys.argv[1:]
    request = json.loads(pathlib.Path(asked).read_text())
    torch.set_num_threads(1)
    measured = PEERS[name](request) if name in PEERS else OWN[name](request)
    pathlib.Path(answer).write_text(json.dumps(measured))


def rate(batches: Iterable[Tensor]) -> float:
    """Images a second from the first micro-batch on, which may wait for what begins."""
    source = iter(batches)
    next(source)
    begin, count = time.perf_counter(), 0
    for batch in source:
        count += len(batch)
    return count / (time.perf_counter() - begin)


# ------------------------------------------------------------------------------------------------------ peers


def image_folder(request: dict[str, Any]) -> dict[str, float]:
    """Torchvision's."""
    source = datasets.ImageFolder(f"{request['root']}/photos/train", _transform)
    loader: Any = DataLoader(source, BATCH, shuffle=True, num_workers=WORKERS)
    return {"ImageFolder": rate(images for images, _ in loader)}


def web_dataset(request: dict[str, Any]) -> dict[str, float]:
    """Webdataset's."""
    webdataset = importlib.import_module("webdataset")

    shards = sorted(map(str, pathlib.Path(request["root"], "shards").glob("train-*.tar")))
    source = webdataset.WebDataset(shards, shardshuffle=100).shuffle(1000).decode("pil")
    source = source.to_tuple("jpg", "cls").map_tuple(_transform, int).batched(BATCH)
    loader = webdataset.WebLoader(source, batch_size=None, num_workers=WORKERS)
    return {"webdataset": rate(images for images, _ in loader)}


def hugging_face(request: dict[str, Any]) -> dict[str, float]:
    """Hugging Face datasets, streaming the same shards."""
    library: Any = importlib.import_module("datasets")
    files = str(pathlib.Path(request["root"], "shards", "train-*.tar"))
    found: Any = library.load_dataset("webdataset", data_files=files, split="train", streaming=True)

    def inputs(row: dict[str, Any]) -> dict[str, Any]:
        image: Image.Image = row["jpg"]
        return {"jpg": _transform(image.convert("RGB")), "cls": int(row["cls"])}

    source = found.shuffle(buffer_size=1000).map(inputs, remove_columns=["__key__", "__url__"])
    loader = DataLoader(source.with_format("torch"), BATCH, num_workers=WORKERS)
    return {"datasets": rate(batch["jpg"] for batch in loader)}


PEERS = {"ImageFolder": image_folder, "webdataset": web_dataset, "datasets": hugging_face}


# -------------------------------------------------------------------------------------------------------- own


def images_of(dataset: str, root: str, **section: Any) -> data.Images:
    """The images of a ``data`` section."""
    asked = {"dataset": dataset, "root": root, "normalize": "imagenet", "image_size": SIDE, **section}
    settings = DataSettings.parse(asked)
    return data.Images(settings, settings.open_source(), 0, torch.device("cpu"))


def epochs(images: data.Images) -> Iterator[Iterator[Tensor]]:
    """The normalised inputs of one epoch after the other."""
    loader = images.training_loader(images.training_sampler(BATCH, 1)).get_data_loader()
    while True:
        yield (images.inputs(pixels, channels_last=False) for pixels, _ in loader)


def own(name: str, request: dict[str, Any]) -> dict[str, float]:
    """This project's first epoch, from the folder or the shards, or of what is decoded already."""
    dataset, folder = ("imagefolder", "photos") if name == "files" else ("webdataset", "shards")
    section: dict[str, Any] = {"decode": "once"}
    if name != "mapped":
        section = {"decode": "stream", "workers": WORKERS}
    if name in ("files", "shards"):
        section["cache"] = {"limit": "1MB"}  # so that nothing decoded is kept
    each = epochs(images_of(dataset, f"{request['root']}/{folder}", **section))
    first = rate(next(each))
    if name not in ("kept", "mapped"):
        return {name: first}
    rate(next(each))  # after which all pages have been touched
    return {name: rate(next(each)), **({"keeping": first} if name == "kept" else {})}


def link(request: dict[str, Any]) -> dict[str, float]:
    """Bytes, and bytes a second, that come over a link from the first request on, in an epoch of shards."""
    begin = time.perf_counter()
    section = {"decode": "stream", "workers": WORKERS, "cache": {"folder": request["cache"]}}
    images = images_of("webdataset", request["root"], **section, image_size=8)
    for _ in next(epochs(images)):
        pass
    size = sum(each.size for each in images.source.shards("train"))
    return {"bytes": size, "rate": size / (time.perf_counter() - begin)}


OWN = {
    "files": lambda request: own("files", request),
    "shards": lambda request: own("shards", request),
    "kept": lambda request: own("kept", request),
    "mapped": lambda request: own("mapped", request),
    "link": link,
}

if __name__ == "__main__":
    main()
