"""Networks written in every form: read again they score alike, and what is damaged or foreign is refused."""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from folders import table
from PIL import Image
from support import PROJECT
from torch import nn

import checkpoint
import data
from classify.images.settings import DataSettings
from classify.models import net_file, registry, state_dicts
from classify.models.registry import NetSpec
from classify.publish import forms

DIGITS = ["--config", str(PROJECT / "experiments/digits.yaml")]
CLASSES = [str(digit) for digit in range(10)]
SMALL = {"num_layers": 1, "hidden_dim": 32, "num_heads": 2, "mlp_dim": 32}
NETS: dict[str, tuple[dict[str, Any], list[int]]] = {  # arguments, and the size that images are scaled to
    "airbench": ({"width": 8}, [36, 36]),
    "vit_b_16": (SMALL, [40, 32]),
    "timm/resnet10t": ({}, [32, 32]),
}
FILES = {form: f"net{each.ending or ''}" for form, each in forms.FORMS.items()}
FILES |= {"pt": "net.pt", "hf": "folder"}


def write_checkpoint(folder: pathlib.Path, name: str, net: nn.Module, resize: list[int]) -> pathlib.Path:
    """A checkpoint, as far as an export needs it."""
    description = {
        "net": {"name": name, "num_classes": 10, "net_args": NETS.get(name, ({},))[0]},
        "classes": CLASSES,
        "input": {"height": 32, "width": 32, "resize": resize, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]},
        "dtype": "float32",
        "provenance": {"steps": 1, "data": {"dataset": "imagefolder", "root": "/of/this/machine/digits"}},
    }  # fmt: skip
    folder.mkdir()
    net_file.write(folder / "net.pt", state_dicts.of_module(net), description)
    (folder / "metadata.json").write_text('{"steps_completed": 1}')
    return folder


def export(source: pathlib.Path, folder: pathlib.Path, form: str, *more: str) -> pathlib.Path:
    target = folder / FILES[form]
    assert checkpoint.main(["export", str(source), str(target), "--format", form, *more]) == 0
    return target


