"""Networks by name, as layers, with other weights, and whether they go with the data."""

import os
import pathlib
import re
from typing import Any

import pytest
import torch
import torchvision
from matrix import TIMM_VIT
from support import error_line
from torch import nn

import net as own
from classify.models import dry_run, pretrained, recompute, registry, stages, state_dicts
from classify.models.registry import NetSpec


def test_a_users_network_is_one_function(monkeypatch):
    monkeypatch.setattr(own, "NETS", dict(own.NETS))

    @own.register("mine")
    def mine(num_classes: int, width: int = 4) -> nn.Module:
        head = nn.Flatten(), nn.Linear(width, num_classes)
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), *head)

    spec = NetSpec("mine", 5, (20, 24), {"width": 3})
    dry_run.check(spec, 2)
    made = registry.build(spec)
    assert made(torch.zeros(2, 3, 20, 24)).shape == (2, 5)
    layers = stages.layers_of(made)
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
    dry_run.check(NetSpec("values", 5, (8, 8)), 64)
    assert torch.equal(torch.get_rng_state(), state)
    line = error_line(dry_run.check, NetSpec("values", 5, (9, 8)), 64)
    assert line.startswith("hyperparameters.net: 'values': fails on images of 9x8 (") and "216" in line


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda classes: [nn.Linear(3, classes)], "its function in net.py returns a list, not an nn.Module"),
        (lambda classes: nn.Flatten(), "has no parameter to train"),
        (lambda classes: flat(nn.LazyLinear(classes)), "has lazy layers"),
        (lambda classes: nn.Linear(3, classes // 0), "cannot be built with image_size 8x8 (integer division"),
        (lambda classes: flat(nn.Linear(192, 3)), "returns (2, 3) for 2 images and 5 classes"),
    ],
)
def test_a_function_that_gives_no_network_is_named(monkeypatch, made, words):
    monkeypatch.setattr(own, "NETS", {**own.NETS, "mine": made})
    line = error_line(dry_run.check, NetSpec("mine", 5, (8, 8)), 2)
    assert line.startswith("hyperparameters.net: 'mine':") and words in line


TIMM_NETS: dict[str, dict[str, Any]] = {
    "timm/resnet10t": {},
    "timm/vit_tiny_patch16_224": TIMM_VIT,
    "timm/mobilenetv3_small_050": {},
}
KINDS = "regnet_y_400mf densenet121 inception_v3 swin_t maxvit_t convnext_tiny".split()


