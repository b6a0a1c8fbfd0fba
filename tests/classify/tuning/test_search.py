"""Searches on this machine: the file's meaning, and real searches that are killed, pruned and go on."""

import csv
import io
import itertools
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import optuna
import pytest
from matplotlib import pyplot
from support import PROJECT, TIME_LIMIT, Run, error_line, execute

import search
from classify.tuning import display, plots, runner, searchers, space, specification
from classify.tuning.display import SearchDisplay
from classify.tuning.results import Results
from harness.errors import InvalidInput

GRID = "experiments/search-grid.yaml"
ASHA = "experiments/search-asha.yaml"
LR = "hyperparameters.overwrite_deepspeed_args.optimizer.params.lr"
STAGE = "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage"
DIGITS = ["data.dataset=digits"]

# What is wrong, by what is set in which file, and the line that says so.
REFUSALS = {
    "unknown searcher": (
        GRID,
        ["searcher.name=grit"],
        "searcher.name: 'grit': unknown searcher; did you mean 'grid'?",
    ),
    "unknown field": (GRID, ["searcher.max_trials=3"], "searcher.max_trials: 3: grid has no such field;"),
    "mode": (
        ASHA,
        ["searcher.mode=quick"],
        "searcher.mode: 'quick': must be one of aggressive, standard, conservative",
    ),
    "no trials": (ASHA, ["searcher.max_trials=null"], "searcher.max_trials: None: adaptive_asha needs it;"),
    "unknown type": (
        GRID,
        [f"{LR}={{type: loq, base: 10, minval: -4, maxval: -1}}"],
        f"{LR}.type: 'loq': unknown hyperparameter type; did you mean 'log'?",
    ),
    "min above max": (
        GRID,
        [f"{LR}={{type: double, minval: 2, maxval: 1, count: 2}}"],
        f"{LR}.minval: 2: must be below maxval, which is 1; exchange them",
    ),
    "no name": (GRID, ["searcher.name=[]"], "searcher.name: []: must be a searcher's name"),
    "too wide": (
        ASHA,
        [f"{LR}={{type: double, minval: 0, maxval: 1e308}}"],
        f"{LR}.maxval: 1e+308: must be a number",
    ),
    "no count": (
        GRID,
        [f"{LR}={{type: double, minval: 1, maxval: 2}}"],
        f"{LR}.count: None: a grid needs it;",
    ),
    "no base": (
        ASHA,
        [f"{LR}={{type: log, minval: 1, maxval: 2}}"],
        f"{LR}.base: None: must be a number above 0",
    ),
    "overflow": (
        ASHA,
        [f"{LR}={{type: log, base: 10, minval: 1, maxval: 999}}"],
        f"{LR}.maxval: 999: too large;",
    ),
    "no values": (GRID, [f"{STAGE}={{type: categorical, vals: []}}"], f"{STAGE}.vals: []: must be a list"),
    "range's key": (
        ASHA,
        [f"{LR}={{type: int, minval: 1, maxval: 2, counts: 2}}"],
        f"{LR}.counts: 2: unknown key; did you mean 'count'?",
    ),
    "metric": (GRID, ["searcher.metric=acuracy"], "searcher.metric: 'acuracy': no validation reports it;"),
    "unit": (
        ASHA,
        ["searcher.time_metric=batches"],
        "searcher.time_metric: 'batches': hyperparameters.max_length counts",
    ),
    "length": (
        ASHA,
        ["searcher.max_time=5"],
        "searcher.max_time: 5: hyperparameters.max_length is 9 epochs;",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_wrong_is_said_before_any_trial(case):
    file, changes, line = REFUSALS[case]
    assert error_line(specification.load, str(PROJECT / file), changes, 1).startswith(line)


def test_every_error_is_said_at_once():
    changes = ["data.rot=x", "searcher.metric=f1", f"{LR}={{type: loq, minval: 1, maxval: 2}}"]
    with pytest.raises(InvalidInput) as caught:
        specification.load(str(PROJECT / GRID), changes, 0)
    keys = sorted(line.split(": ")[0] for line in caught.value.errors)
    assert keys == ["--parallel", "data.rot", f"{LR}.type", "searcher.metric"]


def test_a_search_of_invalid_trials_alone_is_refused(tmp_path, capsys):
    arguments = command(
        tmp_path / "search", str(PROJECT / GRID), f"{STAGE}={{type: categorical, vals: [4, 5]}}"
    )[2:]
    assert search.main(arguments) == 2
    assert "zero_optimization.stage: 4" in capsys.readouterr().err
    assert search.main([*arguments[:-1], f"{STAGE}={{type: categorical, vals: [7]}}"]) == 2
    assert "zero_optimization.stage: 7" in capsys.readouterr().err  # mended, the same folder serves
    missing = ["--set", "data.dataset=imagefolder", "--set", f"data.root={tmp_path}/none"]
    assert search.main([*command(tmp_path / "other", str(PROJECT / GRID))[2:], *missing]) == 2
    assert f"data.root: {tmp_path}/none: no such folder" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert search.main([*arguments, "--output", "/proc/none"]) == 2
    assert "--output: /proc/none: cannot be made" in capsys.readouterr().err
    assert not (tmp_path / "search/trials").exists()


def test_what_cannot_be_honoured_is_said(capsys):
    changes = ["searcher.max_concurrent_trials=4", "searcher.divisor=2.5", "searcher.smaller_is_better=null"]
    specification.load(str(PROJECT / ASHA), changes, 2)
    notes = capsys.readouterr().err
    assert "searcher.smaller_is_better: None: so less accuracy is better" in notes
    assert "searcher.max_concurrent_trials: 4: 2 at a time here" in notes
    assert "searcher.divisor: 2.5: one in 2 goes on here" in notes


def test_names_are_text_in_the_table():
    values = ["[bold]x", "[/no]", ":smile:", "e\x1b[31m"]
    changes = ["name='[/red]grid'", f"{STAGE}={{type: categorical, vals: {json.dumps(values)}}}"]
    loaded = specification.load(str(PROJECT / GRID), [*changes, "searcher.metric='accuracy/a[/b]'"], 1)
    study = optuna.create_study()
    for value in values:
        params = {each.name: value if each.path == STAGE else 0.1 for each in loaded.ranges}
        kinds: dict = {
            name: optuna.distributions.CategoricalDistribution([each]) for name, each in params.items()
        }
        ended = {"bracket": 0, "outcome": "invalid", "reason": f"data.root: {value}: none"}
        trial = optuna.create_trial(value=0.5, params=params, distributions=kinds, user_attrs=ended)
        study.add_trial(trial)
    shown = display.SearchDisplay(Results(study, loaded), pathlib.Path(), "test images")
    shown.console.width, shown.console.file = 300, io.StringIO()
    shown.console.print(shown._table())
    text = shown.console.file.getvalue()
    assert all(each.isprintable() for each in text.splitlines())
    for name in ("[/red]grid", "accuracy/a[/b]", *values[:3], r"e\x1b[31m"):
        assert f" {name} " in text
    assert all(f"invalid: data.root: {name}: none" in text for name in (*values[:3], r"e\x1b[31m"))


def draws_of(file, *changes, count=12):
    loaded = specification.load(str(PROJECT / file), list(changes), 1)
    return list(itertools.islice(loaded.draws(), count))


def test_the_same_seed_draws_the_same():
    assert draws_of(ASHA) == draws_of(ASHA)
    assert draws_of(ASHA) != draws_of(ASHA, "reproducibility.experiment_seed=1")


def test_what_is_drawn_follows_the_file():
    drawn = draws_of(ASHA, count=200)
    rates = [each["overwrite_deepspeed_args.optimizer.params.lr"] for each in drawn]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert 0.35 < sum(rate < 10**-2.5 for rate in rates) / len(rates) < 0.65  # even in the exponent
    assert {each["overwrite_deepspeed_args.zero_optimization.stage"] for each in drawn} == {0, 1, 2, 3}


def test_a_grid_is_every_pair():
    drawn = draws_of(GRID, count=99)
    assert len(drawn) == 12
    exponents = sorted({math.log10(each["overwrite_deepspeed_args.optimizer.params.lr"]) for each in drawn})
    assert exponents == pytest.approx([-4, -4 + 2 / 3, -4 + 4 / 3, -2])
    loaded = specification.load(str(PROJECT / GRID), [], 1)
    assert loaded.overrides_of(drawn[0]) == [f"{LR}=0.0001", f"{STAGE}=0"]


@pytest.mark.parametrize(
    ("chosen", "shares"),
    [
        ({"mode": "aggressive"}, [(16, 3, 1)]),
        ({"mode": "standard"}, [(12, 3, 1), (4, 2, 4)]),
        ({"mode": "conservative"}, [(12, 3, 1), (3, 2, 4), (1, 1, 16)]),
        ({"bracket_rungs": [2]}, [(16, 2, 4)]),
    ],
)
def test_brackets_are_determineds(chosen, shares):
    """The numbers of master/pkg/searcher/adaptive_asha.go for 16 trials of 16 epochs."""
    section = {"name": "adaptive_asha", "max_trials": 16, "max_time": 16, "divisor": 4, **chosen}
    assert searchers.brackets(section, 1) == [searchers.Bracket(*share) for share in shares]


@pytest.mark.parametrize(("least", "most"), [(-3.0, -2.9), (-3.0, -2.0), (-4.0, -1.0)])
def test_plots_have_labels_apart_whole_trials_and_no_white_line(tmp_path, monkeypatch, least, most):
    changes = [f"{LR}={{type: log, base: 10, minval: {least}, maxval: {most}}}"]
    loaded = specification.load(str(PROJECT / ASHA), changes, 1)
    distributions = space.space(loaded.ranges)
    study = optuna.create_study(direction="maximize")
    for number, drawn in enumerate(itertools.islice(loaded.draws(), 4)):
        study.add_trial(
            optuna.create_trial(
                value=number / 4,
                params={name: drawn[name] for name in distributions},
                distributions=distributions,
                intermediate_values={9: number / 4},
                user_attrs={"outcome": "complete"},
            )
        )
    figures = {}

    def keep(folder, name):
        figures[name] = pyplot.gcf()
        pyplot.savefig(tmp_path / name)
        return name

    monkeypatch.setattr(plots, "_save", keep)
    assert SearchDisplay(Results(study, loaded), tmp_path, "validation images").finish() == 0
    assert all(tick == int(tick) for tick in figures["history.png"].axes[0].get_xticks())
    for axes in (axes for figure in figures.values() for axes in figure.axes):
        axis = axes.xaxis if axes.get_xscale() == "log" else axes.yaxis
        labels = [*axis.get_majorticklabels(), *axis.get_minorticklabels()]
        boxes = [each.get_window_extent() for each in labels if each.get_text() and each.get_visible()]
        seen = [box for box in boxes if axes.figure.bbox.overlaps(box)]
        assert len(seen) > 1 and not [
            pair for pair in itertools.combinations(seen, 2) if pair[0].overlaps(pair[1])
        ]
    (lines,) = figures["parallel-coordinates.png"].axes[0].collections
    assert np.asarray(lines.get_edgecolor())[:, :3].min(axis=1).max() < 0.7  # white is 1
    pyplot.close("all")


def test_a_trial_that_starts_with_other_code_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "PROJECT", tmp_path)
    for name in ("net.py", "mine/__init__.py", "mine/deep/loss.py", "data/photos.py", "experiments/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    begun = runner.code_digests()
    assert set(begun) == {"net.py", "mine/__init__.py", "mine/deep/loss.py", "experiments/a.json"}
    (tmp_path / "net.py").write_text("2")
    (tmp_path / "mine/deep/loss.py").unlink()
    (tmp_path / "mine/new.py").write_text("3")
    study = optuna.create_study()
    search = specification.load(str(PROJECT / GRID), [], 1)
    display = SearchDisplay(Results(study, search), tmp_path, "test images")
    for number in (1, 2, 3):
        display.tell_changes(number, begun, runner.code_digests())
        if number == 2:
            (tmp_path / "net.py").write_text("1")
    first, second = capsys.readouterr().err.splitlines()
    assert "trial 1: mine/deep/loss.py, mine/new.py, net.py changed since the search began" in first
    assert "trial 3: mine/deep/loss.py, mine/new.py changed since" in second


# ------------------------------------------------------------------------------------------------ real searches


def command(output: pathlib.Path, file: str, *changes: str) -> list[str]:
    sets = [part for change in (*DIGITS, *changes) for part in ("--set", change)]
    return [sys.executable, "search.py", "--config", file, "--output", str(output), *sets]


def run_search(tmp_path, file, *changes) -> Run:
    return execute(command(tmp_path / "search", file, *changes), tmp_path / "search")


def start_search(arguments: list[str]) -> subprocess.Popen[str]:
    """A search that the test may kill."""
    return subprocess.Popen(arguments, cwd=PROJECT, stdout=subprocess.PIPE, text=True)


def rows(output: pathlib.Path) -> list[dict[str, str]]:
    with open(output / "trials.csv") as file:
        return list(csv.DictReader(file))


def entries(output: pathlib.Path, trial: int, group: str) -> list[dict]:
    lines = (output / f"trials/{trial:03}/metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["group"] == group]


def wait_until(holds):
    until = time.monotonic() + TIME_LIMIT
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


FOUR_RATES = [
    f"{LR}={{type: log, base: 10, minval: -4, maxval: -1, count: 4}}",
    f"{STAGE}=1",
    "hyperparameters.max_length={batches: 300}",
    "min_validation_period={batches: 150}",
    "scheduling_unit=10",
]


def test_a_search_goes_on_after_sigkill_and_trains_at_the_rates_it_searches(tmp_path, capsys):
    output = tmp_path / "search"
    going = start_search(command(output, GRID, *FOUR_RATES))
    second = output / "trials/001/metrics.jsonl"
    wait_until(lambda: second.exists() and second.read_text().count("\n") > 5)
    going.kill()
    going.communicate()
    first = (output / "trials/000/net.pt").stat()
    rest = run_search(tmp_path, GRID, *FOUR_RATES)
    assert rest.code == 0, rest.stderr
    assert (output / "trials/000/net.pt").stat() == first  # not run again
    table = rows(output)
    assert [row["outcome"] for row in table] == ["complete"] * 4
    wanted = [each["overwrite_deepspeed_args.optimizer.params.lr"] for each in draws_of(GRID, *FOUR_RATES)]
    assert [float(row["overwrite_deepspeed_args.optimizer.params.lr"]) for row in table] == wanted
    losses = set()
    for trial, rate in enumerate(wanted):
        training = entries(output, trial, "training")
        assert [entry["steps_completed"] for entry in training] == sorted(
            {e["steps_completed"] for e in training}
        )
        assert training[-1]["learning_rate"] == pytest.approx(
            rate, rel=1e-6
        )  # the engine's own, after warm-up
        assert training[-1]["steps_completed"] == 300
        losses.add(training[-1]["loss"])
    assert len(losses) == 4
    assert (output / "trials/001.log").read_text().count("validation") == 2  # gone on with, not begun anew
    best = max(table, key=lambda row: float(row["accuracy"]))
    assert f"best: trial {best['trial']}, " in rest.stdout
    shown = re.search(r"train with them: (.*)", rest.stdout)
    assert shown and f"{LR}={best['overwrite_deepspeed_args.optimizer.params.lr']}" in shown[1]
    assert {"history.png", "accuracy-by-lr.png"} <= {path.name for path in output.glob("*.png")}
    assert search.main(command(output, GRID, *FOUR_RATES, "reproducibility.experiment_seed=3")[2:]) == 2
    assert "holds another search" in capsys.readouterr().err


def test_invalid_pairs_are_reported_and_the_rest_finishes(tmp_path):
    changes = [
        f"{LR}={{type: double, minval: 0.001, maxval: 0.002, count: 2}}",
        f"{STAGE}={{type: categorical, vals: [1, 2]}}",
        "hyperparameters.pipe_parallel_size=2",
        "resources.slots_per_trial=2",
        "hyperparameters.max_length={batches: 20}",
    ]
    run = run_search(tmp_path, GRID, *changes)
    assert run.code == 0, run.stderr
    outcomes = {
        (row["overwrite_deepspeed_args.zero_optimization.stage"], row["outcome"]) for row in rows(run.output)
    }
    assert outcomes == {("1", "complete"), ("2", "invalid")}
    assert "zero_optimization.stage: 2: a pipeline" in run.stdout
    assert len(list(run.output.glob("trials/*/summary.json"))) == 2


def test_asha_stops_the_worse_and_bears_a_killed_trial(tmp_path):
    changes = [
        "searcher.max_trials=5",
        "reproducibility.experiment_seed=2",
        f"{LR}={{type: categorical, vals: [0.002, 0.0000001]}}",
        "hyperparameters.overwrite_deepspeed_args.train_micro_batch_size_per_gpu=32",
        "scheduling_unit=10",
    ]
    output = tmp_path / "search"
    going = start_search(command(output, ASHA, *changes))
    first = output / "trials/000/metrics.jsonl"
    wait_until(lambda: first.exists() and "validation" in first.read_text())
    pids = subprocess.run(["pgrep", "-P", str(going.pid)], capture_output=True, text=True).stdout.split()
    (pid,) = [pid for pid in pids if b"train.py" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(pid), signal.SIGKILL)
    stdout, _ = going.communicate(timeout=TIME_LIMIT)
    assert going.returncode == 0, stdout
    table = rows(output)
    assert (table[0]["outcome"], table[0]["reason"]) == ("failed", "killed by SIGKILL")
    rates = [row["overwrite_deepspeed_args.optimizer.params.lr"] for row in table[1:]]
    assert rates == ["1e-07", "1e-07", "0.002", "1e-07"]
    # One in three goes on; the first two are equals, with none that is better.
    assert [row["outcome"] for row in table[1:]] == ["complete", "complete", "complete", "pruned"]
    for row in table[1:]:
        folder = output / row["folder"]
        assert list(folder.glob("checkpoints/*/metadata.json"))
        if row["outcome"] == "pruned":
            assert int(row["steps"]) < 9 * 45
            assert "not among the best after" in row["reason"]
            assert not (folder / "summary.json").exists()
