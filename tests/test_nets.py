"""Networks of torchvision and of one's own: trained for real in several forms, resumed, and refused where they must be."""

import json
import pathlib
import re
import resource
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from conftest import all_at_once, execute, fault, launcher, overrides, train_many
from modes import DEEPSPEED, losses
from PIL import Image
from ruamel.yaml import YAML
from torch import nn

import checkpointing
import hyperparameters
import memory
import mixing
import net as own
import nets
import weights
from data import DataConfig, ImageSet, as_inputs, normalization
from errors import InvalidInput

STEPS, STOP = 6, 3
SMALL = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
NETS: dict[str, dict[str, object]] = {
    "resnet18": {},
    "mobilenet_v3_small": {},
    "vit_b_16": {"hyperparameters__net_args": json.dumps(SMALL)},
    "alexnet": {"data__image_size": 64, "hyperparameters__pipe_parallel_size": 2},
}
FIXED = overrides(
    data__dataset="digits",
    hyperparameters__max_length=f"{{batches: {STEPS}}}",
    scheduling_unit=1,
    **{
        f"{DEEPSPEED}train_batch_size": 32,
        f"{DEEPSPEED}scheduler": "null",
        f"{DEEPSPEED}optimizer__params__lr": 0.001,
    },
)


def rows(processes: int) -> dict[str, list[str]]:
    """Every network with every stage of ZeRO that it goes with; a pipeline last, whose stages DeepSpeed keeps."""
    table = {}
    for name, how in NETS.items():
        pipeline = name == "alexnet"
        for stage in (0, 1) if pipeline else (0, 2, 3):
            if processes == 2 or not pipeline:
                zero = {f"{DEEPSPEED}zero_optimization__stage": stage}
                table[f"{name} zero{stage}"] = [*FIXED, *overrides(hyperparameters__net=name, **how, **zero)]
    for name in ("resnet18 zero0", "resnet18 zero3"):  # running statistics and weights are of one dtype
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
        assert len(losses(run)) == STEPS
        assert min(losses(run)[-2:]) < losses(run)[0], f"{name}: {losses(run)}"
        unshared = runs[f"{name.split()[0]} zero0"]  # which starts with the same weights
        assert losses(run)[0] == pytest.approx(losses(unshared)[0], rel=5e-2 if "bf16" in name else 1e-4), name
        assert run.summary["validation"]["images"] == 360
        assert len(run.summary["peak_memory_mib"]) == run.summary["world_size"]


def test_every_network_resumes_to_the_same_bits(straight, tmp_path):
    processes, whole = straight
    table = rows(processes)
    for name, run in train_many(tmp_path, table, processes, sigterm_at=STOP).items():
        assert run.code == 130, f"{name}: {run.stderr}"
    rest = {name: [*row, "--resume", "latest"] for name, row in table.items()}
    for name, run in train_many(tmp_path, rest, processes).items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert losses(run) == losses(whole[name]), name
        assert run.summary["validation"] == whole[name].summary["validation"], name
        assert run.summary["weights_sha256"] == whole[name].summary["weights_sha256"], name


# ---------------------------------------------------------------------------------------------- photographs

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
        pixels = np.clip((slope + bands) / 2 + random.normal(0, 20, (height, width, 3)), 0, 255).astype(np.uint8)
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
    assert run.summary["validation"]["images"] == held
    assert run.summary["validation"]["accuracy"] > 2 / CLASSES
    assert list(run.summary["validation"]["per_class_accuracy"]) == [f"class {label}" for label in range(CLASSES)]
    described = json.loads((run.output / "net.json").read_text())
    assert described["input"]["height"] == 64 and described["input"]["resize"] == [72, 72]
    assert described["net"]["name"] == "resnet18" and described["net"]["num_classes"] == CLASSES


# ------------------------------------------------------------------------------------------------- builders


def test_every_name_of_torchvision_is_there():
    assert {"net", "net-moe", "resnet50", "vit_b_16", "convnext_tiny"} <= set(nets.names())


def test_ones_own_network_is_one_function(monkeypatch):
    monkeypatch.setattr(own, "NETS", dict(own.NETS))

    @own.register("mine")
    def mine(num_classes: int, width: int = 4) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)
        )

    nets.check("mine", 5, (20, 24), {"width": 3}, 2)
    made = nets.build("mine", 5, (20, 24), {"width": 3})
    assert made(torch.zeros(2, 3, 20, 24)).shape == (2, 5)
    layers = nets.layers(made)
    assert layers and [name for name, _ in layers] == ["0", "1", "2", "3"]


