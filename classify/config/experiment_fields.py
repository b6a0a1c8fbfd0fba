"""Checks the fields of an experiment configuration that no other part of the program reads.

Source: https://docs.determined.ai/latest/reference/training/experiment-config-reference.html
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from classify.config.metric_table import METRICS, SPEED_METRIC, is_metric
from classify.config.rules import BOOL, TEXT, Rule, is_count, one_of, whole
from deepspeed_trial import redaction
from deepspeed_trial.errors import InvalidInput, nearest
from deepspeed_trial.experiment import (
    LENGTH,
    MINUTES,
    PERIOD_UNITS,
    Experiment,
    length_errors,
    of_one_unit,
    unit_errors,
)

FIELDS = """bind_mounts checkpoint_policy checkpoint_storage data debug description entrypoint environment
    hyperparameters integrations labels log_policies max_restarts min_checkpoint_period min_validation_period
    name optimizations pbs perform_initial_validation preemption_timeout profiling project records_per_epoch
    reproducibility resources retention_policy scheduling_unit searcher security slurm tensorboard_storage
    workspace""".split()
# The keys of the sections that are read here.
SECTIONS = {
    "reproducibility": ["experiment_seed"],
    "resources": """agent_label devices is_single_node max_slots native_parallel priority resource_pool
        shm_size slots slots_per_trial weight""".split(),
    "checkpoint_storage": """access_key account_url bucket checkpoint_path connection_string container
        container_path credential endpoint_url host_path prefix propagation save_experiment_best
        save_trial_best save_trial_latest secret_key storage_path tensorboard_path type user""".split(),
    "profiling": ["begin_on_batch", "enabled", "end_after_batch", "sync_timings"],
}
# The keys of each searcher.
_COMMON = """name metric smaller_is_better source_trial_id source_checkpoint_uuid max_length time_metric
    max_time""".split()
_HALVING = [*_COMMON, "max_trials", "max_concurrent_trials", "divisor", "stop_once"]
SEARCHERS = {
    "single": _COMMON,
    "random": [*_COMMON, "max_trials", "max_concurrent_trials"],
    "grid": [*_COMMON, "max_concurrent_trials"],
    "async_halving": [*_HALVING, "num_rungs"],
    "adaptive_asha": [*_HALVING, "mode", "max_rungs", "bracket_rungs"],
    "tpe": [*_COMMON, "max_trials", "max_concurrent_trials"],
}
SAMPLED_TYPES = ("int", "double", "log", "categorical")
DEFAULT_METRIC = {"metric": "accuracy", "smaller_is_better": False}


def _is_metric(value: Any) -> bool:
    return is_metric(value) or value == SPEED_METRIC


RULES: dict[str, Rule] = {
    "resources.slots_per_trial": whole(1),
    "searcher.name": TEXT._replace(message="must be a searcher's name, e.g. single"),
    "searcher.metric": Rule(
        _is_metric,
        f"no validation reports it; use {', '.join((*METRICS, SPEED_METRIC))}, accuracy/CLASS or"
        " precision/CLASS",
    ),
    "searcher.smaller_is_better": BOOL,
    "perform_initial_validation": BOOL,
    "profiling.enabled": BOOL,
    "name": TEXT,
    "description": TEXT,
    "checkpoint_storage.save_trial_best": whole(0),
    "checkpoint_storage.save_trial_latest": whole(0),
    "reproducibility.experiment_seed": Rule(
        lambda value: is_count(value, 0) and value < 2**31, "must be a whole number from 0 to 2147483647"
    ),
    "scheduling_unit": whole(1),
    "checkpoint_policy": one_of("best", "all", "none"),
}


def check(config: Mapping[str, Any], search: bool = False) -> Experiment:
    """Checks the fields, all but ``data`` and what of the hyperparameters is not their length.

    Args:
        config: the whole configuration.
        search: leave ranges among the hyperparameters.

    Raises:
        InvalidInput: with a line for each field that is wrong.
    """
    errors = _unknown_keys("", config, FIELDS, "field")
    sections = ("hyperparameters", "searcher", *SECTIONS)
    wrong = [k for k in sections if config.get(k) is not None and not isinstance(config[k], Mapping)]
    errors += [f"{k}: {redaction.shown(k, config[k])}: must be a mapping, as in const.yaml" for k in wrong]
    read = {k: config.get(k) or {} for k in sections if k not in wrong}
    for section, known in SECTIONS.items():
        errors += _unknown_keys(f"{section}.", read.get(section, {}), known)
    if not search:  # or workbench/search/searchers.py checks it
        errors += _searcher_errors(read.get("searcher", {}))
    for field in ("min_validation_period", "min_checkpoint_period"):
        if config.get(field) is not None:
            errors += unit_errors(field, config[field], PERIOD_UNITS, least=0)
    for path, rule in RULES.items():
        section, _, field = path.rpartition(".")
        value = (read.get(section, {}) if section else config).get(field)
        if value is not None and not rule.is_valid(value):
            errors.append(f"{path}: {redaction.shown(path, value)}: {rule.message}")
    hyperparameters = copy.deepcopy(dict(read.get("hyperparameters", {})))
    if "hyperparameters" in read:
        errors += take_constants("hyperparameters", hyperparameters, search)
        errors += _length_errors(hyperparameters.get("max_length"), read.get("searcher", {}), search)
    if errors:
        raise InvalidInput(errors)
    if not read["searcher"].get("metric"):
        config = {**config, "searcher": {**read["searcher"], **DEFAULT_METRIC}}
    return Experiment(config, hyperparameters)


def _unknown_keys(
    path: str, section: Mapping[str, Any], known: Collection[str], what: str = "key"
) -> list[str]:
    unknown = {
        key: redaction.shown(f"{path}{key}", value) for key, value in section.items() if key not in known
    }
    return [f"{path}{k}: {v}: unknown {what}; {nearest(k, known)}" for k, v in unknown.items()]


def _searcher_errors(searcher: Mapping[str, Any]) -> list[str]:
    name = searcher.get("name")
    if isinstance(name, str) and name not in SEARCHERS:
        return [f"searcher.name: {name!r}: unknown searcher; {nearest(name, SEARCHERS)}"]
    return _unknown_keys("searcher.", searcher, {key for keys in SEARCHERS.values() for key in keys})


def cluster_notes(config: Mapping[str, Any]) -> list[str]:
    """Return a line for each field of a file that a cluster refuses, or whose credentials it would show.

    The file may hold anything.
    """
    lines, searcher, data = [], config.get("searcher"), config.get("data")
    if isinstance(searcher, Mapping) and searcher.get("name") == "tpe":
        what = "a cluster has no such searcher; random, which it has, takes the same fields"
        random = "--set searcher.name=random (det: --config searcher.name=random)"
        lines.append(f"searcher.name: 'tpe': {what}: {random}")
    places = (
        {key: data[key] for key in ("root", "storage") if data.get(key)} if isinstance(data, Mapping) else {}
    )
    for key, value in redaction.field("data", places).items():
        if value != places[key]:
            what = "may hold credentials, which a cluster's master keeps and shows"
            lines.append(f"data.{key}: {value}: {what}; give them in the environment there (docs/sources.md)")
    return lines


def _length_errors(length: Any, searcher: Mapping[str, Any], search: bool) -> list[str]:
    """Checks the length, and that a search that stops trials early counts in its unit, up to it."""
    errors, length = length_errors(length), of_one_unit(length)
    metric, longest = searcher.get("time_metric"), searcher.get("max_time")
    if not errors and MINUTES in length and (search or metric is not None or longest is not None):
        what = "a search compares its trials after as many epochs or batches"
        return [f"{LENGTH}: {dict(length)!r}: {what}; use {{epochs: N}} or {{batches: N}}"]
    if errors or (metric is None and longest is None):
        return errors
    unit, number = next(iter(length.items()))
    if metric != unit:
        return [f"searcher.time_metric: {metric!r}: {LENGTH} counts {unit}; use the same unit in both"]
    if longest != number:
        return [f"searcher.max_time: {longest!r}: {LENGTH} is {number} {unit}; make them the same"]
    return []


def take_constants(path: str, section: dict[str, Any], search: bool) -> list[str]:
    """Puts the value in the place of every ``{type: const, val: VALUE}``; a range is for searches alone."""
    errors = []
    for key, value in section.items():
        if not isinstance(value, dict):
            continue
        kind, here = value.get("type"), f"{path}.{key}"
        if kind == "const" and "val" in value:
            section[key] = value["val"]
        elif kind in SAMPLED_TYPES and search:
            continue
        elif kind in SAMPLED_TYPES:
            errors.append(
                f"{here}: {value!r}: is a range to search; --set {here}=VALUE trains with one value"
            )
        else:
            errors += take_constants(here, value, search)
    return errors


def experiment_of(context: Any) -> Mapping[str, Any]:
    """The experiment configuration of a Determined context; empty where it was made without one."""
    try:
        return context.get_experiment_config()
    except ValueError:
        return {}
