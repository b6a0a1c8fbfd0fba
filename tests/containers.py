"""Containers of a trial as a master starts them: Determined's files in a folder, its own launch layer, real processes."""

import base64
import json
import os
import pathlib
import sys
import tarfile
from typing import Any

import numpy as np
from determined import ClusterInfo, _info
from determined.common import context, util
from master import Master
from support import PROJECT, Run, execute, free_port

HERE = PROJECT / "tests/container"
# The master gives each allocation ports of its own.
PORTS = ("C10D_PORT", "DTRAIN_SSH_PORT", "INTER_TRAIN_PROCESS_COMM_PORT_1", "INTER_TRAIN_PROCESS_COMM_PORT_2")
# The master's entrypoint.sh from the hook on, which it has bash print.
ENTRYPOINT = "set -ex; source startup-hook.sh; set +x; exec python3 -m determined.exec.launch"
SMALL = {
    "max_length": {"batches": 90},
    "deepspeed_config": "ds_config.json",
    "overwrite_deepspeed_args": {"train_batch_size": 32, "zero_optimization": {"stage": 1}},
}


def drawn_seed(experiment_seed: int) -> int:
    """The seed that the master gives a single trial: 31 bits, after the 16 bytes of the trial's UUID."""
    draws = np.random.RandomState(experiment_seed).randint(0, 2**32, 5, dtype=np.uint32)
    return int(draws[4]) & 0x7FFFFFFF


def container(
    folder: pathlib.Path,
    master: Master,
    slots: int,
    hparams: dict,
    *,
    config: dict[str, Any] | None = None,
    rank: int = 0,
    addresses: tuple[str, ...] = ("127.0.0.1",),
    latest_checkpoint: str | None = None,
    steps_completed: int = 0,
    trial_run_id: int = 1,
) -> dict[str, str]:
    """Writes a container's files by Determined's own writers, and gives its environment.

    Args:
        folder: the container's.
        master: that the trial reports to.
        slots: of each container.
        hparams: the trial's.
        config: fields of the experiment configuration beside those of ``digits.yaml``.
        rank: of the container.
        addresses: of all containers.
        latest_checkpoint: that the trial goes on from.
        steps_completed: in that checkpoint.
        trial_run_id: which run of the trial this is.
    """
    with open(PROJECT / "experiments/digits.yaml") as file:
        experiment = util.safe_load_yaml_with_exceptions(file)
    (folder / "shared").mkdir(parents=True, exist_ok=True)  # the shared file system
    experiment.update(
        hyperparameters=hparams,
        checkpoint_storage={"type": "shared_fs", "host_path": "/shared", "storage_path": "checkpoints"},
        debug=False,
        scheduling_unit=10,
        min_validation_period={"batches": 40},
        **(config or {}),
    )
    for item in context.read_v1_context(PROJECT):  # what `det experiment create` uploads
        path = folder / "model" / item.path
        if item.type == ord(tarfile.REGTYPE):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(item.content or ""))
    seed = drawn_seed(experiment["reproducibility"]["experiment_seed"])
    _info.TrialInfo(1, 1, seed, hparams, experiment, steps_completed, trial_run_id, False, None)._to_file(
        str(folder / "trial.json")
    )
    _info.RendezvousInfo(list(addresses), rank, [slots] * len(addresses))._to_file(
        str(folder / "rendezvous.json")
    )
    _info.ResourcesInfo([])._to_file(str(folder / "resources.json"))
    ClusterInfo(
        master.url,
        cluster_id="c",
        agent_id=f"agent {rank}",
        slot_ids=list(range(slots)),
        task_id="1.task",
        allocation_id=f"1.{os.getpid()}.{folder.parent.name}",
        session_token="token",
        task_type="TRIAL",
        latest_checkpoint=latest_checkpoint,
    )._to_file(str(folder / "cluster.json"))
    return {
        "CONTAINER_FILES": str(folder),
        "PYTHONPATH": str(HERE),
        "PATH": f"{HERE}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "DET_RESOURCES_ID": "r",
        "DET_SLOT_IDS": json.dumps(list(range(slots))),
        "DET_MASTER": master.url,
        "DET_SESSION_TOKEN": "secret-token",
        "DET_USER": "determined",
        "DET_EXPERIMENT_CONFIG": json.dumps(experiment),
    }


def run_container(folder: pathlib.Path, master: Master, slots: int, hparams: dict, **trial: Any) -> Run:
    """What a container does: the startup hook, then the entrypoint of the experiment file."""
    environment = container(folder, master, slots, hparams, **trial)
    ports = {name: str(free_port()) for name in PORTS}
    return execute(["bash", "-c", ENTRYPOINT], folder, cwd=folder / "model", **environment, **ports)