class NeedsValues(nn.Sequential):
    """Cannot run on torch's meta device, where a tensor has no value."""

    def __init__(self, classes):
        rates = [each.item() for each in torch.linspace(0, 0.1, 3)]
        super().__init__(nn.Flatten(), *(nn.Dropout(rate) for rate in rates), nn.Linear(192, classes))

    def forward(self, images):
        assert len(images) == 64 and images.std() > 0  # as in training
        return super().forward(images / images.std() if images.abs().max() > 9 else images)


def test_a_network_that_needs_values_is_checked_by_computing(monkeypatch):
    monkeypatch.setattr(own, "NETS", {**own.NETS, "values": NeedsValues})
    state = torch.get_rng_state()
    nets.check("values", 5, (8, 8), None, 64)
    assert torch.equal(torch.get_rng_state(), state)
    line = fault(nets.check, "values", 5, (9, 8), None, 64)
    assert line.startswith("hyperparameters.net: 'values': fails on images of 9x8 (") and "216" in line


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda classes: [nn.Linear(3, classes)], "its function in net.py gives a list, no nn.Module"),
        (lambda classes: nn.Flatten(), "has no parameter to train"),
        (lambda classes: nn.Sequential(nn.Flatten(), nn.LazyLinear(classes)), "has layers without a size"),
        (
            lambda classes: nn.Linear(3, classes // 0),
            "cannot be made with image_size 8x8 (integer division or modulo by zero)",
        ),
        (lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), "gives (2, 3) for 2 images and 5 classes"),
    ],
)
def test_a_function_that_gives_no_network_is_named(monkeypatch, made, words):
    monkeypatch.setattr(own, "NETS", {**own.NETS, "mine": made})
    line = fault(nets.check, "mine", 5, (8, 8), None, 2)
    assert line.startswith("hyperparameters.net: 'mine':") and words in line


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
    made: Any = nets.build("own", 10, (32, 32), None)
    made.load_state_dict(torch.load(run.output / "net.pt"))
    assert torch.equal(made.first.weight, made.again.weight)
    line = fault(nets.check, "own", 10, (32, 32), None, 2, True)
    assert "hyperparameters.channels_last: True: own does not take it" in line


