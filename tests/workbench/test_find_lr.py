"""``train.py --find-lr``: the rate of a curve, the file that it writes, and real ramps."""

import json
import re
import sys

import numpy as np
import pytest
from folders import table
from support import DIGITS, contents, overrides, run, train_many

import train
from classify.config import experiment_file
from deepspeed_trial.errors import TrainingStopped
from workbench import find_lr, tune

ARGS = "hyperparameters__overwrite_deepspeed_args"
MUON = {f"{ARGS}__optimizer": "{type: Muon, params: {lr: 0.02, adam_lr: 0.002, momentum: 0.9}}"}
SHORT = overrides(
    hyperparameters__max_length="{batches: 4}", **{f"{ARGS}__scheduler__params__warmup_num_steps": 2}
)
RATES = np.logspace(-6, 1, find_lr.STEPS)


def curve(best: float) -> np.ndarray:
    """The losses of a network that learns from a hundredth of a rate on, and diverges above it."""
    steps = np.log10(RATES / best)
    return 2.3 - 1.5 / (1 + np.exp(-4 * (steps + 1))) + np.exp(np.clip(8 * (steps - 0.2), -50, 50))


@pytest.mark.parametrize("best", [1e-4, 3e-3, 0.5])
def test_the_rate_follows_the_curve_and_not_its_noise(best):
    noise = np.random.default_rng(0).normal(0, 0.05, find_lr.STEPS)
    rates = [find_lr.choose(RATES, curve(best) + n) for n in (0, noise, -noise)]
    assert max(rates) < 2 * min(rates)
    assert all(0.03 * best < rate < best for rate in rates)


@table(
    "losses, line",
    flat=(np.full(100, 2.3), "the loss does not fall at rates from"),
    rising=(2.3 + np.arange(100) / 50, "the loss does not fall at rates from"),
    few=(np.full(3, 2.3), "the loss is not finite after 3 steps"),
)
def test_a_curve_without_a_fall_has_no_rate(losses, line):
    with pytest.raises(TrainingStopped, match=line):
        find_lr.choose(RATES[: len(losses)], losses)


@table(
    "values, found",
    file=({}, {"lr": 0.5}),
    muon=(MUON, {"lr": 0.5, "adam_lr": 0.05}),
    peak=({f"{ARGS}__scheduler__params__warmup_max_lr": 0.1}, {"lr": 0.5}),
)
def test_a_rate_is_set_with_the_rates_that_follow_it(values, found):
    experiment = experiment_file.load("experiments/digits.yaml", overrides(**values)[1::2])
    before = json.dumps(experiment.hyperparameters)
    section = find_lr.with_rate(experiment.hyperparameters, 0.5)["overwrite_deepspeed_args"]
    assert {key: section["optimizer"]["params"][key] for key in found} == pytest.approx(found)
    assert section["scheduler"]["params"].get("warmup_max_lr", 0.5) == 0.5
    assert json.dumps(experiment.hyperparameters) == before


@pytest.mark.parametrize(
    "row",
    [(1, {}), (2, {**MUON, f"{ARGS}__zero_optimization__stage": 2, f"{ARGS}__gradient_clipping": 0})],
    ids=["adam", "muon zero2"],
)
def test_a_ramp_finds_a_rate_and_leaves_one_file(row, tmp_path, capsys):
    ranks, values = row
    more, folder = [*SHORT, *overrides(**values)], tmp_path / "found"
    made = run(
        ["train.py", *DIGITS, *more, "--find-lr", "--output", str(folder)],
        folder,
        processes=ranks if ranks > 1 else 0,
    )
    assert made.code == 0, made.stderr
    assert set(contents(folder)) == {find_lr.FOUND, find_lr.PLOT}
    (rate,) = map(float, re.findall(r"^rate: +(\S+),", made.stdout, re.M))
    assert 1e-4 < rate < 1
    launch = "torchrun --nproc-per-node 2" if ranks == 2 else "python3"
    assert f"train:   {launch} train.py --config {folder / find_lr.FOUND}" in made.stdout
    assert train.main(["--config", str(folder / find_lr.FOUND), "--check", "--slots", str(ranks)]) == 0
    resolved = json.loads(capsys.readouterr().out)["optimizer"]["params"]
    assert resolved["lr"] == pytest.approx(rate, rel=0.05)
    assert train.main([*DIGITS, "--find-lr", "--output", str(folder)]) == 2
    assert "found-lr.yaml: exists; give another folder" in capsys.readouterr().err


@table(
    "name, slots, command",
    classify=("classify", 1, "classify train --config"),
    of_classify=("/bin/classify train", 2, "torchrun --nproc-per-node 2 -m classify train --config"),
    script=("train.py", 1, "python3 train.py --config"),
)
def test_the_next_command_begins_as_the_users(name, slots, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    tune.write_experiment(tmp_path / "a b.yaml", {"name": "x"}, slots)
    assert capsys.readouterr().out == f"train:   {command} '{tmp_path}/a b.yaml'\n"


def test_a_found_file_trains_to_the_bits_of_its_rate(tmp_path):
    """The ramp leaves nothing behind: the file trains to the weights of the same rate given by hand."""
    experiment = experiment_file.load("experiments/digits.yaml", SHORT[1::2])
    found = find_lr.with_rate(experiment.hyperparameters, 0.004)
    (tmp_path / "file.json").write_text(json.dumps({**experiment.config, "hyperparameters": found}))
    rows = {"found": ["--config", str(tmp_path / "file.json")], "hand": [*DIGITS, *SHORT, "--lr", "0.004"]}
    one, other = train_many(tmp_path, rows).values()
    assert one.summary["weights_sha256"] == other.summary["weights_sha256"]
