"""The hyperparameters of the trial: each once, with its type, default, rule and documentation.

Every other hyperparameter is a key of DeepSpeed's, checked in ``classify/engine``. What does not go
together is in ``classify/engine/combinations.py``; what must be the same after a resume, in
``ClassifierHooks.identity``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from classify.config.metric_table import is_metric
from classify.config.options import Options, ProgressiveResizing, TestTimeAugmentation, WeightAverage
from classify.config.parameter_groups import entry_errors, is_pattern
from classify.config.rules import ANY, BOOL, Rule, is_count, is_number, one_of, optional, whole
from deepspeed_trial.errors import ErrorList
from deepspeed_trial.experiment import (
    HANG_AFTER,
    LENGTH_UNITS,
    MINUTES,
    hang_errors,
    length_errors,
    of_one_unit,
    tracker_errors,
    unit_errors,
)


def _are_counts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(is_count(each, 1) for each in value)


def _is_beta(value: Any) -> bool:
    """Whether it is a parameter of a Beta distribution, or 0; below 0.001 both of torch's draws are 0."""
    return is_number(value) and (value == 0 or 0.001 <= value <= 1e6)


def _is_partition_method(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return value in ("parameters", "uniform") or (value.startswith("type:") and is_pattern(value[5:]))


def _is_decay(value: Any) -> bool:
    return is_number(value) and 0 < value < 1


def _is_head_only(value: Any) -> bool:
    return isinstance(value, bool) or (
        value is not None and not unit_errors("", value, LENGTH_UNITS, least=1)
    )


def _is_early_stopping(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() - {"metric", "patience", "min_improvement"}:
        return False
    return (
        is_count(value.get("patience"), 1)
        and is_number(value.get("min_improvement", 0))
        and is_metric(value.get("metric", "loss"))
    )


_MAPPING = Rule(lambda value: isinstance(value, Mapping), "")
_WEIGHTS = "must be the path of a state_dict, e.g. a run's net.pt, or DEFAULT for one of torchvision or timm"
_STOPPING = "must be e.g. {patience: 3, min_improvement: 0.01}: validations to wait, and for how much"
_HEAD_ONLY = "must be true, or for how long at first: {epochs: N} or {batches: N}"
_BETA = Rule(_is_beta, "must be 0 or a number from 0.001 to 1e6, e.g. 0.2")


def _setting(default: Any, rule: Rule) -> Any:
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class Hyperparameters:
    """The trial's own hyperparameters, and in ``inline`` the others, which are DeepSpeed's."""

    net: str = _setting("net", ANY)
    """The network: one of ``net.py``, ``net-moe``, one of torchvision's, or of timm's as ``timm/NAME``."""
    net_args: Mapping[str, Any] | None = _setting(
        None, optional(_MAPPING._replace(message="must be a mapping of the network's arguments"))
    )
    """Further arguments of the network's function."""
    weights: str | None = _setting(None, optional(Rule(lambda v: isinstance(v, str) and bool(v), _WEIGHTS)))
    """Where training starts: the path of a ``state_dict``, or the name of torchvision's or timm's weights."""

    max_length: Mapping[str, Any] | None = _setting(None, ANY)
    """The training's length: ``{epochs: N}``, ``{batches: N}``, a batch being an optimizer step, or
    ``{minutes: M}`` of wall time."""
    early_stopping: Mapping[str, Any] | None = _setting(None, optional(Rule(_is_early_stopping, _STOPPING)))
    """Validations to wait for an improvement of ``searcher.metric``: ``patience``, ``min_improvement``."""
    best_weights: bool = _setting(False, BOOL)
    """Whether to keep and test the network of the best validation by ``searcher.metric``."""

    track: tuple[str, ...] | None = _setting(None, ANY)
    """Where else the run is written down: ``mlflow``, ``wandb``."""

    hang_after: float = _setting(
        HANG_AFTER, Rule(lambda v: not hang_errors(v), "must be seconds, at least 3")
    )
    """Seconds without a move of any rank after which a run ends; before, it says where each is."""

    deepspeed_config: str | None = _setting(
        None, optional(Rule(lambda v: isinstance(v, str), "must be a file's name, e.g. ds_config.json"))
    )
    """The file with the DeepSpeed configuration."""
    overwrite_deepspeed_args: Mapping[str, Any] | None = _setting(
        None,
        optional(
            _MAPPING._replace(message="must be a mapping of DeepSpeed's keys, e.g. {train_batch_size: 32}")
        ),
    )
    """Overrides for ``deepspeed_config``."""

    loss: str | Mapping[str, Any] = _setting("cross_entropy", ANY)
    """The loss of training: its name, or a mapping of that to its arguments."""
    class_weights: str | Mapping[str, float] | None = _setting(None, ANY)
    """How much images count by their class: ``balanced``, or numbers by the classes' names."""
    label_smoothing: float = _setting(
        0.0, Rule(lambda v: is_number(v, 0, 1), "must be a number from 0 to below 1")
    )
    """The share of the target that is spread over all classes (https://arxiv.org/abs/1512.00567)."""
    mixup: float = _setting(0.0, _BETA)
    """The Beta distribution's parameter of MixUp; 0 for none (https://arxiv.org/abs/1710.09412)."""
    cutmix: float = _setting(0.0, _BETA)
    """The same of CutMix (https://arxiv.org/abs/1905.04899)."""

    weight_average: WeightAverage | None = dataclasses.field(
        default=None, metadata={"rule": ANY, "options": WeightAverage}
    )
    """An average of the weights, to be validated and kept, or to go on from."""
    test_time_augmentation: TestTimeAugmentation | None = dataclasses.field(
        default=None, metadata={"rule": ANY, "options": TestTimeAugmentation}
    )
    """Views of each image, by whose mean scores validations classify it once more."""
    progressive_resizing: ProgressiveResizing | None = dataclasses.field(
        default=None, metadata={"rule": ANY, "options": ProgressiveResizing}
    )
    """Smaller images in the first part of the training."""
    weight_decay_on: str = _setting("all", one_of("all", "weights"))
    """``weights`` for no decay of biases, norms and other weights of one dimension."""
    layer_decay: float | None = _setting(None, optional(Rule(_is_decay, "must be a number between 0 and 1")))
    """The learning rate of each layer over that of the next, the head having all of it
    (https://arxiv.org/abs/2106.08254, appendix)."""
    head_only: bool | Mapping[str, int] | None = _setting(None, optional(Rule(_is_head_only, _HEAD_ONLY)))
    """``true`` to train the last layer alone; ``{epochs: N}`` or ``{batches: N}`` for so long at first."""
    parameter_groups: tuple[Mapping[str, Any], ...] = _setting((), ANY)
    """Parameters by patterns of their names: each with its ``lr_factor``, ``weight_decay``, or ``frozen``."""

    channels_last: bool | None = _setting(None, BOOL)
    """Whether images have that memory format; if not given, where it is known to be faster."""
    checkpoint_activations: bool = _setting(False, BOOL)
    """Activation checkpointing: whether blocks are computed again in the backward pass."""
    sync_batchnorm: bool = _setting(False, BOOL)
    """Whether batch normalization is over all processes."""

    pipe_parallel_size: int = _setting(1, whole(1))
    """The stages of a pipeline."""
    partition_method: str = _setting(
        "parameters", Rule(_is_partition_method, "must be one of parameters, uniform, type:REGEX")
    )
    """How layers are dealt out to the stages."""

    moe: bool | None = _setting(None, BOOL)
    """Whether the network is a mixture of experts; implied by ``net: net-moe``."""
    num_experts: tuple[int, ...] = _setting(
        (), Rule(_are_counts, "must be a list with the experts of each MoE layer, e.g. [2]")
    )
    """The experts of each MoE layer; one layer of 2 if not given."""
    ep_world_size: int = _setting(1, whole(1))
    """Over how many processes the experts of a layer are spread."""
    mlp_type: str = _setting("standard", one_of("standard", "residual"))
    """``residual`` for a fixed layer beside the experts (https://arxiv.org/abs/2201.05596)."""
    top_k: int = _setting(1, one_of(1, 2))
    """How many experts see an image."""
    min_capacity: int = _setting(0, whole(0))
    """The least images that an expert takes of a micro-batch."""
    noisy_gate_policy: str | None = _setting(None, one_of("RSample", "Jitter", "None", None))
    """The noise of the gate in training."""
    moe_param_group: bool = _setting(True, BOOL)
    """Whether experts form parameter groups of their own, which ZeRO needs."""
    moe_loss_coefficient: float = _setting(0.01, Rule(is_number, "must be a number of at least 0"))
    """The weight of the load-balancing loss; default of https://arxiv.org/abs/2101.03961, section 2.2."""

    inline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All other keys."""
    given: frozenset[str] = frozenset()
    """The names of those that the file has."""

    @property
    def minutes(self) -> float | None:
        """The training's length, where it is a time."""
        return (self.max_length or {}).get(MINUTES)

    @property
    def has_experts(self) -> bool:
        """Whether a mixture of experts is asked for, in either way."""
        return bool(self.moe) or self.net == "net-moe"

    @property
    def experts(self) -> dict[str, Any]:
        """The arguments of ``NetMoE`` that are hyperparameters."""
        return {key: getattr(self, key) for key in EXPERTS} | {"num_experts": self.num_experts or (2,)}

    @classmethod
    def parse(cls, hparams: Mapping[str, Any], check_net: Callable[[object], None]) -> Hyperparameters:
        """Checks each value by itself and fills in the defaults.

        Args:
            hparams: the experiment's.
            check_net: raises ``InvalidInput`` for a name that ``net`` cannot have.

        Raises:
            InvalidInput: with a line for each that is wrong.
        """
        given = {key: hparams[key] for key in RULES if key in hparams}
        given.update({key: of_one_unit(given[key]) for key in ("max_length", "head_only") if key in given})
        errors = ErrorList()
        errors.lines += [
            f"hyperparameters.{key}: {value!r}: {RULES[key].message}"
            for key, value in given.items()
            if not RULES[key].is_valid(value)
        ]
        for key, options in OPTIONS.items():
            if given.get(key) is not None:
                with errors.collecting():
                    given[key] = options.parse(f"hyperparameters.{key}", given[key])
        if "max_length" in given:
            errors.lines += length_errors(given["max_length"])
        errors.lines += entry_errors(given.get("parameter_groups"))
        errors.lines += tracker_errors(given.get("track"))
        with errors.collecting():
            check_net(given.get("net", cls.net))
        errors.raise_any()
        return cls._of(hparams, given)

    @classmethod
    def parse_form(cls, hparams: Mapping[str, Any]) -> Hyperparameters | None:
        """Those alone that say where the DeepSpeed configuration is; None if one of them is wrong."""
        given = {key: hparams[key] for key in FORM if key in hparams}
        is_right = all(RULES[key].is_valid(value) for key, value in given.items())
        return cls._of(hparams, given) if is_right else None

    @classmethod
    def _of(cls, hparams: Mapping[str, Any], given: Mapping[str, Any]) -> Hyperparameters:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        inline = {key: value for key, value in hparams.items() if key not in RULES}
        return cls(**values, inline=inline, given=frozenset(given))


RULES: dict[str, Rule] = {
    field.name: field.metadata["rule"] for field in dataclasses.fields(Hyperparameters) if field.metadata
}
OPTIONS: dict[str, type[Options]] = {  # the mappings
    field.name: field.metadata["options"]
    for field in dataclasses.fields(Hyperparameters)
    if "options" in field.metadata
}
FORM = ("deepspeed_config", "overwrite_deepspeed_args")
EXPERTS = ("num_experts", "ep_world_size", "mlp_type", "top_k", "min_capacity", "noisy_gate_policy")
EXPERTS_ONLY = (*EXPERTS, "moe_param_group", "moe_loss_coefficient")  # which do nothing without experts
