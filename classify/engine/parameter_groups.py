"""Which parameters the optimizer treats alike, and how.

By ``parameter_groups``, ``weight_decay_on``, ``layer_decay`` and ``head_only``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from classify.config.hyperparameters import Hyperparameters
from classify.config.parameter_groups import KEY
from classify.models.depths import depths
from classify.models.heads import head_layers
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.patches.muon import USES_MUON
from deepspeed_trial.schedules import FACTOR, STARTS_AFTER

OTHERS = "others"  # the parameters that no pattern matches
_EXPERT = re.compile(r"(deepspeed_experts)\.\d+\.")


@dataclass(frozen=True)
class Group:
    """Parameters that the optimizer treats alike.

    Attributes:
        name: what to call it.
        parameters: their names in the plain network, in its order.
        weights: how many numbers they hold.
        lr_factor: of the optimizer's rate.
        weight_decay: None for the optimizer's.
        frozen: whether they stay as they are.
        starts_after: the optimizer steps for which their rate is 0.
        muon: whether Muon trains them, or the Adam beside it; None with another optimizer.
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
        """The group in a line, with the rate and the decay that it has by the optimizer's parameters."""
        count = len(self.parameters)
        size = f"{self.name}: {count:,} parameter{'s' * (count != 1)}, {self.weights:,} weights"
        if self.frozen:
            return f"{size}, frozen"
        decay = optimizer.get("weight_decay", 0) if self.weight_decay is None else self.weight_decay
        factor = f" ({self.lr_factor:g} times)" if self.lr_factor != 1 else ""
        wait = f", after {self.starts_after:,} steps" if self.starts_after else ""
        rate = f"learning rate {optimizer['lr'] * self.lr_factor:g}{factor}{wait}"
        return f"{size}, {rate}, weight decay {decay:g}"


class _Treatment(NamedTuple):
    """How one parameter is treated: what those of a group have in common.

    Attributes:
        entry: which of ``parameter_groups`` it matches; -1 for none.
        half: whether Muon trains it, or the Adam beside it; None with another optimizer, or if frozen.
        decays: whether it has the weight decay.
        layer: where each layer has a rate of its own.
        frozen: whether it stays as it is.
        waits: whether it does so for the first steps.
    """

    entry: int
    half: bool | None
    decays: bool
    layer: int
    frozen: bool
    waits: bool

    @property
    def place(self) -> tuple[Any, ...]:
        """Where its group comes among the others."""
        return self.entry, not self.half, not self.decays, self.layer, self.frozen, self.waits


def assign(
    net: nn.Module,
    hyper: Hyperparameters,
    classes: int = 0,
    muon: Mapping[str, Any] | None = None,
    waits: int = 0,
) -> tuple[Group, ...]:
    """Deals a network's parameters out.

    Args:
        net: the plain network, which may be on the meta device.
        hyper: the hyperparameters.
        classes: into which it sorts, for its last layer has as many rows.
        muon: the optimizer's parameters, if it is Muon.
        waits: the optimizer steps for which all but the head stays as it is.

    Returns:
        The groups that have parameters: first those that no pattern matches. What the network has frozen
        itself is in none.

    Raises:
        InvalidInput: with a line for each pattern that matches none, for patterns that match the same, and if
            nothing is left to train.
    """
    entries = hyper.parameter_groups or ()
    patterns = [re.compile(entry["match"]) for entry in entries]
    shapes = {name: tuple(each.shape) for name, each in net.named_parameters()}
    found = {name: [i for i, each in enumerate(patterns) if each.search(name)] for name in shapes}
    errors = [*_unmatched(entries, found), *_matched_twice(entries, found), *_uneven_experts(hyper, found)]
    hidden, heads = _hidden_matrices(net, classes), head_layers(net)
    layers = depths(net) if hyper.layer_decay else {}
    trains = {name for name, each in net.named_parameters() if each.requires_grad}
    held: dict[_Treatment, list[str]] = {}
    for name, indices in found.items():
        if name not in trains:  # for the network has frozen it
            continue
        index = indices[0] if indices else -1
        entry = entries[index] if index >= 0 else {}
        uses_muon = entry.get("muon", name in hidden)
        if muon and uses_muon and len(shapes[name]) < 2:
            what = f"{name} has one dimension, and Muon takes matrices; set it to false"
            errors.append(f"{KEY}[{index}].muon: True: {what}")
        is_body = name.rpartition(".")[0] not in heads
        frozen = entry.get("frozen", False) or (is_body and hyper.head_only is True)
        decays = hyper.weight_decay_on == "all" or sum(size > 1 for size in shapes[name]) > 1
        treatment = _Treatment(
            entry=index,
            half=uses_muon if muon and not frozen else None,
            decays=decays or frozen or "weight_decay" in entry,
            layer=0 if frozen else layers.get(name, 0),
            frozen=frozen,
            waits=is_body and waits > 0 and not frozen,
        )
        held.setdefault(treatment, []).append(name)
    last = max(layers.values(), default=0)
    groups = []
    for each in sorted(held, key=lambda each: each.place):
        names = held[each]
        entry = {**entries[each.entry]} if each.entry >= 0 else {}
        name = entry.pop("match", OTHERS)
        marks = []
        if each.frozen:
            entry = {"frozen": True}
        if muon and each.half is not None:
            share = 1 if each.half else muon["adam_lr"] / muon["lr"]
            entry |= {"muon": each.half, "lr_factor": entry.get("lr_factor", 1) * share}
            marks.append("Muon" if each.half else "Adam")
        if layers and not each.frozen:
            decay = hyper.layer_decay or 1.0
            entry["lr_factor"] = entry.get("lr_factor", 1) * decay ** (last - each.layer)
            marks.append(f"layer {each.layer} of 0 to {last}")
        if not each.decays:
            entry["weight_decay"] = 0.0
            marks.append("no decay")
        if each.waits:
            entry["starts_after"] = waits
        name += f" ({', '.join(marks)})" if marks else ""
        weights = sum(math.prod(shapes[each]) for each in names)
        groups.append(Group(name, tuple(names), weights, **entry))
    if groups and all(group.frozen for group in groups):
        key = KEY if entries else "hyperparameters.head_only"
        errors.append(f"{key}: freeze every parameter of {hyper.net}; leave one to train")
    if errors:
        raise InvalidInput(errors)
    return tuple(groups)


