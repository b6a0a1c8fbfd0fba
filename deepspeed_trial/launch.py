"""The entrypoint of a trial on a Determined cluster: ``python3 -m deepspeed_trial.launch python3 train.py``.

It replaces ``determined.launch.deepspeed`` of Determined 0.38.1, which has four faults:

- When the workers have ended, it gives DeepSpeed's launcher 5 seconds and then sends SIGTERM. On a busy host
  a completed trial then exits with code 241. This entrypoint waits for the launcher.
- It imports torch and DeepSpeed three times before the trial. Here a single slot needs no launcher: the
  command replaces this process.
- DeepSpeed always uses port 29500, so a second trial on the same host's network fails.
- On several hosts the chief starts all processes over ssh, and the command in the log contains its
  environment with the session token. Here each container starts its processes with DeepSpeed's launcher and
  the wrappers of ``determined.launch.torch_distributed``.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zlib
from typing import NoReturn

import determined as det
from determined.launch import torch_distributed

Cmd = list[str]


def main(command: Cmd) -> int:
    """Run a command in every slot of this container, and return the exit code."""
    if not command:
        print("usage: python3 -m deepspeed_trial.launch COMMAND...", file=sys.stderr)
        return 2
    info = det.get_cluster_info()
    if info is None:
        print(f"deepspeed_trial.launch: not on a cluster; here run {' '.join(command)}", file=sys.stderr)
        return 2
    if sum(info.container_slot_counts) <= 1:
        _become(command)
    os.environ.update(USE_DEEPSPEED="1", DET_CHIEF_IP=info.container_addrs[0])
    if interface := os.environ.get("DET_INTER_NODE_NETWORK_INTERFACE"):  # of the master's configuration
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    launcher = subprocess.Popen(in_each_slot(info, command))
    with det.util.forward_signals(launcher):
        return launcher.wait()


def in_each_slot(info: det.ClusterInfo, command: Cmd) -> Cmd:
    """Return the command that runs ``command`` in every slot of this container, as ranks of the trial."""
    slots = [list[int | str](range(count)) for count in info.container_slot_counts]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        slots[info.container_rank] = [*visible.split(",")]
    containers = {str(number): devices for number, devices in enumerate(slots)}
    world = base64.urlsafe_b64encode(json.dumps(containers).encode()).decode()
    chief = info.container_addrs[0] if len(slots) > 1 else "127.0.0.1"
    master = [f"--master_addr={chief}", f"--master_port={master_port(info)}"]
    python, layer = ["python3", "-u", "-m"], torch_distributed
    return [
        *layer.create_pid_server_cmd(info.allocation_id, len(slots[info.container_rank])),
        *[*python, "deepspeed.launcher.launch", f"--world_info={world}", *master],
        *[f"--node_rank={info.container_rank}", "--log_level=warning", "--no_python", "--no_local_rank"],
        *[*python, *layer.create_pid_client_cmd(info.allocation_id)],
        *layer.create_log_redirect_cmd(),
        *command,
    ]


def master_port(info: det.ClusterInfo) -> int:
    """Return the port of the trial's process group: the same in all its containers, different for each trial.

    The master reserves the port. Otherwise the port is computed from the allocation.
    """
    return int(os.environ.get("C10D_PORT") or 20000 + zlib.crc32(info.allocation_id.encode()) % 10000)


def _become(command: Cmd) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"deepspeed_trial.launch: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(exit_code)  # at once: the master kills an invalid trial 10 s after its report, torch ends slowly
