"""Networks of timm: their names, sizes, normalisation and weights; test_matrix.py trains them."""

import argparse
import json
import sys
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from matrix import DEEPSPEED
from matrix import TIMM_VIT as SMALL
from safetensors.torch import save_file
from support import DIGITS, error_line, overrides
from torch import nn

import train
from classify.engine.trial_config import TrialConfig
from classify.images.settings import DataSettings
from classify.models import pretrained, registry, state_dicts
from classify.models.heads import head_layers
from classify.models.registry import NetSpec

RESNET, SIZE = "timm/resnet10t", (32, 32)
VIT, MOBILENET = "timm/vit_tiny_patch16_224", "timm/mobilenetv3_small_050"


def test_names_are_timms_or_the_nearest_is_said():
    for name in (RESNET, "timm/resnet50.a1_in1k"):
        registry.check_name(name)
    for name, nearest in (("timm/resnet10", "resnet10t"), ("timm/resnet50.a1_in2k", "resnet50.a1_in1k")):
        line = error_line(registry.check_name, name)
        assert line.startswith(f"hyperparameters.net: '{name}': timm has no such network")
        assert f"did you mean 'timm/{nearest}'" in line
    line = error_line(registry.build, NetSpec("timm/hf-hub:some/net", 3, SIZE))
    assert "timm has no such network" in line
    line = error_line(registry.build, NetSpec(RESNET, 3, SIZE, {"pretrained": True}))
    assert line.startswith("hyperparameters.net_args.pretrained:") and "hyperparameters.weights" in line


def test_without_timm_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    line = error_line(registry.check_name, RESNET)
    assert "needs timm, which cannot be imported" in line and "requirements.txt" in line
    assert registry.is_name(RESNET)


def test_their_heads_are_found():
    for name, head in {RESNET: "fc", VIT: "head", MOBILENET: "classifier"}.items():
        args = SMALL if name == VIT else None
        assert head_layers(registry.on_meta_device(NetSpec(name, 3, SIZE, args))) == [head]


