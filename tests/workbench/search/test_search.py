"""Searches on this machine: the meaning of the file, the choice among trials, and a real search."""

import csv
import io
import itertools
import json
import math
import pathlib
import re
import subprocess
import sys

import optuna
import pytest
from folders import table
from matrix import Runs
from support import PROJECT, error_line, execute, run

import search
from classify.config import experiment_file
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from deepspeed_trial.errors import InvalidInput
from workbench.search import runner, specification, trial_run
from workbench.search.results import Results, SearchDisplay, quiet_optuna
from workbench.search.runner import SearchRunner
from workbench.search.trial_run import ThisMachine, TrialRun

GRID, ASHA = (str(PROJECT / f"experiments/search-{name}.yaml") for name in ("grid", "asha"))
RATE = "overwrite_deepspeed_args.optimizer.params.lr"
ZERO = "overwrite_deepspeed_args.zero_optimization.stage"
LR, STAGE = f"hyperparameters.{RATE}", f"hyperparameters.{ZERO}"


@pytest.fixture(autouse=True)
def quiet():
    quiet_optuna()


@table(
    "file, change, line",
    unknown_searcher=(GRID, "searcher.name=grit", "searcher.name: 'grit': unknown searcher; did you mean 'grid'?"),
    unknown_field=(GRID, "searcher.max_trials=3", "searcher.max_trials: 3: grid has no such field;"),
    mode=(ASHA, "searcher.mode=quick", "searcher.mode: 'quick': must be one of aggressive, standard, conservative"),
    no_trials=(ASHA, "searcher.max_trials=null", "searcher.max_trials: missing: the searcher adaptive_asha needs it;"),
    unknown_type=(GRID, f"{LR}={{type: loq, base: 10, minval: -4, maxval: -1}}", f"{LR}.type: 'loq': unknown hyperparameter type; did you mean 'log'?"),
    min_above_max=(GRID, f"{LR}={{type: double, minval: 2, maxval: 1, count: 2}}", f"{LR}.minval: 2: must be below maxval, which is 1; exchange them"),
    no_name=(GRID, "searcher.name=[]", "searcher.name: []: must be one of single, random, "),
    too_wide=(ASHA, f"{LR}={{type: double, minval: 0, maxval: 1e308}}", f"{LR}.maxval: 1e+308: must be a number"),
    no_count=(GRID, f"{LR}={{type: double, minval: 1, maxval: 2}}", f"{LR}.count: missing: a grid needs it;"),
    no_base=(ASHA, f"{LR}={{type: log, minval: 1, maxval: 2}}", f"{LR}.base: missing: must be a number above 0"),
    overflow=(ASHA, f"{LR}={{type: log, base: 10, minval: 1, maxval: 999}}", f"{LR}.maxval: 999: too large;"),
    no_end=(ASHA, f"{LR}={{type: double, minval: 1}}", f"{LR}.maxval: missing: must be a number"),
    no_values=(GRID, f"{STAGE}={{type: categorical, vals: []}}", f"{STAGE}.vals: []: must be a list"),
    ranges_key=(ASHA, f"{LR}={{type: int, minval: 1, maxval: 2, counts: 2}}", f"{LR}.counts: 2: unknown key; did you mean 'count'?"),
    metric=(GRID, "searcher.metric=acuracy", "searcher.metric: 'acuracy': must be a metric that validations report: "),
    unit=(ASHA, "searcher.time_metric=batches", "searcher.time_metric: 'batches': hyperparameters.max_length counts"),
    length=(ASHA, "searcher.max_time=5", "searcher.max_time: 5: hyperparameters.max_length is 9 epochs;"),
)  # fmt: skip
def test_an_invalid_search_is_refused_before_any_trial(file, change, line):
    assert error_line(specification.load, file, [change], 1).startswith(line)


def test_every_error_is_named_at_once():
    changes = ["data.rot=x", "searcher.metric=f1", f"{LR}={{type: loq, minval: 1, maxval: 2}}"]
    with pytest.raises(InvalidInput) as caught:
        specification.load(GRID, changes, 0)
    keys = sorted(line.split(": ")[0] for line in caught.value.errors)
    assert keys == ["--parallel", "data.rot", f"{LR}.type", "searcher.metric"]


