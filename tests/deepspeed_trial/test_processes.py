"""Processes: their launchers, cores and ports, Determined's stock trainer, and a checkpoint's code."""

import json
import os
import shutil
import socket
import sys
from typing import Any

import pytest
from support import DIGITS, PROJECT, TWO, execute, free_port, launcher, overrides, run

from deepspeed_trial.processes import joblib, threads_per_process


@pytest.mark.parametrize(("by", "chosen", "threads"), [("torchrun", None, 4), ("deepspeed", "2", 2)])
def test_a_launcher_s_processes_share_the_cores_and_listen_on_the_loopback_alone(
    tmp_path, monkeypatch, by, chosen, threads
):
    """Each of two has half of the eight cores, unless OMP_NUM_THREADS says otherwise."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    output = tmp_path / "run"
    env: dict[str, Any] = {"PYTHONPATH": str(PROJECT), "FOUND": str(tmp_path / "found")}
    env |= {"OMP_NUM_THREADS": chosen} if chosen else {}
    done = execute([*launcher(by, 2), "tests/listening.py", *TWO, "--output", str(output)], output, **env)
    assert done.code == 0, done.stderr
    assert (done.summary["world_size"], done.summary["validation"]["images"]) == (2, 360)
    found = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in (0, 1)]
    assert [each["threads"] for each in found] == [threads] * 2
    assert [{address for address, _ in each["listening"]} for each in found] == [{"127.0.0.1"}] * 2


@pytest.mark.parametrize(
    ("chosen", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "7"}, "PASSIVE")],
)
def test_threads_sleep_while_they_wait_unless_the_environment_says_otherwise(tmp_path, chosen, policy):
    """OpenMP says what it has read."""
    done = execute(
        [sys.executable, "-c", "import deepspeed_trial"], tmp_path, OMP_DISPLAY_ENV="verbose", **chosen
    )
    assert done.code == 0 and f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
    assert ("GOMP_SPINCOUNT = '7'" in done.stderr) == ("GOMP_SPINCOUNT" in chosen)


def test_a_port_in_use_is_one_line(tmp_path):
    """Rank 0 of a launcher without a store listens at the port itself."""
    output = tmp_path / "run"
    rank: dict[str, Any] = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        refused = run(["train.py", *DIGITS, "--output", str(output)], output, **rank)
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"train.py: --master_port: {port}: in use") and "another port" in line
    assert refused.code == 2 and not output.exists()


IN_A_PACKAGE = """
import pathlib, sys, train
from classify.engine import hooks
hooks.PROJECT = pathlib.Path.cwd()
sys.exit(train.main(sys.argv[1:]))
"""


def test_runs_and_images_in_the_package_stay_out_of_a_checkpoint_s_code(tmp_path, image_folder):
    """.detignore names only some of their folders, and a checkpoint must not hold itself."""
    for file in ("model_def.py", "ds_config.json", ".detignore"):
        shutil.copy(PROJECT / file, tmp_path)
    shutil.copytree(image_folder, tmp_path / "photos")
    for folder in ("earlier", "runs/another"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "run.json").touch()
    (tmp_path / "dangling").symlink_to("nothing")
    config = ["--config", str(PROJECT / "experiments/digits.yaml")]
    data = overrides(
        data__dataset="imagefolder", data__root="photos", hyperparameters__max_length="{batches: 1}"
    )
    arguments = [*config, *data, "--output", "results/mine"]
    done = run(["-c", IN_A_PACKAGE, *arguments], tmp_path / "results/mine", cwd=tmp_path)
    assert done.code == 0, done.stderr
    (code,) = done.output.glob("checkpoints/*/code")
    assert {path.name for path in code.iterdir()} == {"model_def.py", "ds_config.json", "results"}
    assert not list((code / "results").iterdir())


WAITS = """
import sys, train
from deepspeed.accelerator import get_accelerator
waits, timers = [], "hyperparameters.overwrite_deepspeed_args.timers.throughput.enabled=true"
get_accelerator().synchronize = lambda *_: waits.append(1)
for more in [], ["--set", timers]:
    assert train.main(sys.argv[2:] + [*more, "--output", f"{sys.argv[1]}{len(more)}"]) == 0
    print("waits", len(waits))
