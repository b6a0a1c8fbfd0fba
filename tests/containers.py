"""Containers of a trial as a master starts them: Determined's files in a folder, and real processes."""

import base64
import json
import os
import pathlib
import sys
import tarfile
from typing import Any

from determined import ClusterInfo, _info
from determined.common import context, util
from master import Master
from support import PROJECT, Run, execute, free_port, run

HERE = PROJECT / "tests/container"
# The master gives each allocation its ports.
PORTS = ("C10D_PORT", "INTER_TRAIN_PROCESS_COMM_PORT_1", "INTER_TRAIN_PROCESS_COMM_PORT_2")
# The master's entrypoint.sh from the hook on, which it has bash print.
ENTRYPOINT = "set -ex; source startup-hook.sh; set +x; exec python3 -m determined.exec.launch"
# In a fork: find the container's files, then train
ALONE = """
import runpy, sys
from determined import _info
_info._info = "unloaded"
runpy.run_path(sys.argv.pop())
runpy.run_path("train.py", run_name="__main__")
"""
SMALL = {
    "max_length": {"batches": 90},
    "deepspeed_config": "ds_config.json",
    "overwrite_deepspeed_args": {"train_batch_size": 32, "zero_optimization": {"stage": 1}},
}


def container(
    folder: pathlib.Path,
    master: Master,
    slots: int,
    hparams: dict,
    *,
    config: dict[str, Any] | None = None,
    rank: int = 0,
    addresses: tuple[str, ...] = ("127.0.0.1",),
    again: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """Write a container's files by Determined's writers, and give its environment.

    ``config`` changes fields of ``digits.yaml``; ``rank`` is the container's among all ``addresses``; a paused
    trial starts ``again`` at a checkpoint and its steps.
    """
    experiment = util.safe_load_yaml_with_exceptions((PROJECT / "experiments/digits.yaml").read_text())
    (folder / "shared").mkdir(parents=True, exist_ok=True)  # the shared file system
    storage = {"type": "shared_fs", "host_path": "/shared", "storage_path": "checkpoints"}
    experiment |= {"hyperparameters": hparams, "checkpoint_storage": storage, "debug": False}
    experiment |= {"scheduling_unit": 10, "min_validation_period": {"batches": 40}, **(config or {})}
    for item in context.read_v1_context(PROJECT):  # what `det experiment create` uploads
        path = folder / "model" / item.path
        if item.type == ord(tarfile.REGTYPE):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(item.content or ""))
    ids, (latest, steps) = list(range(slots)), again or (None, 0)
    seed = 1 + experiment["reproducibility"]["experiment_seed"]  # the master draws another one, too
    names = {"cluster_id": "c", "agent_id": f"agent {rank}", "task_id": "1.task", "task_type": "TRIAL"}
    names |= {"session_token": "token", "allocation_id": f"1.{os.getpid()}.{folder.parent.name}"}
    infos = {
        "cluster": ClusterInfo(master.url, slot_ids=ids, latest_checkpoint=latest, **names),
        "trial": _info.TrialInfo(1, 1, seed, hparams, experiment, steps, 2 if again else 1, False, None),
        "rendezvous": _info.RendezvousInfo(list(addresses), rank, [slots] * len(addresses)),
        "resources": _info.ResourcesInfo([]),
    }
    for name, info in infos.items():
        info._to_file(str(folder / f"{name}.json"))
    determined = {
        "RESOURCES_ID": "r",
        "SLOT_IDS": json.dumps(ids),
        "MASTER": master.url,
        "USER": "determined",
    }
    determined |= {"SESSION_TOKEN": "secret-token", "EXPERIMENT_CONFIG": json.dumps(experiment)}
    paths = f"{HERE}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    found = {"CONTAINER_FILES": str(folder), "PYTHONPATH": str(HERE), "PATH": paths}
    return {**found, **{f"DET_{name}": value for name, value in determined.items()}}


def run_container(folder: pathlib.Path, master: Master, slots: int, hparams: dict, **trial: Any) -> Run:
    """Run the startup hook, then the entrypoint of the experiment file, as a container does."""
    environment = container(folder, master, slots, hparams, **trial)
    ports = {name: str(free_port()) for name in PORTS}
    return execute(["bash", "-c", ENTRYPOINT], folder, cwd=folder / "model", **environment, **ports)


def run_alone(folder: pathlib.Path, master: Master, slots: int, hparams: dict, **trial: Any) -> Run:
    """Run in a fork the command that the launch layer becomes in a container of one slot."""
    assert slots == 1
    environment = container(folder, master, slots, hparams, **trial)
    return run(["-c", ALONE, str(HERE / "sitecustomize.py")], folder, cwd=folder / "model", **environment)
