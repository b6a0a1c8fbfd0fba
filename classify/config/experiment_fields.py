"""The fields of an experiment configuration, except ``data`` and the hyperparameters.

Source: https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/experiment-config-reference.rst
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from classify.config.hyperparameters import Hyperparameters
from classify.config.metric_table import COMPARED, MAP_METRIC, SPEED_METRIC, is_metric
from classify.config.rules import (
    ANY,
    BOOL,
    TEXT,
    Rule,
    elsewhere,
    is_count,
    is_finite,
    one_of,
    optional,
    whole,
)
from classify.config.sections import Key, key_errors, unknown_keys
from deepspeed_trial import redaction
from deepspeed_trial.checkpoints import storage
from deepspeed_trial.errors import InvalidInput, nearest
from deepspeed_trial.experiment import (
    LENGTH,
    MINUTES,
    PERIOD_UNITS,
    SCHEDULING_UNIT,
    Experiment,
    length_errors,
    of_one_unit,
    unit_errors,
)


def _key(rule: Rule, about: str, default: Any = None, unit: str = "") -> Key:
    return Key(optional(rule), about, default, unit)


def _keys(others: str = "", **keys: Key) -> dict[str, Key]:
    """Return the keys of a section. Only Determined reads ``others``; they have no documentation here."""
    return {**keys, **dict.fromkeys(others.split(), Key(ANY, ""))}


# The keys of each searcher
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
# The keys that each searcher needs, and what to write there
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
MODES = ("aggressive", "standard", "conservative")  # the values of adaptive_asha's mode
_PERIOD = elsewhere(" or ".join(f"{{{unit}: N}}" for unit in PERIOD_UNITS))
_METRIC = Rule(
    lambda value: is_metric(value) or value == SPEED_METRIC,
    f"must be a metric that validations report: {', '.join((*COMPARED, SPEED_METRIC))}, accuracy/CLASS,"
    " precision/CLASS or average_precision/CLASS",
)
FIELDS = _keys(
    """bind_mounts checkpoint_storage data debug entrypoint environment hyperparameters integrations labels
    log_policies max_restarts optimizations pbs preemption_timeout profiling project records_per_epoch
    reproducibility resources retention_policy searcher security slurm tensorboard_storage workspace""",
    name=_key(TEXT, "The experiment's name."),
    description=_key(TEXT, "The experiment's description."),
    min_validation_period=_key(_PERIOD, "The interval between validations; by default only at the end."),
    perform_initial_validation=_key(BOOL, "Whether to validate before the training.", False),
    min_checkpoint_period=_key(_PERIOD, "The interval between checkpoints; by default only at the end."),
    checkpoint_policy=_key(one_of("best", "all", "none"), "The validations that save a checkpoint.", "best"),
    scheduling_unit=_key(
        whole(1), "The interval between reports of training metrics.", SCHEDULING_UNIT, "optimizer steps"
    ),
)
SECTIONS = {
    "reproducibility": _keys(
        experiment_seed=_key(whole(0, 2**31), "The seed of weights, order and augmentation.", 0)
    ),
    "resources": _keys(
        """agent_label devices is_single_node max_slots native_parallel prefer_gpu_topology priority
        resource_pool shm_size slots weight""",
        slots_per_trial=_key(whole(1), "The slots of a trial on a cluster, each with one process.", 1),
    ),
    "checkpoint_storage": _keys(
        """account_url checkpoint_path connection_string container credential propagation save_experiment_best
        tensorboard_path user""",
        type=_key(elsewhere(f"one of {', '.join(storage.TYPES)}"), "The type of storage for checkpoints."),
        bucket=_key(elsewhere("text"), "The bucket of `s3` or `gcs`."),
        prefix=_key(elsewhere("text"), "The folder in the bucket."),
        endpoint_url=_key(elsewhere("a URL"), "The server of `s3`, if it is not Amazon's."),
        access_key=_key(elsewhere("text"), "The access key of `s3`; environment variables are safer."),
        secret_key=_key(elsewhere("text"), "The secret key of `s3`; environment variables are safer."),
        host_path=_key(elsewhere("a folder's path"), "The folder of `shared_fs`."),
        storage_path=_key(elsewhere("a folder's path"), "The folder in `host_path`."),
        container_path=_key(elsewhere("a folder's path"), "The folder of `directory`."),
        save_trial_best=_key(whole(0), "The number of best checkpoints to keep.", 1),
        save_trial_latest=_key(whole(0), "The number of latest checkpoints to keep.", 1),
    ),
    "profiling": _keys(
        "begin_on_batch end_after_batch sync_timings",
        enabled=_key(BOOL, "Whether to record a profile of a few steps.", False),
    ),
    "searcher": _keys(
        "source_trial_id source_checkpoint_uuid max_length time_metric max_time",
        name=_key(
            TEXT._replace(message=f"must be one of {', '.join(SEARCHERS)}"), "The search method.", "single"
        ),
        metric=_key(_METRIC, "The metric that chooses checkpoints and trials.", "accuracy"),
        smaller_is_better=_key(BOOL, "Smaller values of the metric are better.", True),
        max_trials=_key(whole(1), "The number of trials."),
        max_concurrent_trials=_key(whole(0), "The number of trials that may run at a time; 0: any number."),
        divisor=_key(
            Rule(lambda v: is_finite(v) and v > 1, "must be a number above 1"),
            "One in `divisor` trials continues after each comparison.",
            4,
        ),
        num_rungs=_key(whole(1), "The number of lengths at which the search compares trials."),
        max_rungs=_key(
            whole(1), "The largest number of rungs: training lengths at which the search compares trials.", 5
        ),
        mode=_key(one_of(*MODES), "How many trials stop early.", "standard"),
        bracket_rungs=_key(
            Rule(
                lambda v: isinstance(v, list) and all(is_count(rungs, 1) for rungs in v),
                "must be a list of whole numbers of at least 1, e.g. [3, 2]",
            ),
            "The number of rungs of each bracket.",
        ),
        stop_once=_key(BOOL, "A stopped trial never resumes.", True),
    ),
}
SAMPLED_TYPES = ("int", "double", "log", "categorical")


def check(config: Mapping[str, Any], search: bool = False) -> Experiment:
    """Return the experiment, with the value of each ``const`` and with a default metric.

    The function checks all fields except ``data``; of the hyperparameters, it checks only ``max_length``.

    Args:
        config: the complete configuration.
        search: whether to accept ranges among the hyperparameters.

    Raises:
        InvalidInput: with a line for each invalid field.
    """
    prefixes = dict.fromkeys(Hyperparameters.keys(), "hyperparameters.")
    errors = key_errors("", config, FIELDS, redaction.shown, prefixes)
    sections = ("hyperparameters", *SECTIONS)
    wrong = [k for k in sections if config.get(k) is not None and not isinstance(config[k], Mapping)]
    errors += [f"{k}: {redaction.shown(k, config[k])}: must be a mapping, as in const.yaml" for k in wrong]
    read = {k: config.get(k) or {} for k in sections if k not in wrong}
    searcher = read.pop("searcher", {})
    errors += [] if "searcher" in wrong else _searcher_errors(searcher, search)
    for section in [name for name in SECTIONS if name in read]:
        errors += key_errors(f"{section}.", read[section], SECTIONS[section], redaction.shown)
    errors += storage.errors(read.get(storage.SECTION, {}))
    for field in ("min_validation_period", "min_checkpoint_period"):
        if config.get(field) is not None:
            errors += unit_errors(field, config[field], PERIOD_UNITS, least=0)
    hyperparameters = copy.deepcopy(dict(read.get("hyperparameters", {})))
    if "hyperparameters" in read:
        errors += take_constants("hyperparameters", hyperparameters, search)
        errors += _length_errors(hyperparameters.get("max_length"), searcher, search)
    if errors:
        raise InvalidInput(errors)
    if not searcher.get("metric"):
        data = config.get("data")
        several = isinstance(data, Mapping) and data.get("several_labels") is not None
        default = MAP_METRIC if several else "accuracy"
        config = {**config, "searcher": {**searcher, "metric": default, "smaller_is_better": False}}
    return Experiment(config, hyperparameters)


def _searcher_errors(searcher: Mapping[str, Any], search: bool) -> list[str]:
    """Return the errors of the section ``searcher``; for a search, also the errors of its searcher."""
    name, keys, errors = searcher.get("name"), SECTIONS["searcher"], list[str]()
    known = SEARCHERS.get(str(name), keys)
    if (isinstance(name, str) or (search and name is None)) and name not in SEARCHERS:
        errors = [f"searcher.name: {name!r}: unknown searcher; {nearest(name, SEARCHERS)}"]
    elif search and isinstance(name, str):
        errors = unknown_keys("searcher.", searcher, known, f"{name} has no such field")
        missing = [key for key in NEEDED.get(name, ()) if searcher.get(key) is None]
        what = f"missing: the searcher {name} needs it"
        errors += [f"searcher.{key}: {what}; {EXAMPLES[key]}" for key in missing]
    if search or errors:
        searcher = {key: value for key, value in searcher.items() if key in known}
    return errors + key_errors("searcher.", searcher, keys, redaction.shown)


def cluster_notes(config: Mapping[str, Any]) -> list[str]:
    """Return a line for each field that a cluster refuses, or whose credentials a cluster would show.

    The configuration may be unchecked.
    """
    lines, searcher, data = [], config.get("searcher"), config.get("data")
    if isinstance(searcher, Mapping) and searcher.get("name") == "tpe":
        what = "a cluster has no such searcher; use random, with the same fields"
        random = "--set searcher.name=random here, --config searcher.name=random for det"
        lines.append(f"searcher.name: 'tpe': {what}: {random}")
    places = (
        {key: data[key] for key in ("root", "storage") if data.get(key)} if isinstance(data, Mapping) else {}
    )
    for key, value in redaction.field("data", places).items():
        if value != places[key]:
            what = "may contain credentials, which a cluster's master stores and shows"
            lines.append(f"data.{key}: {value}: {what}; use environment variables (docs/sources.md)")
    return lines


def _length_errors(length: Any, searcher: Mapping[str, Any], search: bool) -> list[str]:
    """Check ``max_length``, and that an ASHA search's ``max_time`` equals it."""
    errors, length = length_errors(length), of_one_unit(length)
    metric, longest = searcher.get("time_metric"), searcher.get("max_time")
    if not errors and MINUTES in length and (search or metric is not None or longest is not None):
        what = "a search compares trials of equal length"
        return [f"{LENGTH}: {dict(length)!r}: {what}; use {{epochs: N}} or {{batches: N}}"]
    if errors or (metric is None and longest is None):
        return errors
    unit, number = next(iter(length.items()))
    if metric != unit:
        return [f"searcher.time_metric: {metric!r}: {LENGTH} counts {unit}; use the same unit in both"]
    if longest != number:
        return [f"searcher.max_time: {longest!r}: {LENGTH} is {number} {unit}; use the same number in both"]
    return []


def take_constants(path: str, section: dict[str, Any], search: bool) -> list[str]:
    """Replace every ``{type: const, val: VALUE}`` with its value, and return errors.

    Args:
        path: the key of the section in error lines.
        section: the section; the function changes it in place.
        search: whether ranges of hyperparameters are allowed.
    """
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
    """Return the experiment configuration of a Determined context; empty if the context has none."""
    try:
        return context.get_experiment_config()
    except ValueError:
        return {}
