"""The benchmarks time every contender and every program; their report holds the measurements."""

import types

import pytest
import torch

from benchmarks import costs, programs, report, steps, worker
from benchmarks.__main__ import main
from classify.config import experiment_file
from classify.engine.trial_config import TrialConfig
from deepspeed_trial import machine

DIGITS = ["data.dataset=digits"]


@pytest.fixture(scope="module")
def row():
    return steps.measure("const.yaml", DIGITS, processes=2, stage=2, micro_batch=16, repeats=3, seconds=0.1)


@pytest.fixture(scope="module")
def whole():
    warmup = "hyperparameters.overwrite_deepspeed_args.scheduler.params.cycle_first_step_size=20"
    return programs.measure([*DIGITS, "min_validation_period={batches: 20}", warmup], repeats=1)


@pytest.fixture(scope="module")
def other(image_folder):
    return costs.measure("const.yaml", ["data.dataset=imagefolder", f"data.root={image_folder}"], repeats=1)


@pytest.mark.soak
def test_every_contender_is_timed(row):
    assert set(row["rates"]) == set(steps.CONTENDERS)
    for name, rates in row["rates"].items():
        assert len(rates) == 3 and min(rates) > 0, name
        assert row["images_per_second"][name] == sorted(rates)[1]


@pytest.mark.soak
def test_the_rate_counts_the_trained_images():
    """The last step of an epoch has fewer images."""
    batch = "hyperparameters.overwrite_deepspeed_args.train_batch_size=1024"
    request = {"config": "const.yaml", "overrides": [*DIGITS, batch], "steps": 3}
    for name, images in {"trial": 1024 + 413 + 1024, "example": 3 * 1024}.items():
        with steps.contender(name, request, 1) as segment:
            assert segment()[0] == images, name


@pytest.mark.parametrize("asked", [[], ["hyperparameters.channels_last=false"]], ids=str)
def test_the_bare_loops_have_the_memory_format_of_the_trial(asked):
    experiment = experiment_file.load("const.yaml", [*DIGITS, *asked])
    config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, 1, "cpu")
    fetch = worker.fetch_from_memory(types.SimpleNamespace(device=torch.device("cpu")), config)
    form = torch.contiguous_format if asked else torch.channels_last
    for _ in range(2):
        images, labels = fetch()
        assert images.is_contiguous(memory_format=form) and len(images) == len(labels) == 16


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--repeats", "0"], ["--repeats: 0", "at least 1"]),
        (["--json", "/nowhere/results.json"], ["--json", "/nowhere/results.json"]),
        (["--config", "nothing.yaml"], ["--config", "nothing.yaml"]),
        (["--set", "data.dataset=mnist"], ["data.dataset", "'mnist'"]),
        (["--set", "data.augment={flip: true}"], ["data.augment", "remove it"]),
        (["--config", "experiments/moe.yaml"], ["hyperparameters.net", "remove it"]),
    ],
    ids=str,
)
def test_refusals_come_before_any_measurement(capsys, arguments, parts):
    digits = [] if "--set" in arguments else ["--set", "data.dataset=digits"]
    assert main([*digits, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and [part for part in parts if part not in captured.err] == []


@pytest.mark.soak
def test_every_program_reaches_an_accuracy_and_is_timed_from_its_start(whole):
    runs = programs.parsed(whole)
    assert set(runs) == set(programs.PEERS)
    for name, (each,) in runs.items():
        times = [seconds for seconds, _ in each.reached]
        assert times == sorted(times) and 0 < each.training < times[0] and times[-1] < each.seconds, name
        assert each.memory > 100 * 2**20, name
    assert programs.reached_by(runs, "trial") > 0.9 and programs.reached_by(runs, "plain loop") > 0.9
    assert len(runs["PyTorch tutorial"][0].reached) == len(runs["DeepSpeed tutorial"][0].reached) == 1
    for name in ("plain loop", "trial"):
        assert len(runs[name][0].reached) == 11, name  # 18 epochs of 12 steps: after every 20, and at the end


def test_the_first_validation_that_reaches_an_accuracy_gives_its_time():
    one, other = ([(5.0, 0.4), (7.0, 0.6), (9.0, 0.5)], [(6.0, 0.7)])
    runs = {"trial": [programs.Watched(10, one, 2.0), programs.Watched(10, other, 2.0)]}
    assert programs.times(runs, "trial", 0.55) == 6.5
    assert programs.times(runs, "trial", 0.55, since_training=True) == 4.5
    assert programs.times(runs, "trial", 0.65) is None


@pytest.mark.soak
def test_the_start_of_train_py_is_compared_with_its_libraries_alone(other):
    for each in other["start"]:
        assert set(each) == {"libraries", "imports", "first_step"}
        for imports, first_step in zip(each["imports"], each["first_step"], strict=True):
            assert 0 < imports < first_step
    assert "`python3 train.py` ends its imports after" in costs.start_line(other)


@pytest.mark.soak
def test_two_ranks_hold_the_decoded_images_once(other):
    held = other["images"]
    assert held["ranks"] == 2 and 0.9 < held["held"] / held["files"] < 1.1
    assert "1.0" in costs.lines(other)[-1]
    embedded = {**other, "images": {"ranks": 2, "held": 0, "files": 0}}
    assert "their own" in costs.lines(embedded)[-1]


@pytest.mark.soak
def test_the_results_hold_the_measurements(row, whole, other, tmp_path):
    measured = {"steps": [row], "programs": whole, "costs": other}
    report.write({"command": "c", "machine": machine.describe(), **measured}, tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    ratios = steps.ratios(row)
    assert list(ratios) == ["pytorch", "engine", "example"]
    assert "trial / pytorch | trial / engine | trial / example |" in text and "| 2 | 2 | 16 |" in text
    assert f"| {' | '.join(f'{ratio:.3f}' for ratio in ratios.values())} |" in text
    for line in (*programs.lines(whole), *costs.lines(other)):
        assert line in text
    assert (tmp_path / "results.png").stat().st_size > 5000