def test_a_trial_is_checked_as_the_search_began(tmp_path):
    """The experiment of a trial, and the data for the image size of its network."""
    file = tmp_path / "search.yaml"
    file.write_text(pathlib.Path(GRID).read_text())
    stages = f"{STAGE}={{type: categorical, vals: [1, {{a: [2]}}]}}"
    data = [
        "hyperparameters.net=timm/resnet18",
        "data={dataset: imagefolder, root: x, augment: {cutout: 64}}",
    ]
    loaded = specification.load(str(file), [stages, *data], 1)
    assert loaded.data and loaded.data.image_size == (224, 224)
    before = json.dumps(loaded.experiment.config)
    for drawn in loaded.draws():
        expected = experiment_file.load(str(file), [stages, *data, *loaded.overrides_of(drawn)])
        made = loaded.experiment_of(drawn)
        assert (made.config, made.hyperparameters) == (expected.config, expected.hyperparameters)
    file.unlink()
    assert loaded.experiment_of(drawn).hyperparameters == made.hyperparameters
    assert json.dumps(loaded.experiment.config) == before


def arguments(output: pathlib.Path, file: str, *changes: str) -> list[str]:
    sets = [part for change in ("data.dataset=digits", *changes) for part in ("--set", change)]
    return ["--config", file, "--output", str(output), *sets]


def test_a_search_of_invalid_trials_alone_is_refused(tmp_path, capsys):
    output = tmp_path / "search"
    assert search.main(arguments(output, GRID, f"{STAGE}={{type: categorical, vals: [4, 5]}}")) == 2
    assert "zero_optimization.stage: 4" in capsys.readouterr().err
    other = arguments(output, GRID, f"{STAGE}={{type: categorical, vals: [7]}}")
    assert search.main(other) == 2
    assert "zero_optimization.stage: 7" in capsys.readouterr().err  # the folder is still free
    missing = ["data.dataset=imagefolder", f"data.root={tmp_path}/none"]
    assert search.main(arguments(tmp_path / "other", GRID, *missing)) == 2
    assert f"data.root: {tmp_path}/none: no such folder" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert search.main([*other, "--output", "/proc/none"]) == 2
    assert "--output: /proc/none: cannot be made" in capsys.readouterr().err
    assert not (output / "trials").exists()


def test_notes_name_settings_that_this_machine_ignores(capsys):
    changes = ["searcher.max_concurrent_trials=4", "searcher.divisor=2.5", "searcher.smaller_is_better=null"]
    specification.load(ASHA, changes, 2)
    notes = capsys.readouterr().err
    assert "searcher.smaller_is_better: not given, so a smaller accuracy is better" in notes
    assert "searcher.max_concurrent_trials: 4: this machine runs 2 at a time" in notes
    assert "searcher.divisor: 2.5: here one in 2 trials continues" in notes


def test_names_are_text_in_the_table():
    values = ["[bold]x", "[/no]", ":smile:", "e\x1b[31m"]
    changes = ["name='[/red]grid'", f"{STAGE}={{type: categorical, vals: {json.dumps(values)}}}"]
    loaded = specification.load(GRID, [*changes, "searcher.metric='accuracy/a[/b]'"], 1)
    study = optuna.create_study()
    for value in values:
        params: dict = {RATE: 0.1, ZERO: value}
        kinds: dict = {name: optuna.distributions.CategoricalDistribution([params[name]]) for name in params}
        ended = {"bracket": 0, "outcome": "invalid", "reason": f"data.root: {value}: none"}
        study.add_trial(optuna.create_trial(value=0.5, params=params, distributions=kinds, user_attrs=ended))
    shown = SearchDisplay(Results(study, loaded), pathlib.Path())
    shown.console.width, shown.console.file = 300, io.StringIO()
    shown.console.print(shown._table())
    text = shown.console.file.getvalue()
    assert all(each.isprintable() for each in text.splitlines())
    for name in ("[/red]grid", "accuracy/a[/b]", *values[:3], r"e\x1b[31m"):
        assert f" {name} " in text
    assert all(f"invalid: data.root: {name}: none" in text for name in (*values[:3], r"e\x1b[31m"))


def draws_of(file, *changes, count=12):
    loaded = specification.load(file, list(changes), 1)
    return list(itertools.islice(loaded.draws(), count))


