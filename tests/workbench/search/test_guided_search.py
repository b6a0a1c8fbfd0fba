"""Searches that learn from their trials: draws, a real search that is killed and continued, and its page."""

import csv
import html
import itertools
import json
import math
import re
import signal

import optuna
import psutil
import pytest
from optuna.trial import TrialState
from support import PROJECT, error_line, run, started, time_limit, wait_until

import checkpoint
import train
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from workbench.search import search_page, space, specification
from workbench.search.runner import SearchRunner
from workbench.search.trial_run import ThisMachine

RANDOM = str(PROJECT / "experiments/search-random.yaml")
ARGS = "hyperparameters.overwrite_deepspeed_args"
LR, STAGE = f"{ARGS}.optimizer.params.lr", f"{ARGS}.zero_optimization.stage"
RATE, ZERO = (path.removeprefix("hyperparameters.") for path in (LR, STAGE))
SMOOTHING = "hyperparameters.label_smoothing={type: double, minval: 0.1, maxval: 0.4}"


def tpe(*changes):
    return specification.load(RANDOM, ["searcher.name=tpe", SMOOTHING, *changes], 1)


def trial(search, drawn, value=None, state=TrialState.COMPLETE):
    about: dict = {"distributions": space.space(search.ranges), "user_attrs": {"bracket": 0}}
    return optuna.create_trial(state=state, value=value, params=drawn, **about)


def searched(search, score, count):
    """Trials that end at once with a score; None is a failure."""
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


def test_a_trial_depends_on_the_file_the_seed_and_earlier_results_alone():
    search = tpe("searcher.max_trials=24")
    first = searched(search, near_a_hundredth, 24)
    assert params(searched(tpe("searcher.max_trials=24"), near_a_hundredth, 24)) == params(first)
    assert next(search.draws(first[:15])) == first[15].params
    random = list(itertools.islice(specification.load(RANDOM, [SMOOTHING], 1).draws(), 7))
    assert random[:6] == params(first[:6]) and random[6] != first[6].params  # a quarter of the trials
    other = searched(tpe("searcher.max_trials=24", "reproducibility.experiment_seed=1"), near_a_hundredth, 8)
    assert not [pair for pair in zip(other, first, strict=False) if pair[0].params == pair[1].params]
    turned = searched(search, lambda drawn: -near_a_hundredth(drawn), 24)
    assert params(turned[:6]) == params(first[:6]) and turned[-1].params != first[-1].params


@pytest.mark.parametrize("smaller", [False, True])
def test_later_trials_are_better_than_random_ones(smaller):
    sign = -1 if smaller else 1
    for seed in range(3):
        changes = [f"reproducibility.experiment_seed={seed}", "searcher.max_trials=40"]
        search = tpe(*changes, f"searcher.smaller_is_better={str(smaller).lower()}")
        found = searched(search, lambda drawn: sign * near_a_hundredth(drawn), 40)
        away = [-near_a_hundredth(each.params) for each in found]
        random = [-near_a_hundredth(each) for each in itertools.islice(search.draws(), 200)]
        assert sum(away[20:]) / 20 < 0.6 * sum(random) / 200


def test_failed_and_running_trials_keep_others_from_their_place():
    search = tpe("searcher.max_trials=40")
    found = searched(search, lambda drawn: None if drawn[ZERO] >= 2 else drawn[RATE], 40)
    assert sum(each.params[ZERO] >= 2 for each in found[20:]) < 5  # of 20; chance would give 10
    known = searched(search, near_a_hundredth, 20)

    def beside(ended, running):
        return next(search.draws([*known[:ended], trial(search, running, state=TrialState.RUNNING)]))

    wanted = {ended: beside(ended, known[0].params) for ended in (12, 16, 20)}
    assert [ended for ended, drawn in wanted.items() if beside(ended, drawn) != drawn]


def test_every_kind_of_range_is_drawn():
    number = "hyperparameters.seed_of_mine={type: int, minval: 3, maxval: 5}"
    search = tpe(f"{STAGE}={{type: categorical, vals: [0, 1]}}", number)
    assert {each.spec["type"] for each in search.ranges} == {"int", "double", "log", "categorical"}
    for each in searched(search, near_a_hundredth, 12):
        for name, distribution in space.space(search.ranges).items():
            assert distribution._contains(distribution.to_internal_repr(each.params[name])), name
        said = dict(line.split("=", 1) for line in search.overrides_of(each.params))
        assert isinstance(json.loads(said[f"{ARGS}.optimizer.params.betas"]), list)


def test_a_constant_is_no_range():
    search = tpe(
        "hyperparameters.net_args={type: const, val: {width: 2}}", "hyperparameters.net={type: const, val: x}"
    )
    assert (search.experiment.hyperparameters["net_args"], search.experiment.hyperparameters["net"]) == (
        {"width": 2},
        "x",
    )
    assert {each.name for each in search.ranges} == {each.name for each in tpe().ranges}


def test_fields_of_tpe_are_checked_and_a_note_says_that_clusters_have_none(capsys):
    assert error_line(tpe, "searcher.max_trials=null").startswith(
        "searcher.max_trials: missing: the searcher tpe needs it;"
    )
    assert error_line(tpe, "searcher.num_rungs=2").startswith("searcher.num_rungs: 2: tpe has no such field;")
    tpe()
    line = "note: searcher.name: 'tpe': a cluster has no such searcher; "
    assert f"search.py: {line}" in capsys.readouterr().err
    check = ["--check", "--config", RANDOM, "--set", "data.dataset=digits", "--set", "searcher.name=tpe"]
    assert train.main(check) == 2  # its ranges
    said = capsys.readouterr().err
    assert f"train.py: {line}" in said and "--set searcher.name=random" in said and f"{LR}: " in said
    assert train.main([*check[:-1], "searcher.name=random"]) == 2
    assert "no such searcher" not in capsys.readouterr().err