"""


def test_steps_do_not_wait_for_the_device(tmp_path):
    """DeepSpeed's own timers do, if the user asks for them."""
    arguments = overrides(hyperparameters__max_length="{batches: 60}", scheduling_unit=60)
    done = run(["-c", WAITS, str(tmp_path / "run"), *DIGITS, *arguments], tmp_path)
    assert done.code == 0, done.stderr
    waits = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("waits")]
    assert waits[0] < 10 and waits[1] > 100


STOCK = """
import deepspeed
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from line_trial import train_on_a_cpu
from model_def import CIFARTrial

train_on_a_cpu(det_ds)

deepspeed.init_distributed()
hparams = {"deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": {"gradient_clipping": 0.5}}
with det_ds.init(hparams=hparams, exp_conf={"data": {"dataset": "digits"}}) as context:
    trial = CIFARTrial(context)
    assert trial.model_engine.gradient_clipping() == 0.5
    det_ds.Trainer(trial, context).fit(max_length=pytorch.Batch(3), checkpoint_policy="none")
    print("trained", trial.model_engine.global_steps, "batches")
"""


def test_determined_s_own_context_and_trainer_run_the_trial(tmp_path):
    """The trial needs only the interface in Determined's guide; on a CPU the context lacks a device."""
    done = run(["-c", STOCK], tmp_path, processes=1, cwd=tmp_path, PYTHONPATH=str(PROJECT))
    assert done.code == 0, done.stderr
    assert "trained 3 batches" in done.stdout


def test_a_process_bound_to_its_cores_uses_all_of_them(monkeypatch):
    mine, launchers = set(range(16)), set(range(16))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: launchers if pid else mine)
    monkeypatch.setattr(joblib, "cpu_count", lambda: len(mine))
    assert [threads_per_process(each) for each in (1, 2, 4, 32)] == [16, 8, 4, 1]
    mine = set(range(8))  # of 16: alone in them, or one of several
    assert [threads_per_process(each) for each in (1, 2, 4)] == [8, 8, 4]
    launchers = mine  # in a container with 8 of the host's cores
    assert [threads_per_process(each) for each in (1, 2, 4)] == [8, 4, 2]


REPLACED = """
import os, sys
rank = os.environ["RANK"]
os.environ |= {"MASTER_PORT": sys.argv[1], "TORCHELASTIC_USE_AGENT_STORE": "False"}
os.environ["TORCHELASTIC_RESTART_COUNT"] = "01"[rank == "0"]
from deepspeed_trial.processes import join_local_processes
ranks = join_local_processes(60)
assert ranks.allgather(rank) == ["0", "1"]
ranks.close()
"""


def test_a_replaced_host_meets_the_one_that_has_restarted(tmp_path):
    """torchrun on the new host counts from 0; with its own store, each start of the ranks has a new one."""
    done = run(["-c", REPLACED, str(free_port())], tmp_path, processes=2)
    assert done.code == 0, done.stderr


BROADCAST = """
import os, sys
from deepspeed_trial.processes import join_local_processes
ranks = join_local_processes(60)
heard = ranks.broadcast(bytes(100_000_000) if ranks.rank == 0 else None)
if ranks.rank:
    open(sys.argv[1], "w").write(str(len(heard)))
ranks.close()
os._exit(0)
"""


def test_a_last_broadcast_arrives_though_its_sender_ends_at_once(tmp_path):
    """Its size exceeds the bytes on their way at the sender's exit, which waits for no thread."""
    assert run(["-c", BROADCAST, str(tmp_path / "heard")], tmp_path, processes=2).code == 0
    assert (tmp_path / "heard").read_text() == "100000000"


def test_deepspeed_starts_without_mlflow(tmp_path):
    """Other code finds it."""
    check = "import sys; from deepspeed.autotuning import autotuner; assert not autotuner.has_mlflow"
    check += "; assert 'mlflow' not in sys.modules; import mlflow; mlflow.log_metric"
    assert run(["-c", check], tmp_path).code == 0
