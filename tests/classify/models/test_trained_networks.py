"""Networks of torchvision and of one's own, trained for real in several forms and resumed."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from modes import DEEPSPEED, FIXED, NET_STEPS, SMALL, losses
from PIL import Image
from support import error_line, execute, launcher, overrides, train_many

import net as own
from classify.models import dry_run, pretrained, registry, state_dicts
from classify.models.heads import head_layers
from classify.models.registry import NetSpec

NETS: dict[str, dict[str, object]] = {
    "resnet18": {},
    "mobilenet_v3_small": {},
    "vit_b_16": {"hyperparameters__net_args": json.dumps(SMALL)},
    "alexnet": {
        "data__image_size": 64,
        "hyperparameters__pipe_parallel_size": 2,
        f"{DEEPSPEED}optimizer__params__lr": 1e-4,  # without normalization it jumps at more
    },
}


def rows(processes: int) -> dict[str, list[str]]:
    """Every network without ZeRO and with a stage; a pipeline last, whose stages DeepSpeed keeps.

    Stage 3, which partitions weights, in two processes; what it does in one, stage 2 does as well.
    """
    table = {}
    for name, how in NETS.items():
        pipeline = name == "alexnet"
        for stage in (0, 1) if pipeline else (0, processes + 1):
            if processes == 2 or not pipeline:
                zero = {f"{DEEPSPEED}zero_optimization__stage": stage}
                table[f"{name} zero{stage}"] = [*FIXED, *overrides(hyperparameters__net=name, **how, **zero)]
    for name in (
        "resnet18 zero0",
        f"resnet18 zero{processes + 1}",
    ):  # running statistics and weights are of one dtype
        table = {f"{name} bf16": [*table[name], *overrides(**{f"{DEEPSPEED}bf16__enabled": True})], **table}
    return table


@pytest.fixture(scope="module", params=[1, 2])
def straight(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"nets{request.param}")
    return request.param, train_many(folder, rows(request.param), request.param)


def test_every_network_learns(straight):
    _, runs = straight
    for name, run in runs.items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert len(losses(run)) == NET_STEPS
        assert min(losses(run)[-2:]) < losses(run)[0], f"{name}: {losses(run)}"
        unshared = runs[f"{name.split()[0]} zero0"]  # which starts with the same weights
        assert losses(run)[0] == pytest.approx(losses(unshared)[0], rel=5e-2 if "bf16" in name else 1e-4), (
            name
        )
        assert run.summary["validation"]["images"] == 360
        assert len(run.summary["peak_memory_mib"]) == run.summary["world_size"]


def test_every_network_resumes_to_the_same_bits(straight, tmp_path):
    processes, whole = straight
    table = rows(processes)
    for name, run in train_many(tmp_path, table, processes, sigterm_at=NET_STEPS // 2).items():
        assert run.code == 130, f"{name}: {run.stderr}"
    rest = {name: [*row, "--resume", "latest"] for name, row in table.items()}
    for name, run in train_many(tmp_path, rest, processes).items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert losses(run) == losses(whole[name]), name
        assert run.summary["validation"] == whole[name].summary["validation"], name
        assert run.summary["weights_sha256"] == whole[name].summary["weights_sha256"], name


CLASSES = 7


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> pathlib.Path:
    """2,000 images of 7 classes, each a hue: JPEG, PNG, WebP, grey, palette and turned by EXIF, of many sizes."""
    root, random = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for index in range(2000):
        label = index % CLASSES
        width, height = random.integers(40, 120, 2)
        slope = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
        bands = (np.arange(height)[:, None, None] * (label + 1) // 12 % 2) * 200.0
        pixels = np.clip((slope + bands) / 2 + random.normal(0, 20, (height, width, 3)), 0, 255).astype(
            np.uint8
        )
        image, kind = Image.fromarray(pixels), index // CLASSES % 6
        folder = root / ("test" if index % 5 == 0 else "train") / f"class {label}"
        folder.mkdir(parents=True, exist_ok=True)
        options: dict = {}
        if kind == 3:
            image = image.convert("L")
        elif kind == 4:
            image = image.convert("P")
        elif kind == 5:
            exif = Image.Exif()
            exif[0x0112] = 6
            image, options = image.transpose(Image.Transpose.ROTATE_90), {"exif": exif}
        image.save(folder / f"{index}.{('jpg', 'png', 'webp', 'png', 'png', 'jpg')[kind]}", **options)
    return root


def test_a_folder_of_photographs_trains_at_its_own_size(photographs, train):
    run = train(
        *("--config", "experiments/photos.yaml"),
        *overrides(
            data__root=photographs,
            data__image_size=64,
            data__resize=72,
            data__normalize="dataset",
            hyperparameters__weights="null",
            hyperparameters__max_length="{epochs: 1}",
            hyperparameters__mixup=0.2,
            hyperparameters__cutmix=1,
        ),
    )
    assert run.code == 0, run.stderr
    held = len(list(photographs.glob("test/*/*")))
    assert run.summary["test"]["images"] == held
    assert run.summary["test"]["accuracy"] > 2 / CLASSES
    assert list(run.summary["validation"]["per_class_accuracy"]) == [
        f"class {label}" for label in range(CLASSES)
    ]
    described = json.loads((run.output / "net.json").read_text())
    assert described["input"]["height"] == 64 and described["input"]["resize"] == [72, 72]
    assert described["net"]["name"] == "resnet18" and described["net"]["num_classes"] == CLASSES


OWN = """
import sys
import torch
from torch import nn
import net

