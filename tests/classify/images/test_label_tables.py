"""Tables that give an image any number of labels."""

import json

import numpy as np
import pytest
import torch
from folders import save, table
from sklearn.datasets import load_digits
from support import error_line

from classify.config.hyperparameters import Hyperparameters
from classify.images.mixup import apply_mixup, make_mixup
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.models import losses
from deepspeed_trial.errors import InvalidInput

COLUMNS = ["red", "round"]
ROWS = [("a.png", "round;red"), ("b.png", ""), ("c.png", "red"), ("d.png", " round ")]
WANTED = [[1, 1], [0, 0], [1, 0], [0, 1]]


def plan(root, several=";", **more):
    section = {"dataset": "table", "root": str(root), "several_labels": several, "image_size": 8, **more}
    return DataPlan.resolve(DataSettings.parse(section))


def write(root, *lines, part="train"):
    (root / f"{part}.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def root(tmp_path):
    for grey, (name, _) in enumerate(ROWS):
        save(tmp_path / name, 50 * grey)
    write(tmp_path, "path,label", *(",".join(row) for row in ROWS))
    write(tmp_path, "path,label", "a.png,red", part="test")
    return tmp_path


def test_a_separator_columns_and_lists_give_the_same_labels(root):
    plans = [plan(root)]
    write(root, "path,round,red", "a.png,1,1", "b.png,0,", "c.png,0,1", "d.png,1,0")
    write(root, "path,red,round", "a.png,1,0", part="test")
    plans.append(plan(root, COLUMNS))
    for file in root.glob("*.csv"):
        file.unlink()
    rows = [
        {"path": name, "label": [each.strip() for each in text.split(";") if each]} for name, text in ROWS
    ]
    (root / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "test.jsonl").write_text('{"path": "a.png", "label": "red"}\n')
    plans.append(plan(root))
    for found in plans:
        images = found.load("train")
        assert found.classes == ("red", "round") and found.has_several_labels
        assert images.labels.dtype == torch.uint8 and images.labels.tolist() == WANTED
        assert images.images[:, 0, 0, 0].tolist() == [0, 50, 100, 150]
        assert (found.count("train"), found.class_counts("train")) == (4, [2, 2])
        assert found.load("test").labels.tolist() == [[1, 0]]


@table(
    "lines, several, said",
    extra=(
        ["path,label", "a.png,red;"],
        ";",
        "line 2: label: 'red;': has an empty label; remove the extra ';'",
    ),
    twice=(
        ["path,label", "a.png,red;red"],
        ";",
        "line 2: label: 'red;red': has the label 'red' twice; remove",
    ),
    short=(
        ["path,label", "a.png,red", "b.png"],
        ";",
        "line 3: has no field label or class; add the field, which",
    ),
    none=(["path,label", "a.png,", "b.png,"], ";", "line 2: no image has a label; add labels to the table"),
    one=(
        ["path,label", "a.png,red", "b.png,"],
        ";",
        "line 2: there is only the class 'red'; give two or more",
    ),
    column=(
        ["path,red", "a.png,1"],
        COLUMNS,
        "line 1: names path, red, but no column round; line 1 must name the columns",
    ),
    again=(["path,red,round,red", "a.png,1,0,1"], COLUMNS, "line 1: names the column red twice; remove one"),
    number=(["path,red,round", "a.png,2,0"], COLUMNS, "line 2: red: '2': must be 0, 1 or empty; correct it"),
    missing=(["path,red,round", "a.png,1"], COLUMNS, "line 2: has no round; add 0 or 1"),
)
def test_a_bad_cell_is_one_line_with_file_and_row(root, lines, several, said):
    write(root, *lines)
    (root / "test.csv").unlink()
    assert error_line(plan, root, several).startswith(f"{root}/train.csv, {said}")


def test_a_label_without_training_images_is_refused(root):
    write(root, "path,label", "a.png,red", "b.png,red;roud", part="test")
    said = "line 3: the label 'roud': no training image has it; did you mean 'round'?"
    assert error_line(plan, root) == f"{root}/test.csv, {said}"


@table(
    "section, line",
    dataset=({"dataset": "imagefolder"}, "several_labels: ';': imagefolder gives an image one label; set"),
    sampling=({"sampling": "balanced"}, "sampling: 'balanced': needs one label for each image; use"),
    one=({"several": ["red"]}, "several_labels: ['red']: must be the separator of the labels in a cell"),
    twice=({"several": ["a", "a"]}, "several_labels: ['a', 'a']: must be the separator"),
    empty=({"several": ""}, "several_labels: '': must be the separator"),
)
def test_a_setting_that_does_not_fit_is_refused(root, section, line):
    section = dict(section)
    several = section.pop("several", ";")
    assert error_line(lambda: plan(root, several, **section)).startswith(f"data.{line}")


def digits(root, count=300):
    """Write digits with two attributes, which are true of each image."""
    bunch = load_digits()
    names = {"even": (0, 2, 4, 6, 8), "loop": (0, 6, 8, 9)}
    rows = ["path,label"]
    for index in range(count):
        save(root / f"{index}.png", int(bunch.target[index]))
        labels = [name for name, those in names.items() if bunch.target[index] in those]
        rows.append(f"{index}.png,{';'.join(labels)}")
    write(root, *rows, part="all")


@pytest.mark.parametrize("more", [{}, {"group": "parent"}])
def test_splits_have_the_share_of_every_label(tmp_path, more):
    digits(tmp_path)
    if more:
        text = (tmp_path / "all.csv").read_text().splitlines()
        for index, line in enumerate(text[1:]):
            name, _, labels = line.partition(",")
            group = tmp_path / str(index // 5)
            group.mkdir(exist_ok=True)
            (tmp_path / name).rename(group / name)
            text[index + 1] = f"{index // 5}/{name},{labels}"
        write(tmp_path, *text, part="all")
    found = plan(tmp_path, validation=0.25, **more)
    whole = np.array(found.source.class_counts("all"))
    sets = {split: found.load(split) for split in found.names}
    assert sum(map(len, sets.values())) == 300
    for split, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
        assert len(sets[split]) == found.count(split) == pytest.approx(300 * share, abs=9 if more else 1)
        assert found.class_counts(split) == sets[split].labels.sum(0).tolist()
        assert found.class_counts(split) == pytest.approx(whole * share, abs=5 if more else 2)
        both = {name: int(images.labels.all(1).sum()) for name, images in sets.items()}
        assert more or both[split] == pytest.approx(sum(both.values()) * share, abs=2)
    rows = [row for images in sets.values() for row in images.rows.tolist()]
    assert sorted(rows) == list(range(300))
    names = [found.file_names(split, range(len(images))) for split, images in sets.items()]
    if more:
        parents = [{name.split("/")[-2] for name in of_split} for of_split in names]
        assert sum(map(len, parents)) == 60


def test_folds_hold_out_every_image_once(tmp_path):
    digits(tmp_path, 100)
    held = [plan(tmp_path, fold=[number, 4]).load("test").rows.tolist() for number in range(1, 5)]
    assert sorted(row for rows in held for row in rows) == list(range(100))
    assert [len(rows) for rows in held] == [25] * 4


def test_a_rare_label_is_in_every_split(tmp_path):
    digits(tmp_path, 100)
    text = (tmp_path / "all.csv").read_text().splitlines()
    for index in (5, 40, 77):
        text[index] = f"{text[index]}{'' if text[index].endswith(',') else ';'}rare"
    write(tmp_path, *text, part="all")
    found = plan(tmp_path, validation=0.1, test=0.1)
    assert [found.class_counts(split)[2] for split in found.names] == [1, 1, 1]


def test_a_rare_label_is_refused_when_splits_are_drawn(root):
    (root / "test.csv").unlink()
    line = "data.root: the class 'red' has 2 images, too few for 3 splits; add some"
    with pytest.raises(InvalidInput) as caught:
        plan(root, validation=0.25)
    assert caught.value.errors[0].startswith(line)


# ----------------------------------------------------------------------------------- the loss, and mixed images

LABELS = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.uint8)
LOGITS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def loss(**how):
    return losses.Loss(Hyperparameters(**{"loss": "bce", **how}), tuple("abc"), lambda: LABELS, True)(
        LOGITS, LABELS
    )


def test_the_loss_is_binary_cross_entropy():
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    targets = LABELS.float()
    torch.testing.assert_close(loss(), bce(LOGITS, targets))
    torch.testing.assert_close(loss(label_smoothing=0.2), bce(LOGITS, 0.8 * targets + 0.1))
    weights = torch.tensor([1 / 3, 3.0, 3.0])  # images without the label over those with it
    torch.testing.assert_close(loss(class_weights="balanced"), bce(LOGITS, targets, pos_weight=weights))
    weights = torch.tensor([1.0, 5.0, 1.0])
    torch.testing.assert_close(loss(class_weights={"b": 5}), bce(LOGITS, targets, pos_weight=weights))


def test_mixup_mixes_the_labels():
    inputs = torch.rand(4, 3, 8, 8)
    mixup = make_mixup(0.5, 0, 3)
    assert mixup
    mixed, targets = apply_mixup(mixup, inputs, LABELS, (0, 1, 2, 3))
    share = ((mixed - inputs.roll(1, 0)) / (inputs - inputs.roll(1, 0))).median()
    torch.testing.assert_close(
        targets, share * LABELS + (1 - share) * LABELS.roll(1, 0), atol=1e-4, rtol=1e-4
    )


@table(
    "choice, weights, line",
    softmax=(
        "cross_entropy",
        None,
        "loss: 'cross_entropy': is for one label an image, but data.several_labels",
    ),
    weights=(
        "focal",
        "balanced",
        "class_weights: 'balanced': with data.several_labels, only the loss bce",
    ),
)
def test_a_loss_of_one_label_is_refused(choice, weights, line):
    assert error_line(losses.check, choice, weights, tuple("abc"), True).startswith(f"hyperparameters.{line}")
    losses.check("bce", "balanced", tuple("abc"), True)
