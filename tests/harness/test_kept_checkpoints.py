"""Which checkpoints are kept and offered, and when training ends early."""

import json
import os
import re
import shutil
import sys

from modes import DEEPSPEED
from support import (
    DIGITS,
    LATEST,
    PROJECT,
    TWO,
    Run,
    checkpoints,
    contents,
    execute,
    launcher,
    overrides,
    train_many,
    truncate_model,
)

from harness.checkpoints import files
from harness.errors import one_line
from harness.local.lost_disk import is_full_disk

METADATA = "metadata.json"


def test_a_run_is_not_replaced(two_checkpoints, tmp_path):
    """Nor is a folder used whose parts are not what a run would write."""
    shutil.copytree(two_checkpoints.output, tmp_path / "again")
    (tmp_path / "odd/metrics.jsonl").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/run.json")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop/checkpoints").symlink_to("checkpoints")
    before = contents(tmp_path / "again")
    runs = train_many(tmp_path, dict.fromkeys(["again", "odd", "pipe", "loop"], TWO))
    assert [run.code for run in runs.values()] == [2] * 4
    assert (
        "holds a run; give another folder, or go on with it: train.py --resume latest" in runs["again"].stderr
    )
    assert "metrics.jsonl: is no file" in runs["odd"].stderr
    assert "run.json: is no file" in runs["pipe"].stderr
    assert "loop/checkpoints: is no folder" in runs["loop"].stderr
    assert contents(tmp_path / "again") == before


def forget(file, key):
    held = json.loads(file.read_text())
    del held[key]
    file.write_text(json.dumps(held))


def as_written_earlier(folder, step):
    forget(folder / "identity.json", "progress")
    (folder / METADATA).unlink()
    files.write_metadata(folder, {"steps_completed": step})
    forget(folder / METADATA, "sha256")


def test_the_whole_checkpoint_offered_goes_on(two_checkpoints, tmp_path):
    """After damage to the last one; and where all are damaged, that is said.

    So does one that an earlier version wrote, without its steps in the identity or a digest of its metadata.
    """
    for name in ("one", "all", "earlier"):
        shutil.copytree(two_checkpoints.output, tmp_path / name)
        for step, folder in checkpoints(Run(0, "", "", tmp_path / name)).items():
            if name == "earlier":
                as_written_earlier(folder, step)
            elif step == 4 or name == "all":
                truncate_model(folder)
    uuid = checkpoints(two_checkpoints)[2].name
    rows = {name: [*TWO, "--resume", uuid] for name in ("one", "earlier")}
    rows["all"] = [*TWO, *LATEST]
    runs = train_many(tmp_path, rows)
    for name in ("one", "earlier"):
        assert runs[name].code == 0, runs[name].stderr
        assert runs[name].summary["weights_sha256"] == two_checkpoints.summary["weights_sha256"]
    assert runs["all"].code == 2
    assert "there is no other whole one" in runs["all"].stderr


# The accuracies of a run's validations in order, from a learning rate that rises until it destroys.
KEPT = overrides(
    hyperparameters__max_length="{epochs: 6}",
    min_validation_period="{epochs: 1}",
    checkpoint_policy="all",
    **{f"{DEEPSPEED}optimizer__params__lr": 0.5, f"{DEEPSPEED}scheduler__params__warmup_num_steps": 4000},
)


def test_the_best_and_the_latest_checkpoints_are_kept(tmp_path):
    rows = {
        "default": [*DIGITS, *KEPT],
        "loss": [*DIGITS, *KEPT, *overrides(searcher__metric="loss", searcher__smaller_is_better="true")],
        "more": [
            *DIGITS,
            *KEPT,
            *overrides(checkpoint_storage="{save_trial_best: 2, save_trial_latest: 2}"),
        ],
    }
    for name, run in train_many(tmp_path, rows).items():
        assert run.code == 0, run.stderr
        of = {e["steps_completed"]: e for e in run.metrics if e["group"] == "validation"}
        assert len(of) == 6
        order = sorted(of, key=lambda step: of[step]["loss"] if name == "loss" else -of[step]["accuracy"])
        best, latest = (order[:2], sorted(of)[-2:]) if name == "more" else (order[:1], [max(of)])
        assert best != latest, "the test needs a run whose best validation is not its last"
        assert set(checkpoints(run)) == {*best, *latest}, name
        assert run.summary["checkpoint"] == checkpoints(run)[270].name


STOPPING = overrides(
    hyperparameters__max_length="{epochs: 30}",
    min_validation_period="{epochs: 1}",
    hyperparameters__early_stopping="{metric: accuracy, patience: 3, min_improvement: 0.02}",
)


