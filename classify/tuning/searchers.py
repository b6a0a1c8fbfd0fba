"""What a searcher asks for: how many trials, which are compared, and when the worse are stopped.

Trials are shared out as Determined 0.38 shares them; Optuna's successive halving decides which go on.
Source: https://docs.determined.ai/latest/reference/training/experiment-config-reference.html#searcher
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from classify.config.experiment_fields import SEARCHERS, cluster_notes
from classify.config.rules import BOOL, Rule, is_count, is_finite, one_of, whole
from deepspeed_trial.errors import nearest
from deepspeed_trial.experiment import Experiment

MODES = ("aggressive", "standard", "conservative")
NEEDED = {
    "random": ["max_trials"],
    "tpe": ["max_trials"],
    "async_halving": ["max_trials", "num_rungs", "time_metric", "max_time"],
    "adaptive_asha": ["max_trials", "time_metric", "max_time"],
}
EXAMPLES = {
    "max_trials": "say how many trials to run, e.g. 12",
    "num_rungs": "say at how many lengths to compare trials, e.g. 3",
    "time_metric": "use the unit of hyperparameters.max_length, epochs or batches",
    "max_time": "use the length in hyperparameters.max_length",
}


# The fields that are checked here; the others are in classify/config/experiment_fields.py.
RULES: dict[str, Rule] = {
    "max_trials": whole(1),
    "max_concurrent_trials": whole(0),
    "num_rungs": whole(1),
    "max_rungs": whole(1),
    "divisor": Rule(lambda v: is_finite(v) and v > 1, "must be a number above 1"),
    "mode": one_of(*MODES),
    "stop_once": BOOL,
    "bracket_rungs": Rule(
        lambda v: isinstance(v, list) and all(is_count(each, 1) for each in v),
        "must be a list of whole numbers of at least 1, e.g. [3, 2]",
    ),
}


def errors_of(searcher: Mapping[str, Any]) -> list[str]:
    """A line for each thing that is wrong with a searcher section."""
    name = searcher.get("name")
    if name is not None and not isinstance(name, str):
        return []  # experiment_fields.py says so
    if name not in SEARCHERS:
        return [f"searcher.name: {name!r}: unknown searcher; {nearest(name, SEARCHERS)}"]
    found = []
    for key, value in searcher.items():
        if key not in SEARCHERS[name]:
            found.append(
                f"searcher.{key}: {value!r}: {name} has no such field; {nearest(key, SEARCHERS[name])}"
            )
        elif key in RULES and value is not None and not RULES[key].is_valid(value):
            found.append(f"searcher.{key}: {value!r}: {RULES[key].message}")
    missing = [key for key in NEEDED.get(name, ()) if searcher.get(key) is None]
    return found + [f"searcher.{key}: None: {name} needs it; {EXAMPLES[key]}" for key in missing]


def notes(experiment: Experiment, parallel: int) -> list[str]:
    """A line for each thing that an experiment's searcher asks for and cannot have on this machine."""
    found, searcher = experiment.notes(), experiment.config["searcher"]
    found += cluster_notes(experiment.config)
    most = searcher.get("max_concurrent_trials")
    if most and most > parallel:
        found.append(
            f"searcher.max_concurrent_trials: {most}: {parallel} at a time here; --parallel N runs more"
        )
    elif most and most < parallel:
        found.append(
            f"searcher.max_concurrent_trials: {most}: fewer than --parallel {parallel}, and so it is kept to"
        )
    if searcher.get("stop_once") is False:
        found.append(
            "searcher.stop_once: False: a trial that was stopped is not taken up again, as in Determined 0.38"
        )
    divisor = searcher.get("divisor")
    if divisor is not None and divisor != _divisor(searcher):
        found.append(f"searcher.divisor: {divisor!r}: one in {_divisor(searcher)} goes on here")
    if searcher.get("max_length") is not None:
        length = searcher["max_length"]
        found.append(
            f"searcher.max_length: {length!r}: is not used; hyperparameters.max_length says the length"
        )
    for key in ("source_trial_id", "source_checkpoint_uuid"):
        if searcher.get(key) is not None:
            start = "is on a cluster; here trials start from new weights, or hyperparameters.weights: net.pt"
            found.append(f"searcher.{key}: {searcher[key]!r}: {start}")
    return found


@dataclass(frozen=True)
class Bracket:
    """Trials that are compared with one another.

    Attributes:
        trials: how many there are to be.
        rungs: at how many lengths they are compared, the whole length the last; 1 stops none.
        first: the first of those lengths.
    """

    trials: int
    rungs: int = 1
    first: int = 0


def brackets(searcher: Mapping[str, Any], grid_size: int) -> list[Bracket]:
    """The trials of a checked searcher section, those that are stopped soonest first."""
    name = searcher["name"]
    if name in ("single", "grid"):
        return [Bracket(grid_size if name == "grid" else 1)]
    trials = searcher["max_trials"]
    if name in ("random", "tpe"):
        return [Bracket(trials)]
    longest, divisor = searcher["max_time"], _divisor(searcher)
    sizes: Sequence[int] = (
        [searcher["num_rungs"]] if name == "async_halving" else searcher.get("bracket_rungs") or ()
    )
    if not sizes:
        most = [int(math.log(n) / math.log(divisor)) + 1 for n in (longest, trials)]
        rungs = min(searcher.get("max_rungs") or 5, *most)
        least = {"aggressive": rungs, "standard": (rungs - 1) // 2 + 1, "conservative": 1}
        sizes = range(least[searcher.get("mode") or "standard"], rungs + 1)
    sizes = sorted(sizes, reverse=True)
    weights = [divisor ** (size - 1) / size for size in sizes]  # about the same work in every bracket
    shares = [max(int(weight / sum(weights) * trials), 1) for weight in weights]
    shares[0] += max(trials - sum(shares), 0)
    first = [max(longest // divisor ** (size - 1), 1) for size in sizes]
    return [Bracket(*each) for each in zip(shares, sizes, first, strict=True)]


def _divisor(searcher: Mapping[str, Any]) -> int:
    return max(2, round(searcher.get("divisor") or 4))


class BracketPruner(BasePruner):
    """Stops the worse trials of each bracket by Optuna's asynchronous successive halving.

    Args:
        searcher: the checked section.
        brackets: its brackets; a trial's user attribute ``bracket`` says which one it is in.
    """

    def __init__(self, searcher: Mapping[str, Any], brackets: Sequence[Bracket]) -> None:
        self.pruners: list[BasePruner] = [
            SuccessiveHalvingPruner(each.first, _divisor(searcher)) if each.rungs > 1 else NopPruner()
            for each in brackets
        ]

    @override
    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        bracket = trial.user_attrs["bracket"]
        among: Any = _OneBracket(study, bracket)
        return self.pruners[bracket].prune(among, trial)


class _OneBracket:
    """A study of which only one bracket's trials are seen."""

    def __init__(self, study: optuna.Study, bracket: int) -> None:
        self._whole, self._bracket = study, bracket

    def get_trials(
        self, deepcopy: bool = True, states: tuple[TrialState, ...] | None = None
    ) -> list[FrozenTrial]:
        trials = self._whole.get_trials(deepcopy=deepcopy, states=states)
        return [trial for trial in trials if trial.user_attrs.get("bracket") == self._bracket]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
