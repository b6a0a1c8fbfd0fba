"""MLflow and Weights & Biases, both without a server: what they hold is what the run has reported, each once."""

import json
import math
import pathlib
import signal
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
from support import (
    DIGITS,
    LATEST,
    PROJECT,
    TIME_LIMIT,
    environment,
    execute,
    overrides,
    train_many,
    wait_for_checkpoint,
)

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("wandb")

SHORT = [
    *DIGITS,
    *overrides(
        hyperparameters__max_length="{batches: 400}",
        min_checkpoint_period="{batches: 20}",
        min_validation_period="{batches: 40}",
        scheduling_unit=5,
    ),
]
TRACKED = overrides(
    hyperparameters__track="[mlflow, wandb]", environment="{environment_variables: [PASSWORD=hidden]}"
)
BLOCK = 32768  # bytes of a .wandb file, which is a log of LevelDB's form


def in_mlflow(folder):
    """The runs in an MLflow database."""
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return client, client.search_runs([each.experiment_id for each in client.search_experiments()])


def histories(client, run):
    """Every value that MLflow has, by metric and step; fails where it has two."""
    found = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        assert len({each.step for each in history}) == len(history), f"{name}: a step twice"
        found.update({(name, each.step): each.value for each in history})
    return found


def in_wandb(file: pathlib.Path):
    """The records of a .wandb file, in order."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""  # after ":W&B", a number and the version
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if not kind:
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(parts)
            parts = b""
            yield record


def rows_of_wandb(file):
    rows = []
    for record in in_wandb(file):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append((record.history.step.num, items))
    return rows


def reported(metrics):
    """What metrics.jsonl has, by GROUP/NAME and step."""
    hidden = ("group", "steps_completed", "time")
    return {
        (f"{entry['group']}/{name}", entry["steps_completed"]): value
        for entry in metrics
        for name, value in entry.items()
        if name not in hidden
    }


def without_speed(values):
    return {key: value for key, value in values.items() if not key[0].endswith("_per_second")}


def test_one_record_however_often_a_run_is_stopped_and_killed(tmp_path):
    """Stopped by SIGTERM, killed by SIGKILL, ended: as metrics.jsonl, without a gap or a duplicate, in both."""
    output = tmp_path / "run"
    where: dict[str, Any] = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "WANDB_DIR": str(tmp_path),
    }
    in_mlflow(tmp_path)  # which sets the database up
    command = [sys.executable, str(PROJECT / "train.py"), *SHORT, *TRACKED, "--output", str(output)]
    statuses: list[str] = []
    for end in (signal.SIGTERM, signal.SIGKILL):
        resume = LATEST if statuses else []
        process = subprocess.Popen(
            [*command, *resume], cwd=PROJECT, env=environment(**where), stderr=subprocess.PIPE
        )
        wait_for_checkpoint(process, output)
        deadline, lines = time.monotonic() + TIME_LIMIT, len(reported_lines(output))
        while len(reported_lines(output)) < lines + 2:  # reports beyond the checkpoint
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(end)
        assert process.wait(TIME_LIMIT) == (130 if end == signal.SIGTERM else -signal.SIGKILL)
        statuses.append(in_mlflow(tmp_path)[1][0].info.status)
    assert statuses[0] == "KILLED"  # after SIGKILL it may not know yet that the run goes on
    last = execute([*command, *LATEST], output, **where)
    assert last.code == 0, last.stderr
    expected = reported(last.metrics)
    assert ("training/loss", 5) in expected and ("validation/accuracy/3", 400) in expected

    client, runs = in_mlflow(tmp_path)
    assert [run.info.status for run in runs] == ["FINISHED"] and runs[0].info.run_name.endswith("run")
    assert without_speed(histories(client, runs[0])) == without_speed(expected)
    assert histories(client, runs[0]).keys() == expected.keys()
    assert runs[0].data.params["hyperparameters.max_length.batches"] == "400"
    assert "hidden" not in f"{runs[0].data.params}{json.loads((output / 'run.json').read_text())['config']}"
    files = {"net.pt", "net.json", "summary.json", "metrics.jsonl", "run.json", "report.html"}
    assert {each.path for each in client.list_artifacts(runs[0].info.run_id)} == files

    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    rows = rows_of_wandb(file)
    assert [step for step, _ in rows] == sorted({entry["steps_completed"] for entry in last.metrics})
    assert {
        (name, step): value for step, row in rows for name, value in row.items() if name[0] != "_"
    } == expected
    assert {each.name for each in (folder / "files").iterdir()} >= files

    (plain,) = train_many(tmp_path, {"plain": SHORT}).values()
    assert plain.summary["weights_sha256"] == last.summary["weights_sha256"]


def reported_lines(output):
    file = output / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def test_a_tracker_that_fails_ends_no_training(tmp_path):
    """It is said once, and at the end what became of it; a resume gives it what it lacks. In a search, too."""
    in_mlflow(tmp_path)
    output, few = tmp_path / "run", overrides(hyperparameters__max_length="{batches: 20}", scheduling_unit=5)
    command = [sys.executable, "train.py", *DIGITS, *few, *overrides(hyperparameters__track="[mlflow]")]
    command += ["--output", str(output)]
    broken = execute(command, output, MLFLOW_TRACKING_URI="sqlite:////proc/none/mlflow.db")
    assert broken.code == 0 and math.isfinite(broken.summary["validation"]["loss"])
    notes = [line for line in broken.stderr.splitlines() if line.startswith("note: mlflow: ")]
    assert "fails, and is tried again while the training goes on (" in notes[0]
    assert notes[1:] == [
        "note: mlflow: has not taken everything; metrics.jsonl has it, and --resume latest gives it again"
    ]
    assert "Traceback" not in broken.stderr
    where = f"sqlite:///{tmp_path}/mlflow.db"
    again = execute([*command, *LATEST], output, MLFLOW_TRACKING_URI=where)
    assert again.code == 0, again.stderr
    client, (run,) = in_mlflow(tmp_path)
    assert histories(client, run) == reported(again.metrics)

    trials = tmp_path / "search"
    trials.mkdir()
    small = ["--set", "data.dataset=digits", "--set", "searcher.max_trials=2", "--output", str(trials), *few]
    command = [sys.executable, "search.py", "--config", "experiments/search-random.yaml", *small]
    command += [*overrides(hyperparameters__track="[mlflow]"), "--parallel", "2"]
    search = execute(command, trials, MLFLOW_TRACKING_URI=f"sqlite:///{trials}/mlflow.db")
    assert search.code == 0, search.stderr
    client, runs = in_mlflow(trials)
    assert sorted(run.info.run_name[-10:] for run in runs) == ["trials/000", "trials/001"]
    for run in runs:
        lines = reported_lines(trials / run.info.run_name[-10:])
        assert histories(client, run) == reported([json.loads(line) for line in lines])
