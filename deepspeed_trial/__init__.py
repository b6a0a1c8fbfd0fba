"""Runs any ``DeepSpeedTrial`` on a Determined cluster, on GPUs, or on the CPU cores of a laptop.

The package replaces Determined's training loop and patches DeepSpeed. It works with any kind of data. In this
package a *mode* is a combination of ZeRO stage, offload, precision, parallelism and number of processes.

    from deepspeed_trial import LocalTestMode, Trainer, init

    with init(hparams=hparams, exp_conf=config) as context:
        Trainer(MyTrial(context), context).fit(max_length=pytorch.Epoch(2))

Import this package before ``torch`` and ``deepspeed``. The import selects the CPU if there is no GPU, or if
several processes would share a Mac's GPU. It hides MLflow from DeepSpeed, lets OpenMP's threads sleep while
they wait, and sets the rank of each task that SLURM's ``srun`` starts.
"""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepspeed_trial import slurm

if TYPE_CHECKING:
    from deepspeed_trial.context import TrialContext, init
    from deepspeed_trial.errors import InvalidInput, TrainingStopped
    from deepspeed_trial.events import Callback, Code, EarlyStopping, TrialHooks
    from deepspeed_trial.local.local_mode import LocalTestMode
    from deepspeed_trial.plan import Minutes
    from deepspeed_trial.trainer import FitResult, Trainer, find_checkpoint

__all__ = [
    "Callback",
    "Code",
    "EarlyStopping",
    "FitResult",
    "InvalidInput",
    "LocalTestMode",
    "Minutes",
    "Trainer",
    "TrainingStopped",
    "TrialContext",
    "TrialHooks",
    "find_checkpoint",
    "init",
]
# These modules import torch and DeepSpeed, so ``__getattr__`` imports them only when a public name is used
PUBLIC_MODULES = ("trainer", "events", "errors", "local.local_mode")
WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # variables of OpenMP's libraries


class NoMLflowInAutotuner(importlib.abc.MetaPathFinder):
    """Hides MLflow from DeepSpeed's unused autotuner, and from no other code.

    The autotuner imports MLflow if it is installed. That import takes a quarter of the start-up time, and
    starts threads, which make a fork unsafe.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Return None, so that Python asks its other finders.

        Raises:
            ImportError: if the autotuner imports MLflow; the autotuner handles this error.
        """
        autotuner = sys.modules.get("deepspeed.autotuning.autotuner")
        if name == "mlflow" and autotuner and not hasattr(autotuner, "has_mlflow"):  # is being imported
            raise ImportError("DeepSpeed's autotuner is not used")


def __getattr__(name: str) -> Any:
    """Import a public name."""
    for module in PUBLIC_MODULES if name in __all__ else ():
        public = vars(importlib.import_module(f"deepspeed_trial.{module}"))
        if name in public:
            return public[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def sleep_while_waiting() -> None:
    """Let OpenMP's threads sleep while they wait for each other, if no variable in ``WAIT_POLICIES`` is set.

    By default they spin, and take the cores from the threads that they wait for. OpenMP reads the variables
    when torch is imported.
    """
    if os.environ.keys().isdisjoint(WAIT_POLICIES):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def choose_accelerator() -> None:
    """Select the CPU for DeepSpeed and torch if there is no GPU, or if processes would share a Mac's GPU."""
    import torch

    if not torch.cuda.is_available():
        if os.environ.get("WORLD_SIZE", "1") != "1" or not torch.backends.mps.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found no accelerator
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or torch's optimizers look for a driver in every step


# Hides warnings of torch's C++ code: each warning of its store about a lost rank is a page of stack frames
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic sums of cuBLAS: random_state.py
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # a Mac's CPU computes what its GPU cannot
sys.meta_path.insert(0, NoMLflowInAutotuner())
sleep_while_waiting()
if sys.orig_argv[1:3] != ["-m", "deepspeed_trial.launch"]:  # the processes that it starts do both
    choose_accelerator()
    slurm.take_ranks(os.environ)
