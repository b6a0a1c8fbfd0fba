"""Ranks from SLURM: what ``srun`` says to each of its tasks, by the names that torch and DeepSpeed read.

Names by ``man srun``, "OUTPUT ENVIRONMENT VARIABLES" (https://slurm.schedmd.com/srun.html). No ssh is needed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import MutableMapping

_NODE = re.compile(r"(?:[^,\[]+|\[[^\]]*\])+")  # the first of "a[01-03,7],b"
_FIRST = re.compile(r"\[(\d+)[^\]]*\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of "2(x3),1"


def take_ranks(environment: MutableMapping[str, str]) -> None:
    """Gives a task of ``srun`` its rank, and the address and port of rank 0, unless another launcher does.

    A ``MASTER_ADDR`` or ``MASTER_PORT`` that is there stays.

    Args:
        environment: of this process, which is changed.
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
    """The first of a list of nodes such as ``a[01-03,7],b``, on which rank 0 is."""
    found = _NODE.match(nodes)
    return _FIRST.sub(r"\1", found[0]) if found else nodes


def tasks_per_node(counts: str) -> list[int]:
    """How many tasks each node has, of a list such as ``2(x3),1``."""
    return [int(tasks) for tasks, times in _TASKS.findall(counts) for _ in range(int(times or 1))]
