"""The kept checkpoints, the end by early stopping, and runs whose folder or disk has no room."""

import itertools
import os
import pathlib
import re
import shutil
import time

import pytest
import torch
from determined import core, pytorch
from line_trial import LineTrial, fit
from matrix import row
from support import DIGITS, LATEST, TWO, Run, checkpoints, contents, overrides, run, train_many

import train as program
from deepspeed_trial.checkpoints.files import known, locate, read_metadata
from deepspeed_trial.checkpoints.store import LocalCheckpoints
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.events import EarlyStopping, Patience
from deepspeed_trial.local.lost_disk import is_full_disk


def test_a_run_is_not_replaced(two_checkpoints, tmp_path, capsys):
    """A run also refuses a folder whose entries have the names of its files, but another kind."""
    shutil.copytree(two_checkpoints.output, tmp_path / "again")
    (tmp_path / "odd/metrics.jsonl").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/run.json")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop/checkpoints").symlink_to("checkpoints")
    before = contents(tmp_path / "again")
    for name, expected in {
        "again": "holds a run; give another folder, or add --resume latest to continue it",
        "odd": "metrics.jsonl: is not a file",
        "pipe": "run.json: is not a file",
        "loop": "loop/checkpoints: is not a folder",
    }.items():
        assert program.main([*TWO, "--output", str(tmp_path / name)]) == 2
        assert expected in capsys.readouterr().err
    assert contents(tmp_path / "again") == before


def test_a_refused_run_leaves_no_empty_folder(tmp_path, capsys):
    """A folder that was there before stays."""
    (tmp_path / "old").mkdir()
    for name in ("new/run", "old"):
        assert program.main([*TWO, "--resume", "no-such-uuid", "--output", str(tmp_path / name)]) == 2
    assert (tmp_path / "old").exists() and not (tmp_path / "new/run").exists()


class Judged(LineTrial):
    """A trial whose validations, one a step, give the errors in ``errors``."""

    errors: list[float] = []

    def evaluate_batch(self, dataloader_iter, batch_idx):
        next(dataloader_iter)
        self.reducer.update(0)
        return {"error": torch.tensor(self.errors[self.context.current_train_batch()])}


class Stopping(Judged):
    """Stops after two validations in a row without an improvement of more than 1."""

    def build_callbacks(self):
        return {"stopping": EarlyStopping(self.context, "error", 2, 1.0, smaller_is_better=True)}


def judge(output, trial_class, errors, config=None, stop=None):
    """Train with a validation after each step; with ``stop`` a second run resumes the first one after that step."""
    trial = type("Trial", (trial_class,), {"errors": errors})
    done = None
    for steps in (stop, len(errors)) if stop else (len(errors),):
        folders = checkpoints(Run(0, "", "", output))
        _, done = fit(
            output,
            trial,
            resumes=bool(folders),
            config={"checkpoint_storage": {"save_trial_latest": 9}, **(config or {})},
            max_length=pytorch.Batch(steps),
            validation_period=pytorch.Batch(1),
            checkpoint_policy="all",
            latest_checkpoint=str(folders[max(folders)]) if folders else None,
        )
    return done, set(checkpoints(Run(0, "", "", output)))


class Misspelt(Judged):
    def build_callbacks(self):
        return {"stopping": EarlyStopping(self.context, "eror", 2)}


def test_early_stopping_by_an_unknown_metric_is_one_line(tmp_path):
    with pytest.raises(InvalidInput) as caught:
        judge(tmp_path / "run", Misspelt, [5, 3])
    assert caught.value.errors == ["EarlyStopping: 'eror': not in a validation; did you mean 'error'?"]


# Whether smaller is better, checkpoint_storage, the errors of six validations, and the steps that are kept
KEPT = {
    "defaults": (None, {}, [5, 3, 1, 4, 1, 6], {3, 6}),
    "most": (False, {}, [5, 3, 7, 4, 7, 6], {3, 6}),
    "two each": (True, {"save_trial_best": 2, "save_trial_latest": 2}, [5, 1, 2, 6, 4, 3], {2, 3, 5, 6}),
    "the latest": (True, {"save_trial_best": 0, "save_trial_latest": 2}, [1, 2, 3, 4, 5, 6], {5, 6}),
}


