"""Credentials stay in memory: no file, page, tracker or line has one that the configuration holds."""

import dataclasses
import json
import pathlib
import re

import pytest
from sources import load, served
from support import LATEST, checkpoints, error_line, overrides, run

import checkpoint
import search
import train
from classify.config import experiment_file
from classify.images.settings import DataSettings
from deepspeed_trial import redaction
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.experiment import Experiment
from workbench.search import runner, trial_run

PLANTED = re.compile(rb"planted_\w*")
FILE = """
name: planted
description: see https://planted_wiki:planted_wikipassword@host/page?x=planted_page#planted_fragment
entrypoint: env KEY=planted_entrypoint python3 train.py
environment:
  environment_variables: [PASSWORD=planted_variable]
  registry_auth: {{username: planted_user, password: planted_registry}}
checkpoint_storage: {{type: shared_fs, host_path: {store}, access_key: planted_access, secret_key: planted_secret, save_trial_best: 0}}
bind_mounts: [{{host_path: /planted_mount, container_path: /cache}}]
integrations: {{pachyderm: {{pachd: {{token: planted_pachyderm}}}}}}
tensorboard_storage: {{type: s3, secret_key: planted_tensorboard}}
data:
  dataset: webdataset
  root: "{root}"
  cache: {{folder: {cache}}}
  storage:
    headers: {{X-Authorization: planted_authorization}}
    client_kwargs: {{headers: {{X-Key: planted_nested}}}}
hyperparameters:
  net: net
  max_length: {{batches: 2}}
  deepspeed_config: ds_config.json
  overwrite_deepspeed_args:
    train_batch_size: 8
    scheduler: {{params: {{warmup_num_steps: 1}}}}
    comet: {{enabled: false, api_key: planted_comet}}
searcher: {{name: single, metric: accuracy, smaller_is_better: false}}
"""
SETS = [
    "--set",
    "environment.pod_spec={spec: planted_pod}",
    "--set=checkpoint_storage.connection_string=planted_connection",
]


