"""Every form of an exported network scores alike, and damaged or foreign files are refused."""

import dataclasses
import json
import os
import pathlib
import shutil
import zipfile
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from folders import save, table
from PIL import Image
from support import PROJECT, error_line
from torch import nn
from written_networks import MEAN, STD, VIT, changed, write_checkpoint

import checkpoint
import data
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.models import net_file, registry
from classify.models.registry import NetSpec
from workbench.publish import forms, scoring
from workbench.publish.network import Trained

DIGITS = ["--config", str(PROJECT / "experiments/digits.yaml")]
CLASSES = [str(digit) for digit in range(10)]
# Arguments, and the size to which images are scaled
NETS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "airbench": ({"width": 8}, (36, 36)),
    "vit_b_16": (VIT, (40, 32)),
    "timm/resnet10t": ({}, (32, 32)),
}
FILES = {form: f"net{each.ending or ''}" for form, each in forms.FORMS.items()}
FILES |= {"pt": "net.pt", "hf": "folder"}


def export(source: pathlib.Path, folder: pathlib.Path, form: str, *more: str) -> pathlib.Path:
    target = folder / FILES[form]
    assert checkpoint.main(["export", str(source), str(target), "--format", form, *more]) == 0
    return target


def printed(capsys, *arguments: str) -> Any:
    capsys.readouterr()
    assert checkpoint.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def trained_on_digits() -> nn.Module:
    """The network of the tutorial after four epochs of the digits."""
    images = DataPlan.resolve(DataSettings("digits")).load("train")
    inputs = data.as_inputs(images.images, MEAN, STD)
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
    return write_checkpoint(tmp_path_factory.mktemp("digits") / "ckpt", "net", trained_on_digits(), CLASSES)


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
    arguments, resize = NETS[name]
    net = changed(name, 10, arguments)
    source = write_checkpoint(tmp_path / "checkpoint", name, net, CLASSES, resize, arguments)
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


@table("limit, value", images=("BATCH", 2), pixels=("PIXELS", 2 * 32 * 32))
def test_one_batch_of_decoded_images_is_in_memory(limit, value, exported, photos, monkeypatch):
    events: list[Any] = []
    decode, classifier = scoring.decode_image, forms.read(exported / "net.pt")

    def noted(event: Any, result: Any) -> Any:
        events.append(event)
        return result

    monkeypatch.setattr(scoring, limit, value)
    monkeypatch.setattr(scoring, "decode_image", lambda *given: noted("decoded", decode(*given)))
    counted = dataclasses.replace(classifier, classify=lambda x: noted(len(x), classifier.classify(x)))
    assert len(scoring.answers(counted, sorted(photos.iterdir()))[1].unknown) == 5
    assert events == ["decoded", "decoded", 2, "decoded", "decoded", 2, "decoded", 1]


def test_a_description_with_any_text_is_exported(digits, tmp_path):
    source = shutil.copytree(digits, tmp_path / "source")
    describe(source / "net.pt", **{"more \ud800": "\udcff"})
    for form in forms.FORMS:
        assert forms.read(export(source, tmp_path, form)).description["classes"] == CLASSES


def test_the_files_of_an_export_have_one_mode(digits, tmp_path):
    before = os.umask(0o027)
    try:
        for form in forms.FORMS:
            export(digits, tmp_path, form)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) == 3 * 2 + 5 and set(modes.values()) == {"0o100640"}, modes


def describe(path: pathlib.Path, **changes: Any) -> None:
    """Change the description of a file; without changes, name the file's digest in it."""
    held = json.loads(net_file.beside(path).read_text())
    if not changes:
        held["provenance"][net_file.DIGEST] = net_file.sha256(path)
    net_file.beside(path).write_text(json.dumps({**held, **changes}))


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_a_byte(path: pathlib.Path) -> None:
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


def replace(path: pathlib.Path) -> None:
    shutil.copy(PROJECT / "README.md", path)


def replace_and_describe(path: pathlib.Path) -> None:
    """Leave it to the library of the form to refuse the file."""
    replace(path)
    describe(path)


def other_onnx(path: pathlib.Path) -> None:
    """Write a whole file of another program."""
    take = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    give = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Abs", ["x"], ["y"])], "g", [take], [give])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    describe(path)


def move_weights_out(path: pathlib.Path) -> None:
    """Put the weights of a network in ONNX into a file that no digest covers."""
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=1000)
    describe(path)


def onnx_of_one_image(path: pathlib.Path) -> None:
    """Let a network in ONNX take one image at a time alone."""
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, path)
    describe(path)


def compress(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path) as archive:
        held = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in held.items():
            archive.writestr(name, content)


def repeat_a_weight(path: pathlib.Path) -> None:
    """Write a weight of 4 bytes that stands for 4 TB."""
    torch.save({"weight": torch.zeros(1).as_strided((10**6, 10**6), (0, 0))}, path)


def remove_description(path: pathlib.Path) -> None:
    net_file.beside(path).unlink()
    path.with_suffix(".json").unlink(missing_ok=True)  # of earlier versions