@pytest.mark.parametrize("stop", [None, 4])
@pytest.mark.parametrize("name", KEPT)
def test_the_best_and_the_latest_checkpoints_stay(tmp_path, name, stop):
    """A resumed run knows the validations before it; of equal ones the earlier is the best."""
    smaller, storage, errors, kept = KEPT[name]
    config = {"searcher": {"metric": "error", "smaller_is_better": smaller}, "checkpoint_storage": storage}
    done, held = judge(tmp_path / "run", Judged, [float(error) for error in errors], config, stop)
    assert held == kept and done.steps == 6


def test_a_clock_that_goes_back_changes_no_order(tmp_path, monkeypatch):
    """The last step stays, and is the latest of an export."""
    clock = itertools.count(2 * 10**18, -(10**9))
    monkeypatch.setattr(time, "time_ns", clock.__next__)
    config = {"checkpoint_storage": {"save_trial_best": 0, "save_trial_latest": 2}}
    _, held = judge(tmp_path / "run", Judged, [6.0, 5.0, 4.0, 3.0], config)
    assert held == {3, 4}
    assert read_metadata(locate(tmp_path / "run"))["steps_completed"] == 4


def test_an_older_checkpoint_goes_once_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    events: list[tuple[str, pathlib.Path]] = []
    rmtree = shutil.rmtree

    def fsync(file):
        events.append(("synced", pathlib.Path(f"/proc/self/fd/{file}").readlink()))

    def remove(path, **_):
        events.append(("removed", path))
        rmtree(path)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(shutil, "rmtree", remove)
    store = LocalCheckpoints(tmp_path, core.DummyDistributedContext(), 0, 1, lambda step: None)
    names = []
    for step in (1, 2):
        with store.store_path({"steps_completed": step}) as (folder, name):
            (folder / "inner").mkdir()
            (folder / "inner/weights").write_text("1")
        names.append(name)
    old, new = (tmp_path / f".partial-{name}" for name in names)
    written = [new / "inner/weights", new / "metadata.json", new, new / "inner", tmp_path]
    assert events[-6:] == [*(("synced", path) for path in written), ("removed", old)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no such layer"), "^no such layer$"),
        (
            PermissionError(13, "Permission denied"),
            r"step 2 cannot be written \(\[Errno 13\] Permission denied\); the last complete one is \S+ \(step 1\); --resume",
        ),
        (
            OSError(28, "No space left on device"),
            r"No space left on device; [0-9,]+ MiB are free there\); the last .*; make",
        ),
    ],
    ids=["program", "rights", "room"],
)
def test_a_failed_save_is_told_as_what_it_is(tmp_path, error, said):
    store = LocalCheckpoints(
        tmp_path / "run/checkpoints", core.DummyDistributedContext(), 1, 1, lambda step: None
    )
    with store.store_path({"steps_completed": 1}):
        pass
    with pytest.raises(RuntimeError, match=said), store.store_path({"steps_completed": 2}):
        raise error
    assert [each["steps_completed"] for each in known(store.folder).values()] == [1]


@pytest.mark.parametrize("stop", [None, 4, 5, 6])
def test_early_stopping_counts_on_after_a_resume(tmp_path, stop):
    """Steps 5 and 6 improve on step 4 by no more than 1; a run that has stopped stays stopped."""
    errors = [9.0, 7.5, 7.0, 6.0, 5.1, 5.0, 3.0]
    done, _ = judge(tmp_path / "run", Stopping, errors, stop=stop)
    assert done.steps == 6


def test_patience():
    for smaller, values, stops in (True, [3, 2, 2, 1.4, 1.5, 1.3], 6), (False, [1, 2, 2.5, 2, 9, 9, 9], 4):
        patience = Patience(2, 0.5, smaller)
        assert [patience.update(value) for value in values].index(True) + 1 == stops
    assert not any(map(Patience(None).update, [1.0] * 99))


