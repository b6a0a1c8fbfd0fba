"""MLflow and Weights & Biases, both without a server: each holds every report of the run once."""

import contextlib
import http.server
import json
import math
import pathlib
import signal
import sqlite3
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from support import DIGITS, LATEST, Run, overrides, run, started, time_limit, wait_until

from deepspeed_trial.experiment import Experiment
from deepspeed_trial.trackers.tracking import Tracking, tracked

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("wandb")

SHORT = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 20}", scheduling_unit=1)]
SHORT += overrides(min_checkpoint_period="{batches: 4}", min_validation_period="{batches: 10}")
BLOCK = 32768  # bytes of a .wandb file, which is a log of LevelDB's form
MISSING = "; metrics.jsonl has every report, and --resume latest sends the missing ones"
ENDS = [(None, False, "FINISHED"), (None, True, "KILLED"), (OSError(), True, "FAILED")]


@pytest.mark.parametrize(("error", "was_interrupted", "status"), ENDS)
def test_a_record_ends_as_its_run_ends(error, was_interrupted, status):
    ended: list[str] = []
    setattr(tracking := Tracking(), "finish", ended.append)  # noqa: B010
    with contextlib.suppress(OSError), tracked(tracking, None, lambda: was_interrupted):
        if error:
            raise error
    assert ended == [status]


def uri(folder) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def in_mlflow(folder):
    """The runs in an MLflow database."""
    client = mlflow.MlflowClient(uri(folder))
    return client, client.search_runs([each.experiment_id for each in client.search_experiments()])


def histories(client, run) -> dict[tuple[str, int], float]:
    """Every value in MLflow, by metric and step; none of them is there twice."""
    found = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        assert len({each.step for each in history}) == len(history), f"{name}: a step twice"
        found.update({(name, each.step): each.value for each in history})
    return found


def last_step(folder) -> int:
    """The last step whose loss MLflow has."""
    database = sqlite3.connect(f"{folder}/mlflow.db")
    return database.execute("select max(step) from metrics where key = 'training/loss'").fetchone()[0]


