"""Runs the search of an experiment file on this machine, as a cluster would, with Optuna.

    on this machine:   python3 search.py --config experiments/search-asha.yaml
    on a cluster:      det experiment create experiments/search-asha.yaml .

    several at once:   --parallel N
    another value:     --set data.dataset=digits --set searcher.max_trials=12
    to go on:          the same command with the same --output

Every trial is a run of train.py in processes of its own, in OUTPUT/trials/NUMBER. OUTPUT holds search.db (the state),
trials.csv (a row a trial), and at the end plots of the search. A signal stops the trials with a checkpoint.
Exit codes: 0 done, 2 bad configuration, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import pathlib
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import filelock
import joblib
import optuna
import torch
from optuna.exceptions import StorageInternalError
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

import data
import experiment
import search_space
import searchers
import train
from errors import InvalidInput, one_line
from search_report import Report
from search_space import Range
from search_trials import TrialRun, wait_for

DEFAULT_CONFIG = "experiments/search-asha.yaml"
POLL = 0.1  # seconds between two looks at the trials


@dataclass(frozen=True)
class Search:
    """A checked search.

    Attributes:
        file: the experiment file.
        overrides: the ``--set`` arguments.
        experiment: both together, with the ranges still among the hyperparameters.
        ranges: the searched hyperparameters, in the file's order.
        brackets: the trials, those that are compared with one another together.
        concurrent: trials at a time.
    """

    file: str
    overrides: list[str]
    experiment: experiment.Experiment
    ranges: list[Range]
    brackets: list[searchers.Bracket]
    concurrent: int

    @property
    def searcher(self) -> dict[str, Any]:
        """The file's searcher section."""
        return self.experiment.config["searcher"]

    @property
    def replaces_invalid(self) -> bool:
        """Whether another trial takes the place of one whose hyperparameters are invalid, as on a cluster."""
        return self.searcher["name"] not in ("grid", "single")

    def draws(self) -> Iterator[dict[str, Any]]:
        """The hyperparameters of trial 0, 1, ..."""
        return search_space.draws(self.ranges, self.searcher["name"] == "grid", self.experiment.seed)

    def overrides_of(self, drawn: dict[str, Any]) -> list[str]:
        """What ``--set`` has to say for a trial with these hyperparameters."""
        return [each.override(drawn[each.name]) for each in self.ranges]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=DEFAULT_CONFIG, metavar="FILE", help="experiment file (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides", help="replace it")
    parser.add_argument("--output", metavar="FOLDER", help="the search's folder (runs/<config>-<time>)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="trials at a time (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Searches as the command line says and gives the exit code."""
    args = parse(argv)
    output = pathlib.Path(
        args.output or f"runs/{pathlib.Path(args.config).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    try:
        search = load(args.config, args.overrides, args.parallel)
        data_config = data.DataConfig.parse(search.experiment.config.get("data"))
        for split in ("train", "test"):  # once for all trials, none of which can go without
            data.load(data_config, split)
        with own_folder(output):
            return Searching(search, output).run()
    except InvalidInput as error:
        for fault in error.faults:
            print(f"search.py: {fault}", file=sys.stderr)
        return 2
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        reason = one_line(getattr(error, "orig", None) or error)
        line = f"{output}: the state of the search cannot be kept there ({reason})"
        print(f"search.py: {line}; mend that, then the same command goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"search.py: interrupted; the same command with --output {output} goes on", file=sys.stderr)
        return 130


def load(file: str, overrides: list[str], parallel: int) -> Search:
    """Reads and checks a search; says what it asks for and cannot have here.

    Args:
        file: the experiment file.
        overrides: ``PATH=VALUE`` each.
        parallel: trials that may run at a time.

    Raises:
        InvalidInput: with a line for each field that is wrong.
    """
    faults = [] if parallel >= 1 else [f"--parallel: {parallel}: must be at least 1"]
    config = experiment.read(file, overrides)
    loaded = None
    try:
        loaded = experiment.check(config, search=True)
    except InvalidInput as error:
        faults += error.faults
    searcher, hyperparameters = config.get("searcher") or {}, config.get("hyperparameters") or {}
    ranges: list[Range] = []
    if isinstance(searcher, dict):
        faults += searchers.faults(searcher)
        if isinstance(hyperparameters, dict):
            grid = searcher.get("name") == "grid"
            ranges, wrong = search_space.find_ranges("hyperparameters", hyperparameters, grid)
            faults += wrong
    slots = loaded.slots if loaded else 1
    if torch.cuda.is_available() and slots > torch.cuda.device_count():
        faults.append(f"resources.slots_per_trial: {slots}: this machine has {torch.cuda.device_count()} GPUs")
    if faults or loaded is None:
        raise InvalidInput(list(dict.fromkeys(faults)))
    for note in searchers.notes(loaded, parallel):
        print(f"search.py: note: {note}", file=sys.stderr)
    if torch.cuda.is_available():
        parallel = min(parallel, torch.cuda.device_count() // slots)
    wanted = searcher.get("max_concurrent_trials") or parallel
    size = len(list(search_space.draws(ranges, True, 0))) if searcher["name"] == "grid" else 1
    return Search(file, overrides, loaded, ranges, searchers.brackets(searcher, size), min(parallel, wanted))


@contextlib.contextmanager
def own_folder(output: pathlib.Path) -> Iterator[None]:
    """Makes the search's folder, and keeps other searches out of it."""
    lock = filelock.FileLock(output / ".lock")
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        fault = f"--output: {output}: another search is writing there; wait for its end or give another folder"
        raise InvalidInput(fault) from None
    except OSError as error:
        raise InvalidInput(f"--output: {output}: cannot be made ({one_line(error)}); give another folder") from error
    try:
        yield
    finally:
        lock.release()


class Searching:
    """A search under way. Its whole state is in Optuna's SQLite file: each trial is waiting, running or ended.

    Args:
        search: what to search.
        output: the search's folder.
    """

    def __init__(self, search: Search, output: pathlib.Path) -> None:
        self.search, self.output = search, output.resolve()
        self.metric, self.unit = search.experiment.metric, search.experiment.max_length[0]
        self.length = search.experiment.max_length[1]
        self.better = min if search.experiment.smaller_is_better else max
        self.running: dict[int, TrialRun] = {}
        self.devices = list(range(torch.cuda.device_count()))
        self.used: dict[int, list[int]] = {}
        pruner = searchers.BracketPruner(search.searcher, search.brackets)
        smaller = search.experiment.smaller_is_better
        self.study = optuna.create_study(
            storage=f"sqlite:///{self.output / 'search.db'}",
            study_name="search",
            direction=StudyDirection.MINIMIZE if smaller else StudyDirection.MAXIMIZE,
            pruner=pruner,
            load_if_exists=True,
        )
        described = json.dumps(search.experiment.config, sort_keys=True, default=str)
        begun = bool(self.study.get_trials(deepcopy=False))
        if begun and self.study.user_attrs["experiment"] != described:
            mend = "give another folder, or the same file and --set"
            raise InvalidInput(f"--output: {output}: holds another search; {mend}")
        self.study.set_user_attr("experiment", described)
        self.config = self.output / "search.yaml"
        self.config.write_text(json.dumps(search.experiment.config, indent=2))  # JSON is YAML
        self.report = Report(self.study, search, self.output)

    def run(self) -> int:
        """Runs all trials that have not ended yet, reports, and gives the exit code."""
        if not self.study.get_trials(deepcopy=False):
            self._refuse_if_all_invalid()
        self._book()
        left_running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        stopped = signal.signal(signal.SIGTERM, _interrupt)
        try:
            with self.report.live():
                for left in left_running:
                    self._start(left.number)
                while True:
                    while len(self.running) < self.search.concurrent and self._waiting():
                        trial = self.study.ask(search_space.space(self.search.ranges))
                        self._start(trial.number)
                    if not self.running:
                        break
                    time.sleep(POLL)
                    self._look()
        except BaseException:
            for run in self.running.values():
                run.stop()
            wait_for(list(self.running.values()), 60)
            raise
        finally:
            signal.signal(signal.SIGTERM, stopped)
        return self.report.finish()

    def _book(self) -> None:
        """Puts the trials that are to be run into the study, those that are not there."""
        booked = self.study.get_trials(deepcopy=False)
        draws = itertools.islice(self.search.draws(), len(booked), None)
        for index, bracket in enumerate(self.search.brackets):
            mine = [trial.user_attrs for trial in booked if trial.user_attrs["bracket"] == index]
            invalid = sum(attributes.get("outcome") == "invalid" for attributes in mine)
            extra = min(invalid, bracket.trials) if self.search.replaces_invalid else 0
            for _ in range(bracket.trials + extra - len(mine)):
                self.study.enqueue_trial(next(draws), user_attrs={"bracket": index})

    def _refuse_if_all_invalid(self) -> None:
        faults: list[str] = []
        for drawn in itertools.islice(self.search.draws(), sum(each.trials for each in self.search.brackets)):
            found = self._faults(drawn)
            if not found:
                return
            faults += found
        raise InvalidInput(list(dict.fromkeys(faults))[:10])

    def _faults(self, drawn: dict[str, Any]) -> list[str]:
        """Why a trial with these hyperparameters cannot run, by the rules that end it on a cluster as ``InvalidHP``."""
        overrides = [*self.search.overrides, *self.search.overrides_of(drawn)]
        try:
            train.resolved(experiment.load(self.search.file, overrides), self.search.experiment.slots)
        except InvalidInput as error:
            return error.faults
        return []

    def _waiting(self) -> bool:
        return bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _start(self, number: int) -> None:
        trial = self.study.get_trials(deepcopy=False)[number]
        drawn = trial.params
        if faults := self._faults(drawn):
            return self._end(number, TrialState.FAIL, "invalid", "; ".join(faults))
        if trial.user_attrs.get("stopping"):  # when the search was interrupted
            return self._end(number, TrialState.PRUNED, "pruned", trial.user_attrs["stopping"])
        slots = self.search.experiment.slots
        folder = self.output / "trials" / f"{number:03}"
        run = TrialRun(folder, self.config, self.search.overrides_of(drawn), slots)
        environment = {}
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, joblib.cpu_count() // (slots * self.search.concurrent)))
        if self.devices:
            self.used[number], self.devices = self.devices[:slots], self.devices[slots:]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in self.used[number])
        self.running[number] = run
        run.start(environment)
        self.report.started(number)

    def _look(self) -> None:
        for number, run in list(self.running.items()):
            ended = run.ended  # before its last words are read
            self._validated(number, run)
            if ended:
                del self.running[number]
                self.devices += self.used.pop(number, [])
                self._ended(number, run)
        self.report.update({number: run.steps() for number, run in self.running.items()})

    def _validated(self, number: int, run: TrialRun) -> None:
        """Tells Optuna of a trial's new validations, and has the trial stop if it is among the worse."""
        frozen = self.study.get_trials(deepcopy=False)[number]
        known, stopping = dict(frozen.intermediate_values), "stopping" in frozen.user_attrs
        trial = optuna.trial.Trial(self.study, frozen._trial_id)
        for entry in run.validations():
            at = int(entry[self.unit])
            if at in known or self.metric not in entry:
                continue
            known[at] = entry[self.metric]
            trial.report(entry[self.metric], at)
            trial.set_user_attr("images_per_second", entry.get("images_per_second"))
            if not stopping and at < self.length and trial.should_prune():
                trial.set_user_attr("stopping", f"not among the best after {at} {self.unit}")
                run.stop()
                stopping = True

    def _ended(self, number: int, run: TrialRun) -> None:
        frozen = self.study.get_trials(deepcopy=False)[number]
        if run.summary and frozen.intermediate_values:
            self._end(number, TrialState.COMPLETE, "complete", "", run.summary["steps"])
        elif "stopping" in frozen.user_attrs:
            self._end(number, TrialState.PRUNED, "pruned", frozen.user_attrs["stopping"], run.steps())
        else:
            self._end(number, TrialState.FAIL, *run.failure(), run.steps())

    def _end(self, number: int, state: TrialState, outcome: str, reason: str, steps: int = 0) -> None:
        frozen = self.study.get_trials(deepcopy=False)[number]
        trial = optuna.trial.Trial(self.study, frozen._trial_id)
        for name, value in {"outcome": outcome, "reason": reason, "steps": steps}.items():
            trial.set_user_attr(name, value)
        value = self.better(frozen.intermediate_values.values()) if state == TrialState.COMPLETE else None
        self.study.tell(number, value, state=state)
        self._book()  # another in the place of an invalid one
        self.report.ended(number)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
