"""Information about the machine of a run: processor, memory, versions."""

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
    """Return the versions of Python and of the numerical packages."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # an image has it without its metadata
            found[package] = "unknown"
    return found


def is_installed(module: str) -> bool:
    """Return whether a module is installed; a plain folder with its name does not count."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def describe() -> dict[str, Any]:
    """Return the processor, the memory in GiB, the accelerators and the versions."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": joblib.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        **versions(),
    }


def has_bf16_instructions() -> bool:
    """Return whether the processor has bf16 instructions, or True if unknown. Without them fp32 is faster."""
    flags = _cpuinfo("flags") or _cpuinfo("Features")  # of x86, of Arm
    return not flags or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())


def _cpuinfo(key: str, source: str = "/proc/cpuinfo") -> str:
    """Return the first field ``key`` of a file of Linux, by default of the first core; empty if missing."""
    file = pathlib.Path(source)
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def peak_memory() -> float:
    """Return the peak memory of this process in MiB, on its GPU, or on the host if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def memory_limit(processes: int, device: str) -> int | None:
    """Return the memory limit in bytes of one of this machine's ``processes``; None if unknown.

    The limit on a GPU is all of its memory. On the host it is an equal share of the machine's memory or of
    the cgroup's limit, and at most the process's limit (``ulimit -v``, ``-d``).
    """
    if device == "cuda":
        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
    shared = min([psutil.virtual_memory().total, *(limit for limit, _ in _control_groups())])
    return min(shared // processes, *_own_limits(resource.RLIMIT_AS, resource.RLIMIT_DATA), sys.maxsize)


def free_memory() -> int:
    """Return the bytes that this process can still allocate, on its GPU, or on the host within all limits."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    own = [limit - _data() for limit in _own_limits(resource.RLIMIT_DATA)]
    return min([psutil.virtual_memory().available, *(free for _, free in _control_groups()), *own])


@contextlib.contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Make host allocations beyond ``more`` bytes fail, so that Linux does not kill the process."""
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
    """Return the bytes that ``RLIMIT_DATA`` counts; 0 if unknown."""
    return 1024 * int((_cpuinfo("VmData", "/proc/self/status") or "0").split()[0])


def _own_limits(*kinds: int) -> list[int]:
    limits = [resource.getrlimit(kind)[0] for kind in kinds]
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def _control_groups(
    groups: pathlib.Path = pathlib.Path("/proc/self/cgroup"),
    root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"),
) -> Iterator[tuple[int, int]]:
    """Yield the limit and the free bytes of each cgroup around this process; cached files count as free.

    Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, names = root, ("memory.max", "memory.current", "file")
        if controllers:
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        group = top / path.lstrip("/")
        for each in [group, *group.parents]:  # a container sees its own group as the top
            if each.is_relative_to(top):
                with contextlib.suppress(OSError, ValueError, KeyError):  # not there, or "max"
                    limit, used = (int((each / name).read_text()) for name in names[:2])
                    cached = dict(text.split() for text in (each / "memory.stat").read_text().splitlines())
                    yield limit, limit - used + int(cached[names[2]])


def waited_for_cores() -> float:
    """Return the seconds that threads of this process were ready to run without a core; 0 if unknown.

    Source: https://docs.kernel.org/scheduler/sched-stats.html
    """
    nanoseconds = 0
    for file in pathlib.Path("/proc/self/task").glob("*/schedstat"):  # on Linux
        with contextlib.suppress(OSError, IndexError, ValueError):  # a thread has just ended
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


def is_alive(process: psutil.Process | None) -> bool:
    """Return whether a process runs; False for a zombie, and for a new process with the old id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