class Own(nn.Module):
    \"\"\"With a view, a buffer that no state_dict holds, and weights that are used twice.\"\"\"

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


def test_ones_own_network_trains_and_its_weights_load(tmp_path, monkeypatch):
    script = f"{OWN}\nimport train\nsys.exit(train.main(sys.argv[1:]))"
    chosen = [*FIXED, *overrides(hyperparameters__net="own"), "--output", str(tmp_path / "run")]
    run = execute([*launcher("python", 1), "-c", script, *chosen], tmp_path / "run")
    assert run.code == 0, run.stderr
    monkeypatch.setattr(own, "NETS", dict(own.NETS))
    exec(OWN, {})
    made: Any = registry.build(NetSpec("own", 10, (32, 32)))
    made.load_state_dict(torch.load(run.output / "net.pt"))
    assert torch.equal(made.first.weight, made.again.weight)
    line = error_line(dry_run.check, NetSpec("own", 10, (32, 32)), 2, True)
    assert "hyperparameters.channels_last: True: own does not take it" in line


def test_weights_of_torchvision_are_fetched_or_it_is_said_where_to_put_them(train, tmp_path):
    chosen = [*FIXED, *overrides(hyperparameters__net="resnet18", hyperparameters__weights="DEFAULT")]
    nowhere = {"TORCH_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    run = train(*chosen, **nowhere)
    assert run.code == 2
    assert (
        "hyperparameters.weights: DEFAULT" in run.stderr and str(tmp_path / "hub/checkpoints") in run.stderr
    )
    file = pathlib.PurePosixPath(torchvision.models.ResNet18_Weights.DEFAULT.url).name
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, tmp_path / "hub/checkpoints" / file)
    run = train(*chosen, *overrides(**{f"{DEEPSPEED}optimizer__params__lr": 0}), **nowhere)
    assert run.code == 0, run.stderr
    assert "weights: DEFAULT: fc.weight, fc.bias start at random, for it has none" in run.stderr
    trained = torch.load(run.output / "net.pt")
    assert torch.equal(trained["layer4.1.conv2.weight"], state["layer4.1.conv2.weight"])
    assert trained["fc.weight"].shape == (10, 512)


def test_a_name_that_is_none_is_refused_with_the_nearest(train):
    run = train(*FIXED, *overrides(hyperparameters__net="resnet81"))
    assert run.code == 2
    assert "hyperparameters.net: 'resnet81'" in run.stderr and "did you mean 'resnet" in run.stderr


@pytest.mark.parametrize("net", ["net", "resnet18", "vgg11"])
def test_a_head_of_as_many_other_classes_starts_at_random(tmp_path, net):
    """As what lies beside a run's weights says; the same names in another order are others, too."""
    spec = NetSpec(net, 3, (32, 32))
    first = registry.build(spec).state_dict()
    torch.save(first, tmp_path / "net.pt")
    (tmp_path / "net.json").write_text(json.dumps({"classes": ["a", "b", "c"]}))
    for classes, is_kept in ((("a", "b", "c"), True), (("a", "c", "b"), False), (("x", "y", "z"), False)):
        made = registry.build(spec)
        found = pretrained.read(net, str(tmp_path / "net.pt"), (32, 32), None, classes)
        skipped = state_dicts.load_pretrained(made, found, "weights")
        head = [name for name in first if name.startswith(tuple(f"{layer}." for layer in head_layers(made)))]
        assert skipped == ([] if is_kept else head) and len(head) == 2
        for name, weight in made.state_dict().items():
            is_bias = name.endswith("bias")  # which may be zeros, that are not drawn
            assert is_bias or torch.equal(weight, first[name]) == (is_kept or name not in head), name
    (tmp_path / "net.json").write_text("{")
    assert len(pretrained.read(net, str(tmp_path / "net.pt"), (32, 32), None, ("x",))) == len(first)
