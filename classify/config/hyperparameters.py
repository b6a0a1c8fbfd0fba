"""The trial's hyperparameters, each with its type, default, rule and documentation.

All other hyperparameters are DeepSpeed's keys, which ``classify/engine`` checks. Its module
``combinations.py`` checks conflicts between keys. A key that changes the loss or the order of the images gets
``repeated=True``: a resume with another value is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from classify.config.metric_table import is_metric
from classify.config.options import ProgressiveResizing, TestTimeAugmentation, WeightAverage
from classify.config.parameter_groups import EXAMPLE, ParameterGroup, entry_errors, is_pattern
from classify.config.rules import (
    BETWEEN_0_AND_1,
    BOOL,
    MAPPING,
    Rule,
    elsewhere,
    is_count,
    is_number,
    number,
    one_of,
    optional,
    whole,
)
from classify.config.sections import Keyed, key
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
    return isinstance(value, (list, tuple)) and bool(value) and all(is_count(count, 1) for count in value)


def _is_partition_method(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return value in ("parameters", "uniform") or (value.startswith("type:") and is_pattern(value[5:]))


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


def _mapping_of(what: str) -> Rule:
    return optional(MAPPING._replace(message=f"must be a mapping of {what}"))


def _text(values: str) -> Rule:
    return optional(Rule(lambda value: isinstance(value, str) and bool(value), f"must be {values}"))


BETA = Rule(  # below 0.001 torch's gamma samples are all 0
    lambda value: is_number(value) and (value == 0 or 0.001 <= value <= 1e6),
    "must be 0 or a number from 0.001 to 1e6, e.g. 0.2",
)


@dataclass(frozen=True)
class Hyperparameters(Keyed):
    """The trial's hyperparameters; ``inline`` has the hyperparameters that are DeepSpeed's keys."""

    net: str = key(
        "net",
        elsewhere("a network of net.py, net-moe, a classifier of torchvision, or timm/NAME"),
        "The network.",
    )
    net_args: Mapping[str, Any] | None = key(
        None, _mapping_of("the network's arguments"), "Arguments of the network's function."
    )
    weights: str | None = key(
        None,
        _text("the path of a state_dict, e.g. a run's net.pt, or DEFAULT for weights of torchvision or timm"),
        "The pretrained weights; without them the network starts with random weights.",
    )

    max_length: Mapping[str, Any] | None = key(
        None,
        elsewhere("{epochs: N}, {batches: N} or {minutes: M}"),
        "The length of the training; a batch is an optimizer step, minutes are wall time. Required.",
    )
    early_stopping: Mapping[str, Any] | None = key(
        None,
        optional(
            Rule(
                _is_early_stopping,
                "must be a mapping, e.g. {patience: 3, min_improvement: 0.01}; patience counts validations",
            )
        ),
        "Training ends after `patience` validations without an improvement of `searcher.metric` by more than"
        " `min_improvement`.",
    )
    best_weights: bool = key(
        False,
        BOOL,
        "The run keeps, tests and exports the weights with the best `searcher.metric` in a validation.",
    )

    track: tuple[str, ...] | None = key(
        None, elsewhere("a list of some of mlflow, wandb"), "Experiment trackers that also record the run."
    )

    hang_after: float = key(
        HANG_AFTER,
        Rule(lambda value: not hang_errors(value), "must be a number of seconds of at least 3"),
        "The run ends after this time if no rank makes progress.",
        unit="seconds",
    )

    deepspeed_config: str | None = key(
        None,
        optional(Rule(lambda value: isinstance(value, str), "must be a file's name, e.g. ds_config.json")),
        "The JSON file with the DeepSpeed configuration.",
    )
    overwrite_deepspeed_args: Mapping[str, Any] | None = key(
        None,
        _mapping_of("DeepSpeed's keys, e.g. {train_batch_size: 32}"),
        "Values that replace values of `deepspeed_config`.",
    )

    loss: str | Mapping[str, Any] = key(
        "cross_entropy",
        elsewhere("cross_entropy, bce, focal or a loss of net.py, or {NAME: {ARGUMENT: VALUE}}"),
        "The training loss; validations report cross-entropy. With `data.several_labels` the default is"
        " `bce`, and validations report `bce`.",
        repeated=True,
    )
    class_weights: str | Mapping[str, float] | None = key(
        None,
        elsewhere("balanced, or a mapping of classes to their weights, e.g. {cat: 2}"),
        "The weight of a class's images in the loss; `balanced`: inverse frequency, with a mean of 1 over the"
        " training images. With `data.several_labels`, the factor of a label's loss on the images with"
        " the label.",
        repeated=True,
    )
    label_smoothing: float = key(
        0.0,
        number(0, 1),
        "The share of the target that is spread evenly over all classes (https://arxiv.org/abs/1512.00567).",
    )
    teacher: str | None = key(
        None,
        _text("the path of an exported network, e.g. a run's net.pt"),
        "A trained network, whose scores the new network also learns: distillation"
        " (https://arxiv.org/abs/1503.02531).",
    )
    teacher_weight: float = key(
        0.5,
        Rule(lambda value: is_number(value) and 0 < value <= 1, "must be a number above 0, of at most 1"),
        "The share of the teacher's scores in the loss; the labels have the rest.",
    )
    teacher_temperature: float = key(
        4.0,
        Rule(lambda value: is_number(value, 0.1) and value <= 100, "must be a number from 0.1 to 100"),
        "The temperature of both networks' probabilities in the loss.",
    )
    mixup: float = key(
        0.0, BETA, "The Beta distribution's parameter of MixUp; 0: off (https://arxiv.org/abs/1710.09412)."
    )
    cutmix: float = key(
        0.0, BETA, "The Beta distribution's parameter of CutMix; 0: off (https://arxiv.org/abs/1905.04899)."
    )

    weight_average: WeightAverage | None = key(
        None,
        elsewhere("a mapping"),
        "A moving average of the weights, which validations and exports use.",
        section=WeightAverage,
    )
    test_time_augmentation: TestTimeAugmentation | None = key(
        None,
        elsewhere("a mapping"),
        "Validations also classify each image by its mean scores over several views.",
        section=TestTimeAugmentation,
    )
    progressive_resizing: ProgressiveResizing | None = key(
        None,
        elsewhere("a mapping"),
        "Smaller images in the first part of the training.",
        section=ProgressiveResizing,
    )
    weight_decay_on: str = key(
        "all",
        one_of("all", "weights"),
        "The parameters with weight decay; `weights` excludes all of one dimension, e.g. biases and norms.",
    )
    layer_decay: float | None = key(
        None,
        optional(BETWEEN_0_AND_1),
        "The learning rate of each layer as a fraction of the next layer's; the head has the full rate"
        " (https://arxiv.org/abs/2106.08254, appendix).",
    )
    head_only: bool | Mapping[str, int] | None = key(
        None,
        optional(
            Rule(_is_head_only, "must be true, or the length of a first phase, {epochs: N} or {batches: N}")
        ),
        "Only the last layer is trained, for the whole training or for a first phase.",
    )
    parameter_groups: tuple[Mapping[str, Any], ...] = key(
        (),
        elsewhere(f"a list of mappings, e.g. {EXAMPLE}"),
        "Groups of parameters, by patterns of their names.",
        section=ParameterGroup,
    )

    channels_last: bool | None = key(
        None,
        BOOL,
        "Whether images have the memory format channels_last; by default only where that is faster.",
    )
    checkpoint_activations: bool = key(
        False, BOOL, "Activation checkpointing: the backward pass recomputes the blocks, which saves memory."
    )
    compile: bool = key(
        False,
        BOOL._replace(
            message=f"{BOOL.message}; put DeepSpeed's section compile under overwrite_deepspeed_args"
        ),
        "torch.compile compiles the network, at ZeRO stage 0 to 2; the first steps take minutes.",
    )
    sync_batchnorm: bool = key(False, BOOL, "Batch normalization uses the statistics of all processes.")

    pipe_parallel_size: int = key(1, whole(1), "The number of pipeline stages.", unit="processes")
    partition_method: str = key(
        "parameters",
        Rule(_is_partition_method, "must be one of parameters, uniform, type:REGEX"),
        "Pipeline stages get equal numbers of parameters, of layers, or of layers of a type.",
    )

    moe: bool | None = key(
        None, BOOL, "The network is a mixture of experts (MoE); implied by `net: net-moe`."
    )
    num_experts: tuple[int, ...] = key(
        (),
        Rule(_are_counts, "must be a list with the number of experts of each MoE layer, e.g. [2]"),
        "The number of experts of each MoE layer; by default one layer with 2 experts.",
    )
    ep_world_size: int = key(
        1, whole(1), "Expert parallelism: the number of processes that share a layer's experts."
    )
    mlp_type: str = key(
        "standard",
        one_of("standard", "residual"),
        "`residual` adds a dense layer to the experts' output (https://arxiv.org/abs/2201.05596).",
    )
    top_k: int = key(1, one_of(1, 2), "The number of experts that process an image.")
    min_capacity: int = key(0, whole(0), "The minimum capacity of an expert in a micro-batch.", unit="images")
    noisy_gate_policy: str | None = key(
        None, one_of("RSample", "Jitter", "None", None), "The noise of the gate in training."
    )
    moe_param_group: bool = key(True, BOOL, "Experts form separate parameter groups, which ZeRO requires.")
    moe_loss_coefficient: float = key(
        0.01,
        Rule(is_number, "must be a number of at least 0"),
        "The weight of the load-balancing loss; the default is from section 2.2 of"
        " https://arxiv.org/abs/2101.03961.",
    )

    inline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The hyperparameters that are not keys of this class."""
    given: frozenset[str] = frozenset()
    """The keys of this class that the file sets."""

    @property
    def minutes(self) -> float | None:
        """The training's length in minutes, or None if it counts steps."""
        return (self.max_length or {}).get(MINUTES)

    @property
    def has_experts(self) -> bool:
        """Whether ``moe`` or ``net`` asks for a mixture of experts."""
        return bool(self.moe) or self.net == "net-moe"

    @property
    def experts(self) -> dict[str, Any]:
        """The hyperparameters that are arguments of ``NetMoE``."""
        return {name: getattr(self, name) for name in EXPERTS} | {"num_experts": self.num_experts or (2,)}

    @classmethod
    def parse(cls, hparams: Mapping[str, Any], check_net: Callable[[object], None]) -> Hyperparameters:
        """Check each value separately and fill in the defaults.

        Args:
            hparams: the experiment's hyperparameters.
            check_net: a function that raises ``InvalidInput`` for a name that ``net`` cannot have.

        Raises:
            InvalidInput: with a line for each error.
        """
        given = {name: hparams[name] for name in RULES if name in hparams}
        given.update(
            {name: of_one_unit(given[name]) for name in ("max_length", "head_only") if name in given}
        )
        errors = ErrorList()
        values = cls.read("hyperparameters.", given, errors)
        if "max_length" in given:
            errors.lines += length_errors(given["max_length"])
        errors.lines += entry_errors(given.get("parameter_groups"))
        errors.lines += tracker_errors(given.get("track"))
        with errors.collecting():
            check_net(given.get("net", cls.net))
        errors.raise_any()
        return cls._of(hparams, values)

    @classmethod
    def parse_form(cls, hparams: Mapping[str, Any]) -> Hyperparameters | None:
        """Return only the keys that locate the DeepSpeed configuration; None if one of them is invalid."""
        given = {name: hparams[name] for name in FORM if name in hparams}
        is_valid = all(RULES[name].is_valid(value) for name, value in given.items())
        return cls._of(hparams, given) if is_valid else None

    @classmethod
    def _of(cls, hparams: Mapping[str, Any], given: Mapping[str, Any]) -> Hyperparameters:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        inline = {name: value for name, value in hparams.items() if name not in RULES}
        return cls(**values, inline=inline, given=frozenset(given))


RULES: dict[str, Rule] = {name: each.rule for name, each in Hyperparameters.keys().items()}
FORM = ("deepspeed_config", "overwrite_deepspeed_args")
EXPERTS = ("num_experts", "ep_world_size", "mlp_type", "top_k", "min_capacity", "noisy_gate_policy")
EXPERTS_ONLY = (*EXPERTS, "moe_param_group", "moe_loss_coefficient")  # they have no effect on other networks
