"""Checkpoints in ``checkpoint_storage`` of runs without a cluster: uploaded, resumed, bounded, never trusted."""

import json
import shutil
import threading
import uuid
from typing import Any

import pytest
import torch
from determined import pytorch
from line_trial import LineTrial, saving_fast
from sources import plain

from deepspeed_trial.checkpoints import files, storage, stored_run, uploads
from deepspeed_trial.errors import InvalidInput, TrainingStopped
from deepspeed_trial.trainer import Trainer, find_checkpoint, init

ACCOUNT = {"access_key": "planted_access", "secret_key": "planted_secret"}


SERVERS: dict[str, Any] = {}  # by URL


def place_of(section) -> storage.Storage:
    place = storage.storage_of(section)
    assert place
    return place


def server(section):
    return SERVERS[section["endpoint_url"]]


@pytest.fixture(scope="module")
def s3():
    """An object store, with a bucket of its own: all of moto's servers in one process share their buckets."""
    moto = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    url = f"http://127.0.0.1:{moto.get_host_and_port()[1]}"
    section = {"type": "s3", "bucket": f"box-{uuid.uuid4()}", "endpoint_url": url, **ACCOUNT}
    SERVERS[url] = moto._server
    place_of(section).open().mkdir(section["bucket"])
    yield section
    moto.stop()


@pytest.fixture(params=["s3", "shared_fs"])
def section(request, tmp_path):
    """The section of each kind of store."""
    if request.param == "s3":
        return {**request.getfixturevalue("s3"), "prefix": tmp_path.name}
    (tmp_path / "share").mkdir()
    return {"type": "shared_fs", "host_path": str(tmp_path / "share"), "storage_path": "ours"}


def fit(output, section, steps=20, which=None, watch=None, **storage):
    """Train up to a step, with a checkpoint every 5; ``which`` resumes; ``watch`` is called after each batch."""

    class Trial(LineTrial):
        def train_batch(self, *arguments):
            if watch and self.context.place_in_data[0] != getattr(self, "watched", None):
                self.watched = self.context.place_in_data[0]
                watch(self.watched)
            return super().train_batch(*arguments)

    config = {"checkpoint_storage": {**section, **storage}, "reproducibility": {"experiment_seed": 3}}
    with saving_fast(), init({}, config, output=output, resumes=bool(which)) as context:
        name, trial = find_checkpoint(context, which), Trial(context)
        every = {"checkpoint_period": pytorch.Batch(5), "checkpoint_policy": "none"}
        done = Trainer(trial, context).fit(pytorch.Batch(steps), latest_checkpoint=name, **every)
        return trial.weights(), done


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The weights of a run without a store."""
    return fit(tmp_path_factory.mktemp("straight") / "run", {})[0]


def assert_same(weights, others):
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


def held(section, folder):
    """Download the store's folder of a run."""
    place = place_of(section)
    place.open().get(f"{place.root}/run", str(folder), recursive=True)
    return plain(folder)


def names_in(files):
    return {name.split("/")[1] for name in files if name.startswith("checkpoints/")}


