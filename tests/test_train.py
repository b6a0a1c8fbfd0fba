"""Whole runs of train.py: real processes, the real trainer and engine, real images."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

from processes import joblib, threads_of_each

import psutil
import pytest
from conftest import DIGITS, PROJECT, TIME_LIMIT, Run, execute, launcher, overrides, train_many

SHORT = overrides(hyperparameters__max_length="{epochs: 2}", min_validation_period="{epochs: 1}")
BATCH = "hyperparameters__overwrite_deepspeed_args__train_batch_size"
KEYS = {
    "steps", "epochs", "world_size", "zero_stage", "dtype", "seconds", "images_per_second", "validation",
    "weights_sha256", "checkpoint", "peak_memory_mib",
}  # fmt: skip


def test_summary_lines_and_seeds(train):
    first, again = train(*DIGITS, *SHORT), train(*DIGITS, *SHORT)
    other = train(*DIGITS, *SHORT, *overrides(reproducibility__experiment_seed=1))
    for run in (first, again, other):
        assert run.code == 0, run.stderr
    summary = first.summary
    assert set(summary) == KEYS
    assert (summary["steps"], summary["epochs"], summary["world_size"]) == (90, 2, 1)
    assert (summary["zero_stage"], summary["dtype"]) == (0, "float32")
    validation = summary["validation"]
    assert validation["images"] == 360
    assert validation["accuracy"] > 0.5
    # The classes are of about equal size, so the mean over them is near the accuracy over the images.
    assert list(validation["per_class_accuracy"]) == [str(digit) for digit in range(10)]
    assert sum(validation["per_class_accuracy"].values()) / 10 == pytest.approx(validation["accuracy"], abs=0.01)
    assert first.stdout.splitlines()[-1] == f"accuracy {validation['accuracy']:.4f}"
    checkpoint = first.output / "checkpoints" / summary["checkpoint"]
    assert json.loads((checkpoint / "metadata.json").read_text())["steps_completed"] == 90
    assert again.summary["weights_sha256"] == summary["weights_sha256"] != other.summary["weights_sha256"]
    assert "deprecated" not in first.stdout + first.stderr
    assert "WARNING" not in first.stdout + first.stderr


def test_resume_gives_the_same_weights(train):
    """Stopping after 20 of 90 steps and going on, with two micro-batches a step, changes no bit."""
    accumulate = overrides(hyperparameters__overwrite_deepspeed_args__gradient_accumulation_steps=2)
    straight = train(*DIGITS, *SHORT, *accumulate)
    part = train(*DIGITS, *accumulate, *overrides(hyperparameters__max_length="{batches: 20}"))
    assert part.code == 0, part.stderr
    rest = train(*DIGITS, *SHORT, *accumulate, "--resume", "latest", output=part.output)
    assert rest.code == 0, rest.stderr
    assert rest.summary["steps"] == 90
    assert rest.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert rest.summary["validation"] == straight.summary["validation"]


@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_saves_a_checkpoint_to_go_on_from(tmp_path, processes, number):
    """The rank that gets the signal tells the others, and what is resumed ends on the straight run's weights."""
    long = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 200}", scheduling_unit=10)]
    row = [*launcher("python" if processes == 1 else "torchrun", processes), "train.py", *long, "--output"]
    straight = execute([*row, str(tmp_path / "straight")], tmp_path / "straight")
    assert straight.code == 0, straight.stderr
    process = subprocess.Popen([*row, str(tmp_path / "run")], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "step 30/" in line:
            workers = psutil.Process(process.pid).children() if processes > 1 else [process]
            workers[-1].send_signal(number)
    code = process.wait(TIME_LIMIT)
    assert code == 130 if processes == 1 else code != 0
    metadata = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("checkpoints/*/metadata.json")]
    assert len(metadata) == 1 and 30 <= metadata[0]["steps_completed"] < 200
    rest = execute([*row, str(tmp_path / "run"), "--resume", "latest"], tmp_path / "run")
    assert rest.code == 0, rest.stderr
    assert rest.summary["weights_sha256"] == straight.summary["weights_sha256"]


