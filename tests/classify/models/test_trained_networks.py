"""Trainings of photographs, of a user's network and from torchvision's weights; test_matrix.py trains the others."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from matrix import DEEPSPEED
from PIL import Image
from support import DIGITS, error_line, overrides, run, train_many

import net as own
from classify.models import dry_run, pretrained, registry, state_dicts
from classify.models.heads import head_layers
from classify.models.registry import NetSpec

SHORT = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 2}", **{f"{DEEPSPEED}scheduler": "null"})]
CLASSES, SIZE = 7, (32, 32)


def write_photographs(root: pathlib.Path) -> None:
    """Bands whose width and hue tell the class: JPEG, PNG, WebP, grey, palette and turned by EXIF, of many sizes."""
    random = np.random.default_rng(0)
    for index in range(420):
        label, kind = index % CLASSES, index // CLASSES % 6
        width, height = random.integers(40, 120, 2)
        slope = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
        bands = (np.arange(height)[:, None, None] * (label + 1) // 12 % 2) * 200.0
        hue = np.eye(3)[label % 3] * 60
        pixels = np.clip((slope + bands) / 2 + hue + random.normal(0, 20, (height, width, 3)), 0, 255)
        options: dict[str, Any] = {}
        image = Image.fromarray(pixels.astype(np.uint8))
        if kind in (3, 4):
            image = image.convert("LP"[kind - 3])
        elif kind == 5:
            exif = Image.Exif()
            exif[0x0112] = 6
            image, options = image.transpose(Image.Transpose.ROTATE_90), {"exif": exif}
        folder = root / ("test" if index % 5 == 0 else "train") / f"class {label}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{index}.{('jpg', 'png', 'webp', 'png', 'png', 'jpg')[kind]}", **options)


def test_a_folder_of_photographs_trains_at_its_own_size(tmp_path):
    write_photographs(tmp_path / "photos")
    chosen = overrides(
        data__root=tmp_path / "photos",
        data__image_size=32,
        data__resize=36,
        data__fit="pad",
        data__normalize="dataset",
        hyperparameters__weights="null",
        hyperparameters__max_length="{epochs: 2}",
        **{f"{DEEPSPEED}optimizer__params__lr": 0.002},
    )
    output = tmp_path / "run"
    made = run(["train.py", "--config", "experiments/photos.yaml", *chosen, "--output", str(output)], output)
    assert made.code == 0, made.stderr
    assert made.summary["test"]["images"] == len(list(tmp_path.glob("photos/test/*/*")))
    assert made.summary["test"]["accuracy"] > 2 / CLASSES
    names = [f"class {label}" for label in range(CLASSES)]
    assert list(made.summary["validation"]["per_class_accuracy"]) == names
    described = json.loads((output / "net.json").read_text())
    assert described["input"]["height"] == 32 and described["input"]["resize"] == [36, 36]
    assert described["input"]["fit"] == "pad"
    assert described["net"]["name"] == "resnet18" and described["net"]["num_classes"] == CLASSES


OWN = """
import sys
import torch
from torch import nn
import net

class Own(nn.Module):
    \"\"\"With a view, a buffer outside the state_dict, and shared weights.\"\"\"

    def __init__(self, classes):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(192, 192), nn.Linear(192, 192), nn.Linear(192, classes)
        self.again.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3, 1, 1), persistent=False)

    def forward(self, images):
        pixels = nn.functional.avg_pool2d(images * self.scale, 4)
        return self.last(self.again(self.first(pixels.view(len(pixels), -1)).relu()).relu())

net.register("own")(Own)
"""


def test_a_users_network_trains_and_its_weights_load(tmp_path, monkeypatch):
    script = f"{OWN}\nimport train\nsys.exit(train.main(sys.argv[1:]))"
    chosen = [*SHORT, *overrides(hyperparameters__net="own"), "--output", str(tmp_path / "run")]
    made = run(["-c", script, *chosen], tmp_path / "run")
    assert made.code == 0, made.stderr
    monkeypatch.setattr(own, "NETS", dict(own.NETS))
    exec(OWN, {})
    built: Any = registry.build(NetSpec("own", 10, SIZE))
    built.load_state_dict(torch.load(made.output / "net.pt"))
    assert torch.equal(built.first.weight, built.again.weight)
    line = error_line(dry_run.check, NetSpec("own", 10, SIZE), 2, True)
    assert "hyperparameters.channels_last: True: own fails on channels_last images" in line


def test_weights_of_torchvision_are_fetched_or_an_error_says_where_to_put_them(tmp_path):
    def train(name, **more):
        chosen = overrides(hyperparameters__net="resnet18", hyperparameters__weights="DEFAULT", **more)
        nowhere = {"TORCH_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
        return train_many(tmp_path, {name: [*SHORT, *chosen]}, environment=nowhere)[name]

    made = train("without")
    assert made.code == 2
    assert "hyperparameters.weights: DEFAULT" in made.stderr
    assert str(tmp_path / "hub/checkpoints") in made.stderr
    file = pathlib.PurePosixPath(torchvision.models.ResNet18_Weights.DEFAULT.url).name
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, tmp_path / "hub/checkpoints" / file)
    made = train("with", **{f"{DEEPSPEED}optimizer__params__lr": 0})
    assert made.code == 0, made.stderr
    assert (
        "weights: DEFAULT: no weights for these classes, so fc.weight, fc.bias start at random" in made.stderr
    )
    trained = torch.load(made.output / "net.pt")
    assert torch.equal(trained["layer4.1.conv2.weight"], state["layer4.1.conv2.weight"])
    assert trained["fc.weight"].shape == (10, 512)


@pytest.mark.parametrize("net", ["net", "resnet18", "mobilenet_v3_small"])
def test_a_head_of_as_many_other_classes_starts_at_random(tmp_path, net):
    """net.json names the classes of a run's weights; another order makes other classes."""
    spec = NetSpec(net, 3, SIZE)
    first = registry.build(spec).state_dict()
    torch.save(first, tmp_path / "net.pt")
    (tmp_path / "net.json").write_text(json.dumps({"classes": ["a", "b", "c"]}))
    for classes, is_kept in ((("a", "b", "c"), True), (("a", "c", "b"), False), (("x", "y", "z"), False)):
        made = registry.build(spec)
        found = pretrained.read(net, str(tmp_path / "net.pt"), SIZE, None, classes)
        skipped = state_dicts.load_pretrained(made, found, "weights")
        head = [name for name in first if name.startswith(tuple(f"{layer}." for layer in head_layers(made)))]
        assert skipped == ([] if is_kept else head) and len(head) == 2
        for name, weight in made.state_dict().items():
            is_drawn = not name.endswith("bias")  # biases may start at 0
            assert not is_drawn or torch.equal(weight, first[name]) == (is_kept or name not in head), name
    (tmp_path / "net.json").write_text("{")
    assert len(pretrained.read(net, str(tmp_path / "net.pt"), SIZE, None, ("x",))) == len(first)