def test_draws_depend_on_the_seed_and_follow_the_file():
    assert draws_of(ASHA) == draws_of(ASHA)
    assert draws_of(ASHA) != draws_of(ASHA, "reproducibility.experiment_seed=1")
    drawn = draws_of(ASHA, count=200)
    rates = [each[RATE] for each in drawn]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert 0.35 < sum(rate < 10**-2.5 for rate in rates) / len(rates) < 0.65  # even in the exponent
    assert {each[ZERO] for each in drawn} == {0, 1, 2, 3}


def test_a_grid_is_every_pair():
    drawn = draws_of(GRID, count=99)
    assert len(drawn) == 12
    exponents = sorted({math.log10(each[RATE]) for each in drawn})
    assert exponents == pytest.approx([-4, -4 + 2 / 3, -4 + 4 / 3, -2])
    loaded = specification.load(GRID, [], 1)
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
    """For 16 trials of 16 epochs master/pkg/searcher/adaptive_asha.go has these numbers."""
    section = {"name": "adaptive_asha", "max_trials": 16, "max_time": 16, "divisor": 4, **chosen}
    assert specification.brackets(section, 1) == [specification.Bracket(*share) for share in shares]


def test_changed_code_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "PROJECT", tmp_path)
    for name in ("net.py", "mine/__init__.py", "mine/deep/loss.py", "data/photos.py", "experiments/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    begun = runner.code_digests()
    assert set(begun) == {"net.py", "mine/__init__.py", "mine/deep/loss.py", "experiments/a.json"}
    (tmp_path / "net.py").write_text("2")
    (tmp_path / "mine/deep/loss.py").unlink()
    (tmp_path / "mine/new.py").write_text("3")
    results = Results(optuna.create_study(), specification.load(GRID, [], 1))
    shown = SearchDisplay(results, tmp_path)
    for number in (1, 2, 3):
        shown.tell_changes(number, begun, runner.code_digests())
        if number == 2:
            (tmp_path / "net.py").write_text("1")
    first, second = capsys.readouterr().err.splitlines()
    assert "trial 1: mine/deep/loss.py, mine/new.py, net.py changed since the search began" in first
    assert "trial 3: mine/deep/loss.py, mine/new.py changed since" in second


RANK_FAILED = "train.py: note: x\nFailures:\n  exitcode  : {} (pid: 7)\n"


@pytest.mark.parametrize(
    ("slots", "log", "code", "found"),
    [
        (1, "train.py: note: x\ntrain.py: net: 'a': must be b\n", 2, ("invalid", "net: 'a': must be b")),
        (1, "train.py: no memory left\ntrain.py: no memory left\n", 1, ("failed", "no memory left")),
        (1, "", -9, ("failed", "killed by SIGKILL")),
        (1, "Traceback\nValueError: x\n\n", 1, ("failed", "exit code 1: ValueError: x; see LOG")),
        (1, "", 1, ("failed", "exit code 1: it printed nothing; see LOG")),
        (2, f"train.py: a: b\n{RANK_FAILED.format(2)}", 1, ("invalid", "a: b")),
        (2, RANK_FAILED.format(-9), 1, ("failed", "killed by SIGKILL")),
    ],
)
def test_the_reason_of_a_failed_trial(tmp_path, slots, log, code, found):
    trial = TrialRun(tmp_path / "000", tmp_path / "search.yaml", [], slots)
    trial.log.write_text(log)
    trial.process = subprocess.Popen(["sh", "-c", "kill -9 $$" if code < 0 else f"exit {code}"])
    trial.process.wait()
    outcome, reason = trial.failure()
    assert (outcome, reason.replace(str(trial.log), "LOG")) == found


@table(
    "text",
    truncated=('{"steps": 9',),
    empty=("",),
    no_mapping=("[]",),
    no_steps=("{}",),
    steps_as_text=('{"steps": "9"}',),
    nested=("[" * 100_000,),
    no_text=("\udcff",),
)
def test_a_trial_with_a_damaged_summary_has_not_ended(tmp_path, text):
    trial = TrialRun(tmp_path, tmp_path / "search.yaml", [], 1)
    (tmp_path / "summary.json").write_bytes(text.encode(errors="surrogateescape"))
    assert trial.summary == {}
    (tmp_path / "summary.json").write_text('{"steps": 9}')
    assert trial.summary == {"steps": 9}


# ----------------------------------------------------------------------------- searches with a stand-in for trials


class StandIn(TrialRun):
    """Instead of a training, writes a validation whenever the search looks: the accuracy is the learning rate."""

    def start(self, environment):
        self.folder.mkdir(parents=True)
        chosen = dict(each.split("=") for each in self.overrides)
        self.left, self.stopped, self.rate = list(range(1, 10)), False, float(chosen[LR])

    @property
    def has_ended(self):
        if self.left and not self.stopped:
            step = self.left.pop(0)
            entry = {"group": "validation", "steps_completed": step, "batches": step, "epochs": step}
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({**entry, "accuracy": self.rate, "loss": self.rate}) + "\n")
            return False
        if not self.stopped:
            (self.folder / "summary.json").write_text('{"steps": 9}')
        return True

    def stop(self):
        self.stopped = True


