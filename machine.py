"""What a run ran on, for its report."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
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


def _processor() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
