"""How much of what its processors can compute a training has used: model FLOPs utilisation (MFU).

The operations that the network needs, over the time of training, over the peak of the devices. Source:
https://arxiv.org/abs/2204.02311, appendix B.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from determined import core

from classify.engine.trial_config import TrialConfig

# Dense operations a second in 16 bits, and in fp32 with TF32 off, by a part of a GPU's name: of data sheets.
GPUS = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 31.2e12),
    "T4": (65e12, 8.1e12),
    "V100": (125e12, 15.7e12),
}
SIZE, SECONDS = 512, 0.1  # of the matrices, and for how long at least; 0.3 s in fp16, which few CPUs have


def peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """The operations a second that this process's device can do; of a CPU what a matrix product reaches.

    Args:
        device: the process's.
        dtype: in which most is computed.

    Returns:
        None for a GPU that is not in ``GPUS``.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = next((peaks for part, peaks in GPUS.items() if part in name), None)
        return found[dtype == torch.float32] if found else None
    left, right = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    best, begun = 0.0, time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        started = time.perf_counter()
        left @ right
        best = max(best, 2 * SIZE**3 / (time.perf_counter() - started))
    return best


def summary(
    config: TrialConfig, rate: float, distributed: core.DistributedContext, device: torch.device
) -> dict[str, Any]:
    """What ``summary.json`` says of it; every rank has to call it, and all measure at the same time.

    Args:
        config: the trial's.
        rate: images a second of its training.
        distributed: the ranks.
        device: this rank's.

    Returns:
        ``flops_per_image`` of forward and backward pass, ``flops_per_second``, ``peak_flops_per_second`` of
        all devices together and ``mfu``; empty where the operations or the peak are not known.
    """
    operations = config.training_flops
    dtype = torch.bfloat16 if config.autocasts else config.dtype
    peaks = distributed.allgather(peak(device, dtype) if operations else None)
    if operations is None or None in peaks:
        return {}
    done = rate * operations
    return {
        "flops_per_image": operations,
        "flops_per_second": done,
        "peak_flops_per_second": sum(peaks),
        "mfu": done / sum(peaks),
    }
