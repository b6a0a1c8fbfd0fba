"""Networks of timm: their names, sizes, normalisation and weights, and their training in every form."""

import argparse
import json
import sys
from typing import Any

import pytest
import torch
from modes import DEEPSPEED, FIXED, losses
from safetensors.torch import save_file
from support import error_line, overrides, train_many
from torch import nn

from classify.engine.trial_config import TrialConfig
from classify.images.settings import DataSettings
from classify.models import dry_run, net_file, pretrained, recompute, registry, state_dicts
from classify.models.heads import head_layers
from classify.models.registry import NetSpec

RESNET, SIZE = "timm/resnet10t", (32, 32)
VIT, SMALL = "timm/vit_tiny_patch16_224", {"depth": 2, "embed_dim": 64, "num_heads": 4}
NETS: dict[str, dict[str, Any]] = {RESNET: {}, VIT: SMALL, "timm/mobilenetv3_small_050": {}}


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


@pytest.mark.parametrize("name", NETS)
def test_they_go_with_the_data_without_computing(name):
    state = torch.get_rng_state()
    dry_run.check(NetSpec(name, 3, SIZE, NETS[name]), 2)
    assert torch.equal(torch.get_rng_state(), state)
    made = registry.on_meta_device(NetSpec(name, 3, SIZE, NETS[name]))
    heads = ["fc"] if name == RESNET else ["head"] if name == VIT else ["classifier"]
    assert head_layers(made) == heads


def test_normalization_and_size_are_those_of_the_weights(tmp_path):
    clip = "openai_ft_in1k"
    assert pretrained.normalization(VIT)[0] == (0.5, 0.5, 0.5)
    assert pretrained.normalization("timm/vit_base_patch16_clip_224", clip)[0][0] == pytest.approx(
        0.4815, abs=1e-4
    )
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
        assert "its config.json is none of timm's" in error_line(registry.input_size, RESNET, str(tmp_path))


def as_timm_trains(state):
    ema = {name: value + 1 if value.is_floating_point() else value for name, value in state.items()}
    return {"state_dict": state, "state_dict_ema": ema, "args": argparse.Namespace(lr=1), "arch": "resnet10t"}


# How a file or folder may hold weights for 11 classes, and what of a network for 3 then starts at random.
FC = ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("form", ["net.pth", "net.safetensors", "checkpoint.pth.tar", "folder", "no head"])
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
    else:
        torch.save(
            {name: value for name, value in state.items() if form != "no head" or name not in FC}, path
        )
    before = torch.get_rng_state()
    found = pretrained.read(RESNET, str(path), SIZE, None, ())
    made = registry.on_meta_device(NetSpec(RESNET, 3, SIZE))
    assert state_dicts.load_pretrained(made, found, form) == FC
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found["layer1.0.conv1.weight"], state["layer1.0.conv1.weight"] + offset)


def test_weights_for_images_of_another_size_are_fitted(tmp_path):
    torch.save(registry.build(NetSpec(VIT, 11, (64, 64), SMALL)).state_dict(), tmp_path / "vit.pth")
    found = pretrained.read(VIT, str(tmp_path / "vit.pth"), SIZE, SMALL, ())
    made = registry.build(NetSpec(VIT, 3, SIZE, SMALL))
    assert state_dicts.load_pretrained(made, found, "vit.pth") == ["head.weight", "head.bias"]


def test_weights_that_cannot_be_had_are_one_line(tmp_path):
    line = error_line(pretrained.read, RESNET, "c3_in1k", SIZE, {"widht": 2}, ())
    assert line.startswith("hyperparameters.net_args: {'widht': 2}") and "cannot be made" in line
    line = error_line(pretrained.read, RESNET, "c3_in2k", SIZE, None, ())
    assert "no such file, nor weights of timm" in line and "did you mean 'c3_in1k'" in line
    assert "no file of weights" in error_line(pretrained.read, RESNET, str(tmp_path), SIZE, None, ())
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "other.pth")
    found = pretrained.read(RESNET, str(tmp_path / "other.pth"), SIZE, None, ())
    made = registry.on_meta_device(NetSpec(RESNET, 3, SIZE))
    assert "give its own weights" in error_line(state_dicts.load_pretrained, made, found, "other.pth")


