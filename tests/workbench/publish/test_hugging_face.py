"""Other libraries load a published folder: timm, huggingface_hub, and the code of its card."""

import json
import pathlib
import re
import shutil
import sys

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image
from support import PROJECT, run
from written_networks import MEAN, STD, VIT, changed, write_checkpoint

import checkpoint
import net
from classify.models import net_file, own_net, pretrained
from classify.models.registry import NetSpec

CLASSES = ["a|b", "[c](d)", "`e`\x1b", "---"]
TIMM = "timm/vit_tiny_patch16_224"
NETS = {"airbench": {"width": 8}, "vit_b_16": VIT, TIMM: {"depth": 2, "embed_dim": 64, "num_heads": 4}}
FITS = {"airbench": {"fit": "pad"}, "vit_b_16": {"fit": "stretch"}, TIMM: {}}
# A fork has this project imported, and other people do not have it
ALONE = f"""
import sys
def is_ours(path): return (path or "").startswith({str(PROJECT)!r}) and not path.startswith(sys.prefix)
sys.path = ["", *(each for each in sys.path if not is_ours(each))]
for name in [name for name, each in sys.modules.items() if is_ours(getattr(each, "__file__", None))]:
    sys.modules.pop(name) if name != "__main__" else None
"""
SHOW = "\nimport json\nprint(json.dumps(probabilities.tolist()))\n"


@pytest.fixture(scope="module", params=NETS)
def published(request, tmp_path_factory) -> tuple[pathlib.Path, str]:
    """A folder, and the name of its network."""
    name, root = request.param, tmp_path_factory.mktemp("published")
    made = changed(name, 4, NETS[name])
    source = write_checkpoint(root / "checkpoint", name, made, CLASSES, (36, 40), NETS[name], **FITS[name])
    assert checkpoint.main(["export", str(source), str(root / "folder"), "--format", "hf"]) == 0
    return root / "folder", name


def test_the_code_of_the_card_classifies_as_predict_does(published, tmp_path, capsys):
    assert_card_predicts(published[0], tmp_path, capsys)


OWN = """
from torch import nn
from net import register

@register("mine")
def mine(num_classes):
    return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
"""


def test_a_net_of_the_working_directory_is_published_beside_the_project_s(tmp_path, monkeypatch, capsys):
    for name in ("NETS", "LOSSES"):
        monkeypatch.setattr(net, name, dict(getattr(net, name)))
    monkeypatch.setenv(own_net.VARIABLE, "")
    (tmp_path / "net.py").write_text(OWN)
    monkeypatch.setitem(sys.modules, own_net.MODULE, None)  # removes the module at the end
    del sys.modules[own_net.MODULE]
    assert own_net.choose(tmp_path / "net.py")
    source = write_checkpoint(tmp_path / "checkpoint", "mine", changed("mine", 4, {}), CLASSES)
    assert checkpoint.main(["export", str(source), str(tmp_path / "folder"), "--format", "hf"]) == 0
    assert (tmp_path / "folder/net.py").read_text() == (PROJECT / "net.py").read_text()
    assert_card_predicts(tmp_path / "folder", tmp_path, capsys)


@pytest.mark.parametrize("published", ["airbench"], indirect=True)
def test_the_code_of_the_card_decodes_a_large_jpeg_as_predict_does(published, tmp_path, capsys):
    assert_card_predicts(published[0], tmp_path, capsys, size=(401, 903))


def assert_card_predicts(folder, tmp_path, capsys, size=(40, 90)):
    here = shutil.copytree(folder, tmp_path / "here")
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(here / "photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", (here / "README.md").read_text(), re.DOTALL)
    made = run(["-c", "\n".join([ALONE, *blocks, SHOW])], here, cwd=here)
    assert made.code == 0, made.stderr
    *_, label, found = made.stdout.splitlines()
    capsys.readouterr()
    assert checkpoint.main(["predict", str(folder), str(here / "photo.jpg"), "--json"]) == 0
    (wanted,) = json.loads(capsys.readouterr().out)
    assert json.loads(found) == pytest.approx([*wanted["probabilities"].values()], abs=1e-5)
    assert label.startswith(wanted["class"])


@pytest.mark.parametrize("published", [TIMM], indirect=True)
def test_timm_and_trainings_load_networks_of_timm(published):
    folder, name = published
    made = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images, kept = torch.randn(3, 3, 32, 32), net_file.read(folder)[0]
    with torch.no_grad():
        assert torch.equal(made(images), kept(images))
    config = timm.data.resolve_data_config(model=made)
    assert list(config["mean"]) == MEAN and config["input_size"] == (3, 32, 32)
    assert (
        config["crop_mode"] == "center"
        and config["interpolation"] == "bilinear"
        and config["crop_pct"] == pytest.approx(32 / 40)
    )
    assert made.pretrained_cfg["label_names"] == CLASSES
    weights = kept.state_dict()
    found = pretrained.read(NetSpec(name, 2, (32, 32), NETS[name]), str(folder), CLASSES)
    assert found.keys() == weights.keys()
    others = pretrained.read(NetSpec(name, 2, (32, 32), NETS[name]), str(folder), ["w", "x", "y", "z"])
    assert 0 < len(weights) - len(others) <= 2  # without the head of other classes
    assert pretrained.normalization(name, str(folder)) == (tuple(MEAN), tuple(STD))


def test_the_card_is_valid_and_transformers_find_the_preprocessing(published):
    folder, _ = published
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.eval_results is None and "metrics of the run were not available" in card.text
    assert r"a\|b, \[c\](d), \`e\`\\x1b, ---" in card.text
    for each in folder.iterdir():
        assert b"/of/this/machine" not in each.read_bytes(), each
    held = json.loads((folder / "preprocessor_config.json").read_text())
    assert held["size"] == {"height": 36, "width": 40} and held["crop_size"] == {"height": 32, "width": 32}
    assert held["image_mean"] == MEAN and held["rescale_factor"] == 1 / 255