class OnGpus(TrialRun):
    """Instead of a training, remembers its GPUs."""

    gpus: list[str] = []
    ended: set[str] = set()

    def start(self, environment):
        self.gpus.append(environment["CUDA_VISIBLE_DEVICES"])

    @property
    def has_ended(self):
        return self.folder.name in self.ended


def test_each_trial_has_gpus_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(trial_run, "TrialRun", OnGpus)
    monkeypatch.setattr(trial_run.torch.cuda, "device_count", lambda: 5)
    machine = ThisMachine(specification.load(GRID, ["resources.slots_per_trial=2"], 4))
    assert machine.room == 2
    for name, ended in (("000", ""), ("001", "000"), ("002", "000")):
        machine.start(tmp_path / name, tmp_path, [], "")
        OnGpus.ended.add(ended)
    assert OnGpus.gpus == ["0,1", "2,3", "0,1"]
    line = error_line(lambda: ThisMachine(specification.load(GRID, ["resources.slots_per_trial=6"], 1)))
    assert line == "resources.slots_per_trial: 6: this machine has 5 GPUs; use at most 5"


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """Search by stand-ins: the trials."""
    monkeypatch.setattr(trial_run, "TrialRun", StandIn)
    monkeypatch.setattr(runner, "POLL", 0)

    def search(file, *changes):
        loaded = specification.load(file, ["data.dataset=digits", *changes], 1)
        made = SearchRunner(loaded, tmp_path, DataPlan.resolve(DataSettings("digits")), ThisMachine(loaded))
        assert made.run() == 0
        return made.display.results

    return search


@pytest.mark.parametrize(("metric", "smaller"), [("accuracy", False), ("loss", True)])
def test_asha_stops_the_worse_trials(searched, capsys, metric, smaller):
    changes = ["searcher.max_trials=10", f"searcher.metric={metric}", f"searcher.smaller_is_better={smaller}"]
    results = searched(ASHA, *changes)
    rates = [trial.params[RATE] * (-1 if smaller else 1) for trial in results.trials]
    outcomes = [trial.user_attrs["outcome"] for trial in results.trials]
    assert len(set(rates)) == 10 and outcomes.count("pruned") > 3
    best = rates.index(max(rates))
    assert outcomes[best] == "complete" and f"best: trial {best}, " in capsys.readouterr().out
    found = results.best(results.trials)
    assert found and found.number == best
    for trial, rate, outcome in zip(results.trials, rates, outcomes, strict=True):
        before, rungs = rates[: trial.number], list(trial.intermediate_values)
        if outcome == "pruned":
            assert rungs[-1] in (1, 3) and max(before) > rate
            assert trial.user_attrs["reason"] == f"not among the best after {rungs[-1]} epochs"
        else:  # a third or less of the trials was better so far
            assert rungs == list(range(1, 10)) and sum(each > rate for each in before) <= len(before) / 3


