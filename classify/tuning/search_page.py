"""One self-contained HTML page about a search, also about one under way."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from classify.reports import page
from classify.tuning import specification
from classify.tuning.results import Results, quiet_optuna
from classify.tuning.space import Range
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.local import metrics_log

TEMPLATE = pathlib.Path(__file__).with_name("search.html.jinja")
HOW = {
    "single": "one trial",
    "random": "random trials",
    "grid": "every point of the grid",
    "async_halving": "random trials, of which the worse are stopped early",
    "adaptive_asha": "random trials, of which the worse are stopped early",
    "tpe": "random trials first, then each by the results so far",
}


def write(folders: Sequence[pathlib.Path], target: pathlib.Path) -> None:
    """Writes the page.

    Args:
        folders: the search's alone.
        target: the page's file.

    Raises:
        InvalidInput: if there are other folders, or the search cannot be read; nothing is written then.
    """
    if len(folders) > 1:
        names = ", ".join(map(str, folders))
        raise InvalidInput(f"report: {names}: a search has a page of its own; give its folder alone")
    results, chosen_on = read(folders[0])
    page.write(page.render(TEMPLATE, _values(results, folders[0], chosen_on)), target)


def read(folder: pathlib.Path) -> tuple[Results, str]:
    """Reads a search from its folder: its trials, and by which images they are compared.

    Raises:
        InvalidInput: if it cannot be read.
    """
    file = folder / "search.db"
    quiet_optuna()
    try:
        study = optuna.load_study(study_name="search", storage=f"sqlite:///{file.resolve()}")
        attributes = study.user_attrs
        config = json.loads(
            (folder / "search.yaml").read_text()
        )  # in the file's order, which the draws go by
    except (SQLAlchemyError, StorageInternalError, RuntimeError, KeyError, ValueError, OSError) as error:
        reason = one_line(getattr(error, "orig", None) or error)
        mend = "give the --output of a search.py that has begun its trials"
        raise InvalidInput(f"{file}: holds no search that can be read ({reason}); {mend}") from error
    given = attributes.get("file", str(folder / "search.yaml")), attributes.get("overrides", [])
    return Results(study, specification.recorded(config, *given)), attributes.get("chosen_on", "images")


def _values(results: Results, folder: pathlib.Path, chosen_on: str) -> dict[str, Any]:
    """What the template shows."""
    search, trials = results.search, results.trials
    begun = [trial for trial in trials if trial.state != TrialState.WAITING]
    best = results.best(begun)
    outcomes = [trial.user_attrs.get("outcome", "not ended") for trial in begun]
    return {
        "title": f"Search: {search.experiment.config.get('name') or folder.resolve().name}",
        "metric": results.metric,
        "better": "less" if search.experiment.smaller_is_better else "more",
        "chosen_on": chosen_on,
        "searcher": search.searcher["name"],
        "how": HOW[search.searcher["name"]],
        "ended": sum(trial.state.is_finished() for trial in begun),
        "planned": len(begun) + results.waiting(trials),
        "outcomes": {name: outcomes.count(name) for name in dict.fromkeys(outcomes)},
        "seconds": sum(trial.duration.total_seconds() for trial in begun if trial.duration),
        "best": best and _row(results, best, folder),
        "command": best and results.command(best),
        "ranges": [(results.short(each.name), _described(each)) for each in search.ranges],
        "trials": [_row(results, trial, folder) for trial in begun],
        "config": page.as_yaml(search.experiment.shown),
    }


def _row(results: Results, trial: FrozenTrial, folder: pathlib.Path) -> dict[str, Any]:
    """A trial, in the columns of the table."""
    found, score, duration = trial.user_attrs, results.score(trial), trial.duration
    steps, speed = found.get("steps"), found.get("images_per_second")
    if steps is None:  # it has not ended
        reports = metrics_log.read(folder / "trials" / f"{trial.number:03}")
        steps = max((entry["steps_completed"] for entry in reports), default=0)
    return {
        "number": trial.number,
        "values": [_shown(trial.params.get(name, "")) for name in results.names],
        "score": "" if score is None else _shown(score),
        "steps": f"{steps:,}",
        "speed": f"{speed:,.0f}" if speed else "",
        "seconds": f"{duration.total_seconds():,.1f}" if duration else "",
        "outcome": found.get("outcome", "not ended"),
        "reason": found.get("reason", ""),
    }


def _described(each: Range) -> str:
    """A range as a reader would say it."""
    if each.spec["type"] == "categorical":
        return ", ".join(json.dumps(value) for value in each.spec["vals"])
    ends = each.distribution
    low, high = _shown(ends.low), _shown(ends.high)  # type: ignore[attr-defined]
    return f"{low} to {high}{', logarithmic' * (each.spec['type'] == 'log')}"


def _shown(value: Any) -> str:
    """A value as the table has it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
