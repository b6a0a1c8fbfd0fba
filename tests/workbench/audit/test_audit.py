"""checkpoint.py audit and head: planted faults, kept features, a linear head, and the list for data.exclude."""

import csv
import json
import pathlib
import shutil

import joblib
import numpy as np
import pytest
import torch
from folders import table
from PIL import Image
from support import DIGITS, overrides

import checkpoint
from benchmarks import audit
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.models import net_file, registry, state_dicts
from classify.models.registry import NetSpec
from workbench.audit import features, head, linear
from workbench.audit.dataset import Dataset

SIZE = overrides(data__image_size=24)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A user's cache of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[pathlib.Path, audit.Planted]:
    """300 striped images, a class for each direction, with 6 copies across splits and 8 wrong labels."""
    source, target = tmp_path_factory.mktemp("stripes"), tmp_path_factory.mktemp("planted") / "images"
    random = np.random.default_rng(0)
    across, down = np.meshgrid(np.arange(32), np.arange(32))
    for number in range(320):
        label = number % 4
        along = (across, down, across + down, across - down)[label]
        stripes = np.sin(along * random.uniform(0.4, 0.6) + random.uniform(0, 6))[..., None]
        spots = np.kron(random.normal(0, 40, (8, 8, 3)), np.ones((4, 4, 1)))
        image = np.clip(128 + 40 * stripes * random.uniform(0.3, 1, 3) + spots, 0, 255).astype(np.uint8)
        (source / "abcd"[label]).mkdir(exist_ok=True)
        Image.fromarray(image).save(source / "abcd"[label] / f"{number:04}.png")
    return target, audit.plant(source, target, 306, seed=0, copies=6, wrong=8)


@pytest.fixture
def main(capsys):
    """Run checkpoint.py in this process; return its lines, or its lines of errors if it exits with 2."""

    def main(*arguments: object, code: int = 0) -> list[str]:
        capsys.readouterr()
        assert checkpoint.main([str(each) for each in arguments]) == code
        said = capsys.readouterr()
        return (said.err if code else said.out).splitlines()

    return main


def test_an_unreadable_image_is_named_and_left_out(planted, main, tmp_path):
    root = shutil.copytree(planted[0], tmp_path / "images")
    broken = sorted(root.rglob("*.png"))[0]
    broken.write_bytes(b"no image")
    said = main("audit", root, *SIZE, "--output", tmp_path)
    assert said[1].startswith(f"left out  {broken}: not a readable image (")
    assert broken.name not in (tmp_path / "audit.csv").read_text()


def test_planted_copies_and_wrong_labels_are_in_the_first_rows(planted, main, tmp_path, monkeypatch):
    root, faults = planted
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.*") if path.name[0] != "."}
    said = main("audit", root, *SIZE, "--output", tmp_path)
    copies, wrong = audit.found(faults, tmp_path / "audit.csv", 20)
    assert copies == 6 and wrong >= 7
    assert said[1].startswith("features  whitened patches: 2,048 numbers an image, ")
    page = (tmp_path / "audit.html").read_text()
    for name in [*faults.copies, *sorted(faults.wrong)[:1]]:
        assert f'<a href="{(root / name).as_uri()}">{name}</a>' in page
        assert f'alt="{name}"' in page
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*.*") if path.name[0] != "."}
    (again,) = (line for line in main("audit", root, *SIZE, "--output", tmp_path) if "features" in line)
    assert again.endswith("stored by an earlier command")
    monkeypatch.chdir(tmp_path)  # caches also clears ./data
    assert any("networks and datasets" in line for line in main("caches"))
    main("caches", "--clear")
    assert not any("features of" in line for line in main("caches"))


