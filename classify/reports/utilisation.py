"""Model FLOPs utilisation (MFU): a training's FLOP/s divided by the peak FLOP/s of its GPUs.

Source: https://arxiv.org/abs/2204.02311, appendix B.
"""

from __future__ import annotations

import torch
from determined import core

from classify.engine.trial_config import TrialConfig

# Peak dense FLOP/s in 16 bits and in fp32 (no TF32) by a part of the GPU's name, from data sheets
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


def peak(gpu: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU by its name; None for a GPU that is not in ``GPUS``."""
    peaks = next((peaks for part, peaks in GPUS.items() if part in gpu), None)
    return peaks[dtype == torch.float32] if peaks else None


def summary(
    config: TrialConfig, rate: float, distributed: core.DistributedContext, device: torch.device
) -> dict[str, float]:
    """Return the FLOP entries of ``summary.json``. Every rank calls it.

    Args:
        config: the trial's configuration.
        rate: training images a second, over all ranks.
        distributed: the context of the ranks.
        device: this rank's device.

    Returns:
        ``flops_per_image`` (forward and backward pass) and ``flops_per_second``, if the operations are known;
        ``peak_flops_per_second`` of all GPUs and ``mfu``, if the GPUs' peaks are known.
    """
    dtype = torch.bfloat16 if config.autocasts else config.dtype
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = distributed.allgather(peak(gpu, dtype))
    operations = config.training_flops
    if operations is None:
        return {}
    used = {"flops_per_image": operations, "flops_per_second": rate * operations}
    if None in peaks:
        return used
    return {**used, "peak_flops_per_second": sum(peaks), "mfu": rate * operations / sum(peaks)}
