"""One self-contained HTML page about a search, during the search or after it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.local import metrics_log
from workbench.reports import page, plots
from workbench.search import specification
from workbench.search.results import Results, quiet_optuna, shown, steps_in
from workbench.search.space import Range

TEMPLATE = pathlib.Path(__file__).with_name("search.html.jinja")
MOST_CURVES = 24  # colours and dashes distinguish this many trials
SEARCHERS = {
    "single": "one trial",
    "random": "random trials",
    "grid": "every point of the grid",
    "async_halving": "random trials; the worse trials stop early",
    "adaptive_asha": "random trials; the worse trials stop early",
    "tpe": "random trials first; then earlier results guide each trial",
}


def write(folders: Sequence[pathlib.Path], target: pathlib.Path) -> None:
    """Write the page.

    Args:
        folders: a list with only the search's folder.
        target: the page's file.

    Raises:
        InvalidInput: if there is more than one folder, or the search cannot be read. Then no page is written.
    """
    if len(folders) > 1:
        names = ", ".join(map(str, folders))
        raise InvalidInput(f"report: {names}: a page shows one search; give only the folder of one")
    page.write(page.render(TEMPLATE, _values(read(folders[0]), folders[0])), target)


def read(folder: pathlib.Path) -> Results:
    """Read the trials of a search.

    Raises:
        InvalidInput: if the search cannot be read.
    """
    file = folder / "search.db"
    quiet_optuna()
    try:
        study = optuna.load_study(study_name="search", storage=f"sqlite:///{file.resolve()}")
        config = json.loads((folder / "search.yaml").read_text())  # keeps the order of the ranges
    except (SQLAlchemyError, StorageInternalError, RuntimeError, KeyError, ValueError, OSError) as error:
        reason = one_line(getattr(error, "orig", None) or error)
        remedy = "give the folder of a search that has begun its trials"
        raise InvalidInput(f"{file}: holds no search that can be read ({reason}); {remedy}") from error
    attributes = study.user_attrs
    command = attributes.get("file", str(folder / "search.yaml")), attributes.get("overrides", [])
    return Results(study, specification.check(config, *command))


def _values(results: Results, folder: pathlib.Path) -> dict[str, Any]:
    """Return the values of the page's template."""
    search, trials = results.search, results.trials
    begun = [trial for trial in trials if trial.state != TrialState.WAITING]
    rows = [results.row(trial) for trial in begun]
    best = results.best(begun)
    outcomes = [row.outcome for row in rows]
    reports = {row.number: metrics_log.read(folder / row.folder) for row in rows}
    cells = {row.number: row.cells(results.metric, steps_in(reports[row.number])) for row in rows}
    return {
        "title": f"Search: {search.experiment.config.get('name') or folder.resolve().name}",
        "metric": results.metric,
        "better": "smaller" if search.experiment.smaller_is_better else "larger",
        "chosen_on": results.chosen_on,
        "searcher": search.searcher["name"],
        "how": SEARCHERS[search.searcher["name"]],
        "ended": sum(trial.state.is_finished() for trial in begun),
        "planned": len(begun) + results.waiting(trials),
        "outcomes": {name: outcomes.count(name) for name in dict.fromkeys(outcomes)},
        "seconds": sum(row.seconds for row in rows if row.seconds),
        "best": best and cells[best.number],
        "command": best and results.command(best),
        "ranges": [(results.short(searched.name), _described(searched)) for searched in search.ranges],
        "trials": list(cells.values()),
        "curves": _curves(results.metric, reports),
        "config": page.as_yaml(search.experiment.shown),
    }


def _curves(metric: str, reports: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Plot the validations of the first 24 trials that have some; return None if no trial has any.

    Args:
        metric: the metric to plot.
        reports: the reports of each trial, by its number.
    """
    lines = []
    for number, of_trial in reports.items():
        entries = [each for each in of_trial if each["group"] == "validation" and metric in each]
        if entries:
            steps, values = zip(*((each["steps_completed"], each[metric]) for each in entries), strict=True)
            lines.append(plots.Line(f"trial {number}", steps, values, number))
    return plots.plot(metric, lines[:MOST_CURVES]) if lines else None


def _described(searched: Range) -> str:
    """Return a description of a range."""
    if searched.spec["type"] == "categorical":
        return ", ".join(json.dumps(value) for value in searched.spec["vals"])
    ends = searched.distribution
    low, high = shown(ends.low), shown(ends.high)  # type: ignore[attr-defined]
    return f"{low} to {high}{', logarithmic' * (searched.spec['type'] == 'log')}"