# A period and the steps at which it validates; there are 45 steps an epoch.
PERIODS = {
    "one and a half epochs": ("{batches: 67}", 2, [67, 90]),
    "two epochs": ("{epochs: 2}", 3, [90, 135]),
    "images": ("{records: 1440}", 3, [45, 90, 135]),
    "never": ("{epochs: 0}", 2, [90]),
}


def test_validation_periods(tmp_path):
    rows = {
        name: [*DIGITS, *overrides(hyperparameters__max_length=f"{{epochs: {epochs}}}", min_validation_period=period)]
        for name, (period, epochs, _) in PERIODS.items()
    }
    for name, run in train_many(tmp_path, rows).items():
        assert run.code == 0, run.stderr
        assert run.validated_at == PERIODS[name][2], name


@pytest.mark.parametrize(
    ("by", "processes", "batch"), [("deepspeed", 2, 32), ("torchrun", 2, 32), ("torchrun", 3, 48), ("torchrun", 3, 16)]
)
def test_processes(train, by, processes, batch):
    run = train(*DIGITS, *SHORT, *overrides(**{BATCH: batch}), processes=processes, by=by)
    if batch % processes:
        assert run.code != 0
        faults = [line for line in run.stderr.splitlines() if line.startswith("train.py:")]
        assert faults == ["train.py: train_batch_size: 16: does not divide among 3 processes; use 15 or 18"]
        assert not run.output.joinpath("checkpoints").exists()
        return
    assert run.code == 0, run.stderr
    assert run.summary["world_size"] == processes
    assert run.summary["validation"]["images"] == 360
    assert run.summary["validation"]["accuracy"] > 0.5


