"""A Mac's GPU, played by this machine's CPU: ``python tests/mac.py PROGRAM ARGUMENTS``.

DeepSpeed and the program see torch's device ``mps``. Its tensors are in the host's memory, but each knows its
device, and a call fails where the device would fail: float64, tensors of two devices, a collective, a copy to
the device that does not wait.
"""

import functools
import pathlib
import runpy
import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

MPS = torch.device("mps", 0)
COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor")
# Calls with tensors of any devices, and calls that leave their tensors where they are
BETWEEN = {"copy_", "cpu", "to", "__set__", "_has_compatible_shallow_copy_type"}
UNTOUCHED = {"device", "_parse_to"}  # they take a device and make no tensor

torch._C._mps_is_available = lambda: True
torch._C._mps_is_on_macos_or_newer = lambda *_: True
torch.backends.mps.is_available.cache_clear()  # torch asks when it is imported
torch.mps.get_rng_state = lambda *_: torch.get_rng_state()
torch.mps.set_rng_state = lambda state, *_: torch.set_rng_state(state)
torch.mps.synchronize = torch.mps.empty_cache = lambda: None
torch.mps.manual_seed = lambda seed: None
for name in ("current_allocated_memory", "driver_allocated_memory", "recommended_max_memory"):
    setattr(torch.mps, name, lambda: 2**33)


def is_mps(device):
    return isinstance(device, torch.device | str) and str(device).partition(":")[0] == "mps"


class Mac(TorchFunctionMode):
    """Makes the tensors of ``mps`` on the CPU, and records each tensor's device by its storage."""

    def __init__(self):
        super().__init__()
        # Of a storage: its device, and the storage, so that no other gets its address
        self.devices: dict[int, tuple[str, object]] = {}

    def device(self, tensor):
        with torch._C.DisableTorchFunction():
            return self.devices.get(tensor.untyped_storage()._cdata, (None,))[0]

    def put(self, tensor, device):
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            self.devices.setdefault(storage._cdata, (device, storage))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        if name in UNTOUCHED:
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return MPS if self.device(args[0]) == "mps" else func(*args)
        leaves = tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor) and each.layout == torch.strided]
        before = [self.device(each) for each in tensors]
        to_mps = any(map(is_mps, leaves))
        to_cpu = name == "cpu" or any(
            str(each) == "cpu" for each in leaves if isinstance(each, torch.device | str)
        )
        if "mps" in before and name not in BETWEEN and not to_mps:
            apart = [each for each, at in zip(tensors, before, strict=True) if at == "cpu" and each.dim()]
            assert not apart, f"{name}: tensors of mps and of the CPU"
            assert name != "numpy", "numpy: a tensor of mps"
        assert not (to_mps and before[:1] == ["cpu"] and kwargs.get("non_blocking")), f"{name}: does not wait"
        args, kwargs = tree_map(lambda each: torch.device("cpu") if is_mps(each) else each, (args, kwargs))
        result = func(*args, **kwargs)
        if name in ("copy_", "__set__"):
            return result
        device = "mps" if to_mps or ("mps" in before and not to_cpu) else "cpu"
        if (
            name in ("cpu", "to")
            and before[0] not in (None, device)
            and result.data_ptr() == args[0].data_ptr()
        ):
            with torch._C.DisableTorchFunction():  # another device has another copy
                is_weight = result.is_leaf and result.requires_grad
                result = result.detach().clone().requires_grad_() if is_weight else result.clone()
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.layout == torch.strided:
                # Gradients come without a call; they have the device of their weight, and are no integers
                if device == "mps" or not tensors or "cpu" in before or not each.is_floating_point():
                    self.put(each, device)
                assert self.device(each) != "mps" or each.dtype != torch.float64, f"{name}: float64 on mps"
        return result


mac = Mac()
run_backward = torch.autograd._engine_run_backward


def backward(*args, **kwargs):
    with mac:  # a mode is off in the calls that it handles, and the backward pass is one
        return run_backward(*args, **kwargs)


def on_cpu(collective):
    @functools.wraps(collective)
    def checked(*args, **kwargs):
        devices = [mac.device(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        assert "mps" not in devices, f"{collective.__name__}: gloo has no tensors of mps"
        return collective(*args, **kwargs)

    return checked


if __name__ == "__main__":
    torch.autograd._engine_run_backward = backward
    for name in COLLECTIVES:
        setattr(torch.distributed, name, on_cpu(getattr(torch.distributed, name)))
    sys.path[0] = str(pathlib.Path.cwd())
    del sys.argv[0]
    with mac:
        runpy.run_path(sys.argv[0], run_name="__main__")
