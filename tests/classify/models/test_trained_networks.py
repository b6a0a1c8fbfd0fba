"""Trainings of a user's network and from torchvision's weights; test_matrix.py trains the others."""

import json
import pathlib
from typing import Any

import pytest
import torch
import torchvision
from matrix import DEEPSPEED
from support import DIGITS, error_line, overrides, run, train_many

import net as own
from classify.models import dry_run, pretrained, registry, state_dicts
from classify.models.heads import head_layers
from classify.models.registry import NetSpec

SHORT = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 2}", **{f"{DEEPSPEED}scheduler": "null"})]
SIZE = (32, 32)


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
        found = pretrained.read(NetSpec(net, 2, SIZE), str(tmp_path / "net.pt"), classes)
        skipped = state_dicts.load_pretrained(made, found, "weights")
        head = [name for name in first if name.startswith(tuple(f"{layer}." for layer in head_layers(made)))]
        assert skipped == ([] if is_kept else head) and len(head) == 2
        for name, weight in made.state_dict().items():
            is_drawn = not name.endswith("bias")  # biases may start at 0
            assert not is_drawn or torch.equal(weight, first[name]) == (is_kept or name not in head), name
    (tmp_path / "net.json").write_text("{")
    assert len(pretrained.read(NetSpec(net, 2, SIZE), str(tmp_path / "net.pt"), ("x",))) == len(first)
