"""The task for SkyPilot: its fields, and in the soak SkyPilot's own parser."""

import pathlib
import shlex
import subprocess
import sys

import pytest
from ruamel.yaml import YAML
from support import PROJECT

import train
from classify.config import experiment_file

TASK = PROJECT / "examples/skypilot.yaml"
# Without accelerators: their catalog is on a server
PARSED = """
import sky, sys
from sky.utils import common_utils, schemas, yaml_utils
config = yaml_utils.read_yaml(sys.argv[1])
common_utils.validate_schema(config, schemas.get_task_schema(), "invalid task: ")
for spot in (False, True):
    config = yaml_utils.read_yaml(sys.argv[1])
    del config["resources"]["accelerators"]
    task = sky.Task.from_yaml_config({**config, "workdir": sys.argv[2]}, env_overrides=[("BUCKET", "mine")])
    task.set_resources_override({"use_spot": spot})
    (resources,) = task.resources
    print(task.name, task.num_nodes, resources.use_spot, resources.job_recovery, task.envs["BUCKET"])
"""


def test_the_task_s_command_is_one_of_this_project(tmp_path):
    """It trains with a store, and a machine that was lost continues."""
    task = YAML(typ="safe").load(TASK)
    values = {**task["envs"], "BUCKET": "mine", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
    run = task["run"].replace("\\\n", " ")
    for name, value in values.items():
        run = run.replace(f"${name}", value)
    words = shlex.split(run)
    arguments = train.parse(words[words.index("train.py") + 1 :])
    assert arguments.resume == "auto" and arguments.output == pathlib.Path("runs/cifar10")
    experiment = experiment_file.load(str(PROJECT / arguments.config), arguments.overrides)
    assert experiment.storage == {"type": "s3", "bucket": "mine"}
    assert task["envs"]["BUCKET"] is None and task["num_nodes"] == 1


@pytest.mark.soak
def test_skypilot_accepts_the_task(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "sky"], check=True)
    python = tmp_path / "sky/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "skypilot==0.14.1"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip("SkyPilot cannot be installed here")
    command = [python, "-c", PARSED, str(TASK), str(PROJECT)]
    done = subprocess.run(command, env={"HOME": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-2:]
    assert [line.split()[:3] for line in lines] == [["cifar10", "1", "False"], ["cifar10", "1", "True"]]
    assert all(line.endswith(" mine") for line in lines)
