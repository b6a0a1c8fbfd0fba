"""What a trial takes from a Determined cluster, and what it gives back of a bad configuration."""

from typing import Any, cast

import determined as det
import pytest
from determined import _info

import engine_config
import experiment
import harness
from errors import InvalidInput

HPARAMS = {"max_length": {"epochs": 3}, "deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": {}}
CONFIG = {
    "searcher": {"name": "adaptive_asha", "metric": "loss", "smaller_is_better": True},
    "reproducibility": {"experiment_seed": 5},
    "min_validation_period": {"epochs": 1},
    "scheduling_unit": 50,
    "registry_auth": None,  # as the master fills fields in
}


@pytest.fixture
def cluster(monkeypatch):
    """A real ClusterInfo, as Determined reads it from its files in a trial's container."""

    def enter(hparams):
        trial = _info.TrialInfo(1, 2, 7, hparams, CONFIG, 0, 1, False, None)
        ids = {"cluster_id": "c", "agent_id": "a", "slot_ids": [0], "task_id": "t", "allocation_id": "t.0"}
        info = det.ClusterInfo(
            "http://localhost:8080",
            session_token="",
            task_type="TRIAL",
            trial_info=trial,
            latest_checkpoint="uuid",
            **ids,
        )
        monkeypatch.setattr(_info, "_info", info)

    return enter


def test_everything_comes_from_the_cluster(cluster):
    assert experiment.from_cluster() is None
    cluster(HPARAMS)
    loaded = experiment.from_cluster()
    assert loaded is not None
    assert loaded.hyperparameters == HPARAMS
    assert (loaded.max_length, loaded.metric, loaded.smaller_is_better) == (("epochs", 3), "loss", True)
    assert (loaded.seed, loaded.scheduling_unit) == (5, 50)
    assert loaded.period("min_validation_period") == ("epochs", 1)
    assert harness.checkpoint_to_resume(cast(Any, None), None) == "uuid"


@pytest.mark.parametrize("on_cluster", [False, True])
def test_a_combination_that_cannot_run_is_an_invalid_hyperparameter_set(cluster, capsys, on_cluster):
    """So the search goes on; off a cluster the same rule is an error with exit code 2."""
    if on_cluster:
        cluster(HPARAMS)
    hparams = {**HPARAMS, "pipe_parallel_size": 2, "overwrite_deepspeed_args": {"zero_optimization": {"stage": 2}}}
    with pytest.raises(det.InvalidHP if on_cluster else InvalidInput) as caught, harness.faults_end_the_trial():
        engine_config.resolve(hparams, 2, "cpu")
    assert "zero_optimization.stage: 2: a pipeline" in str(getattr(caught.value, "msg", caught.value))
    assert ("zero_optimization.stage" in capsys.readouterr().err) == on_cluster


def test_a_trial_without_a_length_is_refused(cluster):
    cluster({})
    with pytest.raises(InvalidInput, match=r"hyperparameters\.max_length"):
        experiment.from_cluster()
