"""Processes and their cores, Determined's own context and trainer, and a checkpoint's code."""

import multiprocessing
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest
from support import DIGITS, PROJECT, TIME_LIMIT, execute, free_port, launcher, overrides

from harness.processes import Ranks, joblib, threads_per_process

SHORT = overrides(hyperparameters__max_length="{epochs: 2}", min_validation_period="{epochs: 1}")


SIZE = 100_000_000  # bytes
BATCH = "hyperparameters__overwrite_deepspeed_args__train_batch_size"


@pytest.mark.parametrize(
    ("by", "processes", "batch"),
    [("deepspeed", 2, 32), ("torchrun", 2, 32), ("torchrun", 3, 48), ("torchrun", 3, 16)],
)
def test_processes(train, by, processes, batch):
    run = train(*DIGITS, *SHORT, *overrides(**{BATCH: batch}), processes=processes, by=by)
    if batch % processes:
        assert run.code != 0
        errors = [line for line in run.stderr.splitlines() if line.startswith("train.py:")]
        assert errors == ["train.py: train_batch_size: 16: does not divide among 3 processes; use 15 or 18"]
        assert not run.output.joinpath("checkpoints").exists()
        return
    assert run.code == 0, run.stderr
    assert run.summary["world_size"] == processes
    assert run.summary["validation"]["images"] == 360
    assert run.summary["validation"]["accuracy"] > 0.5


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        command = [*launcher("deepspeed", 2)[:-1], f"--master_port={port}", "train.py", *DIGITS]
        run = execute([*command, "--output", str(tmp_path / "run")], tmp_path / "run")
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("train.py:")]
    assert line.startswith(f"train.py: --master_port: {port}: in use") and "another port" in line
    assert "Traceback" not in run.stderr and not run.output.exists()


def test_runs_and_images_within_the_package_stay_out_of_a_checkpoints_code(tmp_path, image_folder):
    """Not only in the folders that .detignore names: a checkpoint would hold itself."""
    package = tmp_path / "package"
    shutil.copytree(PROJECT, package, ignore=shutil.ignore_patterns(".*", "runs", "tests", "data"))
    shutil.copytree(image_folder, package / "photos")
    data = overrides(
        data__dataset="imagefolder", data__root="photos", hyperparameters__max_length="{batches: 4}"
    )
    for output in ("out", "results/mine"):
        run = execute(
            [sys.executable, "train.py", *DIGITS, *data, "--output", output],
            package / output,
            cwd=package,
            PYTHONPATH="",
        )
        assert run.code == 0, run.stderr
        (code,) = run.output.glob("checkpoints/*/code")
        assert (code / "model_def.py").exists()
        assert not [name for name in ("out", "results/mine", "photos") if (code / name).exists()]


def test_steps_do_not_wait_for_the_device(tmp_path):
    """As with DeepSpeed's own timers, which the user may ask for."""
    script = (
        "import sys; import train; from deepspeed.accelerator import get_accelerator\n"
        "waits, timers = [], 'hyperparameters.overwrite_deepspeed_args.timers.throughput.enabled='\n"
        "get_accelerator().synchronize = lambda *_: waits.append(1)\n"
        "for more in [], ['--set', timers + 'true']:\n"
        "    assert train.main(sys.argv[2:] + [*more, '--output', f'{sys.argv[1]}{len(more)}']) == 0\n"
        "    print('waits', len(waits))"
    )
    arguments = overrides(hyperparameters__max_length="{batches: 60}", scheduling_unit=60)
    command = [*launcher("python", 1), "-c", script, str(tmp_path / "run"), *DIGITS, *arguments]
    run = execute(command, tmp_path)
    assert run.code == 0, run.stderr
    without, with_timers = [
        int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("waits")
    ]
    assert without < 10 and with_timers > 100


def test_stock_context_and_trainer(train, tmp_path):
    """The trial needs of Determined only what its usage guide shows; on a CPU the context's device has to be lent."""
    script = pathlib.Path(tmp_path / "stock.py")
    script.write_text(STOCK)
    run = execute([*launcher("torchrun", 1), str(script)], tmp_path, PYTHONPATH=str(PROJECT))
    assert run.code == 0, run.stderr
    assert "trained 3 batches" in run.stdout


