"""The benchmark runs every contender for real, and its report holds what was measured."""

import argparse

import pytest

from benchmarks import __main__ as benchmarks


@pytest.fixture(scope="module")
def row():
    args = argparse.Namespace(config="const.yaml", overrides=["data.dataset=digits"])
    return benchmarks.measure(args, processes=2, stage=2, micro_batch=16, repeats=3, seconds=0.1)


def test_every_contender_is_timed(row):
    assert set(row["seconds_per_step"]) == set(benchmarks.CONTENDERS)
    for name, times in row["seconds_per_step"].items():
        assert len(times) == 3 and min(times) > 0, name
        assert row["images_per_second"][name] == pytest.approx(32 / sorted(times)[1])


def test_the_results_say_what_was_measured(row, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "__file__", str(tmp_path / "__main__.py"))
    benchmarks.write({"command": "c", "machine": benchmarks.machine.describe(), "repeats": 3, "rows": [row]})
    text = (tmp_path / "RESULTS.md").read_text()
    over_engine, over_example = benchmarks.ratios(row)
    assert f"| {over_engine:.3f} | {over_example:.2f} |" in text and "| 2 | 2 | 16 |" in text
    assert (tmp_path / "results.png").stat().st_size > 5000
