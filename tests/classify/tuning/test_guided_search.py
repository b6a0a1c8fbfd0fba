"""Searches that learn from their trials: what they draw, a real one that is killed and goes on, its page."""

import csv
import html
import itertools
import json
import math
import re
import subprocess
import sys
import time

import optuna
import pytest
from optuna.trial import TrialState
from support import PROJECT, TIME_LIMIT, error_line, execute

import checkpoint
import train
from classify.images.settings import DataSettings
from classify.tuning import search_page, space, specification
from classify.tuning.runner import SearchRunner

RANDOM = str(PROJECT / "experiments/search-random.yaml")
ARGS = "hyperparameters.overwrite_deepspeed_args"
LR, STAGE = f"{ARGS}.optimizer.params.lr", f"{ARGS}.zero_optimization.stage"
RATE, ZERO = (path.removeprefix("hyperparameters.") for path in (LR, STAGE))
SMOOTHING = "hyperparameters.label_smoothing={type: double, minval: 0.1, maxval: 0.4}"


def tpe(*changes):
    return specification.load(RANDOM, ["searcher.name=tpe", SMOOTHING, *changes], 1)


def trial(search, drawn, value=None, state=TrialState.COMPLETE):
    return optuna.create_trial(
        state=state,
        value=value,
        params=drawn,
        distributions=space.space(search.ranges),
        user_attrs={"bracket": 0},
    )


def searched(search, score, count):
    """The trials of a search in which each ends at once with a score; None is a failure."""
    known: list[optuna.trial.FrozenTrial] = []
    for _ in range(count):
        drawn = next(search.draws(known))
        value = score(drawn)
        known.append(trial(search, drawn, value, TrialState.FAIL if value is None else TrialState.COMPLETE))
    return known


def near_a_hundredth(drawn):
    return -abs(math.log10(drawn[RATE]) + 2)


def params(trials):
    return [each.params for each in trials]


def test_a_trial_depends_on_the_file_the_seed_and_the_results_before_alone():
    search = tpe("searcher.max_trials=24")
    first = searched(search, near_a_hundredth, 24)
    assert params(searched(tpe("searcher.max_trials=24"), near_a_hundredth, 24)) == params(first)
    assert next(search.draws(first[:15])) == first[15].params  # gone on with, after 15
    random = list(itertools.islice(specification.load(RANDOM, [SMOOTHING], 1).draws(), 7))
    assert random[:6] == params(first[:6]) and random[6] != first[6].params  # a quarter of the trials
    other = searched(tpe("searcher.max_trials=24", "reproducibility.experiment_seed=1"), near_a_hundredth, 8)
    assert not [pair for pair in zip(other, first, strict=False) if pair[0].params == pair[1].params]
    turned = searched(search, lambda drawn: -near_a_hundredth(drawn), 24)
    assert params(turned[:6]) == params(first[:6]) and turned[-1].params != first[-1].params


@pytest.mark.parametrize("smaller", [False, True])
def test_later_trials_are_better_than_random_ones(smaller):
    """Whichever way is better, of the range's two ends."""
    sign = -1 if smaller else 1
    for seed in range(3):
        changes = [f"reproducibility.experiment_seed={seed}", "searcher.max_trials=40"]
        search = tpe(*changes, f"searcher.smaller_is_better={str(smaller).lower()}")
        found = searched(search, lambda drawn: sign * near_a_hundredth(drawn), 40)
        away = [-near_a_hundredth(each.params) for each in found]
        random = [-near_a_hundredth(each) for each in itertools.islice(search.draws(), 200)]
        assert sum(away[20:]) / 20 < 0.6 * sum(random) / 200


def test_trials_that_fail_keep_others_from_their_place():
    search = tpe("searcher.max_trials=40")
    found = searched(search, lambda drawn: None if drawn[ZERO] >= 2 else drawn[RATE], 40)
    assert sum(each.params[ZERO] >= 2 for each in found[20:]) < 5  # of 20, half of which would be by chance


