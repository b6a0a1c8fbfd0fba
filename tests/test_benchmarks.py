"""The benchmark runs every contender and every program for real, and its report holds what was measured."""

import pytest

import machine
from benchmarks import costs, programs, report, steps

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


def test_every_contender_is_timed(row):
    assert set(row["seconds_per_step"]) == set(steps.CONTENDERS)
    for name, times in row["seconds_per_step"].items():
        assert len(times) == 3 and min(times) > 0, name
        assert row["images_per_second"][name] == pytest.approx(32 / sorted(times)[1])


def test_every_program_reaches_an_accuracy_and_is_timed_from_its_start(whole):
    runs = programs.parsed(whole)
    assert set(runs) == set(programs.PEERS)
    for name, (each,) in runs.items():
        times = [seconds for seconds, _ in each.reached]
        assert times == sorted(times) and 0 < each.training < times[0] and times[-1] < each.seconds, name
        assert each.memory > 100 * 2**20, name
    assert programs.reached_by(runs, "trial") > 0.9 and programs.reached_by(runs, "plain loop") > 0.9
    assert len(runs["PyTorch tutorial"][0].reached) == len(runs["DeepSpeed tutorial"][0].reached) == 1


def test_time_to_an_accuracy_is_that_of_the_first_validation_with_it():
    one, other = ([(5.0, 0.4), (7.0, 0.6), (9.0, 0.5)], [(6.0, 0.7)])
    runs = {"trial": [programs.Watched(10, one, 2.0), programs.Watched(10, other, 2.0)]}
    assert programs.times(runs, "trial", 0.55) == 6.5
    assert programs.times(runs, "trial", 0.55, since_training=True) == 4.5
    assert programs.times(runs, "trial", 0.65) is None


def test_two_ranks_hold_the_decoded_images_once(other):
    held = other["images"]
    assert held["ranks"] == 2 and 0.9 < held["held"] / held["files"] < 1.1


def test_the_results_say_what_was_measured(row, whole, other, tmp_path):
    results = {"command": "c", "machine": machine.describe(), "steps": [row], "programs": whole, "costs": other}
    report.write(results, tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    over_engine, over_example = steps.ratios(row)
    assert f"| {over_engine:.3f} | {over_example:.2f} |" in text and "| 2 | 2 | 16 |" in text
    for line in (*programs.lines(whole), *costs.lines(other)):
        assert line in text
    assert (tmp_path / "results.png").stat().st_size > 5000
