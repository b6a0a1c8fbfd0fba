"""A trial on a Determined cluster: real launch layer, real core context, and a stand-in for the master over HTTP."""

import json
import os
from typing import Any, cast

import determined as det
import mlflow
import pytest
import torch
from containers import SMALL, run_container
from determined import _info, core
from master import Master
from support import DIGITS

import checkpoint
from classify.engine.trial_config import TrialConfig
from classify.models import state_dicts
from harness.cluster import cluster_experiment, errors_end_the_trial, leaves_once_reported
from harness.errors import InvalidInput
from harness.trainer import find_checkpoint

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
    assert cluster_experiment() is None
    cluster(HPARAMS)
    loaded = cluster_experiment()
    assert loaded is not None
    assert loaded.hyperparameters == HPARAMS
    assert (loaded.max_length, loaded.metric, loaded.smaller_is_better) == (("epochs", 3), "loss", True)
    assert (loaded.seed, loaded.scheduling_unit) == (5, 50)
    assert loaded.period("min_validation_period") == ("epochs", 1)
    assert find_checkpoint(cast(Any, None), None) == "uuid"


@pytest.mark.parametrize("on_cluster", [False, True])
def test_a_combination_that_cannot_run_is_an_invalid_hyperparameter_set(cluster, capsys, on_cluster):
    """So the search goes on; off a cluster the same rule is an error with exit code 2."""
    if on_cluster:
        cluster(HPARAMS)
    hparams = {
        **HPARAMS,
        "pipe_parallel_size": 2,
        "overwrite_deepspeed_args": {"zero_optimization": {"stage": 2}},
    }
    with (
        pytest.raises(det.InvalidHP if on_cluster else InvalidInput) as caught,
        errors_end_the_trial(),
    ):
        TrialConfig.resolve(hparams, {"data": {"dataset": "digits"}}, 2, "cpu")
    assert "zero_optimization.stage: 2: a pipeline" in str(getattr(caught.value, "msg", caught.value))
    assert ("zero_optimization.stage" in capsys.readouterr().err) == on_cluster


class Gone(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "end"), [(det.InvalidHP("batch"), Gone), (SystemExit(3), SystemExit), (OSError(), OSError)]
)
def test_nothing_follows_the_report_of_invalid_hyperparameters(monkeypatch, tmp_path, error, end):
    """The master kills a container that is still there 10 seconds later, and shows the trial as canceled."""

    def leave(code):
        assert code == 0
        raise Gone

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(end), leaves_once_reported(), core.init(checkpoint_storage=str(tmp_path)):
        raise error


