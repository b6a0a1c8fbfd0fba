"""What a run runs on: processor, memory, versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import pathlib
import platform
import resource
import sys
from collections.abc import Iterator
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

    Of a GPU all its memory; else an equal share of the machine's or of a control group's, and no more than
    the process's own limit (``ulimit -v``, ``-d``).
    """
    if device == "cuda":
        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
    shared = min([psutil.virtual_memory().total, *(limit for limit, _ in _control_groups())])
    return min(shared // processes, *_own_limits(resource.RLIMIT_AS, resource.RLIMIT_DATA), sys.maxsize)


def free_memory() -> int:
    """Bytes that this process may still take: of its GPU, or of the host within all limits."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    own = [limit - _data() for limit in _own_limits(resource.RLIMIT_DATA)]
    return min([psutil.virtual_memory().available, *(free for _, free in _control_groups()), *own])


@contextlib.contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Has allocations on the host fail, rather than Linux end the process, beyond so many more bytes."""
    if torch.cuda.is_available() or not _data():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = min(_data() + more, *_own_limits(resource.RLIMIT_DATA), sys.maxsize)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data() -> int:
    """The bytes that ``RLIMIT_DATA`` counts; 0 where the system does not say."""
    status = pathlib.Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmData")), 0)


def _own_limits(*kinds: int) -> list[int]:
    limits = [resource.getrlimit(kind)[0] for kind in kinds]
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def _control_groups(
    groups: pathlib.Path = pathlib.Path("/proc/self/cgroup"),
    root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"),
) -> Iterator[tuple[int, int]]:
    """Each limit around this process, and what it leaves; what files are cached in can be had again.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory, and cgroup-v1/memory.html beside it
    """
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, names = root, ("memory.max", "memory.current", "file")
        if controllers:
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        group = top / path.lstrip("/")
        for each in [group, *group.parents]:  # a container sees its own as the top
            if each.is_relative_to(top):
                with contextlib.suppress(OSError, ValueError, KeyError):  # not there, or "max"
                    limit, used = (int((each / name).read_text()) for name in names[:2])
                    cached = dict(text.split() for text in (each / "memory.stat").read_text().splitlines())
                    yield limit, limit - used + int(cached[names[2]])


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