def _hidden_matrices(net: nn.Module, classes: int) -> set[str]:
    """The weights of convolutions and linear layers but the last, whose rows are the classes."""
    layers = {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    }
    heads = [name for name, module in layers.items() if module.weight.shape[0] == classes]
    weights = {f"{name}.weight" for name in layers if name not in heads[-1:]}
    attention = (n for n, module in net.named_modules() if isinstance(module, nn.MultiheadAttention))
    return weights | {f"{name}.in_proj_weight" for name in attention}


def _unmatched(entries: Sequence[Mapping[str, Any]], found: Mapping[str, list[int]]) -> list[str]:
    matched = {index for indices in found.values() for index in indices}
    some = ", ".join([*found][:2] + [*found][-1:])
    return [
        f"{KEY}[{index}].match: {entry['match']!r}: matches no parameter; their names are e.g. {some}"
        for index, entry in enumerate(entries)
        if index not in matched
    ]


def _matched_twice(entries: Sequence[Mapping[str, Any]], found: Mapping[str, list[int]]) -> list[str]:
    twice: dict[tuple[int, ...], list[str]] = {}
    for name, indices in found.items():
        if len(indices) > 1:
            twice.setdefault(tuple(indices), []).append(name)
    errors = []
    for several, names in twice.items():
        patterns = " and ".join(repr(entries[index]["match"]) for index in several)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        errors.append(
            f"{KEY}[{several[1]}].match: {entries[several[1]]['match']!r}: {names[0]}{more} matched by"
            f" {patterns}; let each parameter match one"
        )
    return errors


def _uneven_experts(hyper: Hyperparameters, found: Mapping[str, list[int]]) -> list[str]:
    """Ranks that hold different experts of a layer have to have the same groups."""
    if not hyper.has_experts or hyper.ep_world_size == 1:
        return []
    of_layer: dict[str, set[tuple[int, ...]]] = {}
    for name, indices in found.items():
        of_layer.setdefault(_EXPERT.sub(r"\1.", name), set()).add(tuple(indices))
    uneven = [name for name, chosen in of_layer.items() if len(chosen) > 1]
    what = "match some experts of a layer and others not, which lie on other ranks; match all, or none"
    return [f"{KEY}: {uneven[0]}: patterns {what}"] if uneven else []


def are_plain(groups: Sequence[Group]) -> bool:
    """Whether there is one group, of which the optimizer's own parameters say all."""
    (first, *more) = groups
    own = first.lr_factor, first.weight_decay, first.frozen, first.starts_after, first.muon
    return not more and own == (1, None, False, 0, None)


def summarise(groups: Sequence[Group]) -> str | None:
    """What must be the same after a resume: which parameters are in which group, and which are frozen.

    None without groups; rates and decays may change.
    """
    if are_plain(groups):
        return None
    named = repr([(group.parameters, group.frozen, group.muon) for group in groups])
    sizes = ", ".join(f"{len(group.parameters)}{' frozen' * group.frozen}" for group in groups)
    return f"{len(groups)} groups of {sizes} parameters ({hashlib.sha256(named.encode()).hexdigest()[:8]})"


def freeze(named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[Group]) -> None:
    """Has the parameters of frozen groups stay as they are."""
    frozen = {name for group in groups if group.frozen for name in group.parameters}
    for name, parameter in named:
        if name in frozen:
            parameter.requires_grad_(False)


def optimizer_groups(
    named: Iterable[tuple[str, nn.Parameter]], groups: Sequence[Group], optimizer: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Parameter groups as torch's optimizers take them, of those parameters that a rank has.

    Args:
        named: the parameters by their names in the plain network.
        groups: how they are dealt out.
        optimizer: its parameters.
    """
    held = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    made = []
    for index, group in enumerate(groups):
        mine = [parameter for name, parameter in held if name in group.parameters]
        decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        rate = {FACTOR: group.lr_factor, STARTS_AFTER: group.starts_after}
        made.append({"params": mine, "name": f"{index} {group.name}", **rate, **decay})
        if group.muon is not None:
            made[-1] |= {USES_MUON: group.muon, **_of_half(group.muon, optimizer), **decay}
            for parameter in mine:
                setattr(parameter, USES_MUON, group.muon)
    return [group for group in made if group["params"]]


def _of_half(is_muon: bool, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Which of the optimizer's parameters are for Muon itself, or for the Adam beside it."""
    keys = ("weight_decay", "momentum", "ns_method") if is_muon else ("weight_decay", "betas", "eps")
    return {key: optimizer[key] for key in keys if key in optimizer}