def undecodable(folder):
    """A folder of images that are none, which is found out when they are decoded."""
    for split in ("train", "test"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            (folder / split / label / "1.png").write_text("no image")
    return folder


def test_a_folder_of_images_gets_the_networks_size_and_normalization(tmp_path):
    hyper = {
        "net": RESNET,
        "max_length": {"batches": 1},
        "train_batch_size": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    }
    section = {"dataset": "imagefolder", "root": str(undecodable(tmp_path)), "normalize": "weights"}
    config = TrialConfig.resolve(hyper, {"data": section}, 1, "cpu")
    assert config.data.image_size == (176, 176)
    assert config.data.normalize == {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.mark.parametrize("name", NETS)
def test_recomputed_blocks_change_nothing_but_memory(name):
    inputs, results = torch.rand(4, 3, *SIZE), []
    for enabled in (False, True):
        torch.manual_seed(0)
        made = registry.build(NetSpec(name, 3, SIZE, NETS[name]))
        if enabled:
            recompute.enable(made)
            assert made.grad_checkpointing
        made(inputs).square().sum().backward()
        grads = {key: each.grad for key, each in made.named_parameters()}
        results.append({**grads, **dict(made.named_buffers())})
    for key, value in results[1].items():
        torch.testing.assert_close(results[0][key], value, rtol=0, atol=0)


def test_batch_normalization_over_processes_keeps_its_activations():
    made = registry.with_sync_batchnorm(
        "timm/mobilenetv3_small_050", registry.build(NetSpec("timm/mobilenetv3_small_050", 3, SIZE))
    )
    assert {type(each).__name__ for each in made.modules() if isinstance(each, nn.SyncBatchNorm)} == {
        "SyncBatchNormAct"
    }


def test_they_train_resume_to_the_same_bits_and_export(tmp_path):
    fixed = [*FIXED, *overrides(data__normalize="weights", **{f"{DEEPSPEED}train_batch_size": 16})]
    rows = {
        f"{name.removeprefix('timm/')} zero{stage}": [
            *fixed,
            *overrides(
                hyperparameters__net=name,
                hyperparameters__net_args=json.dumps(NETS[name]),
                hyperparameters__checkpoint_activations=str(stage == 3).lower(),
                **{f"{DEEPSPEED}zero_optimization__stage": stage},
            ),
        ]
        for name in NETS
        for stage in (0, 3)
    }
    nowhere = ("dataset", "imagefolder"), ("root", undecodable(tmp_path / "photos"))
    offline = [*rows["resnet10t zero0"], *overrides(**{f"data__{key}": value for key, value in nowhere})]
    offline += overrides(hyperparameters__weights="DEFAULT")
    (tmp_path / "whole").mkdir()
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    whole = train_many(tmp_path / "whole", {**rows, "offline": offline}, environment=hub)
    refused = whole.pop("offline")
    assert refused.code == 2
    (line,) = [each for each in refused.stderr.splitlines() if each.startswith("train.py: hyper")]
    assert "hyperparameters.weights: DEFAULT: timm cannot fetch resnet10t.c3_in1k (" in line
    assert "give the path of a file or folder" in line
    for name, run in whole.items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert losses(run) == pytest.approx(losses(whole[f"{name.split()[0]} zero0"]), rel=1e-3), name
        net, description = net_file.read(run.output / "net.pt")
        assert net(torch.zeros(2, 3, *SIZE)).shape == (2, 10)
        assert description["net"]["name"] == f"timm/{name.split()[0]}"
    (tmp_path / "parts").mkdir()
    first = {
        name: [*row, *overrides(hyperparameters__max_length="{batches: 2}")] for name, row in rows.items()
    }
    for name, run in train_many(tmp_path / "parts", first).items():
        assert run.code == 0, f"{name}: {run.stderr}"
    rest = {name: [*row, "--resume", "latest"] for name, row in rows.items()}
    for name, run in train_many(tmp_path / "parts", rest).items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert run.summary["weights_sha256"] == whole[name].summary["weights_sha256"], name