def test_normalization_and_size_are_those_of_the_weights(tmp_path):
    clip = "openai_ft_in1k"
    assert pretrained.normalization(VIT)[0] == (0.5, 0.5, 0.5)
    mean, _ = pretrained.normalization("timm/vit_base_patch16_clip_224", clip)
    assert mean[0] == pytest.approx(0.4815, abs=1e-4)
    assert registry.input_size("timm/vit_base_patch16_384") == (384, 384)
    assert registry.input_size("resnet18") is None
    assert DataSettings.parse({"dataset": "imagefolder"}, (384, 384)).image_size == (384, 384)
    assert DataSettings.parse({"dataset": "imagefolder", "image_size": 64}, (384, 384)).image_size == (64, 64)
    assert DataSettings.parse({"dataset": "digits"}, (384, 384)).image_size == SIZE
    config: dict[str, Any] = {
        "architecture": "resnet10t",
        "pretrained_cfg": {"input_size": [3, 96, 64], "mean": [0.1] * 3, "std": [1] * 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert registry.input_size(RESNET, str(tmp_path)) == (96, 64)
    assert pretrained.normalization(RESNET, str(tmp_path)) == ((0.1, 0.1, 0.1), (1, 1, 1))
    (tmp_path / "config.json").write_text(json.dumps({**config, "architecture": "resnet18"}))
    assert "set hyperparameters.net: timm/resnet18" in error_line(registry.input_size, RESNET, str(tmp_path))
    sizes = config["pretrained_cfg"] | {"input_size": [3, "96", 64]}
    for text in ("{", json.dumps({**config, "pretrained_cfg": sizes})):
        (tmp_path / "config.json").write_text(text)
        assert "config.json is not timm's" in error_line(registry.input_size, RESNET, str(tmp_path))


def as_timm_trains(state):
    ema = {name: value + 1 if value.is_floating_point() else value for name, value in state.items()}
    return {"state_dict": state, "state_dict_ema": ema, "args": argparse.Namespace(lr=1), "arch": "resnet10t"}


# These weights of a network for 3 classes start at random, where a file has those for 11
FC = ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("form", ["net.safetensors", "checkpoint.pth.tar", "folder"])
def test_weights_of_a_file_or_folder_start_a_network_for_other_classes(tmp_path, form):
    state = registry.build(NetSpec(RESNET, 11, SIZE)).state_dict()
    path, offset = tmp_path / form, 0
    if form == "folder":
        path.mkdir()
        save_file(state, path / "model.safetensors")
    elif form == "net.safetensors":
        save_file(state, path)
    elif form == "checkpoint.pth.tar":
        torch.save(as_timm_trains(state), path)
        offset = 1
    before = torch.get_rng_state()
    found = pretrained.read(NetSpec(RESNET, 2, SIZE), str(path), ())
    made = registry.on_meta_device(NetSpec(RESNET, 3, SIZE))
    assert state_dicts.load_pretrained(made, found, form) == FC
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found["layer1.0.conv1.weight"], state["layer1.0.conv1.weight"] + offset)


def test_weights_for_images_of_another_size_are_fitted(tmp_path):
    torch.save(registry.build(NetSpec(VIT, 11, (64, 64), SMALL)).state_dict(), tmp_path / "vit.pth")
    found = pretrained.read(NetSpec(VIT, 2, SIZE, SMALL), str(tmp_path / "vit.pth"), ())
    made = registry.build(NetSpec(VIT, 3, SIZE, SMALL))
    assert state_dicts.load_pretrained(made, found, "vit.pth") == ["head.weight", "head.bias"]


def test_weights_that_cannot_be_had_are_one_line(tmp_path):
    line = error_line(pretrained.read, NetSpec(RESNET, 2, SIZE, {"widht": 2}), "c3_in1k", ())
    assert line.startswith("hyperparameters.net_args: {'widht': 2}") and "cannot be built" in line
    line = error_line(pretrained.read, NetSpec(RESNET, 2, SIZE), "c3_in2k", ())
    assert "no such file or weights of timm" in line and "did you mean 'c3_in1k'" in line
    assert "no file of weights" in error_line(pretrained.read, NetSpec(RESNET, 2, SIZE), str(tmp_path), ())
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "other.pth")
    found = pretrained.read(NetSpec(RESNET, 2, SIZE), str(tmp_path / "other.pth"), ())
    made = registry.on_meta_device(NetSpec(RESNET, 3, SIZE))
    assert "give weights of this network" in error_line(state_dicts.load_pretrained, made, found, "other.pth")


def undecodable(folder):
    """A folder of images that are none, which is found out when they are decoded."""
    for split in ("train", "test"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            (folder / split / label / "1.png").write_text("no image")
    return folder


def test_a_folder_of_images_gets_the_networks_size_and_normalization(tmp_path):
    optimizer = {"type": "Adam", "params": {"lr": 0.001}}
    hyper = {"net": RESNET, "max_length": {"batches": 1}, "train_batch_size": 2, "optimizer": optimizer}
    section = {"dataset": "imagefolder", "root": str(undecodable(tmp_path)), "normalize": "weights"}
    config = TrialConfig.resolve(hyper, {"data": section}, 1, "cpu")
    assert config.data.image_size == (176, 176)
    assert config.data.normalize == {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def test_batch_normalization_over_processes_keeps_its_activations():
    made = registry.with_sync_batchnorm(MOBILENET, registry.build(NetSpec(MOBILENET, 3, SIZE)))
    kinds = {type(each).__name__ for each in made.modules() if isinstance(each, nn.SyncBatchNorm)}
    assert kinds == {"SyncBatchNormAct"}


def test_offline_an_error_says_where_to_put_the_weights(tmp_path, monkeypatch, capsys):
    """Before any image is decoded."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    chosen = {
        "data__dataset": "imagefolder",
        "data__root": undecodable(tmp_path / "photos"),
        "hyperparameters__net": RESNET,
        "hyperparameters__weights": "DEFAULT",
        "hyperparameters__max_length": "{batches: 1}",
        f"{DEEPSPEED}train_batch_size": 2,
    }
    assert train.main([*DIGITS, *overrides(**chosen), "--output", str(tmp_path / "run")]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("train.py: hyper")]
    assert "hyperparameters.weights: DEFAULT: timm cannot fetch resnet10t.c3_in1k (" in line
    assert "give the path of a file or folder" in line