@pytest.mark.parametrize("slots", [1, 2])
def test_a_trial_on_a_cluster(tmp_path, train, slots, monkeypatch):
    """Runs, reports, and gives the weights that it gives off a cluster.

    In two slots it also is paused, goes on from its checkpoint, and ends as if never paused; MLflow has it as one run.
    """
    with Master() as master:
        straight = run_container(tmp_path / "straight", master, slots, SMALL)
    assert straight.code == 0, straight.stderr
    validations = master.metrics("validation")
    assert list(validations) == [40, 80, 90]
    assert validations[90]["images"] == 360 and validations[90]["accuracy"] > 0.5
    assert all(isinstance(value, (int, float)) for each in validations.values() for value in each.values())
    epoch = 45  # at whose end metrics are reported, too
    assert list(master.metrics("training")) == sorted([*range(10, 100, 10), epoch])
    progress = [body["progress"] if isinstance(body, dict) else body for body in master.bodies("/progress")]
    assert progress[-1] == 1 and progress == sorted(progress)
    saved = master.bodies("/checkpoints")[-1]
    assert saved["metadata"]["steps_completed"] == 90
    files = {f"det_state_dict_rank{rank}.pth" for rank in range(slots)} | {
        "trial_state.pkl",
        "net.pt",
        "net.json",
        "code/",
    }
    assert files <= set(saved["resources"])
    stored = tmp_path / "straight/shared/checkpoints" / saved["uuid"]  # as `det checkpoint download` gives it
    assert checkpoint.main(["export", str(stored), str(tmp_path / "net.pt")]) == 0
    assert json.loads((tmp_path / "net.json").read_text())["provenance"]["steps"] == 90
    assert any("tfevents" in str(path) for path in (tmp_path / "straight/shared").rglob("*"))
    assert "Reported checkpoint" in straight.stderr + straight.stdout
    assert "[rank=1] INFO" not in straight.stderr + straight.stdout
    here = train(*DIGITS, "--set", f"hyperparameters={json.dumps(SMALL)}", processes=slots)
    weights = torch.load(stored / "net.pt", weights_only=True)
    assert state_dicts.sha256(weights) == here.summary["weights_sha256"]
    if slots == 1:
        return

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    tracked = {**SMALL, "track": ["mlflow"]}
    with Master() as master:
        master.preempt_after_steps = 20
        paused = run_container(tmp_path / "paused", master, slots, tracked)
    assert paused.code == 0, paused.stderr
    before = master.metrics("training")
    experiments = [each.experiment_id for each in client.search_experiments()]
    assert [run.info.status for run in client.search_runs(experiments)] == ["KILLED"]
    assert master.bodies("/signals/ack_preemption")
    saved = master.bodies("/checkpoints")[-1]
    steps = saved["metadata"]["steps_completed"]
    assert 20 <= steps < 90
    with Master() as master:
        again = {"latest_checkpoint": saved["uuid"], "steps_completed": steps, "trial_run_id": 2}
        rest = run_container(tmp_path / "paused", master, slots, tracked, **again)
    assert rest.code == 0, rest.stderr
    (run,) = client.search_runs(experiments)
    recorded = client.get_metric_history(run.info.run_id, "training/loss")
    assert run.info.status == "FINISHED"
    assert [each.step for each in recorded] == [*before, *master.metrics("training")]
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"net.pt", "net.json"}
    assert min(master.metrics("training")) > steps
    for each in (validations, again := master.metrics("validation")):
        assert each[90].pop("images_per_second") > 0
    assert again[90] == validations[90]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_trial_that_its_search_stops(tmp_path, slots):
    """The master marks the trial and tells it nothing; it ends with a checkpoint, and is not to be restarted."""
    searcher = {"name": "adaptive_asha", "metric": "accuracy", "smaller_is_better": False, "max_trials": 4}
    with Master() as master:
        master.stop_after_steps = 80
        run = run_container(tmp_path / "trial", master, slots, SMALL, config={"searcher": searcher})
    assert run.code == 0, run.stderr
    assert list(master.metrics("validation")) == [40, 80] and max(master.metrics("training")) == 80
    assert master.bodies("/checkpoints")[-1]["metadata"]["steps_completed"] == 80
    assert not master.bodies("/signals/ack_preemption") and not master.bodies("/early_exit")
    assert "the search has stopped this trial after step 80" in run.stderr


# What the master lets pass, and the one line in the trial's log.
WRONG: dict[str, Any] = {
    "no length": ({**SMALL, "max_length": None}, 1, "hyperparameters.max_length: None: must be"),
    "batch": (
        {**SMALL, "overwrite_deepspeed_args": {"train_batch_size": 15}},
        2,
        "train_batch_size: 15: does not divide among 2 processes; use 14 or 16",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_trial_ends_at_once_as_invalid(tmp_path, case):
    """The master is told, so that it neither restarts the trial nor ends the search."""
    hparams, slots, line = WRONG[case]
    with Master() as master:
        run = run_container(tmp_path / "trial", master, slots, hparams)
    assert line in run.stderr + run.stdout
    reasons = [body for path, body in master.posted if "early_exit" in path]
    assert reasons and "INVALID_HP" in json.dumps(reasons[0])
    assert not master.bodies("/checkpoints")


def test_the_test_at_the_end_is_a_group_of_its_own(tmp_path):
    """Where validation images are held out the master judges by those; those of the test come once, as `test`."""
    config = {"data": {"dataset": "digits", "validation": 0.2}}
    with Master() as master:
        run = run_container(tmp_path, master, 1, {**SMALL, "max_length": {"batches": 50}}, config=config)
    assert run.code == 0, run.stderr
    validations, (tested,) = master.metrics("validation"), master.metrics("test").items()
    assert [*validations] == [40, 50] and tested[0] == 50
    assert {each["images"] for each in validations.values()} == {287} and tested[1]["images"] == 360
    assert 0 < tested[1]["accuracy"] < 1 and tested[1]["loss"] != validations[50]["loss"]
