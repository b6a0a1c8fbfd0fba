"""The entrypoint of a trial on a Determined cluster: ``python3 -m deepspeed_trial.launch python3 train.py``.

In place of ``determined.launch.deepspeed``, which in Determined 0.38.1 does this:

- After the workers' end it gives DeepSpeed's launcher 5 seconds, then sends it SIGTERM. On a busy host a
  trial that has trained all its steps so ends with exit code 241. Here the launcher's end is awaited.
- Before the trial it imports torch and DeepSpeed three times. Here one slot needs no launcher: its command
  takes the place of this process. Several slots of one host have DeepSpeed's launcher alone, within the
  processes that ``determined.launch.torch_distributed`` puts around torch's.
- DeepSpeed always takes port 29500. The second trial on a host's network fails.
- On several hosts the chief's environment becomes part of the command that ssh runs: in quotes, around which
  DeepSpeed sets its own, and with the session's token, which is then in the log. Here every process has the
  environment of the container that it runs in; all else is Determined's.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

import determined as det
from determined import constants
from determined.launch import torch_distributed

import deepspeed_trial

IN_CONTAINER = "--in-container"  # before a command that ssh runs
FOR_LAUNCHER = ("PATH", "LD_LIBRARY_PATH", "DS_ACCELERATOR")  # what DeepSpeed's launcher has to have
PLAIN = re.compile(r"[\w@%+=:,./-]*")  # what neither DeepSpeed nor a shell quotes

Cmd = list[str]


def main(command: Cmd) -> int:
    """Runs a command in every slot of this trial and gives the exit code."""
    if not command:
        print("usage: python3 -m deepspeed_trial.launch COMMAND...", file=sys.stderr)
        return 2
    if command[0] == IN_CONTAINER:
        os.environ.update(json.loads(_environment_file().read_text()))
        _become(command[1:])
    info = det.get_cluster_info()
    if info is None:
        print(f"deepspeed_trial.launch: not on a cluster; here run {' '.join(command)}", file=sys.stderr)
        return 2
    if sum(info.container_slot_counts) <= 1:
        _become(command)
    os.environ.update(USE_DEEPSPEED="1", DET_CHIEF_IP=info.container_addrs[0])
    if len(info.container_addrs) == 1:
        launcher = subprocess.Popen(on_this_host(info, command))
        with det.util.forward_signals(launcher):
            return launcher.wait()
    deepspeed_trial.choose_accelerator()
    from determined.launch import deepspeed as layer

    patch_for_several_hosts(layer, info)
    return layer.main(command)


def on_this_host(info: det.ClusterInfo, command: Cmd) -> Cmd:
    """The command that runs another in each of several slots of one host."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else list(range(info.container_slot_counts[0]))
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    master = ["--master_addr=127.0.0.1", f"--master_port={master_port(info)}"]
    python, layer = ["python3", "-u", "-m"], torch_distributed
    return [
        *layer.create_pid_server_cmd(info.allocation_id, len(devices)),
        *[*python, "deepspeed.launcher.launch", f"--world_info={world}", *master],
        *["--log_level=warning", "--no_python", "--no_local_rank"],
        *[*python, *layer.create_pid_client_cmd(info.allocation_id)],
        *layer.create_log_redirect_cmd(),
        *command,
    ]


def master_port(info: det.ClusterInfo) -> int:
    """The port of the trial's process group, alike in all its containers and of no other trial.

    It is the one that the master keeps for this, or follows from the allocation.
    """
    return int(os.environ.get("C10D_PORT") or 20000 + zlib.crc32(info.allocation_id.encode()) % 10000)


def patch_for_several_hosts(layer: Any, info: Any) -> None:
    """Replace functions of ``determined.launch.deepspeed``; skip functions that the installed release lacks.

    Args:
        layer: the module.
        info: the trial's ``ClusterInfo``.
    """
    replacements: dict[str, Callable[..., Any]] = {
        "create_pid_server_cmd": _await_launcher,
        "create_run_command": functools.partial(_run_on_port, master_port(info)),
        "create_pid_client_cmd": _run_in_container,
        "create_deepspeed_env_file": _write_launcher_environment,
    }
    for name, replacement in replacements.items():
        if original := getattr(layer, name, None):
            setattr(layer, name, functools.partial(replacement, original))
    file = _environment_file()
    file.touch(mode=0o600)
    file.write_text(json.dumps(layer.filter_env_vars(os.environ)))


def _await_launcher(original: Callable[..., Cmd], *args: Any) -> Cmd:
    command = original(*args)
    if "--on-exit" in command:
        command[command.index("--on-exit") + 1] = "WAIT"
    return command


def _run_on_port(port: int, original: Callable[..., Cmd], *args: Any) -> Cmd:
    command = original(*args)
    return [command[0], f"--master_port={port}", *command[1:]]


def _run_in_container(original: Callable[..., Cmd], *args: Any) -> Cmd:
    return ["python3", "-m", "deepspeed_trial.launch", IN_CONTAINER, *original(*args)]


def _write_launcher_environment(original: Callable[[], None]) -> None:
    from deepspeed.launcher import runner

    handed = {name: os.environ.get(name, "") for name in FOR_LAUNCHER}
    lines = [f"{name}={value}\n" for name, value in handed.items() if value and PLAIN.fullmatch(value)]
    pathlib.Path(runner.DEEPSPEED_ENVIRONMENT_NAME).write_text("".join(lines))


def _environment_file() -> pathlib.Path:
    """Where a container keeps its environment for the processes that ssh starts in it."""
    return pathlib.Path(constants.MANAGED_TRAINING_MODEL_COPY).with_name("environment.json")


def _become(command: Cmd) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"deepspeed_trial.launch: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(
        exit_code
    )  # torch takes seconds to end, of the ten that a trial with invalid hyperparameters has