def test_a_run_resumes_on_another_machine(section, straight, tmp_path, capfd):
    """The store holds the latest checkpoint alone, byte for byte; a second new run is refused."""
    output = tmp_path / "run"
    _, first = fit(output, section, 10, save_trial_best=0)
    here = plain(output)
    assert names_in(here) == {first.checkpoint} and not list(output.glob("checkpoints/.*"))
    assert held(section, tmp_path / "there") == here
    shutil.rmtree(output)
    with pytest.raises(InvalidInput, match="holds a run of this name; give another folder, or add"):
        fit(output, section, 10)
    weights, done = fit(output, section, which="latest", save_trial_best=0)
    assert_same(weights, straight)
    reported = [
        json.loads(line)["steps_completed"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    assert done.steps == max(reported) == 20 and min(reported) <= 10
    assert names_in(held(section, tmp_path / "later")) == names_in(plain(output)) == {done.checkpoint}
    written = b"".join(plain(tmp_path).values()) + "".join(capfd.readouterr()).encode()
    assert b"planted_" not in written


def test_a_store_that_is_away_changes_no_bit(s3, straight, tmp_path, monkeypatch, caplog):
    """It goes after the first checkpoint, and comes back when the training has ended."""
    section = {**s3, "prefix": tmp_path.name}
    monkeypatch.setattr(uploads, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(uploads, "LONGEST_WAIT", 0.1)
    finish, here = uploads.Uploads._finish, server(s3).app

    def away(environ, start_response):
        start_response("403 Forbidden", [])
        return []

    def go(step):
        if step == 6:
            server(s3).app = away

    def back(self, patience):
        threading.Timer(0.5, lambda: setattr(server(s3), "app", here)).start()
        finish(self, patience)

    monkeypatch.setattr(uploads.Uploads, "_finish", back)
    weights, done = fit(tmp_path / "run", section, watch=go)
    assert_same(weights, straight)
    assert "the run retries for up to 300 seconds" in caplog.text
    assert done.checkpoint in names_in(held(section, tmp_path / "there"))


def test_a_store_that_stays_away_costs_no_checkpoint(tmp_path, monkeypatch):
    """The run ends with a line; a later one uploads the rest."""
    share, disk, wall = tmp_path / "share", tmp_path / "disk", tmp_path / "wall"
    disk.mkdir()
    share.symlink_to(disk)
    section = {"type": "directory", "container_path": str(share)}
    monkeypatch.setattr(uploads, "PATIENCE", 0.01)

    def lose(step):
        if step == 6:
            wall.touch()
            wall.replace(share)  # at once: a missing folder would be made again; nothing can be below a file

    with pytest.raises(TrainingStopped, match="has the checkpoints; --resume latest uploads them"):
        fit(tmp_path / "run", section, watch=lose)
    share.unlink()
    share.symlink_to(disk)
    _, done = fit(tmp_path / "run", section, 25, which="latest")
    assert done.steps == 25 and names_in(held(section, tmp_path / "there")) == {done.checkpoint}


def test_a_lost_folder_of_the_run_costs_the_store_nothing(tmp_path):
    section = {"type": "shared_fs", "host_path": str(tmp_path / "share")}
    (tmp_path / "share").mkdir()
    _, done = fit(tmp_path / "run", section, 5)
    before = held(section, tmp_path / "there")
    run = stored_run.StoredRun(place_of(section), "run")
    assert run.prepare(tmp_path / "run", True)
    with uploads.Uploads(run, tmp_path / "run", ()):
        shutil.rmtree(tmp_path / "run/checkpoints")
    assert held(section, tmp_path / "later") == before and names_in(before) == {done.checkpoint}


def described(metadata, **changes):
    """A checkpoint's description with changes, and its right digest."""
    changed = {**json.loads(metadata.read_text()), **changes}
    del changed[files.OWN_DIGEST]
    metadata.write_text(json.dumps({**changed, files.OWN_DIGEST: files._digest_of(changed)}))


def name_of(place):
    return lambda metadata: described(metadata, files={place: [1, "0"]})


HOSTILE = {
    "a file above": (name_of("../../escaped"), "is not the name of a file in the checkpoint's folder"),
    "a path": (
        lambda m: name_of(f"{m.parents[4]}/escaped")(m),
        "is not the name of a file in the checkpoint's folder",
    ),
    "its description": (name_of("metadata.json"), "is not the name of a file in the checkpoint's folder"),
    "more bytes": (lambda m: described(m, files={"identity.json": [1, "0"]}), "has more bytes than"),
    "a vast file": (lambda m: described(m, files={"identity.json": [2**49, "0"]}), "MiB are free"),
    "no size": (lambda m: described(m, files={"identity.json": [-1, "0"]}), "has -1 bytes"),
    "no files": (lambda m: described(m, files={}), "it describes no files"),
    "no description": (lambda m: m.write_text("[" * 10_000), "cannot be read"),
    "a missing file": (lambda m: (m.parent / "identity.json").unlink(), "identity.json: is missing"),
    "other bytes": (
        lambda m: (m.parent / "trial_state.pkl").write_bytes(
            b"0" * (m.parent / "trial_state.pkl").stat().st_size
        ),
        "trial_state.pkl",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_store_is_trusted(name, trained, tmp_path, capfd):
    """No file is written outside the run's folder, and no training begins."""
    change, said = HOSTILE[name]
    shutil.copytree(trained, tmp_path / "share")
    (metadata,) = tmp_path.glob("share/run/checkpoints/*/metadata.json")
    change(metadata)
    before = plain(tmp_path / "share")
    with pytest.raises(InvalidInput) as caught:
        fit(
            tmp_path / "inner/run",
            {"type": "shared_fs", "host_path": str(tmp_path / "share")},
            which="latest",
        )
    assert said in f"{caught.value}{capfd.readouterr().err}"
    assert plain(tmp_path / "share") == before
    assert {path.name for path in tmp_path.iterdir()} == {"share", "inner"}
    assert not list(tmp_path.rglob("escaped"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A shared folder with a run of 5 steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "share").mkdir()
    fit(folder / "run", {"type": "shared_fs", "host_path": str(folder / "share")}, 5)
    return folder / "share"


def test_partial_checkpoints_in_the_store_are_removed_and_whole_ones_taken(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "share")
    (whole,) = tmp_path.glob("share/run/checkpoints/*")
    partial = whole.with_name("00000000-0000-4000-8000-000000000000")
    shutil.copytree(whole, partial)
    (partial / "metadata.json").unlink()
    (whole.parent / "notes").mkdir()
    section = {"type": "shared_fs", "host_path": str(tmp_path / "share")}
    _, done = fit(tmp_path / "run", section, 10, which="latest")
    assert {path.name for path in whole.parent.iterdir()} == {done.checkpoint, "notes"}
