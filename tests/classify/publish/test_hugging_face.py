"""A published folder is what others' libraries load: timm, huggingface_hub, and the code of its own card."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image

import checkpoint
from classify.models import net_file, pretrained, registry, state_dicts
from classify.models.registry import NetSpec

CLASSES = ["a|b", "[c](d)", "`e`\x1b", "---"]
SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 4}
VIT = {"num_layers": 1, "hidden_dim": 32, "num_heads": 2, "mlp_dim": 32}
NETS = {
    "airbench": {"width": 8},
    "vit_b_16": VIT,
    "timm/vit_tiny_patch16_224": SMALL,
}
SHOW = "\nprint(json.dumps(probabilities.tolist()))\n"


@pytest.fixture(scope="module", params=NETS)
def published(request, tmp_path_factory) -> tuple[pathlib.Path, str]:
    """A folder, and the name of its network."""
    name, root = request.param, tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    net = registry.build(NetSpec(name, 4, (32, 32), NETS[name]))
    with torch.no_grad():
        net(torch.randn(64, 3, 32, 32))  # so that running statistics are not those of the beginning
        for each in net.parameters():
            each.add_(0.05 * torch.randn_like(each))
    description = {
        "net": {"name": name, "num_classes": 4, "net_args": NETS[name]},
        "classes": CLASSES,
        "input": {"height": 32, "width": 32, "resize": [36, 40], "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]},
        "dtype": "float32",
        "provenance": {"steps": 1000, "data": {"dataset": "imagefolder", "root": "/of/this/machine/photos"}},
    }  # fmt: skip
    source = root / "checkpoint"
    source.mkdir()
    net_file.write(source / "net.pt", state_dicts.of_module(net), description)
    (source / "metadata.json").write_text('{"steps_completed": 1000}')
    assert checkpoint.main(["export", str(source), str(root / "folder"), "--format", "hf"]) == 0
    return root / "folder", name


def test_the_code_of_the_card_classifies_as_predict_does(published, tmp_path, capsys):
    folder, _ = published
    here = shutil.copytree(folder, tmp_path / "here")
    pixels = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(here / "photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", (here / "README.md").read_text(), re.DOTALL)
    script = "\n".join(blocks) + SHOW
    run = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *_, label, found = run.stdout.splitlines()
    capsys.readouterr()
    assert checkpoint.main(["predict", str(folder), str(here / "photo.jpg"), "--json"]) == 0
    (wanted,) = json.loads(capsys.readouterr().out)
    assert json.loads(found) == pytest.approx([*wanted["probabilities"].values()], abs=1e-5)
    assert label.startswith(wanted["class"])


def test_timm_loads_its_own_networks(published):
    folder, name = published
    if not name.startswith("timm/"):
        pytest.skip("of another library")
    net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(net(images), net_file.read(folder)[0](images))
    config = timm.data.resolve_data_config(model=net)
    assert list(config["mean"]) == [0.5, 0.4, 0.3] and config["input_size"] == (3, 32, 32)
    assert config["interpolation"] == "bilinear" and config["crop_pct"] == pytest.approx(32 / 40)
    assert net.pretrained_cfg["label_names"] == CLASSES


def test_it_may_be_what_a_training_starts_from(published):
    folder, name = published
    if not name.startswith("timm/"):
        pytest.skip("of another library")
    weights = net_file.read(folder)[0].state_dict()
    found = pretrained.read(name, str(folder), (32, 32), NETS[name], CLASSES)
    assert found.keys() == weights.keys()
    others = pretrained.read(name, str(folder), (32, 32), NETS[name], ["w", "x", "y", "z"])
    assert 0 < len(weights) - len(others) <= 2  # without the head, which is of other classes
    assert pretrained.normalization(name, str(folder)) == ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def test_the_card_is_valid_and_its_names_are_text(published):
    folder, _ = published
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.eval_results is None and "figures were not at hand" in card.text
    assert r"a\|b, \[c\](d), \`e\`\\x1b, ---" in card.text
    for each in folder.iterdir():
        assert b"/of/this/machine" not in each.read_bytes(), each


def test_preprocessing_is_by_the_keys_of_transformers(published):
    folder, _ = published
    held = json.loads((folder / "preprocessor_config.json").read_text())
    assert held["size"] == {"height": 36, "width": 40} and held["crop_size"] == {"height": 32, "width": 32}
    assert held["image_mean"] == [0.5, 0.4, 0.3] and held["rescale_factor"] == 1 / 255