def add_a_class(path: pathlib.Path) -> None:
    describe(path, classes=[*CLASSES, "eleven"], net={"name": "net", "num_classes": 11})


OTHER = "is not the file that its JSON file describes"
WEIGHTS = "the weights differ from the weights that the JSON file describes"


@pytest.fixture
def error(exported, photos, tmp_path, capsys):
    """Predict with a damaged copy of a form: the line that refuses it."""

    def predict(form, damage):
        shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
        path = tmp_path / FILES[form]
        damage(path / "model.safetensors" if form == "hf" and damage is not remove_description else path)
        capsys.readouterr()
        assert checkpoint.main(["predict", str(path), str(photos)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"checkpoint.py: {tmp_path}/") and "; " in said
        return said

    return predict


@pytest.mark.parametrize("form", FILES)
def test_a_truncated_changed_or_foreign_file_is_one_line(form, error):
    if form == "onnx":
        lines = [OTHER] * 3
    else:
        file = "folder/model.safetensors" if form == "hf" else FILES[form]
        unreadable = f"{file}: not a readable state_dict"
        lines = [unreadable, "net.pt: " if form == "pt" else WEIGHTS, unreadable]
    for damage, line in zip((truncate, change_a_byte, replace), lines, strict=True):
        assert line in error(form, damage), damage


@table(
    "form, damage, line",
    no_onnx=("onnx", replace_and_describe, "is not the classifier that its JSON file describes ("),
    another_onnx=("onnx", other_onnx, "is not the classifier that its JSON file describes (its input has the shape [1], its output"),
    onnx_of_other_files=("onnx", move_weights_out, "describes (weights are in other files)"),
    onnx_of_one_image=("onnx", onnx_of_one_image, "is not the classifier that its JSON file describes ("),
    onnx_of_other_classes=("onnx", add_a_class, "is not the classifier that its JSON file describes (its input has the shape ["),
    missing_onnx=("onnx", pathlib.Path.unlink, "net.onnx: no such file or folder; give"),
    missing_in_folder=("hf", pathlib.Path.unlink, "folder/model.safetensors: not a readable state_dict (["),
    undescribed_onnx=("onnx", remove_description, "net.onnx.json: is missing"),
    a_compressed_archive=("pt", compress, "net.pt: not a readable state_dict (its archive is compressed)"),
    endless_weights=("pt", repeat_a_weight, "net.pt: holds no state_dict"),
    undescribed_folder=("hf", remove_description, "folder/config.json: is missing"),
)  # fmt: skip
def test_another_or_a_missing_file_is_one_line(form, damage, line, error):
    assert line in error(form, damage)


@table(
    "arguments, line",
    int8=(["net.pt", "--int8", *DIGITS], "--int8: does not work with pt; give a file that ends in .onnx"),
    alone=(["net.onnx", *DIGITS], "--config, --set: are only for the images of --int8; add"),
    unknown=(["net.tflite"], "net.tflite: unknown ending; use .pt, .safetensors or .onnx, or add --format pt"),
    ending=(["net.pt", "--format", "onnx"], "net.pt: must end in .onnx for --format onnx"),
    full=(["full", "--format", "hf"], "full: is not an empty folder; give another"),
    a_file=(["full/kept", "--format", "hf"], "full/kept: is not an empty folder; give another"),
    a_folder=(["full"], "full: must be the name of a file"),
    classes=(["net.onnx", "--int8", *DIGITS, "--set", "data={dataset: imagefolder, root: ROOT}"], "its classes (a, b) differ from the classes of"),
)  # fmt: skip
def test_impossible_exports_are_refused(arguments, line, digits, tmp_path, capsys):
    save(tmp_path / "full/kept", Image.new("1", (1, 1)), format="png")
    for name in ("train/a", "train/b", "test/a", "test/b"):
        save(tmp_path / "images" / name / "1.png", 1)
    target, *more = (each.replace("ROOT", str(tmp_path / "images")) for each in arguments)
    assert checkpoint.main(["export", str(digits), str(tmp_path / target), *more]) == 2
    *_, said = capsys.readouterr().err.splitlines()  # a line about decoded images may come first
    assert said.startswith("checkpoint.py: ") and line in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["full", "images"]
    assert [each.name for each in (tmp_path / "full").iterdir()] == ["kept"]


def test_the_working_directory_is_read_but_not_written(
    digits, exported, tmp_path, photos, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert checkpoint.main(["export", str(digits), ".", "--format", "hf"]) == 2
    assert "must be the name of a new folder, e.g. published" in capsys.readouterr().err
    monkeypatch.chdir(exported / FILES["hf"])
    assert checkpoint.main(["predict", ".", str(photos)]) == 0


@pytest.mark.parametrize("form", ["onnx", "hf"])
def test_experts_have_only_forms_of_weights(form, tmp_path):
    net = {"name": registry.MOE, "num_classes": 10}
    description = {"net": net, "input": {"height": 32, "width": 32}, "provenance": {}}
    line = error_line(forms.FORMS[form].write, tmp_path / FILES[form], Trained({}, description))
    assert line.startswith("--format: ") and line.endswith("; use pt or safetensors")
    assert not list(tmp_path.iterdir())