def planted_in(folder: pathlib.Path) -> dict[str, set[bytes]]:
    """Find the planted credentials in the files of a folder and in their names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    found = {str(path): set(PLANTED.findall(bytes(path) + path.read_bytes())) for path in files}
    return {path: each for path, each in found.items() if each}


def experiment_file_with_credentials(folder: pathlib.Path, shards: pathlib.Path, url: str) -> str:
    """Write an experiment file with a credential in every field that can hold one."""
    names = ",".join(sorted(file.stem for file in shards.glob("*.tar")))
    query = "sig=planted_signature&X-Amz-Signature=planted_amazon"
    root = f"{url.replace('://', '://planted_token@')}/{{{names}}}.tar?{query}"
    file = folder / "planted.yaml"
    store = folder / "out" / "store"
    store.mkdir(parents=True)
    file.write_text(FILE.format(root=root, cache=folder / "out" / "cache", store=store))
    return str(file)


def test_no_file_of_a_run_and_no_line_of_it_holds_a_credential(written, tmp_path, capfd):
    output, out = tmp_path / "out" / "run", tmp_path / "out"
    with served(written) as (_, url):
        config = ["--config", experiment_file_with_credentials(tmp_path, written, url), *SETS]
        row = ["train.py", *config, "--output", str(output)]
        first = run(row, output)
        assert first.code == 0, first.stderr
        more = overrides(hyperparameters__max_length="{batches: 3}")
        second = run([*row, *more, *LATEST], output)
        assert second.code == 0, second.stderr
        assert (found := list(checkpoints(second))) and max(found) == 3
        assert train.main([*config, "--check"]) == 0
    assert checkpoint.main(["export", str(output), str(out / "net.onnx")]) == 0
    assert checkpoint.main(["export", str(output), str(out / "hf"), "--format", "hf"]) == 0
    assert checkpoint.main(["report", str(output)]) == 0
    printed = "".join([first.stdout, first.stderr, second.stdout, second.stderr, *capfd.readouterr()])
    assert PLANTED.findall(printed.encode()) == []
    assert (
        "data.storage: {'headers': '***', 'client_kwargs': '***'}: may contain credentials, which a cluster's master"
        in printed
    )
    assert planted_in(out) == {}

    described = json.loads((output / "run.json").read_text())
    assert described["config"]["environment"] == {
        "environment_variables": "***",
        "registry_auth": "***",
        "pod_spec": "***",
    }
    assert described["config"]["data"]["storage"] == {"headers": "***", "client_kwargs": "***"}
    assert described["command"][described["command"].index("--set") + 1] == "environment.pod_spec=***"
    (load_data,) = {file.read_text() for file in output.glob("checkpoints/*/load_data.json")}
    assert json.loads(load_data)["experiment_config"]["searcher"]["metric"] == "accuracy"


def test_an_error_line_holds_no_credential(tmp_path, capsys):
    """A table's signed URLs, a refused configuration, and YAML that cannot be read."""
    with served(tmp_path) as (_, url):
        signed = f"{url.replace('://', '://planted_token@')}/missing.png?sig=planted_signature"
        for part in ("train", "test"):
            rows = [f"{signed},{name}\n" for name in ("a", "b")]
            (tmp_path / f"{part}.csv").write_text("".join(["path,label\n", *rows]))
        line = error_line(lambda: load("table", tmp_path))
    shown = f"{url.replace('://', '://***@')}/missing.png?***"
    assert line.startswith(f"{tmp_path}/train.csv, line 2: {shown}: is a URL; download the images")
    (broken := tmp_path / "broken.yaml").write_text("environment: [PASSWORD=planted_variable")
    for arguments in (
        ["--config", str(broken)],
        ["--set", "environment={a: [planted_variable"],
        ["--set", "enviroment={environment_variables: [PASSWORD=planted_variable]}"],
        [
            "--set",
            "environment=planted_text",
            "--set",
            "environment.environment_variables=[planted_variable]",
        ],
        ["--set", "checkpoint_storage=planted_storage"],
        ["--set", "checkpoint_storage.secret_kye=planted_storage"],
        ["--set", "data.storage=planted_storage"],
        ["--set", "data.storge={key: planted_storage}"],
    ):
        assert train.main([*arguments, "--check"]) == 2
        said = "".join(capsys.readouterr())
        assert said.count("train.py: ") >= 1 and "planted_" not in said, said


def test_a_search_keeps_credentials_from_its_folder_and_its_trials_have_them(
    written, tmp_path, monkeypatch, capfd
):
    """Its trials read the whole file from a descriptor without a name, one after the other and several times."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(TRIAL)
    monkeypatch.setattr(trial_run, "PROJECT", tmp_path / "project")
    monkeypatch.setattr(runner, "POLL", 0.05)
    output = tmp_path / "out" / "search"
    rate = (
        "hyperparameters.overwrite_deepspeed_args.optimizer.params.lr={type: categorical, vals: [0.1, 0.2]}"
    )
    with served(written) as (_, url):
        config = ["--config", experiment_file_with_credentials(tmp_path, written, url), *SETS, "--set", rate]
        command = [*config, "--set", "searcher={name: grid, metric: accuracy}", "--output", str(output)]
        assert search.main(command) == 0
        assert search.main(command) == 0, "the same search continues"
    assert checkpoint.main(["report", str(output)]) == 0
    assert len(list(output.glob("trials/*/summary.json"))) == 2
    assert PLANTED.findall("".join(capfd.readouterr()).encode()) == []
    assert planted_in(tmp_path / "out") == {}


TRIAL = """
import json, pathlib, sys
config, output = (pathlib.Path(sys.argv[sys.argv.index(name) + 1]) for name in ("--config", "--output"))
for _ in range(2):
    whole = json.loads(config.read_text())
    assert "planted_token@" in whole["data"]["root"] and whole["data"]["storage"]["headers"]["X-Authorization"][:8] == "planted_"
