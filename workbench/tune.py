"""``train.py --tune``: benchmark configurations, and write the experiment file of the fastest one."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from classify.config.command_line import called, typed
from classify.engine.deepspeed_keys import ACCUMULATION, MICRO_BATCH
from classify.engine.memory import advise
from classify.engine.trial_config import TrialConfig
from classify.tuning.fastest import OFFLOAD, RECOMPUTE, STAGE, Tries, Try, changed, find
from deepspeed_trial import attempts, processes, redaction
from deepspeed_trial.errors import InvalidInput, printable
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local.folder import locked_folder, shown

TUNED, TRIED = "tuned.yaml", "tried.json"


def tune(trial_class: Callable[..., Any], experiment: Experiment, slots: int, output: pathlib.Path) -> None:
    """Benchmark configurations, print a table, and write the benchmarks and the fastest configuration.

    Args:
        trial_class: the class of the trial.
        experiment: the experiment.
        slots: the number of processes, all on this host.
        output: the folder to write into.

    Raises:
        InvalidInput: if the configuration is wrong, or the folder has the files of another ``--tune``.
        TrainingStopped: if no configuration trains.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        remedy = f"run {typed('train', '--tune', '--slots', 'N')}"
        raise InvalidInput(f"--tune: starts the processes itself; {remedy}")
    threads = processes.threads_of_each(slots)
    with attempts.forking(), locked_folder(output, "run"):
        for file in (output / TUNED, output / TRIED):
            if file.exists():
                raise InvalidInput(f"--output: {file}: exists; give another folder")
        hyperparameters, device = experiment.hyperparameters, processes.device_type()
        config = TrialConfig.resolve(hyperparameters, experiment.config, slots, device)

        def attempt(changed: Experiment, needs: int) -> attempts.Attempt:
            return attempts.attempt(trial_class, changed, attempts.local_ranks(slots), threads, needs)

        tries = Tries(config, experiment, attempt, lambda tried: _tell(tried, config))
        best = find(tries) or tries.fail(advise(config, None, 0))
        Console(markup=False, emoji=False).print(_table(tries, best))
        batch = {MICRO_BATCH: best.micro_batch, ACCUMULATION: best.accumulation}
        found = changed(hyperparameters, best.changes, batch)
        (output / TRIED).write_text(json.dumps([asdict(each) for each in tries.done], indent=2) + "\n")
        fastest = ", ".join(f"{key} {value}" for key, value in {**best.changes, **batch}.items())
        print(f"fastest: {fastest}")
        write_experiment(output / TUNED, {**experiment.config, "hyperparameters": found}, slots)


def write_experiment(file: pathlib.Path, config: Mapping[str, Any], slots: int) -> None:
    """Write an experiment file, and print the command that trains it.

    Args:
        file: the file.
        config: the experiment configuration.
        slots: the number of processes that the command starts.
    """
    shared = redaction.experiment(config)
    with open(file, "w") as written:
        YAML().dump(shared, written)
    command = typed("train", "--config", printable(shown(file)))
    if slots > 1:
        script = command.removeprefix("python3 ")
        launch = f"torchrun --nproc-per-node {slots}"
        command = f"{launch} {script}" if script != command else f"{launch} -m {command}"
    print(f"train:   {command}")
    if redaction.MARK in str(shared):
        what = "hides a possible credential; give the credential again, by --set or in the file"
        print(f"{called('train')}: note: {file.name}: {redaction.MARK} {what}", file=sys.stderr)


def _tell(tried: Try, config: TrialConfig) -> None:
    stage, micro_batch, accumulation, more = _cells(tried, config)[:4]
    which = (
        f"ZeRO {stage}, micro-batch {micro_batch}, accumulation {accumulation}{', ' if more else ''}{more}"
    )
    print(printable(f"{which}: {tried.outcome}"), flush=True)


def _cells(tried: Try, config: TrialConfig) -> list[str]:
    stage = tried.changes.get(STAGE, config.zero_stage)
    recomputes = tried.changes.get(RECOMPUTE, config.hyper.checkpoint_activations)
    more = ["recomputed activations"] * bool(recomputes) + ["offload"] * bool(tried.changes.get(OFFLOAD))
    rate, memory = f"{tried.images_per_second:,.4g}", f"{tried.peak_memory:,.0f}"
    figures = [tried.reason, ""] if tried.reason else [rate, memory]
    return [str(stage), str(tried.micro_batch), str(tried.accumulation), ", ".join(more), *figures]


def _table(tries: Tries, best: Try) -> Table:
    """Return the table of the benchmarks, the fastest first."""
    table = Table(box=box.SIMPLE)
    for name in ("ZeRO", "micro-batch", "accumulation", "with", "images/s", "MiB a rank"):
        table.add_column(name, justify="left" if name == "with" else "right")
    for tried in sorted(tries.done, key=lambda each: -each.images_per_second):
        table.add_row(*_cells(tried, tries.config), style="bold" if tried is best else "")
    return table