def test_a_grid_trains_all_valid_pairs_and_names_the_best(searched, tmp_path, capsys):
    changes = [f"{STAGE}={{type: categorical, vals: [1, 4]}}"]
    results = searched(GRID, *changes)
    table = rows(tmp_path)
    assert [row["outcome"] for row in table] == ["complete", "invalid"] * 4
    assert all("zero_optimization.stage: 4" in row["reason"] for row in table[1::2])
    rates = [float(row[RATE]) for row in table]
    assert rates == [drawn[RATE] for drawn in draws_of(GRID, *changes)]
    best = results.best(results.trials)
    assert best and best.number == 6
    shown = capsys.readouterr().out
    assert f"best: trial 6, accuracy {100 * rates[6]:.2f} %: " in shown
    command = re.search(r"train with these values: (.*)", shown)
    assert command and f"{LR}={rates[6]}" in command[1]
    assert search.main(arguments(tmp_path, GRID, *changes, "reproducibility.experiment_seed=3")) == 2
    assert "holds another search" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ real searches


def rows(output: pathlib.Path) -> list[dict[str, str]]:
    with open(output / "trials.csv") as file:
        return list(csv.DictReader(file))


def entries(output: pathlib.Path, trial: int, group: str) -> list[dict]:
    lines = (output / f"trials/{trial:03}/metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["group"] == group]


KILLS = """
import os, pathlib, signal, sys

def source(root):
    wish = pathlib.Path(root, "kill")
    if sys.argv[0].endswith("train.py") and wish.exists():
        wish.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return {part: [(file, file.parent.name) for file in sorted(pathlib.Path(root, part).glob("*/*"))] for part in ("train", "test")}
"""


def test_a_search_bears_a_killed_trial_and_stops_the_worse(runs: Runs, tmp_path):
    """The first trial kills itself."""
    root = runs.files["photos"]
    (tmp_path / "own.py").write_text(KILLS)
    (tmp_path / "kill").touch()
    for part in ("train", "test"):
        (tmp_path / part).symlink_to(root / part)
    changes = [
        f"data={{dataset: {tmp_path}/own.py, root: {tmp_path}}}",
        "searcher={name: async_halving, num_rungs: 2, divisor: 3, max_trials: 3, metric: loss, smaller_is_better: true, time_metric: batches, max_time: 90}",
        f"{LR}={{type: categorical, vals: [0.002, 0.0000001]}}",
        f"{STAGE}=0",
        "hyperparameters.overwrite_deepspeed_args.train_micro_batch_size_per_gpu=48",
        "hyperparameters.overwrite_deepspeed_args.scheduler.params.warmup_num_steps=2",
        "hyperparameters.max_length={batches: 90}",
        "min_validation_period={batches: 30}",
        "scheduling_unit=1",
    ]
    output = tmp_path / "search"
    made = run(["search.py", *arguments(output, ASHA, *changes)], output)
    assert made.code == 0, made.stderr
    failed, good, worse = table = rows(output)
    assert [row["outcome"] for row in table] == ["failed", "complete", "pruned"]
    assert failed["reason"] == "killed by SIGKILL"
    assert [good[RATE], worse[RATE]] == ["0.002", "1e-07"]
    assert (good["steps"], worse["reason"]) == ("90", "not among the best after 30 batches")
    assert 30 <= int(worse["steps"]) < 90
    for row in (good, worse):
        assert list((output / row["folder"]).glob("checkpoints/*/metadata.json"))
        training = entries(output, int(row["trial"]), "training")
        assert training[-1]["learning_rate"] == pytest.approx(float(row[RATE]), rel=1e-6)
    assert not (output / worse["folder"] / "summary.json").exists()


@pytest.mark.soak
def test_invalid_pairs_of_two_ranks_are_reported_and_the_others_finish(tmp_path):
    changes = [
        f"{LR}={{type: double, minval: 0.001, maxval: 0.002, count: 2}}",
        f"{STAGE}={{type: categorical, vals: [1, 2]}}",
        "hyperparameters.pipe_parallel_size=2",
        "resources.slots_per_trial=2",
        "hyperparameters.max_length={batches: 20}",
    ]
    output = tmp_path / "search"
    made = execute([sys.executable, "search.py", *arguments(output, GRID, *changes)], output)
    assert made.code == 0, made.stderr
    assert {(row[ZERO], row["outcome"]) for row in rows(output)} == {("1", "complete"), ("2", "invalid")}
    assert "zero_optimization.stage: 2: a pipeline" in made.stdout
    assert len(list(output.glob("trials/*/summary.json"))) == 2