def test_a_trial_that_runs_keeps_others_from_its_place():
    search = tpe("searcher.max_trials=40")
    known = searched(search, near_a_hundredth, 20)

    def beside(ended, running):
        return next(search.draws([*known[:ended], trial(search, running, state=TrialState.RUNNING)]))

    wanted = {ended: beside(ended, known[0].params) for ended in (12, 16, 20)}
    assert [ended for ended, drawn in wanted.items() if beside(ended, drawn) != drawn]


def test_every_kind_of_range_is_drawn():
    search = tpe(
        f"{STAGE}={{type: categorical, vals: [0, 1]}}",
        "hyperparameters.seed_of_mine={type: int, minval: 3, maxval: 5}",
    )
    known = searched(search, near_a_hundredth, 12)
    kinds = {each.spec["type"] for each in search.ranges}
    assert kinds == {"int", "double", "log", "categorical"}
    for each in known:
        for name, distribution in space.space(search.ranges).items():
            assert distribution._contains(distribution.to_internal_repr(each.params[name])), name
        said = dict(line.split("=", 1) for line in search.overrides_of(each.params))
        assert isinstance(json.loads(said[f"{ARGS}.optimizer.params.betas"]), list)


def test_what_tpe_needs_and_does_not_know():
    assert error_line(tpe, "searcher.max_trials=null").startswith("searcher.max_trials: None: tpe needs it;")
    assert error_line(tpe, "searcher.num_rungs=2").startswith("searcher.num_rungs: 2: tpe has no such field;")


def test_that_a_cluster_has_no_such_searcher_is_said(capsys):
    tpe()
    line = "note: searcher.name: 'tpe': a cluster has no such searcher; "
    assert f"search.py: {line}" in capsys.readouterr().err
    check = ["--check", "--config", RANDOM, "--set", "data.dataset=digits", "--set", "searcher.name=tpe"]
    assert train.main(check) == 2  # its ranges
    said = capsys.readouterr().err
    assert f"train.py: {line}" in said and "--set searcher.name=random" in said and f"{LR}: " in said
    assert train.main([*check[:-1], "searcher.name=random"]) == 2
    assert "no such searcher" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "slots", "concurrent", "most", "parts"),
    [
        (
            5,
            1,
            2,
            20,
            ["--parallel 2: 1 of 5 cores idle: every process has 2 threads", "; --parallel 1 uses"],
        ),
        (
            6,
            1,
            4,
            20,
            ["--parallel 4: 2 of 6 cores idle: every process has 1 thread;", "; --parallel 3 uses"],
        ),
        (8, 2, 3, 20, ["--parallel 3: 2 of 8 cores idle", "; --parallel 4 uses all"]),
        (8, 2, 3, 3, ["; --parallel 2 uses all"]),
        (5, 2, 1, 20, ["--parallel 1: 1 of 5 cores idle"]),
        (6, 1, 3, 20, []),
        (2, 1, 4, 20, []),  # each has a thread
    ],
)
def test_cores_that_are_left_over_are_said(cores, slots, concurrent, most, parts):
    lines = specification.idle_cores(cores, slots, concurrent, most)
    assert len(lines) == bool(parts) and all(part in lines[0] for part in parts)


def test_no_trial_keeps_cores_for_trials_that_there_are_not():
    assert specification.load(RANDOM, ["searcher.max_trials=2"], 8).concurrent == 2
    assert specification.load(RANDOM, ["searcher.max_concurrent_trials=3"], 8).concurrent == 3


# ------------------------------------------------------------------------------------------------ a real search