def test_the_list_leaves_one_image_of_each_pair_out(planted, main, tmp_path):
    root, _ = planted
    main("audit", root, *SIZE, "--output", tmp_path)
    rows = list(csv.DictReader((tmp_path / "audit.csv").open()))
    pairs = [row for row in rows if row["kind"] in ("leak", "copy")]
    section = {"dataset": "imagefolder", "root": str(root), "image_size": 24}
    every = DataPlan.resolve(DataSettings.parse(section))
    left = DataPlan.resolve(DataSettings.parse({**section, "exclude": str(tmp_path / "exclude.txt")}))
    gone = {row["image"] for row in pairs}
    assert every.count("train") + every.count("test") - len(gone) == left.count("train") + left.count("test")
    assert left.count("test") == every.count("test") - sum(name.startswith("test/") for name in gone)
    label = next(row["image"] for row in rows if row["kind"] == "label")
    text = (tmp_path / "exclude.txt").read_text()
    assert f"\n#{label}\n" in text
    (tmp_path / "decided.txt").write_text(text.replace(f"#{label}", label))
    fewer = DataPlan.resolve(DataSettings.parse({**section, "exclude": str(tmp_path / "decided.txt")}))
    assert fewer.count("train") + fewer.count("test") == left.count("train") + left.count("test") - 1


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> pathlib.Path:
    """A network with random weights for three classes, whose logits are its head's outputs divided by 32."""
    torch.manual_seed(0)
    arguments = {"width": 8}
    net = registry.build(NetSpec("airbench", 3, (16, 16), arguments))
    path = tmp_path_factory.mktemp("net") / "net.pt"
    image = {"height": 16, "width": 16, "resize": [16, 16], "mean": [0.5] * 3, "std": [0.5] * 3}
    description = {
        "net": {"name": "airbench", "num_classes": 3, "net_args": arguments},
        "classes": ["a", "b", "c"],
        "input": image,
        "dtype": "float32",
        "provenance": {"steps": 1},
    }
    net_file.write(path, state_dicts.of_module(net), description)
    return path


def test_a_head_scores_as_its_file_does(net, main, tmp_path):
    target = tmp_path / "new.pt"
    said = main("head", net, target, *DIGITS)
    (accuracy,) = (line.split()[1] for line in said if line.startswith("accuracy"))
    assert float(accuracy) > 0.8
    evaluated = json.loads("\n".join(main("evaluate", target, *DIGITS, "--json")))
    assert f"{evaluated['accuracy']:.4f}" == accuracy and evaluated["images"] == 360
    assert evaluated["loss"] < 1  # the network divides the head's outputs by 32
    before, after = (torch.load(path) for path in (net, target))
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["head.weight"]


def test_no_bit_depends_on_the_number_of_processes(net, tmp_path, monkeypatch):
    extractor, network = features.of_network(net)
    dataset = Dataset.open({"dataset": "digits"}, network.size)
    found, heads = [], []
    for cores in (3, 1):
        monkeypatch.setattr(joblib, "cpu_count", lambda cores=cores: cores)
        monkeypatch.setattr(features, "stand_ins", lambda cores=cores: tmp_path / str(cores))
        found.append(features.kept(extractor, dataset))
        heads.append(linear.fit(network, dataset, found[0].values))
    assert np.array_equal(found[0].values, found[1].values)
    assert torch.equal(*(each.weights["head.weight"] for each in heads))
    patches = features.of_patches(dataset)
    assert patches.identity == features.of_patches(dataset).identity
    (file,) = (tmp_path / "1" / features.FOLDER).iterdir()
    again = features.kept(extractor, dataset)
    assert again.seconds is None and np.array_equal(again.values, found[0].values)
    file.write_bytes(file.read_bytes()[:-8])
    again = features.kept(extractor, dataset)
    assert again.seconds is not None and np.array_equal(again.values, found[0].values)


def test_a_fit_of_two_classes_and_of_raw_features_is_scikit_learns():
    random = np.random.default_rng(0)
    labels = np.arange(60) % 2
    vectors = random.normal(5, 3, (60, 4)) + labels[:, None]
    weights, biases = head.fit(vectors, labels, 1.0)
    found = head.probabilities(vectors, weights, biases)
    assert weights.shape == (2, 4) and np.allclose(found.sum(1), 1)
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    expected = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300)).fit(vectors, labels)
    assert np.allclose(found, expected.predict_proba(vectors), atol=1e-6)


@table(
    "arguments, line",
    folder=(["audit", "{tmp}/none"], "data.root: {tmp}/none: no such folder; "),
    both=(["audit", "{tmp}", "--config", "experiments/digits.yaml"], "--config: experiments/digits.yaml: {tmp} also names images; remove one of the two"),
    net=(["audit", "--net", "{tmp}/none.pt", *DIGITS], "{tmp}/none.pt: "),
    target=(["head", "{tmp}/none.pt", "{tmp}/new.onnx", *DIGITS], "{tmp}/new.onnx: must be the name of a file that ends in .pt"),
)  # fmt: skip
def test_an_error_is_a_line(arguments, line, main, tmp_path):
    (said,) = main(*(each.format(tmp=tmp_path) for each in arguments), code=2)
    assert said.startswith(f"checkpoint.py: {line.format(tmp=tmp_path)}")
