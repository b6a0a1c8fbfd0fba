"""The seed of a trial, and the determinism of GPUs; no test runs on one."""

import pytest
import torch

from deepspeed_trial.random_state import seed_everything


@pytest.mark.parametrize("has_gpu", [True, False])
def test_only_a_gpu_gets_deterministic_operations(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    try:
        seed_everything(3)
        first = torch.rand(4)
        assert torch.is_deterministic_algorithms_warn_only_enabled() == has_gpu
        assert torch.utils.deterministic.fill_uninitialized_memory != has_gpu  # type: ignore[attr-defined]
        seed_everything(3)
        assert torch.equal(torch.rand(4), first)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
