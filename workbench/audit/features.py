"""Features of images: one vector per image, computed once and stored on disk.

A network's features are the inputs of its head. Without a network, features are the responses of filters,
which are whitened patches of the training images. Source: A. Coates, H. Lee, A. Ng, "An Analysis of
Single-Layer Networks in Unsupervised Feature Learning" (https://proceedings.mlr.press/v15/coates11a.html).
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import joblib
import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn import functional as F

from classify.images.pixels import work_on, workers_for
from classify.models import net_file, state_dicts
from classify.models.heads import head_layers
from classify.models.registry import logits
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.host_lock import stand_ins
from deepspeed_trial.output_files import replacing
from workbench.audit.dataset import Dataset
from workbench.publish.scoring import inputs_of

FOLDER = "features"  # in the user's cache; checkpoint.py caches lists it
PATCH, FILTERS, SAMPLED = 6, 256, 20_000  # a patch's side in pixels; filters; sampled patches
REGIONS = 2  # responses are averaged in 2 x 2 regions of an image
_FORMAT = 1  # the version of the computation; features of another version are computed again


@dataclass(frozen=True)
class Extractor:
    """A function that computes features of images.

    Attributes:
        name: the function's name in the output.
        identity: a text that identifies the function and its weights.
        compute: the function, from images (B, 3, h, w) uint8 to features (B, D) float32.
    """

    name: str
    identity: str
    compute: Callable[[Tensor], Tensor]


class HeadInput:
    """A network's head and the inputs of the head, which are the features.

    Args:
        net: the network, in evaluation mode, on the CPU.
        description: the network's description; see ``net_file.read_description``.
        path: the name of the network in error lines.

    Attributes:
        layer: the name of the head, a fully connected layer.
        scale: the factor from the layer's outputs to the network's logits.

    Raises:
        InvalidInput: if the network's logits are not the outputs of a fully connected layer times a number.
    """

    def __init__(self, net: nn.Module, description: Mapping[str, Any], path: str) -> None:
        self.net, self.description = net, description
        layers = head_layers(net)
        self.layer = layers[-1] if layers else ""
        if not layers or not isinstance(net.get_submodule(self.layer), nn.Linear):
            raise InvalidInput(f"{path}: its last layer is not fully connected; use another network")
        image = description["input"]
        example = torch.rand(
            4, 3, image["height"], image["width"], generator=torch.Generator().manual_seed(0)
        )
        features, scores = self._run(example * 2 - 1)
        if features.shape[1] != self.head.in_features:
            raise InvalidInput(f"{path}: its last layer gets several vectors an image; use another network")
        outputs = self.head(features).detach()
        self.scale = float((scores * outputs).sum() / outputs.square().sum().clamp(min=1e-30))
        if not torch.allclose(scores, self.scale * outputs, rtol=1e-3, atol=1e-5):
            raise InvalidInput(f"{path}: layers follow its last fully connected layer; use another network")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the decoded images for the network, in pixels."""
        height, width = self.description["input"]["resize"]
        return height, width

    @property
    def head(self) -> nn.Linear:
        """The layer that computes the logits."""
        layer = self.net.get_submodule(self.layer)
        assert isinstance(layer, nn.Linear)
        return layer

    def compute(self, images: Tensor) -> Tensor:
        """Return features (B, D) float32 of images (B, 3, h, w) uint8."""
        (inputs,) = inputs_of(self.description, images, len(images))
        return self._run(inputs)[0]

    @torch.no_grad()
    def _run(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda layer, arguments: seen.append(arguments[0]))
        try:
            scores = logits(self.net(inputs))
        finally:
            hook.remove()
        return seen[-1].flatten(1).float(), scores.float()


def of_network(path: pathlib.Path) -> tuple[Extractor, HeadInput]:
    """Return the extractor of an exported network's features, and the network's head.

    Raises:
        InvalidInput: if the file is damaged, or its network has no fully connected head.
    """
    net, description = net_file.read(path)
    head = HeadInput(net, description, str(path))
    weights = state_dicts.sha256(dict(sorted(net.state_dict().items())))
    identity = f"{weights} {description['net']} {description['input']}"
    return Extractor(f"{description['net']['name']} ({path})", identity, head.compute), head


