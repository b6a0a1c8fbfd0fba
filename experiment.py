"""An experiment file, as Determined's own, read and checked on this machine."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import determined as det
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from errors import InvalidInput, nearest, one_line
from rules import is_bool, is_count

# https://docs.determined.ai/latest/reference/training/experiment-config-reference.html
FIELDS = """bind_mounts checkpoint_policy checkpoint_storage data debug description entrypoint environment
    hyperparameters integrations labels log_policies max_restarts min_checkpoint_period min_validation_period name
    optimizations pbs perform_initial_validation preemption_timeout profiling project records_per_epoch reproducibility
    resources retention_policy scheduling_unit searcher security slurm tensorboard_storage workspace""".split()
# The parser raises Python's own errors for a tagged value such as "!!int x", and for one nested too deep.
YAML_ERRORS = (YAMLError, ValueError, KeyError, RecursionError)
PERIOD_UNITS = ("batches", "records", "epochs")
LENGTH_UNITS = ("batches", "epochs")
METRICS = ("accuracy", "loss", "images_per_second")
CHECKPOINT_POLICIES = ("best", "all", "none")
SAMPLED_TYPES = ("int", "double", "log", "categorical")
COMMON = "name metric smaller_is_better source_trial_id source_checkpoint_uuid max_length time_metric max_time".split()
HALVING = [*COMMON, "max_trials", "max_concurrent_trials", "divisor", "stop_once"]
SEARCHERS = {
    "single": COMMON,
    "random": [*COMMON, "max_trials", "max_concurrent_trials"],
    "grid": [*COMMON, "max_concurrent_trials"],
    "async_halving": [*HALVING, "num_rungs"],
    "adaptive_asha": [*HALVING, "mode", "max_rungs", "bracket_rungs"],
}
# The keys of the sections that are read here.
SECTIONS = {
    "reproducibility": ["experiment_seed"],
    "resources": """agent_label devices is_single_node max_slots native_parallel priority resource_pool shm_size slots
        slots_per_trial weight""".split(),
    "checkpoint_storage": """access_key account_url bucket checkpoint_path connection_string container container_path
        credential endpoint_url host_path prefix propagation save_experiment_best save_trial_best save_trial_latest
        secret_key storage_path tensorboard_path type user""".split(),
    "profiling": ["begin_on_batch", "enabled", "end_after_batch", "sync_timings"],
}


def _is_metric(value: Any) -> bool:
    return value in METRICS or (isinstance(value, str) and value.startswith("accuracy/"))


# Fields of one value: what holds of a good one, and what to say of another.
FIELD_RULES = (
    ("resources.slots_per_trial", lambda v: is_count(v, 1), "must be a whole number of at least 1"),
    ("searcher.name", lambda v: isinstance(v, str), "must be a searcher's name, e.g. single"),
    ("searcher.metric", _is_metric, f"no validation reports it; use {', '.join(METRICS)} or accuracy/CLASS"),
    ("searcher.smaller_is_better", is_bool, "must be true or false"),
    ("perform_initial_validation", is_bool, "must be true or false"),
    ("profiling.enabled", is_bool, "must be true or false"),
    ("name", lambda v: isinstance(v, str), "must be text"),
    ("description", lambda v: isinstance(v, str), "must be text"),
    ("checkpoint_storage.save_trial_best", lambda v: is_count(v, 0), "must be a whole number of at least 0"),
    ("checkpoint_storage.save_trial_latest", lambda v: is_count(v, 0), "must be a whole number of at least 0"),
    (
        "reproducibility.experiment_seed",
        lambda v: is_count(v, 0) and v < 2**31,
        "must be a whole number from 0 to 2147483647",
    ),
    ("scheduling_unit", lambda v: is_count(v, 1), "must be a whole number of at least 1"),
    ("checkpoint_policy", lambda v: v in CHECKPOINT_POLICIES, f"must be one of {', '.join(CHECKPOINT_POLICIES)}"),
)


@dataclass(frozen=True)
class Experiment:
    """A checked experiment configuration with one value for every hyperparameter.

    Attributes:
        config: the whole configuration, as Determined has it.
        hyperparameters: what a trial gets.
    """

    config: dict[str, Any]
    hyperparameters: dict[str, Any]

    @property
    def seed(self) -> int:
        """The one seed of everything random: weights, order of the images."""
        return int(_section(self.config, "reproducibility").get("experiment_seed") or 0)

    @property
    def max_length(self) -> tuple[str, int]:
        """The training length: ``("batches" | "epochs", N)``."""
        return next(iter(self.hyperparameters["max_length"].items()))

    @property
    def slots(self) -> int:
        """Processes of a trial, one a slot; off a cluster the launcher says how many there are."""
        return int(_section(self.config, "resources").get("slots_per_trial") or 1)

    def check_length(self) -> None:
        """Raises ``InvalidInput`` where ``max_length``, which is no field of the master's, cannot be meant."""
        faults = _unit_faults(
            "hyperparameters.max_length", self.hyperparameters.get("max_length"), LENGTH_UNITS, least=1
        )
        if faults:
            raise InvalidInput(faults)

    def period(self, field: str) -> tuple[str, int] | None:
        """A period such as ``min_validation_period``: (unit, N), or None if there is none."""
        section = _section(self.config, field)
        return next(((unit, n) for unit, n in section.items() if n), None)

    @property
    def scheduling_unit(self) -> int:
        """Optimizer steps between two reports of training metrics."""
        return int(self.config.get("scheduling_unit") or 100)

    def keep(self, field: str) -> int:
        """How many checkpoints ``save_trial_best`` or ``save_trial_latest`` say to keep."""
        value = _section(self.config, "checkpoint_storage").get(field)
        return 1 if value is None else int(value)  # Determined's defaults

    @property
    def profiling(self) -> bool:
        """Whether to profile."""
        return bool(_section(self.config, "profiling").get("enabled"))

    @property
    def metric(self) -> str:
        """The validation metric by which checkpoints and trials are compared."""
        return str(_section(self.config, "searcher").get("metric") or "accuracy")

    @property
    def smaller_is_better(self) -> bool:
        """Whether smaller values of ``metric`` are better: so Determined takes them, where a file does not say."""
        section = _section(self.config, "searcher")
        chosen = section.get("smaller_is_better")
        return section.get("metric") is not None if chosen is None else bool(chosen)

    def notes(self) -> list[str]:
        """What a file leaves to a default that may surprise."""
        silent = _section(self.config, "searcher").get("smaller_is_better") is None
        if not (silent and self.smaller_is_better) or self.metric == "loss":
            return []
        return [f"searcher.smaller_is_better: None: so less {self.metric} is better, as in Determined; false turns it"]


