"""Parameter groups: parameters with the same rate, decay and optimizer.

``parameter_groups``, ``weight_decay_on``, ``layer_decay`` and ``head_only`` define them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from classify.config.hyperparameters import Hyperparameters
from classify.config.parameter_groups import KEY
from classify.models.depths import depths
from classify.models.heads import head_layers
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.patches.muon import USES_MUON
from deepspeed_trial.schedules import FACTOR, STARTS_AFTER

OTHERS = "others"  # the name of the group without a pattern
_EXPERT = re.compile(r"(deepspeed_experts)\.\d+\.")


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer.

    Attributes:
        name: the group's name in reports.
        parameters: the parameters' names in the network without parallelism, in that network's order.
        weights: the count of numbers in the parameters.
        lr_factor: the group's learning rate divided by the optimizer's learning rate.
        weight_decay: the group's weight decay; None for the optimizer's weight decay.
        frozen: whether the parameters keep their values.
        starts_after: number of optimizer steps with learning rate 0 at the start of the training.
        muon: whether Muon trains the group; False for Muon's Adam; None if the optimizer is not Muon.
    """

    name: str
    parameters: tuple[str, ...]
    weights: int
    lr_factor: float = 1
    weight_decay: float | None = None
    frozen: bool = False
    starts_after: int = 0
    muon: bool | None = None

    def describe(self, optimizer: Mapping[str, Any]) -> str:
        """Return a line with the group's learning rate and decay, given ``optimizer.params``."""
        count = len(self.parameters)
        size = f"{self.name}: {count:,} parameter{'s' * (count != 1)}, {self.weights:,} weights"
        if self.frozen:
            return f"{size}, frozen"
        decay = optimizer.get("weight_decay", 0) if self.weight_decay is None else self.weight_decay
        factor = f" ({self.lr_factor:g} times the optimizer's)" if self.lr_factor != 1 else ""
        wait = f", after {self.starts_after:,} steps" if self.starts_after else ""
        rate = f"learning rate {optimizer['lr'] * self.lr_factor:g}{factor}{wait}"
        return f"{size}, {rate}, weight decay {decay:g}"


def assign(
    net: nn.Module,
    hyper: Hyperparameters,
    classes: int = 0,
    muon: Mapping[str, Any] | None = None,
    waits: int = 0,
) -> tuple[Group, ...]:
    """Assign a network's parameters to groups.

    Args:
        net: the network without parallelism, which may be on the meta device.
        hyper: the hyperparameters.
        classes: number of classes, which is the number of rows of the last layer.
        muon: the optimizer's parameters, if the optimizer is Muon.
        waits: number of optimizer steps at the start of the training that train only the head.

    Returns:
        The groups that have parameters; the group without a pattern is first. No group has parameters that
        the network's code has frozen.

    Raises:
        InvalidInput: with a line for each wrong entry, e.g. a pattern that matches no parameter, and a line
            if no parameter is left to train.
    """
    entries = hyper.parameter_groups or ()
    patterns = [re.compile(entry["match"]) for entry in entries]
    parameters = dict(net.named_parameters())
    matches = {name: [i for i, p in enumerate(patterns) if p.search(name)] for name in parameters}
    errors = [*_unmatched(entries, matches), *_matched_twice(entries, matches)]
    errors += _uneven_experts(hyper, matches)
    rules = _Rules(net, hyper, classes, muon, waits)
    members: dict[tuple[Any, ...], list[str]] = {}
    settings: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            index = matches[name][0] if matches[name] else -1
            if muon and index >= 0 and entries[index].get("muon") and parameter.dim() < 2:
                reason = f"{name} has one dimension, and Muon takes matrices; set muon: false"
                errors.append(f"{KEY}[{index}].muon: True: {reason}")
            place, settings_of_name = rules.apply(name, parameter, index)
            members.setdefault(place, []).append(name)
            settings[place] = settings_of_name
    groups = []
    for place in sorted(members):
        weights = sum(parameters[name].numel() for name in members[place])
        groups.append(Group(parameters=tuple(members[place]), weights=weights, **settings[place]))
    if groups and all(group.frozen for group in groups):
        key = KEY if entries else "hyperparameters.head_only"
        errors.append(f"{key}: every parameter of {hyper.net} is frozen; leave one to train")
    if errors:
        raise InvalidInput(errors)
    return tuple(groups)


