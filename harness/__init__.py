"""Runs any ``DeepSpeedTrial``: on a Determined cluster, on GPUs, or on the CPU cores of a laptop.

What Determined 0.38 and DeepSpeed 0.19 leave undone is done here; nothing here knows of images.

    from harness.trainer import Trainer, init
    from harness.local.local_mode import LocalTestMode

    with init(hparams=hparams, exp_conf=config) as context:
        Trainer(MyTrial(context), context).fit(max_length=pytorch.Epoch(2))

Importing this package tells DeepSpeed, which looks for an accelerator while it is imported, that there is
none, and gives each task of SLURM's ``srun`` its rank. So it has to be imported before ``deepspeed``:
``model_def.py`` and ``classify``'s packages do that.
"""

import os
import sys

from harness import slurm


def choose_accelerator() -> None:
    """Tells DeepSpeed and torch that there is no GPU, where there is none."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found no accelerator
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or torch's optimizers look for a driver in every step


if sys.orig_argv[1:3] != ["-m", "harness.launch"]:  # which chooses once it knows that it starts processes
    choose_accelerator()
    slurm.take_ranks(os.environ)