def of_patches(dataset: Dataset) -> Extractor:
    """Return an extractor of responses to whitened patches of the training images.

    The features have D = 4 regions x 256 filters x 2 signs.
    """
    with threadpool_limits(1):  # the same bits on any number of cores
        weight, shift, side = _whitened(dataset)

    def compute(images: Tensor) -> Tensor:
        unfolded = F.unfold(images.float(), side).transpose(1, 2)
        responses = (_contrast(unfolded) @ weight.T - shift).transpose(1, 2)
        height, width = images.shape[2:]
        responses = responses.unflatten(2, (height - side + 1, width - side + 1))
        signed = torch.cat([(responses - 0.25).clamp(min=0), (-responses - 0.25).clamp(min=0)], 1)
        return F.adaptive_avg_pool2d(signed, REGIONS).flatten(1)

    digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    return Extractor("whitened patches", f"patches {digest}", compute)


def _whitened(dataset: Dataset) -> tuple[Tensor, Tensor, int]:
    """Return filters (256, 3 * side**2), their responses to the mean patch (256,), and a patch's side."""
    random = np.random.default_rng(0)
    train = dataset.rows("train")
    chosen = np.sort(random.permutation(train)[:2000])
    images = torch.cat([dataset.select(part) for part in np.array_split(chosen, -(-len(chosen) // 64))])
    height, width = images.shape[2:]
    side = min(PATCH, height, width)
    places = [
        random.integers(0, most, SAMPLED) for most in (len(images), height - side + 1, width - side + 1)
    ]
    patches = torch.stack(
        [
            images[i, :, top : top + side, left : left + side]
            for i, top, left in zip(*map(np.ndarray.tolist, places), strict=True)
        ]
    )
    patches = _contrast(patches.flatten(1).double())
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((patches - mean).T))
    whiten = (vectors * (values + 0.1).rsqrt()) @ vectors.T
    filters = F.normalize((patches[random.permutation(SAMPLED)[:FILTERS]] - mean) @ whiten, dim=1) @ whiten
    return filters.float(), (filters @ mean).float(), side


def _contrast(patches: Tensor) -> Tensor:
    """Normalise the brightness and the contrast of patches (..., D) with values from 0 to 255."""
    patches = patches - patches.mean(-1, keepdim=True)
    return patches / (patches.var(-1, keepdim=True) + 10).sqrt()


@dataclass(frozen=True)
class Features:
    """Features of all images of a dataset.

    Attributes:
        values: float32 (N, D).
        seconds: the time to compute them; None if an earlier command has stored them.
    """

    values: np.ndarray
    seconds: float | None

    def __str__(self) -> str:
        count = f"{self.values.shape[1]:,} numbers an image"
        return (
            f"{count}, stored by an earlier command"
            if self.seconds is None
            else f"{count}, {self.seconds:.1f} s"
        )


def kept(extractor: Extractor, dataset: Dataset) -> Features:
    """Compute the features of all images, or read them if an earlier command computed them.

    The number of processes does not change the result: one thread computes each batch of a fixed size.
    """
    identity = f"{_FORMAT} {torch.__version__} {extractor.identity} {dataset.digest()}"
    file = stand_ins() / FOLDER / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # a missing or damaged file is written
        features = np.load(file, allow_pickle=False)
        if features.dtype == np.float32 and features.ndim == 2 and len(features) == len(dataset):
            return Features(features, None)
    start = time.monotonic()
    chunks, compute = dataset.chunks(), lambda rows: extractor.compute(dataset.select(rows)).numpy()
    with workers_for(compute, min(joblib.cpu_count(), len(chunks))) as pool:
        features = np.concatenate(list(pool.map(work_on, chunks)))
    seconds = time.monotonic() - start
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file, shared=True) as partial, open(partial, "wb") as written:
        np.save(written, features)
    return Features(features, seconds)
