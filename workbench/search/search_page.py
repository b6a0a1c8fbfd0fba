"""One self-contained HTML page about a search, during the search or after it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.local import metrics_log
from workbench.reports import page, plots
from workbench.search import specification
from workbench.search.results import Results, Row, quiet_optuna, shown
from workbench.search.space import Range

TEMPLATE = pathlib.Path(__file__).with_name("search.html.jinja")
MOST_CURVES = 24  # of trials; colours and dashes tell them apart
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
        InvalidInput: if there is more than one folder, or the search cannot be read; then nothing is written.
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
        config = json.loads((folder / "search.yaml").read_text())  # keeps the order of the draws
    except (SQLAlchemyError, StorageInternalError, RuntimeError, KeyError, ValueError, OSError) as error:
        reason = one_line(getattr(error, "orig", None) or error)
        remedy = "give the --output of a search.py that has begun its trials"
        raise InvalidInput(f"{file}: holds no search that can be read ({reason}); {remedy}") from error
    attributes = study.user_attrs
    file_and_overrides = attributes.get("file", str(folder / "search.yaml")), attributes.get("overrides", [])
    search = specification.recorded(config, *file_and_overrides)
    return Results(study, search)


def _values(results: Results, folder: pathlib.Path) -> dict[str, Any]:
    """Return the values of the page's template."""
    search, trials = results.search, results.trials
    begun = [trial for trial in trials if trial.state != TrialState.WAITING]
    rows = [results.row(trial) for trial in begun]
    best = results.best(begun)
    outcomes = [row.outcome for row in rows]
    cells = {row.number: _cells(row, folder) for row in rows}
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
        "curves": _curves(results, rows, folder),
        "config": page.as_yaml(search.experiment.shown),
    }


def _curves(results: Results, rows: Sequence[Row], folder: pathlib.Path) -> dict[str, Any] | None:
    """Plot the validations of the first 24 trials; None without validations."""
    lines = []
    for row in rows:
        reports = [each for each in metrics_log.read(folder / row.folder) if results.metric in each]
        points = [
            (each["steps_completed"], each[results.metric])
            for each in reports
            if each["group"] == "validation"
        ]
        if points:
            steps, values = zip(*points, strict=True)
            lines.append(plots.Line(f"trial {row.number}", steps, values, row.number))
    return plots.plot(results.metric, lines[:MOST_CURVES]) if lines else None


def _cells(row: Row, folder: pathlib.Path) -> dict[str, Any]:
    """Return the formatted cells of a trial, by the names of the table's columns."""
    steps = row.steps
    if steps is None:  # it has not ended
        reports = metrics_log.read(folder / row.folder)
        steps = max((entry["steps_completed"] for entry in reports), default=0)
    return {
        "number": row.number,
        "values": [shown(value) for value in row.values],
        "score": shown(row.score),
        "steps": f"{steps:,}",
        "speed": f"{row.images_per_second:,.0f}" if row.images_per_second else "",
        "seconds": f"{row.seconds:,.1f}" if row.seconds else "",
        "outcome": row.outcome,
        "reason": row.reason or "",
    }


def _described(searched: Range) -> str:
    """Return a description of a range."""
    if searched.spec["type"] == "categorical":
        return ", ".join(json.dumps(value) for value in searched.spec["vals"])
    ends = searched.distribution
    low, high = shown(ends.low), shown(ends.high)  # type: ignore[attr-defined]
    return f"{low} to {high}{', logarithmic' * (searched.spec['type'] == 'log')}"
