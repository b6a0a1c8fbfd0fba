"""Networks that torch.compile compiles: their code, its cache, and the refusals."""

from typing import Any

import deepspeed
import pytest
import torch
from matrix import ROWS, train
from support import DIGITS, LATEST

from train import main

COMPILED = ["hyperparameters.compile=true"]
BAD = {
    "no switch": (["hyperparameters.compile=max"], 1, "'max': must be true or false"),
    "DeepSpeed's section": (["hyperparameters.compile={deepcompile: true}"], 1, "under overwrite_deepspeed_args"),
    "stage 3": ([*COMPILED, "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage=3"], 1, "True: DeepSpeed's hooks of ZeRO stage 3"),
    "a pipeline": ([*COMPILED, "hyperparameters.pipe_parallel_size=2"], 2, "True: does not work with a pipeline"),
    "experts": ([*COMPILED, "hyperparameters.net=net-moe"], 1, "True: does not work with experts"),
    "recomputed blocks": ([*COMPILED, "hyperparameters.net=resnet18", "hyperparameters.checkpoint_activations=true"], 1, "True: does not work with checkpoint_activations"),
}  # fmt: skip


def refusal(capsys, changes, slots=1):
    """Return the only error line of a check."""
    sets = [part for change in changes for part in ("--set", change)]
    assert main([*DIGITS, *sets, "--check", "--slots", str(slots)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "note: " not in line]
    return line


@pytest.mark.parametrize("case", BAD)
def test_a_combination_that_cannot_be_compiled_is_one_line(capsys, case):
    changes, slots, reason = BAD[case]
    line = refusal(capsys, changes, slots)
    assert line.startswith("train.py: hyperparameters.compile: ") and reason in line


def test_a_machine_without_a_compiler_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "compile: True: there is no C++ compiler 'no-such-compiler' here" in refusal(capsys, COMPILED)


def test_a_release_of_deepspeed_that_cannot_compile_is_one_line(capsys, monkeypatch):
    monkeypatch.delattr(deepspeed.DeepSpeedEngine, "compile")
    assert f"compile: True: DeepSpeed {deepspeed.__version__} cannot compile;" in refusal(capsys, COMPILED)


@pytest.mark.soak
def test_two_ranks_share_a_new_cache_and_a_resume_with_another_has_the_same_bits(tmp_path, monkeypatch):
    row = ROWS["compiled zero2"]
    fault: Any = {"FAULT": "SIGTERM", "RANK_AT_FAULT": "1", "STEP": "4"}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    straight, stopped = train(row, 2, tmp_path / "one", {}), train(row, 2, tmp_path / "two", {}, **fault)
    assert (straight.code, stopped.code) == (0, 130), straight.stderr + stopped.stderr
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other_cache"))
    resumed = train(row, 2, tmp_path / "two", {}, (*LATEST,))
    assert resumed.code == 0, resumed.stderr
    assert resumed.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert all([*(tmp_path / name).rglob("*.so")] for name in ("cache", "other_cache")), (
        "nothing was compiled"
    )
    assert not any("_orig_mod" in name for name in torch.load(tmp_path / "one/net.pt", weights_only=True))
