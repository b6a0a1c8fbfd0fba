"""``data.exclude: FILE``: training as if the images that a file names had never been there."""

import pathlib
import shutil

import pytest
import torch
from folders import save, table
from sources import everything, load, opened
from support import DIGITS, overrides

import train as program
from classify.images.plan import DataPlan
from classify.images.sources.left_out import image_names
from workbench.audit.dataset import Dataset


def listed(tmp_path: pathlib.Path, *names: str) -> str:
    """Write a list with a comment, a blank line and the line ends of another system."""
    file = tmp_path / "exclude.txt"
    file.write_bytes("\r\n".join(["# from an audit", "", *names, ""]).encode())
    return str(file)


@pytest.mark.parametrize("decode", ["once", "stream"])
@pytest.mark.parametrize("unreadable", ["fail", "skip"])
def test_a_folder_is_split_as_if_the_files_had_never_been_there(decode, unreadable, tmp_path):
    root, other = tmp_path / "all", tmp_path / "other"
    for number in range(20):
        save(root / "ab"[number % 2] / f"{number}.png", 10 * number)
    gone = ["a/4.png", "b/7.png", "./b/19.png"]
    shutil.copytree(root, other)
    for name in gone:
        (other / name).unlink()
    section = {"decode": decode, "unreadable": unreadable, "validation": 0.2}
    for split in ("train", "val", "test"):
        found = load("imagefolder", root, split, exclude=listed(tmp_path, *gone), **section)
        expected = load("imagefolder", other, split, **section)
        assert torch.equal(everything(found), everything(expected))
        assert torch.equal(found.labels, expected.labels)
    assert len(load("imagefolder", root, exclude=listed(tmp_path))) == 16


def test_an_image_of_a_shard_is_named_by_its_place(written, tmp_path):
    def plan(**section) -> DataPlan:
        return opened(written, dataset="webdataset", image_size=8, **section)

    every = plan()
    names = list(image_names(every.source, "train"))
    assert names[0].endswith(".tar#0") and len(set(names)) == len(names) == every.count("train")
    images, labels = everything(every.load("train")), every.load("train").labels
    kept = plan(exclude=listed(tmp_path, names[1], names[-1]), decode="stream")
    rows = torch.tensor([index for index in range(len(names)) if index not in (1, len(names) - 1)])
    assert torch.equal(everything(kept.load("train")), images[rows])
    assert torch.equal(kept.load("train").labels, labels[rows])
    assert str(kept.excluded_identity).startswith("excluded: 2, digest ")
    assert every.excluded_identity is None
    section = {"dataset": "webdataset", "root": str(written), "exclude": kept.settings.exclude}
    assert Dataset.open(section).names[: len(rows)] == [names[row] for row in rows]  # as a second audit


def test_an_image_of_a_decoded_source_is_named_by_its_index(tmp_path):
    images = load("digits", "data", image_size=8)
    kept = load("digits", "data", image_size=8, exclude=listed(tmp_path, "train/0", "train/1436", "test/3"))
    assert torch.equal(everything(kept), images.images[1:-1])
    assert torch.equal(kept.labels, images.labels[1:-1])


@table(
    "content, lines",
    unknown=("train/a/1.bmp\ntrain/a/9.bmp\n\x1b[2J", ["line 2: train/a/9.bmp: the dataset has no such image", "line 3: \\x1b[2J: the dataset has no such image"]),
    empty_class=("test/b/1.bmp", ["leaves no image of the class 'b' in 'test'; remove some lines"]),
    no_text=(b"\xff\xfe", ["is not text in UTF-8"]),
    no_file=(None, ["cannot be used"]),
)  # fmt: skip
def test_an_error_names_the_line(content, lines, folder, tmp_path, capsys):
    file = tmp_path / "list.txt"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    section = overrides(data__dataset="imagefolder", data__root=folder, data__exclude=file)
    assert program.main([*DIGITS, *section, "--check"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == len(lines)
    for error, line in zip(errors, lines, strict=True):
        assert f"data.exclude: {file}" in error and line in error


def test_a_resume_with_another_list_is_refused(train, tmp_path):
    arguments = [*DIGITS, *overrides(data__exclude=listed(tmp_path, "train/3"))]
    first = train(*arguments, *overrides(hyperparameters__max_length="{batches: 2}"))
    assert first.code == 0 and "1,436 to train" in first.stdout, first.stderr
    listed(tmp_path, "train/4")
    more = overrides(hyperparameters__max_length="{batches: 3}")
    again = train(*arguments, *more, "--resume", "latest", output=first.output)
    assert again.code == 2 and "data.exclude: 'excluded: 1, digest" in again.stderr
