"""An image classifier.

Examples for a notebook, and for a ``net.py`` next to your photos:

    run = classify.train("photos", minutes=5)    # the run's folder
    net = classify.load(run)
    net.predict(["a.jpg"])                       # class, probability, and all probabilities of each image

    @classify.register("mine")                   # in net.py: for `classify photos --net mine`

A package here may import ``deepspeed_trial`` and the packages above it in this list.

- ``config``: the experiment file and the hyperparameters;
- ``images``: image sets, their sources, order, augmentation and loaders;
- ``models``: networks, losses and weights;
- ``engine``: the DeepSpeed configuration, its checks, and the engine;
- ``reports``: metrics, TensorBoard, the first lines, ``summary.json``;
- ``tuning``: search for the fastest micro-batch and configuration.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

# The module of each public name, imported at the first use of the name: these modules import torch
PUBLIC = {
    "train": "workbench.notebook",
    "load": "workbench.notebook",
    "register": "net",
    "register_loss": "net",
}


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    add_project()
    return getattr(importlib.import_module(PUBLIC[name]), name)


def add_project() -> None:
    """Let Python find the project's modules before modules of the same name in the working directory."""
    from classify.config.project import PROJECT

    if str(PROJECT) not in sys.path[:1]:
        sys.path.insert(0, str(PROJECT))
