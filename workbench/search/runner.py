"""Runs a search: starts, watches and prunes trials, and replaces invalid ones."""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import signal
import sys
import time
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from classify.config import experiment_file
from classify.config.command_line import called
from classify.config.project import PROJECT
from classify.engine.trial_config import TrialConfig
from classify.images.plan import DataPlan
from deepspeed_trial import redaction
from deepspeed_trial.errors import ErrorList, InvalidInput
from workbench.search import searchers, space
from workbench.search.display import SearchDisplay
from workbench.search.ray_cluster import RayCluster
from workbench.search.results import Results
from workbench.search.specification import Search
from workbench.search.this_machine import ThisMachine
from workbench.search.trial_run import LAST_WORDS, TrialRun, wait_for

POLL = 0.1  # seconds between two looks at the trials


class SearchRunner:
    """Run a search. Optuna's SQLite file stores the whole state: the waiting, running and ended trials.

    Args:
        search: the search.
        output: the search's folder.
        source: the dataset.
        machine: the machine or cluster that runs the trials.

    Raises:
        InvalidInput: if the folder holds another search.
    """

    def __init__(
        self, search: Search, output: pathlib.Path, source: DataPlan, machine: ThisMachine | RayCluster
    ) -> None:
        self.search, self.output, self.source, self.machine = search, output.resolve(), source, machine
        self.metric = search.experiment.metric
        self.unit, self.length = search.experiment.max_length
        self.better = min if search.experiment.smaller_is_better else max
        self.running: dict[int, TrialRun] = {}
        self.study = optuna.create_study(
            storage=f"sqlite:///{self.output / 'search.db'}",
            study_name="search",
            direction=search.direction,
            pruner=searchers.BracketPruner(search.searcher, search.brackets),
            load_if_exists=True,
        )
        config, shown = search.experiment.config, search.experiment.shown
        described = json.dumps(shown, sort_keys=True, default=str)
        if self._trials() and self.study.user_attrs["experiment"] != described:
            remedy = "give another folder, or the same file and --set"
            raise InvalidInput(f"--output: {output}: holds another search; {remedy}")
        overrides = [redaction.override(each) for each in search.overrides]
        said = {"file": search.file, "overrides": overrides, "chosen_on": source.chosen_on}
        for name, value in {"experiment": described, **said}.items():
            self.study.set_user_attr(name, value)
        if "code" not in self.study.user_attrs:
            self.study.set_user_attr("code", code_digests())
        self.config = self.output / "search.yaml"
        self.config.write_text(json.dumps(shown, indent=2))  # JSON is YAML
        self.whole = "" if shown == config else json.dumps(config)
        self.display = SearchDisplay(Results(self.study, search), self.output, source.chosen_on)

    def run(self) -> int:
        """Run all trials that have not ended, report, and return the exit code."""
        left_running = self._trials(TrialState.RUNNING)
        handler = signal.signal(signal.SIGTERM, _interrupt)
        try:
            with self.display.live():
                for left in left_running:  # by an interrupted search, perhaps without hyperparameters
                    for name, distribution in space.space(self.search.ranges).items():
                        self._writable(left.number)._suggest(name, distribution)
                    self._start(left.number)
                while True:
                    self._start_waiting()
                    if not self.running:
                        break
                    time.sleep(POLL)
                    self._look()
        except BaseException as end:
            if isinstance(end, KeyboardInterrupt) and self.running:
                print(
                    f"{called('search')}: stopping: the trials save checkpoints", file=sys.stderr, flush=True
                )
            for run in self.running.values():
                run.stop()
            wait_for(list(self.running.values()), LAST_WORDS)
            raise
        finally:
            signal.signal(signal.SIGTERM, handler)
        return self.display.finish()

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _trial(self, number: int) -> FrozenTrial:
        return self._trials()[number]

    def _writable(self, number: int) -> optuna.trial.Trial:
        return optuna.trial.Trial(self.study, self._trial(number)._trial_id)

    def _enqueue_missing(self) -> None:
        """Add the missing trials to the study; a guided search adds one at a time."""
        known = self._trials()
        missing = self.search.missing(known)
        if self.search.is_guided:
            missing = [] if self._trials(TrialState.WAITING) else missing[:1]
        if missing:
            for bracket, drawn in zip(missing, self.search.draws(known), strict=False):
                self.study.enqueue_trial(drawn, user_attrs={"bracket": bracket})

    def refuse_if_all_invalid(self) -> None:
        """Raise ``InvalidInput`` for a new search if all trials are invalid."""
        if self._trials():
            return
        errors: list[str] = []
        trials = sum(bracket.trials for bracket in self.search.brackets)
        for drawn in itertools.islice(self.search.draws(), trials):
            found = self._errors(drawn)
            if not found:
                return
            errors += found
        raise InvalidInput(list(dict.fromkeys(errors))[:10])

    def _errors(self, drawn: dict[str, Any]) -> list[str]:
        """Check a trial's hyperparameters by the trial's rules; return a line for each error."""
        overrides = [*self.search.overrides, *self.search.overrides_of(drawn)]
        errors = ErrorList()
        with errors.collecting():
            experiment = experiment_file.load(self.search.file, overrides)
            slots, device = self.search.experiment.slots, self.machine.device
            TrialConfig.resolve(experiment.hyperparameters, experiment.config, slots, device, self.source)
        return errors.lines

    def _start_waiting(self) -> None:
        while len(self.running) < self.machine.room:
            self._enqueue_missing()  # also to replace an invalid trial
            if not self._trials(TrialState.WAITING):
                return
            self._start(self.study.ask(space.space(self.search.ranges)).number)

    def _start(self, number: int) -> None:
        trial = self._trial(number)
        if errors := self._errors(trial.params):
            return self._end(number, TrialState.FAIL, "invalid", "; ".join(errors))
        if trial.user_attrs.get("stopping"):  # when the search was interrupted
            return self._end(number, TrialState.PRUNED, "pruned", trial.user_attrs["stopping"])
        self.display.tell_changes(number, self.study.user_attrs["code"], code_digests())
        overrides = self.search.overrides_of(trial.params)
        self.running[number] = self.machine.start(self._folder(number), self.config, overrides, self.whole)
        self.display.started(number)

    def _folder(self, number: int) -> pathlib.Path:
        return self.output / "trials" / f"{number:03}"

    def _look(self) -> None:
        for number, run in list(self.running.items()):
            has_ended = run.has_ended  # before reading: an ended trial has written all validations
            self._take_validations(number, run)
            if has_ended:
                del self.running[number]
                self.machine.release(self._folder(number))
                self._judge(number, run)
        self.display.update({number: run.steps() for number, run in self.running.items()})

    def _take_validations(self, number: int, run: TrialRun) -> None:
        """Report a trial's new validations to Optuna; stop the trial if Optuna prunes it."""
        frozen = self._trial(number)
        known, stopping = dict(frozen.intermediate_values), "stopping" in frozen.user_attrs
        trial = self._writable(number)
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

    def _judge(self, number: int, run: TrialRun) -> None:
        """Record the end of a trial whose processes have ended."""
        frozen = self._trial(number)
        if run.summary and frozen.intermediate_values:
            self._end(number, TrialState.COMPLETE, "complete", "", run.summary["steps"])
        elif "stopping" in frozen.user_attrs:
            self._end(number, TrialState.PRUNED, "pruned", frozen.user_attrs["stopping"], run.steps())
        else:
            self._end(number, TrialState.FAIL, *run.failure(), run.steps())

    def _end(self, number: int, state: TrialState, outcome: str, reason: str, steps: int = 0) -> None:
        trial = self._writable(number)
        for name, value in {"outcome": outcome, "reason": reason, "steps": steps}.items():
            trial.set_user_attr(name, value)
        scores = self._trial(number).intermediate_values.values()
        self.study.tell(number, self.better(scores) if state == TrialState.COMPLETE else None, state=state)
        self.display.ended(number)


def code_digests() -> dict[str, str]:
    """Return the SHA-256 of every file of code that a trial may import, and of DeepSpeed's configurations.

    A trial runs these files as they are when the trial starts.
    """
    packages = (each.parent.rglob("*.py") for each in PROJECT.glob("*/__init__.py"))
    others = (PROJECT.glob(pattern) for pattern in ("*.py", "*.json", "experiments/*.json"))
    files = itertools.chain(*others, *packages)
    return {str(each.relative_to(PROJECT)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
