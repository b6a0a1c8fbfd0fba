"""Groups of images stay whole, and folds hold each image out once."""

import csv

import numpy as np
import pytest
import torch
from folders import save, table
from sklearn.model_selection import StratifiedGroupKFold
from sources import copied, opened
from support import error_line

from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.images.splits import Cut, _assign
from deepspeed_trial.errors import InvalidInput

PERSON = "/([a-z]+)[0-9]+-[0-9]+[.]"


@pytest.fixture
def people(tmp_path):
    """Bursts of 1 to 4 images by 12 people; each person took images of two of three classes."""
    root, random = tmp_path / "Fötos", np.random.default_rng(0)
    for person in range(12):
        for label in (person % 3, (person + 1) % 3):
            for number in range(random.integers(1, 5)):
                name = f"{chr(97 + person)}x{label}-{number}.bmp"
                save(root / "abc"[label] / name, person * 20 + label)
    return root


def people_in(plan: DataPlan, split: str) -> list[int]:
    images = plan.load(split)
    assert len(images) == plan.count(split)
    return (images.select(torch.arange(len(images)))[:, 0, 0, 0] // 20).tolist()


def rows_of(plan: DataPlan, split: str) -> list[int]:
    rows = plan.load(split).rows
    assert rows is not None
    return rows.tolist()


@pytest.mark.parametrize("unreadable", ["fail", "skip"])
def test_a_person_is_in_one_split_and_each_class_in_all(people, unreadable):
    if unreadable == "skip":
        (people / "a/ax0-0.bmp").write_bytes(b"")
    section = {"validation": 0.2, "group": PERSON, "unreadable": unreadable}
    plan = opened(people, **section)
    splits = {split: people_in(plan, split) for split in ("train", "val", "test")}
    everyone = [person for split in splits.values() for person in set(split)]
    assert sorted(everyone) == list(range(12))  # no person twice
    assert sum(map(len, splits.values())) == sum(
        len(people_in(opened(people, unreadable=unreadable), each)) for each in ("train", "test")
    )
    assert all(set(plan.load(split).labels.tolist()) == {0, 1, 2} for split in splits)
    assert {split: people_in(opened(people, **section), split) for split in splits} == splits
    assert people_in(opened(people, split_seed=1, **section), "test") != splits["test"]
    alone = opened(people, validation=0.2, unreadable=unreadable)
    assert len({*people_in(alone, "test")} & {*people_in(alone, "train")}) > 0  # as they are without groups


@pytest.mark.parametrize("group", [PERSON, None])
def test_folds_hold_each_image_out_once(people, group):
    held: list[int] = []
    sizes: list[int] = []
    for number in range(1, 5):
        plan = opened(people, validation="auto", group=group, fold=[number, 4])
        splits = {split: rows_of(plan, split) for split in plan.names}
        assert plan.names == ("train", "val", "test")
        assert sorted(row for rows in splits.values() for row in rows) == list(
            range(plan.source.count("all"))
        )
        assert all(set(plan.load(split).labels.tolist()) == {0, 1, 2} for split in plan.names)
        if group:
            kept = [{*people_in(plan, split)} for split in plan.names]
            assert sum(map(len, kept)) == 12
        held += splits["test"]
        sizes.append(len(splits["test"]))
    assert sorted(held) == list(range(len(held)))
    assert max(sizes) - min(sizes) <= (8 if group else 1)  # of a person


def test_a_fold_of_a_dataset_with_test_images_is_for_validations():
    held: list[int] = []
    for number in (1, 2, 3):
        plan = DataPlan.resolve(DataSettings.parse({"dataset": "digits", "fold": [number, 3]}))
        assert (plan.names, plan.validation, plan.has_test) == (("train", "val", "test"), "val", True)
        rows = rows_of(plan, "val")
        assert len(rows) == plan.count("val")
        assert len(rows) + plan.count("train") == 1437 and plan.count("test") == 360
        held += rows
    assert sorted(held) == list(range(1437))


def test_the_columns_of_a_table_and_parents_are_groups(people, tmp_path):
    files = sorted(people.rglob("*.bmp"))
    with open(people / "all.csv", "w", newline="") as out:
        rows = [[file.relative_to(people), file.parent.name, file.name[0]] for file in files]
        csv.writer(out).writerows([["path", "label", "person"], *rows])
    by_column = opened(people, dataset="table", group="person")
    by_pattern = opened(people, group="/([a-z])x")
    for split in by_column.names:
        assert people_in(by_column, split) == people_in(by_pattern, split)
    root = tmp_path / "by folder"
    for file in files:
        target = root / file.parent.name / file.name[0] / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    by_parent = opened(root, group="parent")
    for split in by_parent.names:
        assert people_in(by_parent, split) == people_in(by_pattern, split)


def test_shares_of_classes_deviate_no_more_than_scikit_learns():
    deviations = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        groups = np.sort(random.integers(0, 60, 1000))
        labels = (random.integers(0, 3, 60)[groups] + random.integers(0, 2, 1000)) % 4
        folds = _assign(labels, groups, [0.2] * 5, seed)
        theirs = np.empty_like(folds)
        sklearns = StratifiedGroupKFold(5, shuffle=True, random_state=seed)
        for number, (_, held) in enumerate(sklearns.split(labels, labels, groups)):
            theirs[held] = number
        sizes, found = np.bincount(labels), []
        for each in (folds, theirs):
            counts = np.array([np.bincount(labels[each == fold], minlength=4) for fold in range(5)])
            found.append(np.abs(counts / sizes - 0.2).mean())
        deviations.append(found)
        assert all(len(np.unique(folds[groups == group])) == 1 for group in np.unique(groups))
    ours, scikit_learns = np.mean(deviations, axis=0)
    assert ours <= scikit_learns


@table(
    "section, line",
    one_side=({"group": "([abc])/"}, "data.group: '([abc])/': the class 'a' has 1 group, too few for 2 splits; add some, or use fewer splits"),
    folds=({"group": PERSON, "fold": [1, 9]}, f"data.group: {PERSON!r}: the class 'a' has 8 groups, too few for 9 folds; add some, or use fewer folds"),
    few=({"fold": [1, 90]}, "too few for 90 folds; add some, or use fewer folds"),
    no_match=({"group": "person([0-9])"}, "data.group: 'person([0-9])': does not match the path 'a/ax0-0.bmp' and "),
    column=({"group": "person"}, "data.group: 'person': imagefolder has no columns; give parent, or a regular expr"),
    broken=({"group": "(["}, "data.group: '([': must be parent, a table's column, or a regular expression"),
    two=({"group": "(.)(.)"}, "data.group: '(.)(.)': must be parent, a table's column, or a regular expression"),
    fold_of=({"fold": [6, 5]}, "data.fold: [6, 5]: must be [K, N], the number of a fold and of all folds"),
    test=({"fold": [1, 5], "test": 0.2}, "data.test: 0.2: data.fold holds out the test images; remove one of the two"),
)  # fmt: skip
def test_groups_and_folds_that_cannot_be_are_refused(people, section, line):
    with pytest.raises(InvalidInput) as caught:
        opened(people, **section)
    assert line in caught.value.errors[0]


def test_splits_of_the_dataset_and_shards_have_no_groups(photos, written, tmp_path):
    root = copied(photos, tmp_path / "photos")
    line = "data.group: 'parent': the dataset has fixed splits, so none is drawn; set data.validation, or remove this key"
    assert error_line(lambda: opened(root, group="parent")) == line
    section = {"dataset": "webdataset", "validation": 0.3}
    line = "data.group: '(.)': webdataset has no file for each image; split the dataset beforehand"
    assert error_line(lambda: opened(written, group="(.)", **section)) == line
    (root / "train.csv").write_text("path,label\ntrain/cat/1.png,cat\ntrain/dog/1.png,dog\n")
    line = f"{root}/train.csv, line 2: has no group in the field person; add one, or remove the row"
    assert error_line(lambda: opened(root, dataset="table", group="person")) == line


def test_a_class_whose_groups_are_all_shared_is_named():
    labels, groups = np.array([0, 0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 0, 0])
    cut = Cut({"test": 0.5}, labels=labels, groups=groups, group="g")
    cut.check(("a", "b"))
    labels, groups = np.array([0, 1, 1, 2, 2, 0]), np.array([0, 0, 1, 1, 2, 2])
    with pytest.raises(InvalidInput, match="has 2 groups, but not in each of 2 splits; set another"):
        Cut({"test": 0.5}, labels=labels, groups=groups, group="g").check("abc")