class _Rules:
    """Determines the settings of each parameter; see ``assign`` for the arguments."""

    def __init__(
        self, net: nn.Module, hyper: Hyperparameters, classes: int, muon: Mapping[str, Any] | None, waits: int
    ) -> None:
        self.hyper, self.muon, self.waits = hyper, muon, waits
        self.hidden, self.heads = _hidden_matrices(net, classes), head_layers(net)
        self.layers = depths(net) if hyper.layer_decay else {}
        self.last = max(self.layers.values(), default=0)

    def apply(self, name: str, parameter: nn.Parameter, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the sort key and the settings of the group that a parameter belongs to.

        Args:
            name: the parameter's name.
            parameter: the parameter.
            index: the index of its entry in ``parameter_groups``; -1 without one.
        """
        hyper, muon = self.hyper, self.muon
        entry = dict((hyper.parameter_groups or ())[index]) if index >= 0 else {}
        match, factor, uses_muon = entry.pop("match", OTHERS), entry.get("lr_factor", 1), None
        is_body = name.rpartition(".")[0] not in self.heads
        if entry.get("frozen") or (is_body and hyper.head_only is True):
            return (index, True, False, 0, True, False), {"name": match, "frozen": True}
        marks = []
        if muon:
            uses_muon = entry.get("muon", name in self.hidden)
            factor *= 1 if uses_muon else muon["adam_lr"] / muon["lr"]
            marks.append("Muon" if uses_muon else "Adam")
        layer = self.layers.get(name, 0)
        if hyper.layer_decay and self.layers:
            factor *= hyper.layer_decay ** (self.last - layer)
            marks.append(f"layer {layer}, the last is {self.last}")
        is_matrix = sum(size > 1 for size in parameter.shape) > 1
        decays = hyper.weight_decay_on == "all" or is_matrix or "weight_decay" in entry
        if not decays:
            entry["weight_decay"] = 0.0
            marks.append("no decay")
        waits = is_body and self.waits > 0
        entry |= {"lr_factor": factor, "muon": uses_muon, "starts_after": self.waits if waits else 0}
        entry["name"] = f"{match} ({', '.join(marks)})" if marks else match
        return (index, not uses_muon, not decays, layer, False, waits), entry


def _hidden_matrices(net: nn.Module, classes: int) -> set[str]:
    """Return the names of the weights of convolutions, linear layers and attention, without the head."""
    layers = {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    }
    heads = [name for name, module in layers.items() if module.weight.shape[0] == classes]
    weights = {f"{name}.weight" for name in layers if name not in heads[-1:]}
    attention = (n for n, module in net.named_modules() if isinstance(module, nn.MultiheadAttention))
    return weights | {f"{name}.in_proj_weight" for name in attention}


def _unmatched(entries: Sequence[Mapping[str, Any]], matches: Mapping[str, list[int]]) -> list[str]:
    matched = {index for indices in matches.values() for index in indices}
    some = ", ".join([*matches][:2] + [*matches][-1:])
    return [
        f"{KEY}[{index}].match: {entry['match']!r}: matches no parameter; there are e.g. {some}"
        for index, entry in enumerate(entries)
        if index not in matched
    ]


def _matched_twice(entries: Sequence[Mapping[str, Any]], matches: Mapping[str, list[int]]) -> list[str]:
    twice: dict[tuple[int, ...], list[str]] = {}
    for name, indices in matches.items():
        if len(indices) > 1:
            twice.setdefault(tuple(indices), []).append(name)
    errors = []
    for several, names in twice.items():
        patterns = " and ".join(repr(entries[index]["match"]) for index in several)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        errors.append(
            f"{KEY}[{several[1]}].match: {entries[several[1]]['match']!r}: {patterns} match"
            f" {names[0]}{more}; let each parameter match one pattern"
        )
    return errors


def _uneven_experts(hyper: Hyperparameters, matches: Mapping[str, list[int]]) -> list[str]:
    """Return an error line if patterns match only some experts of a layer: the ranks' groups would differ."""
    if not hyper.has_experts or hyper.ep_world_size == 1:
        return []
    by_layer: dict[str, set[tuple[int, ...]]] = {}
    for name, indices in matches.items():
        by_layer.setdefault(_EXPERT.sub(r"\1.", name), set()).add(tuple(indices))
    uneven = [name for name, chosen in by_layer.items() if len(chosen) > 1]
    reason = "match only some experts of a layer, but several ranks share the layer; match all, or none"
    return [f"{KEY}: {uneven[0]}: patterns {reason}"] if uneven else []


def are_plain(groups: Sequence[Group]) -> bool:
    """Return whether one group has all parameters and changes no setting of the optimizer."""
    (first, *more) = groups
    settings = first.lr_factor, first.weight_decay, first.frozen, first.starts_after, first.muon
    return not more and settings == (1, None, False, 0, None)


def summarise(groups: Sequence[Group]) -> str | None:
    """Return a text that must stay the same on resume; None without groups.

    It identifies the parameters of every group, and the frozen groups. Rates and decays may change.
    """
    if are_plain(groups):
        return None
    named = repr([(group.parameters, group.frozen, group.muon) for group in groups])
    sizes = ", ".join(f"{len(group.parameters)}{' frozen' * group.frozen}" for group in groups)
    return f"{len(groups)} groups of {sizes} parameters ({hashlib.sha256(named.encode()).hexdigest()[:8]})"


def freeze(named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[Group]) -> None:
    """Freeze the parameters of frozen groups."""
    frozen = {name for group in groups if group.frozen for name in group.parameters}
    for name, parameter in named:
        if name in frozen:
            parameter.requires_grad_(False)


def optimizer_groups(
    named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[Group], optimizer: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return parameter groups for torch's optimizers, with this rank's parameters; mark these for Muon.

    Args:
        named: this rank's parameters by their names in the network without parallelism.
        groups: the groups from ``assign``.
        optimizer: the optimizer's parameters.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    torch_groups = []
    for index, group in enumerate(groups):
        members = [parameter for name, parameter in trained if name in group.parameters]
        settings = {
            "name": f"{index} {group.name}",
            FACTOR: group.lr_factor,
            STARTS_AFTER: group.starts_after,
        }
        if group.muon is not None:
            keys = ("momentum", "ns_method") if group.muon else ("betas", "eps")
            settings |= {key: optimizer[key] for key in ("weight_decay", *keys) if key in optimizer}
            settings[USES_MUON] = group.muon
            for parameter in members:
                setattr(parameter, USES_MUON, group.muon)
        if group.weight_decay is not None:
            settings["weight_decay"] = group.weight_decay
        torch_groups.append({"params": members, **settings})
    return [group for group in torch_groups if group["params"]]
