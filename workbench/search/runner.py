"""Runs a search: starts, watches and prunes trials, and replaces invalid ones."""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from classify.config.command_line import called
from classify.config.project import PROJECT
from classify.engine.trial_config import TrialConfig
from classify.images.plan import DataPlan
from deepspeed_trial import redaction
from deepspeed_trial.errors import ErrorList, InvalidInput
from workbench.search import space
from workbench.search.ray_cluster import RayCluster
from workbench.search.results import Results, SearchDisplay, steps_in
from workbench.search.specification import BracketPruner, Search
from workbench.search.trial_run import ThisMachine, TrialRun, as_files, stopping

POLL = 0.1  # seconds between two looks at the trials
STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}  # of Optuna; FAIL for other outcomes


class SearchRunner:
    """Runs a search. Optuna's SQLite file stores the whole state: the waiting, running and ended trials.

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
        self.running: dict[Trial, TrialRun] = {}
        self.study = optuna.create_study(
            storage=f"sqlite:///{self.output / 'search.db'}",
            study_name="search",
            direction=search.direction,
            pruner=BracketPruner(search),
            load_if_exists=True,
        )
        described = json.dumps(search.experiment.shown, sort_keys=True, default=str)
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
        text, self.whole = as_files(search.experiment.config)
        self.config.write_text(text)
        self.display = SearchDisplay(Results(self.study, search), self.output)

    def run(self) -> int:
        """Run all trials that have not ended, print the best trial, and return the exit code."""
        with stopping(self.running.values()):
            try:
                with self.display.live():
                    self._run_all()
            except KeyboardInterrupt:
                if self.running:
                    what = "stopping: the trials save checkpoints"
                    print(f"{called('search')}: {what}", file=sys.stderr, flush=True)
                raise
        return self.display.finish()

    def _run_all(self) -> None:
        for left in self._trials(TrialState.RUNNING):  # trials of an interrupted search
            trial = Trial(self.study, left._trial_id)
            for name, distribution in space.space(self.search.ranges).items():
                trial._suggest(name, distribution)  # it may have no hyperparameters yet
            self._start(trial)
        while True:
            self._start_waiting()
            if not self.running:
                return
            time.sleep(POLL)
            self._look()

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def refuse_if_all_invalid(self) -> None:
        """Raise ``InvalidInput`` for a new search if all trials are invalid."""
        if self._trials():
            return
        errors: list[str] = []
        for drawn in itertools.islice(self.search.draws(), self.search.trials):
            found = self._errors(drawn)
            if not found:
                return
            errors += found
        raise InvalidInput(list(dict.fromkeys(errors))[:10])

    def _errors(self, drawn: Mapping[str, Any]) -> list[str]:
        """Check a trial's hyperparameters by the trial's rules; return a line for each error."""
        errors, slots, device = ErrorList(), self.search.experiment.slots, self.machine.device
        with errors.collecting():
            experiment = self.search.experiment_of(drawn)
            TrialConfig.resolve(experiment.hyperparameters, experiment.config, slots, device, self.source)
        return errors.lines

    def _start_waiting(self) -> None:
        """Start trials while there is room."""
        while len(self.running) < self.machine.room:
            self._enqueue_missing()  # also to replace an invalid trial
            if not self._trials(TrialState.WAITING):
                return
            self._start(self.study.ask(space.space(self.search.ranges)))

    def _enqueue_missing(self) -> None:
        """Add the missing trials to the study; a guided search adds one at a time."""
        known = self._trials()
        missing = self.search.missing(known)
        if self.search.is_guided:
            missing = [] if self._trials(TrialState.WAITING) else missing[:1]
        if missing:
            for bracket, drawn in zip(missing, self.search.draws(known), strict=False):
                self.study.enqueue_trial(drawn, user_attrs={"bracket": bracket})

    def _start(self, trial: Trial) -> None:
        if errors := self._errors(trial.params):
            return self._end(trial, "invalid", "; ".join(errors))
        if stopping := trial.user_attrs.get("stopping"):  # pruned before the search was interrupted
            return self._end(trial, "pruned", stopping)
        self.display.tell_changes(trial.number, self.study.user_attrs["code"], code_digests())
        folder, overrides = self.output / f"trials/{trial.number:03}", self.search.overrides_of(trial.params)
        self.running[trial] = self.machine.start(folder, self.config, overrides, self.whole)
        self.display.started(trial.number)

    def _look(self) -> None:
        """Take the new validations of the running trials, and record the trials that have ended."""
        steps = dict[int, int]()
        for trial, run in list(self.running.items()):
            has_ended = run.has_ended  # before reading: an ended trial has written all validations
            reports = run.reports()
            steps[trial.number] = steps_in(reports)
            self._take_validations(trial, run, reports)
            if has_ended:
                del self.running[trial]
                self._judge(trial, run, steps.pop(trial.number))
        self.display.update(steps)

    def _take_validations(self, trial: Trial, run: TrialRun, reports: Sequence[dict[str, Any]]) -> None:
        """Report a trial's new validations to Optuna; stop the trial if Optuna prunes it."""
        metric, (unit, length) = self.search.experiment.metric, self.search.experiment.max_length
        known = set(self._trials()[trial.number].intermediate_values)
        for entry in reports:
            if entry["group"] != "validation" or metric not in entry or (at := int(entry[unit])) in known:
                continue
            known.add(at)
            trial.report(entry[metric], at)
            trial.set_user_attr("images_per_second", entry.get("images_per_second"))
            if "stopping" not in trial.user_attrs and at < length and trial.should_prune():
                trial.set_user_attr("stopping", f"not among the best after {at} {unit}")
                run.stop()

    def _judge(self, trial: Trial, run: TrialRun, steps: int) -> None:
        """Record the end of a trial whose processes have ended."""
        summary, stopping = run.summary, trial.user_attrs.get("stopping")
        if summary and self._trials()[trial.number].intermediate_values:
            self._end(trial, "complete", "", summary["steps"])
        elif stopping:
            self._end(trial, "pruned", stopping, steps)
        else:
            self._end(trial, *run.failure(), steps)

    def _end(self, trial: Trial, outcome: str, reason: str, steps: int = 0) -> None:
        for name, value in {"outcome": outcome, "reason": reason, "steps": steps}.items():
            trial.set_user_attr(name, value)
        score = self.display.results.score(self._trials()[trial.number]) if outcome == "complete" else None
        self.study.tell(trial, score, state=STATES.get(outcome, TrialState.FAIL))
        self.display.ended(trial.number)


def code_digests() -> dict[str, str]:
    """Return the SHA-256 of every file of code that a trial may import, and of DeepSpeed's configurations.

    A trial runs these files as they are when the trial starts.
    """
    packages = (each.parent.rglob("*.py") for each in PROJECT.glob("*/__init__.py"))
    others = (PROJECT.glob(pattern) for pattern in ("*.py", "*.json", "experiments/*.json"))
    files = itertools.chain(*others, *packages)
    return {str(each.relative_to(PROJECT)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