def test_early_stopping_by_the_experiment_file(tmp_path):
    """An accuracy improves by no more than 1: the third epoch of five steps is the last, and stays it."""
    stopping = {"metric": "accuracy", "patience": 2, "min_improvement": 1}
    arguments = [*row("digits", early_stopping=stopping, max_length={"epochs": 30}).arguments]
    done = train_many(tmp_path, {"run": arguments})["run"]
    assert done.code == 0, done.stderr
    before = done.summary
    assert (before["epochs"], before["steps"]) == (3, 15)
    again = train_many(tmp_path, {"run": [*arguments, *LATEST]})["run"].summary
    for name in ("steps", "epochs", "validation", "weights_sha256", "checkpoint"):
        assert again[name] == before[name]
    assert again["images_per_second"] == 0


LIMITED = """
import os, resource, runpy, sys
limit = int(sys.argv.pop(1))
if os.environ.get("RANK", "0") != "0":
    limit = -1
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_full_disk_leaves_the_last_checkpoint(two_checkpoints, tmp_path):
    """A limit on the size of files stands for the full disk: metrics fit, a checkpoint does not."""
    output = shutil.copytree(two_checkpoints.output, tmp_path / "run")
    before = checkpoints(Run(0, "", "", output))
    longer = overrides(hyperparameters__max_length="{batches: 9}", checkpoint_storage__save_trial_latest=1)
    full = run(["-c", LIMITED, "200000", *TWO, *longer, *LATEST, "--output", str(output)], output)
    assert full.code == 1
    (line,) = [line for line in full.stderr.splitlines() if line.startswith("train.py:")]
    assert "the checkpoint of step 6 cannot be written" in line and "MiB are free" in line
    last = f"the last complete one is {before[4].name} (step 4)"
    assert line.endswith(f"{last}; make room, then --resume latest continues")
    assert "Traceback" not in full.stderr
    assert checkpoints(full) == before
    assert not list(output.glob("checkpoints/.partial*"))


def test_a_disk_without_any_room_is_one_line_of_each_rank(tmp_path):
    """The limit of rank 0 is enough for metrics, but not for the files of a validation."""
    output = tmp_path / "run"
    row = [*DIGITS, *overrides(min_validation_period="{batches: 1}", checkpoint_policy="none")]
    full = run(["-c", LIMITED, "2000", *row, "--output", str(output)], output, processes=2)
    assert full.code == 1
    line = f"train.py: {output}: [Errno 27] File too large; make room, then start again"
    assert line in full.stderr.splitlines(), full.stderr
    assert re.search(
        r"^(train.py: )?rank 0 \(.*(is gone|has failed), in .*; --resume latest", full.stderr, re.M
    )
    assert "[rank" not in full.stderr and "deepspeed_trial/" not in full.stderr  # a rank's traceback


TENSORBOARD = """
import pathlib, resource, sys
from torch.utils.tensorboard import SummaryWriter
from deepspeed_trial.errors import TrainingStopped
from deepspeed_trial.local.lost_disk import explain_lost_disk
resource.setrlimit(resource.RLIMIT_FSIZE, (50, -1))
try:
    with explain_lost_disk(pathlib.Path(sys.argv[1])):
        SummaryWriter(sys.argv[1])
except TrainingStopped as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    sys.exit(str(error))
"""


def test_tensorboard_s_thread_leaves_a_full_disk_to_its_caller(tmp_path):
    full = run(["-c", TENSORBOARD, str(tmp_path / "run")], tmp_path)
    (line,) = full.stderr.splitlines()
    assert full.code == 1 and line.endswith("[Errno 27] File too large; make room, then start again")


def test_the_error_of_a_folder_s_copy_is_short():
    error = shutil.Error([(f"a{i}", "b", "[Errno 28] No space left on device: 'a'") for i in range(100)])
    assert one_line(error) == "[Errno 28] No space left on device: 'a'" and is_full_disk(error)