def rows_of_wandb(file: pathlib.Path) -> list[tuple[str, int, Any]]:
    """The reported values in a .wandb file, in order."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, rows = file.read_bytes(), 7, b"", []  # after ":W&B", a number and the version
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
            if record.WhichOneof("record_type") == "history":
                for each in record.history.item:
                    name = each.key or "/".join(each.nested_key)
                    rows.append((name, record.history.step.num, json.loads(each.value_json)))
    return rows


def reported(metrics) -> dict[tuple[str, int], float]:
    """The values in metrics.jsonl, by GROUP/NAME and step."""
    hidden = ("group", "steps_completed", "time")
    return {
        (f"{entry['group']}/{name}", entry["steps_completed"]): value
        for entry in metrics
        for name, value in entry.items()
        if name not in hidden
    }


@pytest.mark.parametrize("ends", ["KILL", pytest.param("TERM KILL KILL", marks=pytest.mark.soak)])
def test_one_record_however_often_a_run_is_stopped_and_killed(tmp_path, ends):
    """Both records are metrics.jsonl, without a gap or a duplicate."""
    where: dict[str, Any] = {"MLFLOW_TRACKING_URI": uri(tmp_path), "WANDB_DIR": str(tmp_path)}
    in_mlflow(tmp_path)  # set the database up
    output, resume, step = tmp_path / "run", list[str](), 6
    row = [*SHORT, *overrides(environment="{environment_variables: [PASSWORD=planted_variable]}")]
    row += overrides(
        data__storage="{headers: {Authorization: planted_authorization}}", description="http://planted_@host"
    )
    row += [*overrides(hyperparameters__track="[mlflow, wandb]"), "--output", str(output)]
    for end in ends.split():
        fault: dict[str, Any] = {"FAULT": "data" if end == "KILL" else "SIGTERM", "RANK_AT_FAULT": "0"}
        with started(["tests/faulty.py", *row, *resume], STEP=str(step), **fault, **where) as program:
            if end == "KILL":  # once MLflow has a report that no checkpoint has
                wait_until(lambda last=step - 1: last_step(tmp_path) == last, program)  # type: ignore[misc]
                program.send_signal(signal.SIGKILL)
            assert program.wait(time_limit()) == (-signal.SIGKILL if end == "KILL" else 130)
        assert end == "KILL" or in_mlflow(tmp_path)[1][0].info.status == "KILLED"
        resume, step = LATEST, step + 4
    last = run(["train.py", *row, *LATEST], output, **where)
    assert last.code == 0, last.stderr
    expected = reported(last.metrics)
    assert ("training/loss", 5) in expected and ("validation/accuracy/3", 20) in expected

    client, runs = in_mlflow(tmp_path)
    assert [run.info.status for run in runs] == ["FINISHED"] and runs[0].info.run_name.endswith("run")
    record = histories(client, runs[0])
    assert record.keys() == expected.keys()
    assert all(record[key] == value for key, value in expected.items() if not key[0].endswith("_per_second"))
    assert runs[0].data.params["hyperparameters.max_length.batches"] == "20"
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"planted_" not in file.read_bytes(), f"{file}: a credential"
    files = {"net.pt", "net.json", "summary.json", "metrics.jsonl", "run.json", "report.html"}
    assert {each.path for each in client.list_artifacts(runs[0].info.run_id)} == files

    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    rows = [row for row in rows_of_wandb(file) if row[0][0] != "_"]
    assert {(name, step): value for name, step, value in rows} == expected and len(rows) == len(expected)
    assert [step for _, step, _ in rows] == sorted(step for _, step, _ in rows)
    assert {each.name for each in (folder / "files").iterdir()} >= files

    plain = run(["train.py", *SHORT, "--output", str(tmp_path / "plain")], tmp_path / "plain")
    assert plain.summary["weights_sha256"] == last.summary["weights_sha256"]


@contextlib.contextmanager
def mlflow_server() -> Iterator[tuple[str, threading.Event]]:
    """Answer the requests of a new run until the event is set; afterwards answer no request."""
    is_silent, is_over = threading.Event(), threading.Event()
    answers = {
        "get-by-name": {"experiment": {"experiment_id": "1", "name": "deepspeed-trials"}},
        "create": {"run": {"info": {"run_id": "1", "experiment_id": "1"}, "data": {}}},
        "update": {"run_info": {"run_id": "1"}},
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if is_silent.is_set():
                is_over.wait()
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps(answers.get(self.path.partition("?")[0].rpartition("/")[2], {})).encode()
            with contextlib.suppress(OSError):  # the client has given up
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", is_silent
        finally:
            is_over.set()
            server.shutdown()


@pytest.mark.parametrize("when", ["never", "before the start", "during the training"])
def test_a_server_that_does_not_answer_delays_no_report(when, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking = Tracking(Experiment({}, {"track": ["mlflow"]}), key=uuid.uuid4().hex, name="run")
    with mlflow_server() as (url, is_silent):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        if when == "before the start":
            is_silent.set()
        tracking.start([])
        if when == "during the training":
            is_silent.set()
        begin = time.monotonic()
        for step in range(100):
            tracking.log("training", step, {"loss": 1.0})
        assert time.monotonic() - begin < 50  # a wait for each answer takes 100 s
        tracking.finish("FINISHED")
    notes = capsys.readouterr().err.splitlines()
    assert [note.endswith(MISSING) for note in notes] == [True] * (when != "never"), notes


@pytest.mark.soak
def test_a_tracker_that_fails_ends_no_training(tmp_path):
    """One line names the tracker; a resume sends it everything. In a search, every trial has a run."""
    in_mlflow(tmp_path)
    output = tmp_path / "run"
    few = overrides(hyperparameters__max_length="{batches: 20}", scheduling_unit=5)
    few += overrides(hyperparameters__track="[mlflow]")
    row = ["train.py", *DIGITS, *few, "--output", str(output)]
    broken = run(row, output, MLFLOW_TRACKING_URI="sqlite:////proc/none/mlflow.db")
    assert broken.code == 0 and math.isfinite(broken.summary["validation"]["loss"])
    notes = [line for line in broken.stderr.splitlines() if line.startswith("note: mlflow: ")]
    assert len(notes) == 1 and notes[0].endswith(MISSING)
    assert "Traceback" not in broken.stderr
    again = run([*row, *LATEST], output, MLFLOW_TRACKING_URI=uri(tmp_path))
    assert again.code == 0, again.stderr
    client, (record,) = in_mlflow(tmp_path)
    assert histories(client, record) == reported(again.metrics)

    (trials := tmp_path / "search").mkdir()
    small = [*few, *overrides(data__dataset="digits", searcher__max_trials=2), "--output", str(trials)]
    command = ["search.py", "--config", "experiments/search-random.yaml", *small, "--parallel", "2"]
    search = run(command, trials, MLFLOW_TRACKING_URI=uri(trials))
    assert search.code == 0, search.stderr
    client, runs = in_mlflow(trials)
    assert sorted(each.info.run_name[-10:] for each in runs) == ["trials/000", "trials/001"]
    for each in runs:
        of_trial = Run(0, "", "", trials / each.info.run_name[-10:])
        assert histories(client, each) == reported(of_trial.metrics)