def _section(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    return config.get(field) or {}


def load(path: str, overrides: Iterable[str] = (), search: bool = False) -> Experiment:
    """Reads an experiment file for training on this machine.

    Args:
        path: the file.
        overrides: ``PATH=VALUE`` each: puts VALUE, read as YAML, in the place of what stands at the dotted PATH.
        search: leave ranges among the hyperparameters; ``search_space.py`` checks them.

    Raises:
        InvalidInput: if the file or an override cannot be read, or with a line for each field that is wrong.
    """
    return check(read(path, overrides), search)


def on_cluster() -> bool:
    """Whether this process runs in a trial of a Determined cluster."""
    info = det.get_cluster_info()
    return info is not None and info.task_type == "TRIAL"


def from_cluster() -> Experiment | None:
    """The experiment of the Determined trial that this process runs in; None off a cluster.

    Its fields were checked by the master, which also chose the hyperparameters.
    """
    info = det.get_cluster_info()
    if info is None or not on_cluster():
        return None
    return Experiment(info.trial._config, info.trial.hparams)


def read(path: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Reads the file and the overrides, as ``load`` has them, without checking the fields."""
    try:
        config = _yaml(pathlib.Path(path).read_text())
    except FileNotFoundError:
        raise InvalidInput(f"--config: {path}: no such file; give an experiment file, e.g. const.yaml") from None
    except (OSError, *YAML_ERRORS) as error:
        raise InvalidInput(f"--config: {path}: not a YAML file ({one_line(error)}); mend it") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"--config: {path}: holds no experiment configuration; see const.yaml for one")
    for override in overrides:
        _override(config, override)
    try:
        json.dumps(config)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"--config: {path}: holds what no JSON can ({one_line(error)}); mend it") from error
    return config


class _Constructor(SafeConstructor):
    """Makes of a date the text that it is, as Determined's master does, which keeps it as JSON."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _yaml(text: str) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return yaml.load(text)


def _override(config: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise InvalidInput(f"--set: {override!r}: must be PATH=VALUE, e.g. data.dataset=digits")
    try:
        value = _yaml(text)
    except YAML_ERRORS as error:
        raise InvalidInput(f"--set {path}: {text!r}: not YAML ({one_line(error)}); quote it") from error
    inner = config
    for depth, key in enumerate(keys[:-1], 1):
        if inner.get(key) is None:
            inner[key] = {}
        inner = inner[key]
        if not isinstance(inner, dict):
            parent = ".".join(keys[:depth])
            raise InvalidInput(f"--set {path}: unknown path; {parent} is {inner!r} and has no keys")
    inner[keys[-1]] = value


def check(config: dict[str, Any], search: bool = False) -> Experiment:
    """Checks the fields that are not left to ``data.py`` and ``engine_config.py``.

    Args:
        config: the whole configuration.
        search: leave ranges among the hyperparameters.

    Raises:
        InvalidInput: with a line for each field that is wrong.
    """
    faults = [f"{k}: {v!r}: unknown field; {nearest(k, FIELDS)}" for k, v in config.items() if k not in FIELDS]
    mappings = ("hyperparameters", "searcher", *SECTIONS)
    wrong = [k for k in mappings if config.get(k) is not None and not isinstance(config[k], dict)]
    faults += [f"{k}: {config[k]!r}: must be a mapping" for k in wrong]
    for section, known in SECTIONS.items():
        if section not in wrong:
            faults += _unknown_keys(section, _section(config, section), known)
    if "searcher" not in wrong and not search:  # or searchers.py checks it
        searcher = _section(config, "searcher")
        name = searcher.get("name")
        if isinstance(name, str) and name not in SEARCHERS:
            faults.append(f"searcher.name: {name!r}: unknown searcher; {nearest(name, SEARCHERS)}")
        else:
            faults += _unknown_keys("searcher", searcher, {key for keys in SEARCHERS.values() for key in keys})
    for field in ("min_validation_period", "min_checkpoint_period"):
        if config.get(field) is not None:
            faults += _unit_faults(field, config[field], PERIOD_UNITS, least=0)
    for path, holds, must in FIELD_RULES:
        section, _, field = path.rpartition(".")
        holder = config if not section else config.get(section) if section not in wrong else None
        value = (holder or {}).get(field)
        if value is not None and not holds(value):
            faults.append(f"{path}: {value!r}: {must}")
    hyperparameters: dict[str, Any] = {}
    if "hyperparameters" not in wrong:
        hyperparameters = copy.deepcopy(dict(_section(config, "hyperparameters")))
        faults += _take_constants("hyperparameters", hyperparameters, search)
        length = hyperparameters.get("max_length")
        wrong_length = _unit_faults("hyperparameters.max_length", length, LENGTH_UNITS, least=1)
        faults += wrong_length
        if not wrong_length and isinstance(length, dict) and "searcher" not in wrong:
            faults += _search_length_faults(_section(config, "searcher"), *next(iter(length.items())))
    if faults:
        raise InvalidInput(faults)
    return Experiment(config, hyperparameters)


def _unknown_keys(path: str, section: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [f"{path}.{k}: {v!r}: unknown key; {nearest(k, known)}" for k, v in section.items() if k not in known]


def _unit_faults(field: str, value: Any, units: tuple[str, ...], least: int) -> list[str]:
    form = " or ".join(f"{{{unit}: N}}" for unit in units)
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in units:
        return [f"{field}: {value!r}: must be {form}"]
    unit, number = next(iter(value.items()))
    if not is_count(number, least):
        return [f"{field}.{unit}: {number!r}: must be a whole number of at least {least}"]
    return []


def _search_length_faults(searcher: Mapping[str, Any], unit: str, length: int) -> list[str]:
    """Checks that a search that stops trials early counts in the training's unit, up to its length."""
    metric, longest = searcher.get("time_metric"), searcher.get("max_time")
    if metric is None and longest is None:
        return []
    if metric != unit:
        return [
            f"searcher.time_metric: {metric!r}: hyperparameters.max_length counts {unit}; use the same unit in both"
        ]
    if longest != length:
        return [f"searcher.max_time: {longest!r}: hyperparameters.max_length is {length} {unit}; make them the same"]
    return []


def _take_constants(path: str, section: dict[str, Any], search: bool) -> list[str]:
    """Puts the value in the place of every ``{type: const, val: VALUE}``; a range is a fault but in a search."""
    faults = []
    for key, value in section.items():
        if not isinstance(value, dict):
            continue
        kind = value.get("type")
        if kind == "const" and "val" in value:
            section[key] = value["val"]
        elif kind in SAMPLED_TYPES and search:
            continue
        elif kind in SAMPLED_TYPES:
            faults.append(
                f"{path}.{key}: {value!r}: is a range to search; --set {path}.{key}=VALUE trains with one value"
            )
        else:
            faults += _take_constants(f"{path}.{key}", value, search)
    return faults
