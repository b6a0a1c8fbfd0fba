"""What a run runs on: processor, memory, versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import pathlib
import platform
import resource
import sys
from typing import Any

import joblib
import psutil
import torch

PACKAGES = ("torch", "torchvision", "deepspeed", "determined")


def versions() -> dict[str, str]:
    """The versions of what computes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # vendored by an image
            found[package] = "unknown"
    return found


def is_installed(module: str) -> bool:
    """Whether a module can be imported; a mere folder of its name, as trackers leave, is none."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def describe() -> dict[str, Any]:
    """Processor, memory in GiB, accelerators and versions."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": joblib.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        **versions(),
    }


def has_bf16_instructions() -> bool:
    """Whether the processor multiplies bf16 numbers itself; where not, fp32 is faster. True if not known."""
    flags = _cpuinfo("flags") or _cpuinfo("Features")  # of x86, of Arm
    return not flags or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    """What Linux says of the first core; empty where it does not."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def peak_memory() -> float:
    """The most memory that this process has used, in MiB: of its GPU, or of the host if there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def memory_limit(processes: int, device: str) -> int | None:
    """The bytes that each of so many processes of this machine may have; None where none is known.

    Of a GPU all its memory; else an equal share of the machine's or the control group's, and no more than
    the process's own limit (``ulimit -v``, ``-d``).
    """
    if device == "cuda":
        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
    shared = [psutil.virtual_memory().total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            shared.append(int(pathlib.Path(file).read_text()))
    own = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min(
        min(shared) // processes, *(each for each in own if each != resource.RLIM_INFINITY), sys.maxsize
    )


def waited_for_cores(thread: str = "*") -> float:
    """The seconds that threads of this process were ready to run and had no core, together; 0 if unknown.

    Source: https://docs.kernel.org/scheduler/sched-stats.html

    Args:
        thread: the id of one, or ``*`` for all.
    """
    nanoseconds = 0
    for file in pathlib.Path("/proc/self/task").glob(f"{thread}/schedstat"):  # on Linux
        with contextlib.suppress(OSError, IndexError, ValueError):  # of a thread that has just ended
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


def is_alive(process: psutil.Process | None) -> bool:
    """Whether a process runs, and is no zombie, nor another that has got its id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