NAME = "<script>alert('x')</script>\x1b[31m"
CHANGES = [
    "data.dataset=digits",
    "searcher.name=tpe",
    "searcher.max_trials=3",
    f"name={json.dumps(NAME)}",
    f"{STAGE}=0",
    "hyperparameters.max_length={batches: 30}",
    "min_validation_period={batches: 15}",
    "scheduling_unit=5",
]


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    """A search killed while it took its first trial, and in its second: its folder, what it said, its page then."""
    output = tmp_path_factory.mktemp("guided") / "search"
    output.mkdir()
    begun = SearchRunner(
        specification.load(RANDOM, CHANGES, 1),
        output,
        DataSettings.parse({"dataset": "digits"}).open_source(),
    )
    begun._enqueue_missing()
    begun.study.ask()  # runs, and has no hyperparameters yet
    sets = [part for change in CHANGES for part in ("--set", change)]
    command = [sys.executable, "search.py", "--config", RANDOM, "--output", str(output), *sets]
    going = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL)
    second, until = output / "trials/001/metrics.jsonl", time.monotonic() + TIME_LIMIT
    while not (second.exists() and "validation" in second.read_text()):
        assert time.monotonic() < until and going.poll() is None
        time.sleep(0.02)
    going.kill()
    going.wait()
    assert checkpoint.main(["report", str(output)]) == 0
    return output, (output / "report.html").read_text(), execute(command, output)


def test_a_killed_search_goes_on_to_the_trials_that_it_would_have_had(guided):
    output, _, run = guided
    assert run.code == 0, run.stderr
    with open(output / "trials.csv") as file:
        table = list(csv.DictReader(file))
    assert [(row["trial"], row["outcome"]) for row in table] == [(str(i), "complete") for i in range(3)]
    assert len(list(output.glob("trials/*/summary.json"))) == 3
    results, _ = search_page.read(output)
    for number, each in enumerate(results.trials):
        assert next(results.search.draws(results.trials[:number])) == each.params
        trained = [
            json.loads(line)
            for line in (output / f"trials/{number:03}/metrics.jsonl").read_text().splitlines()
        ]
        steps = [entry["steps_completed"] for entry in trained if entry["group"] == "validation"]
        assert steps == [15, 30]


def rows(page):
    """The cells of the page's table of trials, and the classes of its rows."""
    table = page[page.index('class="trials"') :].split("<tbody>")[1].split("</tbody>")[0]
    found = re.findall(r"<tr([^>]*)>(.*?)</tr>", table, re.S)
    return [
        ([html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)], kind)
        for kind, row in found
    ]


def test_a_search_has_a_page_also_under_way(guided, capsys):
    output, before, run = guided
    cells = [row for row, _ in rows(before)]
    assert [row[-1] for row in cells] == ["complete", "not ended"]
    assert "1 of 3" in before and 15 <= int(cells[1][-4]) <= 30  # steps
    assert checkpoint.main(["report", str(output)]) == 0
    page = (output / "report.html").read_text()
    assert "<script" not in page and html.escape("<script>alert(") in page and r"\x1b[31m" in page
    assert "<b>3 of 3</b>" in page and "chosen on test images" in page
    assert page.count('src="data:image/png;base64,') == len(list(output.glob("*.png"))) > 1 and not re.search(
        r'(src|href)="(?!data:)', page
    )
    results, _ = search_page.read(output)
    best = results.best(results.trials)
    assert best
    for each, (row, kind) in zip(results.trials, rows(page), strict=True):
        assert row[0] == str(each.number) and f"{results.score(each):.4g}" in row
        assert [f"{each.params[RATE]:.4g}", "30", "complete"] == [row[1], row[-4], row[-1]]
        assert ("best" in kind) == (each.number == best.number)
    (shown,) = re.findall(r"^train with them: (.*)", run.stdout, re.M)
    assert html.unescape(re.findall(r'<pre class="framed">(.*?)</pre>', page)[0]) == shown
    assert f"report: python3 checkpoint.py report {output}" in run.stdout


def test_a_page_of_what_is_no_search_is_refused(guided, tmp_path, capsys):
    (tmp_path / "search.db").write_text("no data base")
    assert checkpoint.main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path}/search.db: holds no search that can be read" in capsys.readouterr().err
    assert not list(tmp_path.glob("*report*"))
    assert checkpoint.main(["report", str(guided[0]), str(tmp_path)]) == 2
    assert "a search has a page of its own; give its folder alone" in capsys.readouterr().err