entry = {"group": "validation", "steps_completed": 2, "batches": 2, "epochs": 1, "accuracy": 0.5}
(output / "metrics.jsonl").write_text(json.dumps(entry) + "\\n")
(output / "summary.json").write_text('{"steps": 2}')
"""


def test_a_file_that_a_program_has_written_names_the_missing_credentials(tmp_path):
    config = {
        "data": {
            "root": "https://me:planted_@host/x.tar",
            "storage": {"key": "planted_", "endpoint_url": "planted_"},
        }
    }
    data = Experiment(config, {}).shown["data"]
    assert data == {"root": "https://***@host/x.tar", "storage": {"key": "***", "endpoint_url": "***"}}
    with pytest.raises(InvalidInput) as caught:
        DataSettings.parse(data)
    keys = ["root", "storage.key", "storage.endpoint_url"]
    assert [line.split(": ")[0] for line in caught.value.errors] == [f"data.{key}" for key in keys]
    assert all(
        line.endswith(f"--set data.{key}=VALUE") for key, line in zip(keys, caught.value.errors, strict=True)
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://planted_@host/a@2x.png", "http://***@host/a@2x.png"),
        ("s3://bucket/a@2x/{000..009}.tar", "s3://bucket/a@2x/{000..009}.tar"),
        ("http://host:8000/a@b", "http://host:8000/a@b"),
        ("http://me:planted_/with/slash@host/a", "http://***@host/a"),
        ("http://me:planted_'quote@host/a", "http://***@host/a"),
        ("'https://host/a?sig=planted_'d&b=planted_;c': mend it", "'https://host/a?***': mend it"),
        ("(https://host/a#planted_); x", "(https://host/a?***); x"),
        ("simplecache::https://me@host?planted_", "simplecache::https://***@host?***"),
        ("a://b c://planted_@d", "a://b c://***@d"),
    ],
)
def test_a_url_is_shown_without_its_user_and_its_query(given, shown):
    assert redaction.text(given) == shown == redaction.text(shown)


def test_hyperparameters_and_known_fields_pass_and_all_others_are_names(tmp_path):
    config = experiment_file.load("experiments/digits.yaml").config
    assert redaction.experiment(config) == config
    fields = {field.name for field in dataclasses.fields(DataSettings)} - {"storage"}
    storage = {"type": "s3", "secret_key": "planted_", "connection": "planted_", "save_trial_best": 2}
    assert redaction.field("checkpoint_storage", storage) == {
        "type": "s3",
        "secret_key": "***",
        "connection": "***",
        "save_trial_best": 2,
    }
    section = dict.fromkeys(fields, 1)
    assert redaction.field("data", {**section, "storage": {"a": {"b": 1}}, "c": 1}) == {
        **section,
        "storage": {"a": "***"},
        "c": "***",
    }
    given = {
        "hf_token": "planted_",
        "class_token": False,
        "api_key": {"type": "const", "val": "planted_"},
        "tokenizer": "x",
    }
    passed = {**given, "hf_token": "***", "api_key": "***"}
    assert redaction.values({"a": [given, ("https://h?planted_",)]}) == {"a": [passed, ["https://h?***"]]}


def test_a_command_is_shown_with_what_set_may_show():
    words = [
        "train.py",
        "--set",
        "data={root: 'http://planted_@h', storage: {a: planted_}}",
        "--se",
        "environment=[planted_]",
    ]
    words += ["--set=hyperparameters.lr=0.1", "--output", "runs/lr=0.1", "--set", "data.cache={folder: x}"]
    assert redaction.command(words) == [
        "train.py",
        "--set",
        'data={"root": "http://***@h", "storage": {"a": "***"}}',
        "--se",
        "environment=***",
        *words[5:],
    ]
