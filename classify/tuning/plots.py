"""The plots of a search: its course, and what each hyperparameter does to the metric."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator

import matplotlib
import numpy as np
import optuna
from matplotlib import pyplot, ticker
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from classify.tuning.results import Results


def draw(results: Results, trials: list[FrozenTrial], folder: pathlib.Path) -> Iterator[str]:
    """Draws the ended trials that have a validation, and gives the names of the files."""
    matplotlib.use("agg")
    scored = [trial for trial in trials if trial.state.is_finished() and results.score(trial) is not None]
    if not scored:
        return
    # With names that fit, and pruned trials as well
    study = optuna.create_study(direction=results.search.direction)
    for trial in scored:
        params = {results.short(name): value for name, value in trial.params.items()}
        distributions = {results.short(name): value for name, value in trial.distributions.items()}
        value = results.score(trial)
        study.add_trial(optuna.create_trial(value=value, params=params, distributions=distributions))
    with pyplot.rc_context({"figure.figsize": (9, 5), "figure.dpi": 120}):
        history = optuna.visualization.matplotlib.plot_optimization_history(study, target_name=results.metric)
        history.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        yield _save(folder, "history.png")
        kinds = scored[0].distributions
        varied = [name for name in results.names if len({trial.params[name] for trial in scored}) > 1]
        if len(varied) > 1:
            short = [results.short(name) for name in varied]
            axes = optuna.visualization.matplotlib.plot_parallel_coordinate(
                study, short, target_name=results.metric
            )
            for lines in axes.collections:  # Optuna's colours begin with white
                blues = pyplot.get_cmap("Blues")(np.linspace(0.35, 1, 256))
                is_reversed = lines.get_cmap().name.endswith("_r")
                lines.set_cmap(ListedColormap(blues[::-1] if is_reversed else blues))
            for each in axes.figure.axes:
                each.grid(visible=False)  # white, and across the lines
                _spread_ticks(each.yaxis)
            yield _save(folder, "parallel-coordinates.png")
        floats = {name: kind for name in varied if isinstance(kind := kinds[name], FloatDistribution)}
        if floats:
            first = next((name for name, kind in floats.items() if kind.log), next(iter(floats)))
            groups = [name for name in varied if name not in floats]
            yield _scatter(results, scored, first, groups, folder)


def _scatter(
    results: Results, scored: list[FrozenTrial], name: str, groups: list[str], folder: pathlib.Path
) -> str:
    """The metric by one hyperparameter, coloured by each of the others; hollow: stopped early."""
    _, all_axes = pyplot.subplots(1, max(1, len(groups)), sharey=True, squeeze=False, figsize=(9, 4))
    for axes, group in itertools.zip_longest(all_axes.flat, groups):
        values = sorted({trial.params[group] for trial in scored}, key=_order) if group else [None]
        for index, value in enumerate(values):
            chosen = [trial for trial in scored if group is None or trial.params[group] == value]
            colour = f"C{index}"
            faces = [colour if trial.state == TrialState.COMPLETE else "none" for trial in chosen]
            label = None if value is None else f"{value}"
            rates, scores = (
                [trial.params[name] for trial in chosen],
                [results.score(trial) or 0.0 for trial in chosen],
            )
            axes.scatter(rates, scores, facecolors=faces, edgecolors=colour, linewidths=1.5)
            axes.plot([], [], "o", color=colour, label=label)
        if getattr(scored[0].distributions[name], "log", False):
            axes.set_xscale("log")
            _spread_ticks(axes.xaxis)
        axes.set_xlabel(results.short(name))
        if group:
            axes.legend(title=results.short(group), fontsize="small", title_fontsize="small")
    all_axes[0, 0].set_ylabel(f"{results.metric} (hollow: stopped early)")
    return _save(folder, f"{results.metric.replace('/', '-')}-by-{results.short(name)}.png")


def _save(folder: pathlib.Path, name: str) -> str:
    pyplot.savefig(folder / name, bbox_inches="tight")
    pyplot.close("all")
    return name


def _spread_ticks(axis: Axis) -> None:
    """Labels a logarithmic axis by its decades alone, or where it has none or one, by a few round numbers."""
    if axis.get_scale() != "log":
        return
    axis.set_minor_formatter(ticker.NullFormatter())
    low, high = sorted(axis.get_view_interval())
    if high / low < 20:
        axis.set_major_locator(ticker.MaxNLocator(4))
        axis.set_major_formatter(ticker.FormatStrFormatter("%.4g"))


def _order(value: object) -> tuple[bool, object]:
    return (False, value) if isinstance(value, (int, float)) else (True, str(value))
