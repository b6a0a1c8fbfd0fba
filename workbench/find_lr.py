"""``train.py --find-lr``: train with a short ramp of the learning rate, and write a file with one rate.

The rate rises by the same factor from step to step, as in https://arxiv.org/abs/1506.01186. The ramp is a
training in a temporary folder, with the images, initial weights, engine and ranks of the experiment.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from determined import pytorch
from determined.pytorch.deepspeed import overwrite_deepspeed_config

from classify.config.hyperparameters import Hyperparameters
from classify.config.schedules import PEAK_KEYS
from classify.engine import deepspeed_config
from classify.engine.optimizer_rules import section_at
from classify.tuning import micro_batch
from classify.tuning.fastest import plain
from deepspeed_trial.cluster import on_cluster
from deepspeed_trial.errors import Diverged, InvalidInput, TrainingStopped, printable
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local import metrics_log
from deepspeed_trial.local.folder import locked_folder, shown
from deepspeed_trial.trainer import Trainer, init
from workbench.tune import write_experiment

FOUND, PLOT = "found-lr.yaml", "found-lr.png"
LEAST, MOST, STEPS = 1e-6, 10.0, 141  # rates of the first and the last step: 20 steps for each power of ten
WIDTH = 4  # the standard deviation of the smoothing, in steps
FALL = 0.98  # the loss falls if its minimum is at most this share of the first loss
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class Ramp(NamedTuple):
    """Learning rates and losses of a ramp.

    Attributes:
        rates: the learning rate of each step before the first loss that is not finite; empty on all
            ranks except the chief.
        losses: the loss of each of these steps, the mean over all ranks.
        is_chief: whether this rank is the chief.
        processes: the number of ranks.
    """

    rates: np.ndarray
    losses: np.ndarray
    is_chief: bool
    processes: int


def find_lr(trial_class: Callable[..., Any], experiment: Experiment, output: pathlib.Path) -> None:
    """Train the ramp, draw it, and write an experiment file with one rate; every rank calls it.

    Args:
        trial_class: the class of the trial.
        experiment: the experiment.
        output: the folder for the file and the drawing.

    Raises:
        InvalidInput: if the configuration is wrong, or the folder has the file of another ``--find-lr``.
        TrainingStopped: if the loss does not fall.
    """
    if on_cluster():
        raise InvalidInput("--find-lr: does not work on a cluster; run it on one machine")
    if (output / FOUND).exists():
        raise InvalidInput(f"--output: {output / FOUND}: exists; give another folder")
    found = train_ramp(trial_class, experiment)
    if not found.is_chief:
        return
    rate = choose(found.rates, found.losses)
    with locked_folder(output, "search of a learning rate"):
        draw(found.rates, found.losses, rate, output / PLOT)
        print(f"loss:    {bars(smoothed(found.losses))} from rate {LEAST:g} to {found.rates[-1]:.2g}")
        print(f"rate:    {rate:g}, a quarter of the rate with the lowest loss")
        print(f"drawing: {printable(shown(output / PLOT))}")
        hyperparameters = with_rate(experiment.hyperparameters, rate)
        config = {**experiment.config, "hyperparameters": hyperparameters}
        write_experiment(output / FOUND, config, found.processes)


class _RampDone(Exception):
    """Ends the ramp after the last rate."""


def train_ramp(trial_class: Callable[..., Any], experiment: Experiment) -> Ramp:
    """Train the ramp; every rank calls it.

    Args:
        trial_class: the class of the trial.
        experiment: the experiment.

    Raises:
        InvalidInput: if the configuration is wrong.
    """
    growth = (MOST / LEAST) ** (1 / (STEPS - 1))
    schedule = {"type": "ExponentialLR", "params": {"gamma": growth}}
    rising = with_rate(plain(experiment.hyperparameters), LEAST, scheduler=schedule)
    rising["max_length"] = {"batches": STEPS + 1}
    tried = dataclasses.replace(experiment, hyperparameters=rising)
    choice = micro_batch.choose(trial_class, tried, None)
    with (
        tempfile.TemporaryDirectory() as folder,
        init(
            tried.hyperparameters,
            tried.config,
            output=pathlib.Path(folder, "ramp"),
            enable_tensorboard_logging=False,
        ) as context,
    ):
        if choice:
            choice.give(context)
        trial = trial_class(context)
        train_batch = trial.train_batch

        def rising_batch(batches: Any, epoch: int, step: int) -> Any:
            if step == STEPS:
                raise _RampDone
            return train_batch(batches, epoch, step)

        trial.train_batch = rising_batch
        with contextlib.suppress(_RampDone, Diverged):
            length = pytorch.Batch(STEPS + 1)
            trainer = Trainer(trial, context)
            trainer.fit(length, reporting_period=pytorch.Batch(1), checkpoint_policy="none")
            raise KeyboardInterrupt  # a signal has ended the ramp
        is_chief = context.distributed.rank == 0
        reports = metrics_log.read(pathlib.Path(folder, "ramp")) if is_chief else []
        context.distributed.broadcast(None)  # the ranks wait until the chief has read the folder
    losses = np.array([each["loss"] for each in reports if each["group"] == "training"], dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(losses))
    losses = losses[: bad[0]] if len(bad) else losses
    return Ramp(LEAST * growth ** np.arange(len(losses)), losses, is_chief, context.distributed.size)


def smoothed(losses: np.ndarray) -> np.ndarray:
    """Return losses smoothed by a Gaussian with a standard deviation of ``WIDTH`` steps."""
    steps = np.arange(len(losses))
    weights = np.exp(-(((steps[:, None] - steps) / WIDTH) ** 2) / 2)
    return weights @ losses / weights.sum(1)


def choose(rates: np.ndarray, losses: np.ndarray) -> float:
    """Return a quarter of the rate with the lowest smoothed loss, rounded to two digits.

    At a quarter of that rate the loss still falls; at that rate it is about to grow.

    Raises:
        TrainingStopped: if the loss does not fall, or is not finite in one of the first 12 steps.
    """
    if len(losses) < 3 * WIDTH:
        why = f"the loss is not finite after {len(losses)} steps, at rates from {LEAST:g}"
        raise TrainingStopped(f"--find-lr: {why}; change the network, its weights or the precision")
    curve = smoothed(losses)
    if curve.min() > FALL * curve[0]:
        why = f"the loss does not fall at rates from {LEAST:g} to {MOST:g}"
        raise TrainingStopped(f"--find-lr: {why}; start from other weights, or keep the rate of the file")
    return float(f"{rates[curve.argmin()] / 4:.2g}")


def bars(curve: np.ndarray) -> str:
    """Draw a curve as 48 characters; a value above the first value is drawn like the first value."""
    chosen = curve[np.linspace(0, len(curve) - 1, 48).round().astype(int)]
    share = (chosen.clip(max=curve[0]) - curve.min()) / max(curve[0] - curve.min(), 1e-12)
    return "".join(BARS[int(each)] for each in (share * (len(BARS) - 1)).round())


def draw(rates: np.ndarray, losses: np.ndarray, rate: float, file: pathlib.Path) -> None:
    """Draw the losses over the rates, and the chosen rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(rates, losses, color="C0", alpha=0.3, label="loss of a step")
    axes.plot(rates, smoothed(losses), color="C0", label="smoothed")
    axes.axvline(rate, color="C3", label=f"rate {rate:.2g}")
    axes.set(xscale="log", xlabel="learning rate", ylim=(0, 1.5 * losses[:WIDTH].mean()))
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(file, dpi=130)