def test_one_set_of_weights_has_one_accuracy(tmp_path, image_folder):
    """52 images, judged by the initial weights in 1, 2 and 3 processes and micro-batches of 2 to 30."""
    runs: list[Run] = []
    for processes in (1, 2, 3):
        rows = {}
        for batch in (6, 30):
            settings = overrides(
                data__dataset="imagefolder",
                data__root=image_folder,
                hyperparameters__max_length="{batches: 1}",
                hyperparameters__overwrite_deepspeed_args__optimizer__params__lr=0,
                **{BATCH: batch},
            )
            rows[f"{processes}-{batch}"] = [*DIGITS, *settings]
        runs += train_many(tmp_path, rows, processes).values()
    for run in runs:
        assert run.code == 0, run.stderr
        validation, expected = run.summary["validation"], runs[0].summary["validation"]
        assert validation["images"] == 52
        assert list(validation["per_class_accuracy"]) == [f"digit {label}" for label in range(4)]
        assert validation["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert validation["accuracy"] == expected["accuracy"]
        assert validation["per_class_accuracy"] == expected["per_class_accuracy"]


def test_test_mode_is_one_batch_of_everything(train):
    run = train(*DIGITS, "--test")
    assert run.code == 0, run.stderr
    assert (run.summary["steps"], run.summary["validation"]["images"]) == (1, 360)  # one batch of the validation's
    assert (run.output / "checkpoints" / run.summary["checkpoint"] / "metadata.json").exists()


def test_check_prints_the_configuration(tmp_path):
    files = [*PROJECT.glob("*.yaml"), *PROJECT.glob("experiments/*.yaml")]
    single = [file for file in files if not file.stem.startswith(("search-", "photos"))]  # photos needs some
    rows = {file.stem: ["--config", str(file), "--check", "--slots", "2"] for file in single}
    assert {"const", "distributed", "digits"} <= set(rows)
    for name, run in train_many(tmp_path, rows).items():
        assert run.code == 0, run.stderr
        resolved = json.loads(run.stdout)
        replicas = 1 if name == "pipeline" else 2
        micro = resolved["train_micro_batch_size_per_gpu"]
        assert resolved["train_batch_size"] == replicas * micro * resolved["gradient_accumulation_steps"]
        assert not run.output.exists()


# What is wrong on the command line, and what the one line on stderr must name.
BAD = {
    "no network": (
        ["--set", "data.dataset=cifar10", "--set", "data.root={tmp}/none"],
        ["data.root", "{tmp}/none", "missing"],
    ),
    "no folder": (["--set", "data.dataset=imagefolder", "--set", "data.root={tmp}/none"], ["data.root", "{tmp}/none"]),
    "unknown dataset": (["--set", "data.dataset=mnist"], ["data.dataset", "'mnist'", "digits"]),
    "unknown data key": (["--set", "data.rot=x"], ["data.rot", "'root'"]),
    "unknown path": (["--set", "dta.root=x"], ["dta", "'data'"]),
    "path through a value": (["--set", "name.x=1"], ["name.x", "digits-deepspeed"]),
    "no value": (["--set", "data.dataset"], ["--set", "PATH=VALUE"]),
    "not YAML": (["--set", "name=[1"], ["--set name", "[1"]),
    "no such file": (["--config", "nothing.yaml"], ["--config", "nothing.yaml"]),
    "batch size": (["--set", "hyperparameters.overwrite_deepspeed_args.train_batch_size=0"], ["train_batch_size", "0"]),
    "length": (["--set", "hyperparameters.max_length={epochs: -1}"], ["hyperparameters.max_length.epochs", "-1"]),
    "period": (["--set", "min_validation_period={hours: 1}"], ["min_validation_period", "batches"]),
    "seed": (["--set", "reproducibility.experiment_seed=x"], ["reproducibility.experiment_seed", "'x'"]),
    "slots to train on": (["--slots", "4"], ["--slots", "4", "--check"]),
    "no checkpoint": (["--resume", "latest"], ["--resume", "latest", "no checkpoint"]),
}


def fill(texts, folder):
    return [text.replace("{tmp}", str(folder)) for text in texts]


@pytest.fixture(scope="module")
def bad_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    rows = {case: fill([*DIGITS, *arguments], folder) for case, (arguments, _) in BAD.items()}
    return folder, train_many(folder, rows)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(bad_runs, case):
    folder, runs = bad_runs
    run = runs[case]
    assert run.code == 2, run.stderr
    assert len(run.stderr.splitlines()) == 1, run.stderr
    for name in fill(BAD[case][1], folder):
        assert name in run.stderr
    assert not list(run.output.glob("checkpoints/*"))


def test_runs_and_images_within_the_package_stay_out_of_a_checkpoints_code(tmp_path, image_folder):
    """Not only in the folders that .detignore names: a checkpoint would hold itself."""
    package = tmp_path / "package"
    shutil.copytree(PROJECT, package, ignore=shutil.ignore_patterns(".*", "runs", "tests", "data"))
    shutil.copytree(image_folder, package / "photos")
    data = overrides(data__dataset="imagefolder", data__root="photos", hyperparameters__max_length="{batches: 4}")
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
    without, with_timers = [int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("waits")]
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
    assert [threads_of_each(each) for each in (1, 2, 4, 32)] == [16, 8, 4, 1]
    mine = set(range(8))  # of 16: alone in them, or one of several
    assert [threads_of_each(each) for each in (1, 2, 4)] == [8, 8, 4]
    launchers = mine  # in a container of 8 of the host's cores
    assert [threads_of_each(each) for each in (1, 2, 4)] == [8, 4, 2]


@pytest.mark.parametrize(
    ("by", "chosen", "threads"),
    [("torchrun", "", 4), ("torchrun", "2", 2), ("deepspeed", "", 4), ("deepspeed", "2", 2)],
)
def test_processes_share_out_the_cores_unless_the_user_does(tmp_path, by, chosen, threads):
    script = tmp_path / "threads.py"
    script.write_text(
        "import os, pathlib, sys\n"
        f"sys.path.insert(0, {str(PROJECT)!r})\n"
        "import processes, torch\n"
        "processes.joblib.cpu_count = lambda: 8\n"
        "processes.share_out_cores()\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(torch.get_num_threads()))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    if chosen:
        environment["OMP_NUM_THREADS"] = chosen
    subprocess.run(
        [*launcher(by, 2), str(script)], env=environment, check=True, capture_output=True, timeout=TIME_LIMIT
    )
    assert [(tmp_path / rank).read_text() for rank in "01"] == [str(threads)] * 2