@pytest.mark.parametrize(
    "name", ["regnet_y_400mf", "densenet121", "inception_v3", "swin_t", "maxvit_t", "convnext_tiny"]
)
def test_networks_of_every_kind_are_checked_without_computing(name):
    state = torch.get_rng_state()
    nets.check(name, 3, (224, 224), None, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sequence_with_a_layer_twice_is_whole_or_none():
    linear, act = nn.Linear(4, 4), nn.ReLU()
    layers = nets.layers(nn.Sequential(linear, act, nn.Linear(4, 4), act, nn.Linear(4, 4)))
    assert layers and [layer for _, layer in layers][1::2] == [act, act]
    assert nets.layers(nn.Sequential(linear, act, linear)) is None
    assert nets.layers(type("Other", (nn.Sequential,), {})(linear)) is None


@pytest.mark.parametrize("name", ["alexnet", "vgg11_bn"])
def test_a_sequence_computes_what_the_network_does(name):
    torch.manual_seed(0)
    made = nets.build(name, 3, (64, 64), None).eval()
    outputs = inputs = torch.rand(2, 3, 64, 64)
    layers = nets.layers(made)
    assert layers
    for _, layer in layers:
        outputs = layer(outputs)
    assert torch.equal(outputs, made(inputs))
    named = {f"{name}.{key}" for name, layer in layers if isinstance(layer, nn.Module) for key in layer.state_dict()}
    assert named == made.state_dict().keys()


def test_checkpointed_activations_change_nothing_but_memory():
    inputs = torch.rand(4, 3, 32, 32)
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        made = nets.build("resnet18", 3, (32, 32), None)
        if enabled:
            assert len(list(checkpointing.blocks(made))) == 8
            checkpointing.enable(made)
        made(inputs).square().sum().backward()
        results.append(({name: each.grad for name, each in made.named_parameters()}, dict(made.named_buffers())))
    for before, after in zip(*results, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_pretrained_weights_start_a_network_for_other_classes(tmp_path):
    torch.manual_seed(0)
    source: Any = torchvision.models.resnet18(num_classes=11)
    torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "r.pth")
    made: Any = nets.build("resnet18", 3, (32, 32), None)
    replaced = weights.start_from(made, weights.read(str(tmp_path / "r.pth")), "r.pth")
    assert replaced == ["fc.weight", "fc.bias"]
    assert torch.equal(made.layer1[0].conv1.weight, source.layer1[0].conv1.weight)
    assert torch.equal(made.bn1.running_mean, source.bn1.running_mean)
    same = nets.build("resnet18", 11, (32, 32), None)
    assert weights.start_from(same, source.state_dict(), "r.pth") == []
    line = fault(weights.start_from, nets.build("resnet34", 3, (32, 32), None), source.state_dict(), "r.pth")
    assert "r.pth:" in line and "give its own weights" in line


def test_older_files_of_weights_are_taken(tmp_path, monkeypatch):
    """DenseNet's names of before torchvision 0.2; no counts of batches, of before torch 0.4.1."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    source: Any = torchvision.models.densenet121()
    file = pathlib.PurePosixPath(torchvision.models.DenseNet121_Weights.DEFAULT.url).name
    state = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", key): value
        for key, value in source.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in state
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.save(state, tmp_path / "hub/checkpoints" / file)
    made: Any = nets.build("densenet121", 1000, (32, 32), None)
    assert weights.start_from(made, nets.pretrained("densenet121", "DEFAULT"), "DEFAULT") == []
    assert torch.equal(
        made.features.denseblock1.denselayer1.conv1.weight, state["features.denseblock1.denselayer1.conv.1.weight"]
    )
    (tmp_path / "hub/checkpoints" / file).write_text("<html>")
    assert "hyperparameters.weights: DEFAULT" in fault(nets.pretrained, "densenet121", "DEFAULT")
    (tmp_path / "w.safetensors").write_text("damaged")
    assert "not a readable state_dict" in fault(weights.read, str(tmp_path / "w.safetensors"))


def test_weights_of_torchvision_are_fetched_or_it_is_said_where_to_put_them(train, tmp_path):
    chosen = [*FIXED, *overrides(hyperparameters__net="resnet18", hyperparameters__weights="DEFAULT")]
    nowhere = {"TORCH_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    run = train(*chosen, **nowhere)
    assert run.code == 2
    assert "hyperparameters.weights: DEFAULT" in run.stderr and str(tmp_path / "hub/checkpoints") in run.stderr
    file = pathlib.PurePosixPath(torchvision.models.ResNet18_Weights.DEFAULT.url).name
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, tmp_path / "hub/checkpoints" / file)
    run = train(*chosen, *overrides(**{f"{DEEPSPEED}optimizer__params__lr": 0}), **nowhere)
    assert run.code == 0, run.stderr
    assert "weights: DEFAULT: fc.weight, fc.bias start at random, for other classes" in run.stderr
    trained = torch.load(run.output / "net.pt")
    assert torch.equal(trained["layer4.1.conv2.weight"], state["layer4.1.conv2.weight"])
    assert trained["fc.weight"].shape == (10, 512)


# ----------------------------------------------------------------------------------------------------- data


def test_mixing_depends_on_its_place_alone():
    mixer: Any = mixing.mixer(0.2, 1.0, 4)
    inputs, labels = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    first, soft = mixing.mixed(mixer, inputs, labels, (0, 3, 1, 0))
    torch.rand(5)
    again, _ = mixing.mixed(mixer, inputs, labels, (0, 3, 1, 0))
    other, _ = mixing.mixed(mixer, inputs, labels, (0, 4, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, inputs)
    assert soft.shape == (8, 4) and torch.allclose(soft.sum(1), torch.ones(8))
    assert mixing.mixer(None, 0, 4) is None


def test_inputs_are_normalised_by_the_statistics_of_the_dataset():
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 1] //= 2
    source = ImageSet(images, torch.zeros(50, dtype=torch.int64), ("a",))
    mean, std = normalization(DataConfig(normalize="dataset"), source)
    inputs = as_inputs(images, mean, std)
    assert inputs.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-4)
    assert inputs.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    assert nets.normalization("resnet18") == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert nets.normalization("inception_v3") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("resnet18", 3, (32, 32), {"depth": 3}, 2), ["hyperparameters.net_args", "depth"]),
        (("alexnet", 3, (32, 32), None, 2), ["data.image_size: 32x32", "alexnet does not take it"]),
        (("vit_b_16", 3, (40, 40), None, 2), ["image_size 40x40", "vit_b_16"]),
        (("net", 3, (64, 64), None, 2), ["data.image_size: 64x64", "net does not take it"]),
        (("resnet18", 3, (32, 32), None, 1), ["train_micro_batch_size_per_gpu: 1", "batch normalization"]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_network_that_cannot_be_is_refused(arguments, parts):
    line = fault(nets.check, *arguments)
    assert [part for part in parts if part not in line] == []


def test_a_name_that_is_none_is_refused_with_the_nearest(train):
    run = train(*FIXED, *overrides(hyperparameters__net="resnet81"))
    assert run.code == 2
    assert "hyperparameters.net: 'resnet81'" in run.stderr and "did you mean 'resnet" in run.stderr


def test_no_memory_left_ends_with_what_to_change(tmp_path):
    """A limit on data that a step of a large micro-batch exceeds: the real allocator fails."""
    script = (
        "import resource, sys; import train, harness\n"
        "fit = harness.fit\n"
        "def limited(trial, *rest, **more):\n"
        "    used = int(open('/proc/self/statm').read().split()[5]) * 4096\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**27, -1))\n"
        "    return fit(trial, *rest, **more)\n"
        "harness.fit = limited\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    command = [*launcher("python", 1), "-c", script, *FIXED, "--output", str(tmp_path / "run")]
    big = overrides(hyperparameters__net="resnet18", data__image_size=64, **{f"{DEEPSPEED}train_batch_size": 256})
    run = execute([*command, *big], tmp_path / "run")
    assert run.code == 1, run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert "no memory left in step 1" in last
    assert "train_micro_batch_size_per_gpu: 128 with gradient_accumulation_steps: 2" in last
    assert last.index("train_micro_batch") < last.index("checkpoint_activations")


def test_no_memory_for_the_engine_ends_with_what_to_change(tmp_path):
    script = (
        "import resource, sys; import train, model_def\n"
        "build = model_def.CIFARTrial._build\n"
        "def limited(trial):\n"
        "    net = build(trial)\n"
        "    used = int(open('/proc/self/statm').read().split()[5]) * 4096\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**27, -1))\n"  # alexnet's weights alone take 217 MiB
        "    return net\n"
        "model_def.CIFARTrial._build = limited\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    command = [*launcher("python", 1), "-c", script, *FIXED, "--output", str(tmp_path / "run")]
    large = {"hyperparameters__net": "alexnet", "data__image_size": 64, f"{DEEPSPEED}zero_optimization.stage": 2}
    run = execute([*command, *overrides(**large)], tmp_path / "run")
    assert run.code == 1, run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert "no memory left before the first step" in last and "bf16.enabled: true (weights" in last
    assert "train_micro_batch" not in last  # of which no image has been seen


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_blocks_are_kept_for_the_next_step_or_returned():
    def page_faults(kept):
        memory.keep_what_is_freed(kept)
        for _ in range(50):  # until all that the forked heap had free has been written to
            torch.ones(2**22)  # 16 MiB
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(2**22)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def compare():
        returned = page_faults(kept=False)  # first: what is kept once is used before more is asked for
        assert page_faults(kept=True) < returned / 10

    all_at_once(compare)


def test_faults_of_hyperparameters():
    for chosen, part in {
        "net: resnet18, moe: true": "resnet18 has no experts",
        "net: net, weights: DEFAULT": "no pretrained weights",
        "net: resnet18, pipe_parallel_size: 2": "no sequence of layers",
        "net: alexnet, pipe_parallel_size: 2, checkpoint_activations: true": "does not go with a pipeline",
        "net: net-moe, net_args: {a: 1}": "experts have hyperparameters of their own",
        "net: net-moe, checkpoint_activations: true": "does not go with experts",
    }.items():
        (line,) = hyperparameters.faults(YAML(typ="safe").load(f"{{{chosen}}}"), 2)
        assert part in line


def test_unreadable_weights_name_their_network():
    with pytest.raises(InvalidInput, match="not a readable"):
        weights.read("/nowhere/net.pt")


def test_images_larger_than_a_limit_of_memory_train_under_it(tmp_path):
    """Under a limit on the process's own memory of a quarter of the decoded images, which are mapped and not loaded."""
    script = (
        "import resource, sys; import train, harness, image_cache, torch\n"
        "from model_def import CIFARTrial\n"
        "train_batch = CIFARTrial.train_batch\n"
        "def limited(self, iterator, epoch, step):\n"
        "    metrics = train_batch(self, iterator, epoch, step)\n"
        "    if step == 2:\n"
        "        used = int(open('/proc/self/statm').read().split()[5]) * 4096\n"
        "        room = self.train_set.images.nbytes // 4\n"
        "        resource.setrlimit(resource.RLIMIT_DATA, (used + room, -1))\n"
        "        try:\n"
        "            torch.ones(2 * room, dtype=torch.uint8)\n"
        "        except RuntimeError:\n"
        "            print('limited')\n"
        "    return metrics\n"
        "CIFARTrial.train_batch = limited\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    random = np.random.default_rng(0)
    for index in range(1500):
        folder = tmp_path / "data" / ("train" if index % 6 else "test") / str(index // 6 % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    chosen = overrides(
        data__dataset="imagefolder",
        data__root=tmp_path / "data",
        data__image_size=448,
        hyperparameters__net="vit_b_32",
        hyperparameters__net_args=json.dumps(SMALL),
        **{f"{DEEPSPEED}train_batch_size": 4},
    )
    command = [*launcher("python", 1), "-c", script, *FIXED, "--output", str(tmp_path / "run")]
    run = execute([*command, *chosen], tmp_path / "run")
    assert run.code == 0, run.stderr
    assert "limited" in run.stdout
    assert run.summary["steps"] == STEPS