def with_rate(
    hyperparameters: Mapping[str, Any], rate: float, scheduler: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return hyperparameters with a given learning rate; Muon's ``adam_lr`` keeps its ratio to ``lr``.

    Args:
        hyperparameters: the experiment's hyperparameters; DeepSpeed's keys are inline or in a file.
        rate: ``optimizer.params.lr``, and the peak of the file's schedule.
        scheduler: a schedule in place of the file's schedule.

    Raises:
        InvalidInput: if the DeepSpeed configuration is wrong.
    """
    found = dict(hyperparameters)
    key = "overwrite_deepspeed_args" if found.get("deepspeed_config") is not None else None
    section = (found.get(key) or {}) if key else found
    form = Hyperparameters.parse_form(hyperparameters)
    before = section_at(deepspeed_config.merge(form).config if form else {}, "optimizer", "params")
    rates = {"lr": rate}
    if "adam_lr" in before:
        rates["adam_lr"] = rate * before["adam_lr"] / before["lr"]
    changes: dict[str, Any] = {"optimizer": {"params": rates}}
    if peaks := section_at(section, "scheduler", "params").keys() & set(PEAK_KEYS.values()):
        changes["scheduler"] = {"params": dict.fromkeys(peaks, rate)}
    section = overwrite_deepspeed_config(copy.deepcopy(dict(section)), changes)
    if scheduler is not None:
        section["scheduler"] = dict(scheduler)
    return {**found, key: section} if key else section