def test_there_are_never_more_trials_at_a_time_than_asked_for():
    assert specification.load(RANDOM, ["searcher.max_trials=2"], 8).concurrent == 2
    assert specification.load(RANDOM, ["searcher.max_concurrent_trials=3"], 8).concurrent == 3


# ------------------------------------------------------------------------------------------------ a real search


NAME = "<script>alert('x')</script>\x1b[31m"
CHANGES = [
    "data.dataset=digits",
    "searcher.name=tpe",
    "searcher.max_trials=2",
    f"name={json.dumps(NAME)}",
    f"{STAGE}=0",
    "hyperparameters.max_length={batches: 200}",  # the second half of a trial outlasts the look at its first
    "min_validation_period={batches: 100}",
    "scheduling_unit=25",
]


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    """(folder, page after the kill, continued run) of a search.

    SIGKILL ends it while it takes its first trial, and ends it and its second trial halfway.
    """
    output = tmp_path_factory.mktemp("guided") / "search"
    output.mkdir()
    source = DataPlan.resolve(DataSettings.parse({"dataset": "digits"}))
    loaded = specification.load(RANDOM, CHANGES, 1)
    begun = SearchRunner(loaded, output, source, ThisMachine(loaded))
    begun._enqueue_missing()
    begun.study.ask()  # it runs, and has no hyperparameters yet
    sets = [part for change in CHANGES for part in ("--set", change)]
    arguments = ["search.py", "--config", RANDOM, "--output", str(output), *sets]
    with started(arguments) as program:
        wait_until(lambda: [*output.glob("trials/001/checkpoints/*/metadata.json")], program)
        killed = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(signal.SIGKILL)
        for each in killed:
            each.kill()
        psutil.wait_procs(killed, time_limit())
    assert checkpoint.main(["report", str(output)]) == 0
    return output, (output / "report.html").read_text(), run(arguments, output)


def test_a_killed_search_continues_with_the_same_trials(guided):
    output, _, made = guided
    assert made.code == 0, made.stderr
    with open(output / "trials.csv") as file:
        table = list(csv.DictReader(file))
    assert [(row["trial"], row["outcome"]) for row in table] == [("0", "complete"), ("1", "complete")]
    assert len(list(output.glob("trials/*/summary.json"))) == 2
    results = search_page.read(output)
    for number, each in enumerate(results.trials):
        assert next(results.search.draws(results.trials[:number])) == each.params
        lines = (output / f"trials/{number:03}/metrics.jsonl").read_text().splitlines()
        trained = [entry for entry in map(json.loads, lines) if entry["group"] == "validation"]
        assert [entry["steps_completed"] for entry in trained] == [100, 200]
    assert (output / "trials/000.log").read_text().count("starting: ") == 1  # it has not run again
    assert (output / "trials/001.log").read_text().count("starting: ") == 2


def rows(page):
    """The cells of the page's table of trials, and the classes of its rows."""
    table = page[page.index('class="trials"') :].split("<tbody>")[1].split("</tbody>")[0]
    return [
        ([html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)], kind)
        for kind, row in re.findall(r"<tr([^>]*)>(.*?)</tr>", table, re.S)
    ]


def test_a_search_has_a_page_at_any_time(guided, tmp_path, capsys):
    output, before, made = guided
    cells = [row for row, _ in rows(before)]
    assert [row[-1] for row in cells] == ["complete", "running"]
    assert "1 of 2" in before and 100 <= int(cells[1][-4]) < 200  # steps
    assert checkpoint.main(["report", str(output)]) == 0
    page = (output / "report.html").read_text()
    assert page.count("<script") == 1 and html.escape("<script>alert(") in page and r"\x1b[31m" in page
    assert "<b>2 of 2</b>" in page and "chosen on test images" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    results = search_page.read(output)
    (found,) = re.findall(r"data-lines='(.*?)'", page)
    assert [(line["name"], [point[2] for point in line["points"]]) for line in json.loads(found)] == [
        ("trial 0", ["100", "200"]),
        ("trial 1", ["100", "200"]),
    ]
    best = results.best(results.trials)
    assert best
    for each, (row, kind) in zip(results.trials, rows(page), strict=True):
        assert row[0] == str(each.number) and f"{100 * (results.score(each) or 0):.2f} %" in row
        assert [f"{each.params[RATE]:.4g}", "200", "complete"] == [row[1], row[-4], row[-1]]
        assert ("best" in kind) == (each.number == best.number)
    (shown,) = re.findall(r"^train with these values: (.*)", made.stdout, re.M)
    assert html.unescape(re.findall(r'<pre class="framed">(.*?)</pre>', page)[0]) == shown
    assert f"report: python3 checkpoint.py report {output}\n" in made.stdout
    assert f"plots:  optuna-dashboard sqlite:///{output}/search.db\n" in made.stdout
    (tmp_path / "search.db").write_text("no data base")
    assert checkpoint.main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path}/search.db: holds no search that can be read" in capsys.readouterr().err
    assert not list(tmp_path.glob("*report*"))
    assert checkpoint.main(["report", str(output), str(tmp_path)]) == 2
    assert "a page shows one search; give only the folder of one" in capsys.readouterr().err
