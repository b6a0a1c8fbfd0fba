"""Ranks from SLURM: translates variables of ``srun`` to the names that torch and DeepSpeed read.

Source: ``man srun``, "OUTPUT ENVIRONMENT VARIABLES" (https://slurm.schedmd.com/srun.html). No ssh is needed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import MutableMapping

_NODE = re.compile(r"(?:[^,\[]+|\[[^\]]*\])+")  # the first of "a[01-03,7],b"
_FIRST = re.compile(r"\[(\d+)[^\]]*\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of "2(x3),1"


def take_ranks(environment: MutableMapping[str, str]) -> None:
    """Set the rank of a task of ``srun``, and rank 0's address and port, unless another launcher did.

    An existing ``MASTER_ADDR`` or ``MASTER_PORT`` stays unchanged.

    Args:
        environment: the variables of this process; changed in place.
    """
    size = int(environment.get("SLURM_STEP_NUM_TASKS", 1))  # not there in a batch script's own process
    if size < 2 or "RANK" in environment or "DET_CLUSTER_ID" in environment:
        return
    node, nodes = environment["SLURM_NODEID"], environment["SLURM_STEP_NUM_NODES"]
    job = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=str(size),
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(node)]),
        GROUP_RANK=node,
        GROUP_WORLD_SIZE=nodes,
    )
    environment.setdefault("MASTER_ADDR", first_node(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(20000 + zlib.crc32(job.encode()) % 10000))


def first_node(nodes: str) -> str:
    """Return the first node, which runs rank 0, of a list such as ``a[01-03,7],b``."""
    found = _NODE.match(nodes)
    return _FIRST.sub(r"\1", found[0]) if found else nodes


def tasks_per_node(counts: str) -> list[int]:
    """Return the number of tasks on each node, from a list such as ``2(x3),1``."""
    return [int(tasks) for tasks, times in _TASKS.findall(counts) for _ in range(int(times or 1))]