STOCK = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves the test a minute of compiling
from determined import pytorch
from determined.pytorch import deepspeed as det_ds

if not torch.cuda.is_available():
    def cpu(self):
        self.device = torch.device("cpu")
    det_ds.DeepSpeedTrialContext._init_device = cpu
    det_ds.DeepSpeedTrialController._sync_device = lambda self: None

from model_def import CIFARTrial

os.chdir(os.path.dirname(os.path.abspath(__file__)))
deepspeed.init_distributed()
hparams = {"deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": {"gradient_clipping": 0.5}}
with det_ds.init(hparams=hparams, exp_conf={"data": {"dataset": "digits"}}) as context:
    trial = CIFARTrial(context)
    assert trial.model_engine.gradient_clipping() == 0.5
    det_ds.Trainer(trial, context).fit(max_length=pytorch.Batch(3), checkpoint_policy="none")
    print("trained", trial.model_engine.global_steps, "batches")
"""


def test_a_process_bound_to_its_cores_uses_all_of_them(monkeypatch):
    mine, launchers = set(range(16)), set(range(16))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: launchers if pid else mine)
    monkeypatch.setattr(joblib, "cpu_count", lambda: len(mine))
    assert [threads_per_process(each) for each in (1, 2, 4, 32)] == [16, 8, 4, 1]
    mine = set(range(8))  # of 16: alone in them, or one of several
    assert [threads_per_process(each) for each in (1, 2, 4)] == [8, 8, 4]
    launchers = mine  # in a container of 8 of the host's cores
    assert [threads_per_process(each) for each in (1, 2, 4)] == [8, 4, 2]


@pytest.mark.parametrize(
    ("by", "chosen", "threads"),
    [("torchrun", "", 4), ("torchrun", "2", 2), ("deepspeed", "", 4), ("deepspeed", "2", 2)],
)
def test_processes_share_out_the_cores_unless_the_user_does(tmp_path, by, chosen, threads):
    script = tmp_path / "threads.py"
    script.write_text(
        "import os, pathlib, sys\n"
        f"sys.path.insert(0, {str(PROJECT)!r})\n"
        "from harness import processes; import torch\n"
        "processes.joblib.cpu_count = lambda: 8\n"
        "processes.share_cores()\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(torch.get_num_threads()))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    if chosen:
        environment["OMP_NUM_THREADS"] = chosen
    subprocess.run(
        [*launcher(by, 2), str(script)], env=environment, check=True, capture_output=True, timeout=TIME_LIMIT
    )
    assert [(tmp_path / rank).read_text() for rank in "01"] == [str(threads)] * 2


def test_a_last_broadcast_arrives_though_its_sender_ends_at_once():
    """Of more bytes than are sent before the sender's exit, which waits for none of its threads."""
    fork, pub_port, pull_port = multiprocessing.get_context("fork"), free_port(), free_port()
    got, sent = fork.Pipe(duplex=False)

    def rank(number):
        place = {"rank": number, "local_rank": number, "cross_rank": 0}
        sizes = {"size": 2, "local_size": 2, "cross_size": 1}
        ranks = Ranks(**place, **sizes, pub_port=pub_port, pull_port=pull_port)
        heard = ranks.broadcast(b"x" * SIZE if number == 0 else None)
        if number:
            sent.send(len(heard))
        ranks.close()
        os._exit(0)

    started = [fork.Process(target=rank, args=(number,)) for number in (0, 1)]
    for each in started:
        each.start()
    try:
        assert got.poll(TIME_LIMIT) and got.recv() == SIZE
    finally:
        for each in started:
            each.kill()
            each.join()


def test_deepspeed_starts_without_mlflow_which_others_find():
    script = (
        "import sys, harness, deepspeed\n"
        "from deepspeed.autotuning import autotuner\n"
        "assert not autotuner.has_mlflow and 'mlflow' not in sys.modules\n"
        "import mlflow\n"
        "mlflow.log_metric"
    )
    subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=True, timeout=TIME_LIMIT)
