"""The README and the pages in docs/: short, linked, and true of the programs."""

import re
import shlex

import pytest
from determined.cli import add_args, cli
from support import PROJECT

import baseline
import checkpoint
import search
import shards
import train

PAGES = [PROJECT / "README.md", *sorted(PROJECT.glob("docs/*.md"))]
ELSEWHERE = ("cifar10_deepspeed.py",)  # of DeepSpeed's examples
PARSERS = {
    "train.py": train.parse,
    "search.py": search.parse,
    "checkpoint.py": checkpoint.parse,
    "baseline.py": baseline.parse,
    "shards.py": shards.parse,
}


def commands(page) -> list[list[str]]:
    """Every command of a page that runs a program of ours, without what starts it."""
    text = page.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    fenced = [line for language, block in blocks if not language for line in block.splitlines()]
    found = []
    for line in [*fenced, *re.findall(r"`([^`\n]+)`", text)]:
        words = shlex.split(line, comments=True)
        starts = [index for index, word in enumerate(words) if word in PARSERS]
        if starts and words[0] in ("python3", "torchrun", "deepspeed"):
            found.append(["2" if word == "N" else word for word in words[starts[0] :]])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_those_of_the_programs(page):
    for program, *arguments in commands(page):
        args = PARSERS[program](arguments)
        config = getattr(args, "config", None)
        assert config in (None, "FILE") or (PROJECT / config).exists(), config


def test_commands_of_determined_are_its_own():
    parser = cli.make_parser()
    add_args(parser, cli.all_args_description)
    found = re.findall(r"`(det (?!\.|deploy)[^`\n]+)`", (PROJECT / "docs/cluster.md").read_text())
    assert len(found) > 9
    for line in found:
        parser.parse_args(shlex.split(line.replace("TRIAL", "1"))[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for file in re.findall(r"`([\w/-]+\.(?:py|yaml))`", text):
        places = [PROJECT / file, PROJECT / "experiments" / file, *PROJECT.rglob(file)]
        assert file in ELSEWHERE or any(place.exists() for place in places), file


def test_every_page_is_linked_and_the_readme_is_short():
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 130
    assert not [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text]


def test_both_programs_lines_are_in_the_table_of_the_migration():
    text = (PROJECT / "docs/from-pytorch.md").read_text()
    table = text[text.index("| | `baseline.py` | `model_def.py` |") :].split("\n\n")[0]
    rows = [re.findall(r"`([^`]+)`", row) for row in table.splitlines()[2:]]
    assert len(rows) >= 6
    before, after = ((PROJECT / name).read_text() for name in ("baseline.py", "model_def.py"))
    for row in rows:
        assert row[0] in before, row[0]
        assert len(row) == 1 or row[1] in after, row[1]
