"""The README and the pages of docs/ are short, linked, and true of the programs."""

import json
import re
import shlex
import sys

import api_page
import pytest
from determined.cli import add_args, cli
from support import PROJECT, execute

import baseline
import checkpoint
import search
import shards
import train
from classify.__main__ import PROGRAMS, parser, subcommands
from classify.config.hyperparameters import Hyperparameters
from classify.images.settings import DataSettings

PAGES = [PROJECT / "README.md", *sorted(PROJECT.glob("docs/*.md"))]
LONG = ("reference", "api", "code", "own-trial")  # programs write two of them
SHORT = [*PROJECT.glob("*.md"), *(page for page in PAGES[1:] if page.stem not in LONG)]
FOLDERS = "benchmarks classify deepspeed_trial docs examples experiments tests workbench".split()
FILES = [*PROJECT.glob("*"), *(file for folder in FOLDERS for file in (PROJECT / folder).rglob("*"))]
# A file of DeepSpeed's examples, and three that a reader or a run writes
ELSEWHERE = ("cifar10_deepspeed.py", "experiment.yaml", "plain.py", "trial.py")
PARSERS = {
    f"{program.__name__}.py": program.parse for program in (train, search, checkpoint, baseline, shards)
}

PARSERS["classify"] = lambda argv: parser().parse_args(argv[1:])  # after the folder


def of_classify(words: list[str]) -> list[str]:
    """Return the program that runs a command of ``classify``, and its arguments."""
    if words[0] in PROGRAMS:
        return [f"{words[0]}.py", *words[1:]]
    return ["checkpoint.py" if words[0] in subcommands() else "classify", *words]


def commands(page) -> list[list[str]]:
    """Find the commands of a page that run a program of this project; leave out the launcher."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    fenced = [line for language, block in blocks if not language for line in block.splitlines()]
    found = []
    for line in [*fenced, *re.findall(r"`([^`\n]+)`", text)]:
        words = shlex.split(line, comments=True)
        starts = [index for index, word in enumerate(words) if word in PARSERS and word != "classify"]
        if starts and words[0] in ("python3", "torchrun", "deepspeed"):
            found.append(["2" if word == "N" else word for word in words[starts[0] :]])
        if words[:1] == ["classify"] and not words[-1].endswith("--help") and len(words) > 1:
            found.append(of_classify(words[1:]))
    return found


def sentences(text: str) -> list[str]:
    """Split the prose of a page into sentences; code, headings and the targets of links are left out."""
    blocks, in_code = [""], False
    for line in text.splitlines():
        stripped = line.lstrip()
        if stripped.startswith("```"):
            in_code = not in_code
        elif in_code or stripped.startswith("#"):
            blocks.append("")
        elif line.startswith("|"):
            blocks += [*line.split("|"), ""]
        else:
            blocks += [stripped] if re.match(r"$|[-*] |\d+\. ", stripped) else [f"{blocks.pop()} {stripped}"]
    plain = [re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "CODE", block)) for block in blocks]
    return [sentence for block in plain for sentence in re.split(r"(?<=[.:;!?])\s+", block)]


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.stem)
def test_a_page_has_short_lines_and_sentences(page):
    text = page.read_text()
    lines = text.splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert not [sentence for sentence in sentences(text) if len(sentence.split()) > 30]


@pytest.mark.parametrize("page", [*PAGES, PROJECT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_a_page_names_options_links_and_files_that_exist(page):
    for program, *arguments in commands(page):
        config = getattr(PARSERS[program](arguments), "config", None)
        assert config in (None, "FILE") or (PROJECT / config).exists(), config
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for file in re.findall(r"`([\w/-]+\.(?:py|yaml))`", text):
        assert file in ELSEWHERE or any(f"/{each}".endswith(f"/{file}") for each in FILES), file


def test_determined_knows_the_commands_of_the_cluster_page():
    parser = cli.make_parser()
    add_args(parser, cli.all_args_description)
    found = re.findall(r"`(det (?!\.|deploy)[^`\n]+)`", (PROJECT / "docs/cluster.md").read_text())
    assert len(found) > 9
    for line in found:
        parser.parse_args(shlex.split(line.replace("TRIAL", "1"))[1:])


def test_the_readme_and_the_site_link_every_page():
    text = PAGES[0].read_text()
    assert len(commands(PAGES[0])) > 5
    site = (PROJECT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in text and f"- docs/{page.name}\n" in site, page.name


def test_editors_find_the_schema_of_every_experiment_file():
    for file in [*PROJECT.glob("experiments/*.yaml"), PROJECT / "const.yaml", PROJECT / "distributed.yaml"]:
        first = file.read_text().split("\n", 1)[0].removeprefix("# yaml-language-server: $schema=")
        assert (file.parent / first).resolve() == PROJECT / "docs/schema.json", file


def test_the_reference_has_every_key_and_is_current(capsys):
    assert train.main(["--keys", "markdown"]) == 0
    page = capsys.readouterr().out
    assert page == (PROJECT / "docs/reference.md").read_text(), (
        "python3 train.py --keys markdown > docs/reference.md"
    )
    assert train.main(["--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert train.main(["--keys", "json"]) == 0
    printed = capsys.readouterr().out
    assert printed == (PROJECT / "docs/schema.json").read_text(), (
        "python3 train.py --keys json > docs/schema.json"
    )
    schema = json.loads(printed)["properties"]
    for section, keys in {"hyperparameters": Hyperparameters.keys(), "data": DataSettings.keys()}.items():
        assert schema[section]["properties"].keys() == keys.keys()
        for name, key in keys.items():
            assert f"| `{name}` | {key.rule.values} | " in page
            place = next(i for i, line in enumerate(lines) if line.startswith(f"{section}.{name}: "))
            assert lines[place + 1] == f"    {key.about}"
    groups = schema["hyperparameters"]["properties"]["parameter_groups"]["items"]["properties"]
    assert (
        "lr_factor" in groups
        and "| `parameter_groups[].lr_factor` | a number from 0 to 1e6 | `1.0` |" in page
    )


def test_the_api_page_shows_the_public_names():
    """``tests/api_page.py`` writes the page."""
    assert (PROJECT / "docs/api.md").read_text() == api_page.page()


def test_the_migration_table_quotes_lines_of_both_programs():
    text = (PROJECT / "docs/baseline.md").read_text()
    table = text[text.index("| | `baseline.py` | `model_def.py` |") :].split("\n\n")[0]
    rows = [re.findall(r"`([^`]+)`", row) for row in table.splitlines()[2:]]
    assert len(rows) >= 6
    before, after = ((PROJECT / name).read_text() for name in ("baseline.py", "model_def.py"))
    for row in rows:
        assert row[0] in before, row[0]
        assert len(row) == 1 or row[1] in after, row[1]


@pytest.mark.soak
def test_the_plain_script_and_the_trial_of_a_page_have_the_same_accuracy(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (PROJECT / "docs/from-pytorch.md").read_text(), re.M | re.S)
    outputs = []
    for name, block in zip(("plain.py", "trial.py"), blocks, strict=True):
        (tmp_path / name).write_text(block)
        ended = execute([sys.executable, name], tmp_path, cwd=tmp_path, PYTHONPATH=str(PROJECT))
        assert ended.code == 0, ended.stderr
        outputs.append(re.findall(r"accuracy (0\.\d+)", ended.stdout)[-1])
    assert outputs == ["0.8722", "0.8722"]
