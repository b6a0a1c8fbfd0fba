"""Whether metrics, network, images and weights, each right by itself, go with one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from classify.config.hyperparameters import Hyperparameters
from classify.config.metric_table import SPEED_METRIC, TOP5_METRIC, TTA_METRIC, metrics_for
from classify.images.splits import Splits
from classify.models import dry_run, recompute, registry, state_dicts
from classify.models.registry import NetSpec
from deepspeed_trial.errors import InvalidInput, nearest
from deepspeed_trial.experiment import Experiment


def check_metrics(hyper: Hyperparameters, searcher: Mapping[str, Any], classes: tuple[str, ...]) -> None:
    """Refuses a metric that no validation will report, with the nearest one that there is."""
    known = metrics_for(classes, hyper.test_time_augmentation is not None)
    hints = {
        TTA_METRIC: "set hyperparameters.test_time_augmentation: {mirror: true}",
        TOP5_METRIC: "it needs more than five classes; use accuracy",
    }
    chosen = {
        "searcher.metric": (searcher.get("metric"), [*known, SPEED_METRIC]),
        "hyperparameters.early_stopping.metric": ((hyper.early_stopping or {}).get("metric"), known),
    }
    errors = [
        f"{key}: {metric!r}: no validation reports it; {hints.get(metric) or nearest(metric, names)}"
        for key, (metric, names) in chosen.items()
        if metric is not None and metric not in names
    ]
    if not errors and len({metric for metric, _ in chosen.values()} - {None}) == 2:
        (wanted, _), (stopping, _) = chosen.values()
        what = f"searcher.metric, {wanted!r}, chooses the best weights and the end; give one metric"
        errors.append(f"hyperparameters.early_stopping.metric: {stopping!r}: {what}")
    if errors:
        raise InvalidInput(errors)


def check_best_weights(hyper: Hyperparameters, experiment: Experiment, source: Splits) -> None:
    """Refuse ``best_weights`` without held-out images or the best checkpoint."""
    if not hyper.best_weights:
        return
    needs = {
        "held-out images; set data.validation, e.g. auto": source.validation == "val",
        "the best checkpoint; set checkpoint_storage.save_trial_best to at least 1": (
            experiment.checkpoints_to_keep("save_trial_best") > 0
        ),
        "the best checkpoint; set checkpoint_policy: best": (
            experiment.config.get("checkpoint_policy") != "none"
        ),
    }
    if errors := [f"hyperparameters.best_weights: True: needs {each}" for each in needs if not needs[each]]:
        raise InvalidInput(errors)


def check_evaluation(source: Splits, parts: int) -> None:
    """Refuses fewer images to validate or to test than micro-batches that all ranks take together."""
    errors = [
        f"data.root: {source.count(split)} images in {split}, fewer than the {parts} micro-batches that all"
        " processes take at a time; use fewer processes, or hold out more"
        for split in source.names[1:]
        if source.count(split) < parts
    ]
    if errors:
        raise InvalidInput(errors)


def check_network(
    spec: NetSpec, hyper: Hyperparameters, micro_batch: int, weights: dict[str, Tensor] | None
) -> None:
    """Refuses a network that does not go with the images, or weights that are not its own.

    Args:
        spec: the network.
        hyper: the hyperparameters.
        micro_batch: the fewest images that it is given at a time in training.
        weights: those that it starts from.
    """
    dry_run.check(spec, micro_batch, bool(hyper.channels_last))
    if how := hyper.progressive_resizing:
        dry_run.check(spec, micro_batch, smaller=how.size(spec.image_size))
    if hyper.has_experts:
        return
    outline = registry.on_meta_device(spec)
    if weights is not None:
        state_dicts.load_pretrained(outline, weights, f"hyperparameters.weights: {hyper.weights}")
    if hyper.checkpoint_activations:
        recompute.enable(outline)