@pytest.mark.parametrize("name", [*KINDS, *TIMM_NETS])
def test_networks_of_every_kind_are_checked_without_computing(name):
    size = (32, 32) if name in TIMM_NETS else (224, 224)
    state = torch.get_rng_state()
    dry_run.check(NetSpec(name, 3, size, TIMM_NETS.get(name)), 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sequence_with_a_layer_twice_is_whole_or_none():
    linear, act = nn.Linear(4, 4), nn.ReLU()
    layers = stages.layers_of(nn.Sequential(linear, act, nn.Linear(4, 4), act, nn.Linear(4, 4)))
    assert layers and [layer for _, layer in layers][1::2] == [act, act]
    assert stages.layers_of(nn.Sequential(linear, act, linear)) is None
    assert stages.layers_of(type("Other", (nn.Sequential,), {})(linear)) is None


@pytest.mark.parametrize("name", ["alexnet", "vgg11_bn"])
def test_a_sequence_computes_what_the_network_does(name):
    torch.manual_seed(0)
    made = registry.build(NetSpec(name, 3, (64, 64))).eval()
    outputs = inputs = torch.rand(2, 3, 64, 64)
    layers = stages.layers_of(made)
    assert layers
    for _, layer in layers:
        outputs = layer(outputs)
    assert torch.equal(outputs, made(inputs))
    parts = [(name, layer) for name, layer in layers if isinstance(layer, nn.Module)]
    assert {
        f"{name}.{key}" for name, layer in parts for key in layer.state_dict()
    } == made.state_dict().keys()


@pytest.mark.parametrize("name", ["resnet18", *TIMM_NETS])
def test_checkpointed_activations_change_nothing_but_memory(name):
    inputs, results = torch.rand(4, 3, 32, 32), []
    for enabled in (False, True):
        torch.manual_seed(0)
        made = registry.build(NetSpec(name, 3, (32, 32), TIMM_NETS.get(name)))
        if enabled:
            recompute.enable(made)
            assert made.grad_checkpointing if name in TIMM_NETS else len(list(recompute.blocks(made))) == 8
        made(inputs).square().sum().backward()
        gradients: dict[str, Any] = {key: each.grad for key, each in made.named_parameters()}
        results.append({**gradients, **dict(made.named_buffers())})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def prefixed(prefix):
    return lambda state: {f"{prefix}{name}": value for name, value in state.items()}


def without(*heads):
    return lambda state: {name: value for name, value in state.items() if not name.startswith(heads)}


# Forms of a file with the weights of a network for 11 classes, and the weights of one for 3 that then start at random
FC, RESNET, MOBILENET = ["fc.weight", "fc.bias"], "resnet18", "mobilenet_v3_small"
HEADS = [f"classifier.{layer}.{part}" for layer in (0, 3) for part in ("weight", "bias")]
TAKEN: dict[str, tuple[str, Any, list[str]]] = {
    "plain": (RESNET, dict, FC),
    "state_dict of DataParallel": (RESNET, lambda s: {"state_dict": prefixed("module.")(s), "epoch": 3}, FC),
    "model_state_dict": (RESNET, lambda s: {"model_state_dict": s, "optimizer": {"state": {}}}, FC),
    "model": (RESNET, lambda s: {"model": s}, FC),
    "module": (RESNET, lambda s: {"module": s, "ds_config": {}}, FC),
    "model in state_dict": (RESNET, lambda s: {"state_dict": {"model": s}}, FC),
    "Lightning": (RESNET, lambda s: {"state_dict": prefixed("model.")(s)}, FC),
    "compiled": (RESNET, prefixed("module._orig_mod."), FC),
    "averaged": (RESNET, lambda s: {"n_averaged": torch.tensor(3), **prefixed("module.")(s)}, FC),
    "no head": (RESNET, without("fc."), FC),
    "no last layer": (MOBILENET, without("classifier.3"), HEADS[2:]),
    "features alone": (MOBILENET, without("classifier."), HEADS),
}


@pytest.mark.parametrize("case", TAKEN)
def test_weights_start_a_network_for_other_classes(tmp_path, case):
    name, form, random = TAKEN[case]
    torch.manual_seed(0)
    source = registry.build(NetSpec(name, 11, (32, 32))).state_dict()
    torch.save(form(source), tmp_path / "r.pth")
    made = registry.build(NetSpec(name, 3, (32, 32)))
    before = {key: value.clone() for key, value in made.state_dict().items()}
    assert state_dicts.load_pretrained(made, state_dicts.read(str(tmp_path / "r.pth")), "r.pth") == random
    for key, value in made.state_dict().items():
        assert torch.equal(value, (before if key in random else source)[key]), key
    said = state_dicts.describe_skipped_weights(["fc.weight"], "r")
    assert said == "r: no weights for these classes, so fc.weight start at random"


class Wrapping(nn.Module):
    """Calls its network as DistributedDataParallel does."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 3)


def test_a_network_keeps_names_that_look_like_a_wrappers(tmp_path):
    sevens = {name: torch.full_like(value, 7) for name, value in Wrapping().state_dict().items()}
    torch.save(sevens, tmp_path / "w")
    state = state_dicts.read(str(tmp_path / "w"))
    assert state_dicts.fitting(Wrapping(), state, "w")["module.bias"].tolist() == [7, 7, 7]
    state_dicts.load_pretrained(made := Wrapping(), state, "w")
    assert made.module.bias.tolist() == [7, 7, 7]


def renamed(old, new):
    return lambda state: {name.replace(old, new): value for name, value in state.items()}


# Refused files, and the line about the first name that does not fit
REFUSED: dict[str, tuple[Any, str]] = {
    "another name": (renamed("layer3.", "stage3."), "layer3.0.bn1.bias is none, but (256,) in this network (the file has stage3.0.bn1.bias and "),
    "a head by another name": (renamed("fc.", "fc2."), "fc.bias is none, but (3,) in this network (the file has fc2.bias), and 3 more do not fit; give weights of this"),
    "a head of other inputs": (lambda s: {**s, "fc.weight": torch.zeros(11, 4)}, "fc.bias is (11,), but (3,) in this network, and 1 more do not fit"),
    "half a head": (without("fc.weight"), "fc.bias is (11,), but (3,)"),
    "half a prefix": (lambda s: {"module.conv1.weight": s["conv1.weight"], **without("conv1")(s)}, "conv1.weight"),
    "whole numbers": (lambda s: {**s, "bn1.weight": s["bn1.weight"].int()}, "bn1.weight is (64,) of int32, but (64,) of float32 in this network; give weights of this network"),
    "nothing": (lambda s: {}, "holds no state_dict"),
    "nothing wrapped": (lambda s: {"model": {}}, "holds no state_dict"),
    "an optimizer": (lambda s: {"optimizer": {"state": {}}}, "holds no state_dict"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_weights_of_another_network_are_refused_by_name(tmp_path, case):
    form, words = REFUSED[case]
    torch.save(form(torchvision.models.resnet18(num_classes=11).state_dict()), tmp_path / "r.pth")
    made = registry.on_meta_device(NetSpec("resnet18", 3, (32, 32)))
    path = str(tmp_path / "r.pth")
    line = error_line(lambda: state_dicts.load_pretrained(made, state_dicts.read(path), path))
    assert line.startswith(path) and words in line


class Calls:
    def __reduce__(self):
        return os.mkdir, ("called",)


@pytest.mark.parametrize("key", ["fc.bias", "epoch"])
def test_a_file_of_weights_runs_no_code(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    torch.save({**nn.Linear(2, 3).state_dict(), key: Calls()}, "net.pt")
    assert "net.pt: not a readable state_dict" in error_line(state_dicts.read, "net.pt")
    assert not pathlib.Path("called").exists()


def test_files_without_weights_are_named(tmp_path):
    """One of them wraps itself."""
    odd: dict[str, Any] = {}
    odd["model"] = odd
    torch.save(odd, tmp_path / "r.pth")
    assert "holds no state_dict" in error_line(state_dicts.read, str(tmp_path / "r.pth"))
    (tmp_path / "w.safetensors").write_text("damaged")
    for file in (str(tmp_path / "w.safetensors"), "/nowhere/net.pt"):
        assert "not a readable state_dict" in error_line(state_dicts.read, file)


def test_older_files_of_weights_are_taken(tmp_path, monkeypatch):
    """DenseNet's names before torchvision 0.2; no counts of batches, as before torch 0.4.1."""
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
    made: Any = registry.build(NetSpec("densenet121", 1000, (32, 32)))
    assert state_dicts.load_pretrained(made, pretrained.fetch("densenet121", "DEFAULT"), "DEFAULT") == []
    old = state["features.denseblock1.denselayer1.conv.1.weight"]
    assert torch.equal(made.features.denseblock1.denselayer1.conv1.weight, old)
    (tmp_path / "hub/checkpoints" / file).write_text("<html>")
    assert "hyperparameters.weights: DEFAULT" in error_line(pretrained.fetch, "densenet121", "DEFAULT")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((NetSpec("resnet18", 3, (32, 32), {"depth": 3}), 2), ["hyperparameters.net_args", "depth"]),
        ((NetSpec("alexnet", 3, (32, 32)), 2), ["data.image_size: 32x32", "alexnet fails on this size"]),
        ((NetSpec("vit_b_16", 3, (40, 40)), 2), ["image_size 40x40", "vit_b_16"]),
        ((NetSpec("net", 3, (64, 64)), 2), ["data.image_size: 64x64", "net fails on this size"]),
        ((NetSpec("resnet18", 3, (32, 32)), 1), ["train_micro_batch_size_per_gpu: 1", "batch normalization"]),
    ],
    ids=lambda value: value[0].name if isinstance(value, tuple) else "",
)
def test_a_network_that_cannot_be_is_refused(arguments, parts):
    line = error_line(dry_run.check, *arguments)
    assert [part for part in parts if part not in line] == []