def printed(capsys, *arguments: str) -> Any:
    capsys.readouterr()
    assert checkpoint.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def trained_on_digits() -> nn.Module:
    """The tutorial's network after a few seconds on the embedded digits."""
    images = data.load(DataSettings("digits"), "train")
    inputs = data.as_inputs(images.images, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    torch.manual_seed(0)
    net = registry.build(NetSpec("net", 10, (32, 32)))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(4):
        for rows in torch.randperm(len(images)).split(32):
            nn.functional.cross_entropy(net(inputs[rows]), images.labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.eval()


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> pathlib.Path:
    """A checkpoint of digits."""
    return write_checkpoint(tmp_path_factory.mktemp("digits") / "ckpt", "net", trained_on_digits(), [32, 32])


@pytest.fixture(scope="module")
def exported(digits, tmp_path_factory) -> pathlib.Path:
    """A folder with the checkpoint of digits in every form."""
    folder = tmp_path_factory.mktemp("exported")
    for form in forms.FORMS:
        export(digits, folder, form)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> pathlib.Path:
    """A folder of images of two sizes."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for index in range(5):
        pixels = random.integers(0, 50 + 50 * index, (40, 30 + index % 2, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((60, 50)).save(folder / f"{index}.png")
    return folder


@pytest.mark.parametrize("name", NETS)
def test_every_form_scores_alike(name, photos, tmp_path, capsys):
    torch.manual_seed(0)
    arguments, resize = NETS[name]
    net = registry.build(NetSpec(name, 10, (32, 32), arguments))
    net(torch.randn(64, 3, 32, 32))  # so that running statistics are not those of the beginning
    with torch.no_grad():
        for each in net.parameters():
            each.add_(0.05 * torch.randn_like(each))  # nor scores all alike
    source = write_checkpoint(tmp_path / "checkpoint", name, net, resize)
    scores = {}
    for form in forms.FORMS:
        rows = printed(capsys, "predict", str(export(source, tmp_path, form)), str(photos))
        scores[form] = np.array([list(row["probabilities"].values()) for row in rows])
        assert scores[form] == pytest.approx(scores["pt"], abs=1e-5), form
    assert scores["pt"].shape == (5, 10) and scores["pt"].std(0).max() > 1e-4


def test_every_form_has_the_accuracy_of_the_checkpoint_and_int8_nearly(digits, exported, tmp_path, capsys):
    wanted = printed(capsys, "evaluate", str(digits / "net.pt"), *DIGITS)
    assert wanted["accuracy"] > 0.9
    for form in forms.FORMS:
        found = printed(capsys, "evaluate", str(exported / FILES[form]), *DIGITS)
        assert found["per_class_accuracy"] == wanted["per_class_accuracy"], form
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4), form
    small = tmp_path / "net-int8.onnx"
    assert checkpoint.main(["export", str(digits), str(small), "--int8", *DIGITS]) == 0
    assert "checkpoint.py evaluate" in capsys.readouterr().out
    found = printed(capsys, "evaluate", str(small), *DIGITS)
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=0.01)
    assert found["loss"] != wanted["loss"]
    assert small.stat().st_size < (exported / "net.onnx").stat().st_size / 2
    kinds = {each.data_type for each in onnx.load(small).graph.initializer if len(each.dims) > 1}
    assert kinds == {onnx.TensorProto.INT8}


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_a_byte(path: pathlib.Path) -> None:
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


def replace(path: pathlib.Path) -> None:
    shutil.copy(PROJECT / "README.md", path)


def replace_and_describe(path: pathlib.Path) -> None:
    """So that the library of the form has to say that it is none."""
    replace(path)
    describe(path)


def other_onnx(path: pathlib.Path) -> None:
    """A whole file, of another program."""
    take = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    give = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Abs", ["x"], ["y"])], "g", [take], [give])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    describe(path)


def describe(path: pathlib.Path) -> None:
    held = json.loads(net_file.beside(path).read_text())
    held["provenance"][net_file.DIGEST] = net_file.sha256(path)
    net_file.beside(path).write_text(json.dumps(held))


def remove(path: pathlib.Path) -> None:
    path.unlink()


def remove_description(path: pathlib.Path) -> None:
    net_file.beside(path).unlink()
    path.with_suffix(".json").unlink(missing_ok=True)  # which an earlier version would have written


def add_a_class(path: pathlib.Path) -> None:
    held = json.loads(net_file.beside(path).read_text())
    held["classes"].append("eleven")
    held["net"]["num_classes"] = 11
    net_file.beside(path).write_text(json.dumps(held))


OTHER = "is not the file that its JSON file describes"


@table(
    "form, damage, line",
    truncated_pt=("pt", truncate, "net.pt: not a readable state_dict"),
    truncated_safetensors=("safetensors", truncate, "net.safetensors: not a readable state_dict"),
    truncated_onnx=("onnx", truncate, OTHER),
    truncated_pt2=("pt2", truncate, OTHER),
    truncated_folder=("hf", truncate, "folder/model.safetensors: not a readable state_dict"),
    changed_pt=("pt", change_a_byte, "net.pt: "),
    changed_safetensors=("safetensors", change_a_byte, "are not those that its JSON file describes"),
    changed_onnx=("onnx", change_a_byte, OTHER),
    changed_pt2=("pt2", change_a_byte, OTHER),
    changed_folder=("hf", change_a_byte, "are not those that its JSON file describes"),
    foreign_pt=("pt", replace, "net.pt: not a readable state_dict"),
    foreign_safetensors=("safetensors", replace, "net.safetensors: not a readable state_dict"),
    foreign_onnx=("onnx", replace, OTHER),
    foreign_pt2=("pt2", replace, OTHER),
    foreign_folder=("hf", replace, "folder/model.safetensors: not a readable state_dict"),
    no_onnx=("onnx", replace_and_describe, "is not the classifier that its JSON file describes ("),
    another_onnx=("onnx", other_onnx, "is not the classifier that its JSON file describes (takes [1] and"),
    no_pt2=("pt2", replace_and_describe, "is no program of torch.export ("),
    another_pt2=("pt2", add_a_class, "is no program of torch.export (it gives (1, 10)"),
    missing_onnx=("onnx", remove, "net.onnx: cannot be used (["),
    missing_in_folder=("hf", remove, "folder/model.safetensors: not a readable state_dict (["),
    undescribed_onnx=("onnx", remove_description, "net.onnx.json: is missing"),
    undescribed_pt2=("pt2", remove_description, "net.pt2.json: is missing"),
    undescribed_folder=("hf", remove_description, "folder/config.json: is missing"),
)
def test_what_is_damaged_or_foreign_is_said_in_one_line(
    form, damage, line, exported, photos, tmp_path, capsys
):
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    path = tmp_path / FILES[form]
    damage(path / "model.safetensors" if form == "hf" and damage is not remove_description else path)
    capsys.readouterr()
    assert checkpoint.main(["predict", str(path), str(photos)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"checkpoint.py: {tmp_path}/") and line in said and "; " in said


@table(
    "arguments, line",
    int8=(["net.pt", "--int8", *DIGITS], "--int8: is not for pt; give a file that ends in .onnx"),
    alone=(["net.onnx", *DIGITS], "--config, --set: say whose training images scale int8; add --int8,"),
    ending=(["net.pt", "--format", "onnx"], "net.pt: must end in .onnx, as --format onnx does"),
    full=(["full", "--format", "hf"], "full: is not an empty folder; give another"),
    a_file=(["full/kept", "--format", "hf"], "full/kept: is not an empty folder; give another"),
    a_folder=(["full"], "full: must be the name of a file"),
    classes=(
        ["net.onnx", "--int8", *DIGITS, "--set", "data={dataset: imagefolder, root: ROOT}"],
        "its classes (a, b) are not those of",
    ),
)
def test_exports_that_cannot_be_are_refused(arguments, line, digits, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").write_text("")
    for split in ("train", "test"):
        for name in "ab":
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("L", (32, 32)).save(tmp_path / "images" / split / name / "1.png")
    target, *more = (each.replace("ROOT", str(tmp_path / "images")) for each in arguments)
    assert checkpoint.main(["export", str(digits), str(tmp_path / target), *more]) == 2
    *_, said = capsys.readouterr().err.splitlines()  # after what is said of decoded images
    assert said.startswith("checkpoint.py: ") and line in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["full", "images"]
    assert [each.name for each in (tmp_path / "full").iterdir()] == ["kept"]


def test_the_working_directory_is_no_name(digits, exported, tmp_path, photos, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert checkpoint.main(["export", str(digits), ".", "--format", "hf"]) == 2
    assert "must be the name of a folder to make, e.g. published" in capsys.readouterr().err
    monkeypatch.chdir(exported / FILES["hf"])
    assert checkpoint.main(["predict", ".", str(photos)]) == 0


@pytest.mark.parametrize("form", ["onnx", "pt2", "hf"])
def test_experts_have_only_forms_of_weights(form, tmp_path):
    description = {"net": {"name": registry.MOE, "num_classes": 10}, "input": {"height": 32, "width": 32}}
    from support import error_line

    from classify.publish.network import Trained

    line = error_line(forms.FORMS[form].write, tmp_path / FILES[form], Trained({}, description))
    assert line.startswith("--format: ") and line.endswith("; use pt or safetensors")
    assert not list(tmp_path.iterdir())