def test_early_stopping_with_and_without_a_resume(tmp_path):
    """It stops where its formula says, also when a stop comes while it waits; a stopped run stays stopped."""
    (straight,) = train_many(tmp_path, {"straight": [*DIGITS, *STOPPING]}).values()
    assert straight.code == 0, straight.stderr
    accuracies = [entry["accuracy"] for entry in straight.metrics if entry["group"] == "validation"]
    best, waited, expected = 0.0, 0, 0
    while waited < 3:
        best, waited = (accuracies[expected], 0) if accuracies[expected] > best + 0.02 else (best, waited + 1)
        expected += 1
    assert straight.summary["epochs"] == expected == len(accuracies) < 30
    row = [*DIGITS, *STOPPING]
    (stopped,) = train_many(tmp_path, {"run": row}, sigterm_at=straight.summary["steps"] - 60).values()
    assert stopped.code == 130
    (rest,) = train_many(tmp_path, {"run": [*row, *LATEST]}).values()
    assert rest.summary["steps"] == straight.summary["steps"]
    assert rest.summary["weights_sha256"] == straight.summary["weights_sha256"]
    (again,) = train_many(tmp_path, {"run": [*row, *LATEST]}).values()
    assert again.code == 0, again.stderr
    measured = {name: again.summary[name] for name in ("seconds", "peak_memory_mib")}
    assert again.summary == {**rest.summary, **measured, "images_per_second": 0}


def test_a_full_disk_leaves_the_last_checkpoint(two_checkpoints, tmp_path):
    """Files may grow to a limit that holds the metrics but no checkpoint, as on a full disk."""
    shutil.copytree(two_checkpoints.output, tmp_path / "run")
    before = checkpoints(Run(0, "", "", tmp_path / "run"))
    script = (
        f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({200_000}, {200_000}));"
        "sys.argv.pop(0); runpy.run_path('train.py', run_name='__main__')"
    )
    longer = overrides(hyperparameters__max_length="{batches: 9}", checkpoint_storage__save_trial_latest=1)
    arguments = ["train.py", *TWO, *longer, *LATEST, "--output", str(tmp_path / "run")]
    run = execute([sys.executable, "-c", script, *arguments], tmp_path / "run")
    assert run.code == 1
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("train.py:")]
    assert "the checkpoint of step 6 cannot be written" in line and "MiB are free" in line
    assert line.endswith(
        f"the last whole one is {before[4].name} (step 4); make room, then --resume latest goes on"
    )
    assert "Traceback" not in run.stderr
    assert checkpoints(run) == before
    assert not list(run.output.glob("checkpoints/.partial*"))


def test_no_room_at_all_is_one_line_of_each_rank(tmp_path):
    """Rank 0's files may grow to what the metrics take, but not what a validation leaves."""
    script = tmp_path / "limited.py"
    script.write_text(
        "import os, resource, runpy, sys; sys.argv.pop(0);"
        "limit = 2_000 if os.environ['RANK'] == '0' else -1;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit));"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    arguments = ["train.py", *DIGITS, "--output", str(tmp_path / "run")]
    run = execute([*launcher("torchrun", 2), str(script), *arguments], tmp_path, PYTHONPATH=str(PROJECT))
    assert run.code == 1
    full = f"train.py: {tmp_path / 'run'}: [Errno 27] File too large; make room, then start again"
    assert full in run.stderr.splitlines(), run.stderr
    assert re.search(
        r"^(train.py: )?rank 0 \(.*(is gone|has ended), in .*; --resume latest", run.stderr, re.M
    )
    assert "[rank" not in run.stderr and "harness/" not in run.stderr  # a rank's traceback


def test_tensorboards_thread_leaves_a_full_disk_to_its_caller(tmp_path):
    script = (
        "import pathlib, resource, sys\n"
        "from torch.utils.tensorboard import SummaryWriter\n"
        "from harness.local.lost_disk import explain_lost_disk\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))\n"
        "with explain_lost_disk(pathlib.Path(sys.argv[1])):\n"
        "    SummaryWriter(sys.argv[1])\n"
    )
    run = execute([sys.executable, "-c", script, str(tmp_path / "run")], tmp_path)
    assert run.code == 1 and "Thread" not in run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.endswith("[Errno 27] File too large; make room, then start again")


def test_the_error_of_a_folders_copy_is_short(tmp_path):
    error = shutil.Error([(f"a{i}", "b", "[Errno 28] No space left on device: 'a'") for i in range(100)])
    assert one_line(error) == "[Errno 28] No space left on device: 'a'" and is_full_disk(error)
