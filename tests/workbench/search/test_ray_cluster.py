"""Searches on Ray: bad input, and a cluster of two nodes on this machine that loses one."""

import csv
import importlib.util
import json
import pathlib
import secrets
import sys
import tempfile

import psutil
import pytest
from folders import table
from support import PROJECT, environment, execute, free_port, overrides, started, wait_until

import search

LR = "hyperparameters__overwrite_deepspeed_args__optimizer__params__lr"
CONFIG = ["--config", str(PROJECT / "experiments/search-grid.yaml")]
CHANGES = overrides(
    data__dataset="digits",
    hyperparameters__overwrite_deepspeed_args__zero_optimization__stage=0,
    hyperparameters__overwrite_deepspeed_args__scheduler__params__warmup_num_steps=5,
    hyperparameters__max_length="{batches: 200}",
    min_validation_period="{batches: 50}",
    min_checkpoint_period="{batches: 50}",
    **{LR: "{type: categorical, vals: [0.001, 0.002, 0.003]}"},
)


@table(
    "address, line",
    refused=(
        "127.0.0.1:PORT",
        "RAY_ADDRESS: 127.0.0.1:PORT: no Ray cluster answers ([Errno 111] Connection refused); give",
    ),
    no_port=("10.0.0.1", "RAY_ADDRESS: 10.0.0.1: no Ray cluster answers (invalid literal"),
    large_port=("127.0.0.1:99999", "RAY_ADDRESS: 127.0.0.1:99999: no Ray cluster answers ("),
    client=("ray://127.0.0.1:10001", "RAY_ADDRESS: ray://127.0.0.1:10001: is for Ray's remote client; give"),
)
def test_a_bad_address_is_one_line(address, line, tmp_path, monkeypatch, capsys):
    port = str(free_port())
    monkeypatch.setenv("RAY_ADDRESS", address.replace("PORT", port))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert search.main([*CONFIG, *CHANGES, "--on", "ray", "--output", str(tmp_path / "search")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"search.py: {line.replace('PORT', port)}") and said.count("\n") == 1
    assert not (tmp_path / "search").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert search.main([*CONFIG, *CHANGES, "--on", "ray", "--output", str(tmp_path / "search")]) == 2
    assert capsys.readouterr().err == "search.py: --on: ray: needs the package ray; pip install ray\n"
    arguments = [*CONFIG, *CHANGES, "--set", "max_restarts=-1", "--on", "ray"]
    assert search.main([*arguments, "--output", str(tmp_path / "search")]) == 2
    assert "max_restarts: -1: must be a whole number of at least 0" in capsys.readouterr().err


def rows(output: pathlib.Path) -> list[dict[str, str]]:
    """A search's trials without their times."""
    with open(output / "trials.csv") as file:
        times = ("images_per_second", "seconds")
        return [{key: row[key] for key in row if key not in times} for row in csv.DictReader(file)]


def weights(output: pathlib.Path) -> list[str]:
    files = sorted(output.glob("trials/*/summary.json"))
    return [json.loads(file.read_text())["weights_sha256"] for file in files]


@pytest.fixture
def ray_environment(tmp_path, monkeypatch):
    """Variables of Ray's processes: a token, and a folder with a short name, which sockets need."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        variables = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **token}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield variables


@pytest.mark.soak
def test_a_trial_of_a_lost_node_resumes_on_another_to_the_same_bits(tmp_path, ray_environment):
    alone, output = tmp_path / "alone", tmp_path / "search"
    made = execute([sys.executable, "search.py", *CONFIG, *CHANGES, "--output", str(alone)], alone)
    assert made.code == 0, made.stderr
    from ray.cluster_utils import Cluster  # after the variables

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = {cluster.add_node(num_cpus=1) for _ in range(2)}
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
        arguments = [
            "search.py",
            *CONFIG,
            *CHANGES,
            "--on",
            "ray",
            "--parallel",
            "1",
            "--output",
            str(output),
        ]
        with started(arguments, RAY_ADDRESS=cluster.address) as program:
            wait_until(lambda: list(output.glob("trials/001/checkpoints/[!.]*/metadata.json")), program)
            (lost,) = (pid for pid in raylets if _trains(pid))
            tree = [psutil.Process(lost), *psutil.Process(lost).children(recursive=True)]
            for process in tree:
                process.suspend()  # so that no process sees the end of another
            for process in tree:
                process.kill()
            assert program.wait(600) == 0, program.stderr
            assert "search.py: note: trial 1: lost " in program.stderr
            assert "raylet" not in program.stdout and program.stderr.count("\n") == 1
    finally:
        cluster.shutdown()
    assert rows(output) == rows(alone) and len(rows(output)) == 3
    assert weights(output) == weights(alone) and len(weights(output)) == 3
    assert (output / "trials/001.log").read_text().count("starting: ") == 2
    assert (output / "trials/000.log").read_text().count("starting: ") == 1


def _trains(pid: int) -> bool:
    return any(
        "train.py" in " ".join(child.cmdline()) for child in psutil.Process(pid).children(recursive=True)
    )


@pytest.mark.soak
def test_a_local_ray_listens_on_the_loopback_alone(tmp_path, ray_environment):
    output = tmp_path / "search"
    program = psutil.Popen(
        [sys.executable, "search.py", *CONFIG, *CHANGES, "--on", "ray", "--output", str(output)],
        cwd=PROJECT,
        env=environment(RAY_ADDRESS="local"),
    )
    try:
        wait_until(lambda: list(output.glob("trials/000/checkpoints/[!.]*/metadata.json")), program)
        processes = [program, *program.children(recursive=True)]
        sockets = [each for process in processes for each in process.net_connections("inet")]
        listening = {each.laddr.ip for each in sockets if each.status == "LISTEN"}
        assert listening and listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        program.terminate()
        assert program.wait(120) == 130
        assert "stopped with a checkpoint" in (output / "trials/000.log").read_text()
    finally:
        for process in [*program.children(recursive=True), program] if program.is_running() else []:
            process.kill()
