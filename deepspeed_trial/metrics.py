"""Metrics of steps and evaluations: stored on the device, fetched together, and reduced over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import determined as det
import numpy as np
import torch
from determined import core, pytorch

from deepspeed_trial.loaders import Batches

NOT_A_DICTIONARY = "{method} must return a dictionary mapping string names to Tensor metrics, got {kind}"


def kept(metrics: Any) -> dict[str, Any]:
    """Return a micro-batch's metrics in a form to store until the next report.

    Scalars stay on the device, without their graph; other tensors are copied to the host.

    Args:
        metrics: the result of ``train_batch``: a dictionary, or the loss as a tensor.

    Raises:
        InvalidExperimentException: for any other type.
    """
    if isinstance(metrics, torch.Tensor):
        metrics = {"loss": metrics}
    if not isinstance(metrics, dict):
        raise det.errors.InvalidExperimentException(
            NOT_A_DICTIONARY.format(method="train_batch", kind=type(metrics))
        )
    waiting = dict(metrics)
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor):
            waiting[name] = value.detach().cpu().numpy() if value.dim() else value.detach().clone()
    return waiting


def fetched(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy the scalar tensors of many micro-batches to the host, in one transfer per metric."""
    copies = [dict(of_batch) for of_batch in metrics]
    for name in copies[0] if copies else ():
        with_tensor = [copy for copy in copies if isinstance(copy.get(name), torch.Tensor)]
        if with_tensor:
            device = with_tensor[0][name].device
            values = torch.stack([copy[name].to(device) for copy in with_tensor]).tolist()
            for copy, value in zip(with_tensor, values, strict=True):
                copy[name] = value
    return copies


def averaged_over_ranks(
    metrics: list[dict[str, Any]], distributed: core.DistributedContext
) -> list[dict[str, Any]]:
    """Return, on rank 0, the mean of each micro-batch's metrics over the ranks that report metrics.

    Every rank calls it; other ranks get an empty list. The mean of arrays is one number. With one rank, the
    metrics stay unchanged.

    Args:
        metrics: this rank's metrics of each micro-batch; equally many on all ranks that report metrics.
        distributed: the ranks.
    """
    if distributed.size == 1:
        return metrics
    of_ranks = [of_rank for of_rank in distributed.gather(metrics) or () if of_rank]
    return [
        {name: _mean([batch.get(name) for batch in batches]) for name in batches[0]}
        for batches in zip(*of_ranks, strict=False)
    ]


def _mean(values: list[Any]) -> Any:
    array = np.array(values)
    mean = np.mean(array[array != None])  # noqa: E711 - elementwise
    return np.array(mean) if isinstance(values[0], np.ndarray) else mean


def as_numpy(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with arrays in place of tensors."""
    return {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in metrics.items()
    }


def evaluated(trial: Any, context: Any, batches: Batches, most: int | None) -> list[dict[str, Any]]:
    """Evaluate batches on this rank.

    Args:
        trial: a ``DeepSpeedTrial``.
        context: the trial's context.
        batches: the data.
        most: maximum number of batches; None for all.

    Returns:
        The metrics of each batch; empty on ranks that report none.

    Raises:
        InvalidExperimentException: if ``evaluate_batch`` returns no dictionary.
        ValueError: if the names of the metrics differ between batches.
    """
    iterator = iter(batches.loader) if batches.loader else None
    takes_index = len(inspect.signature(trial.evaluate_batch).parameters) > 1
    metrics: list[dict[str, Any]] = []
    for index in range(batches.count if most is None else min(most, batches.count)):
        result = trial.evaluate_batch(iterator, index) if takes_index else trial.evaluate_batch(iterator)
        if not context.mpu.should_report_metrics:
            continue
        if not isinstance(result, dict):
            raise det.errors.InvalidExperimentException(
                NOT_A_DICTIONARY.format(method="evaluate_batch", kind=type(result))
            )
        if metrics and result.keys() != metrics[0].keys():
            names = f"{list(metrics[0])} != {list(result)}"
            raise ValueError(f"Validation metric names must match across all batches of data: {names}")
        metrics.append(as_numpy(result))
    return metrics


def reduced_over_ranks(
    metrics: list[dict[str, Any]], reducer: Any, distributed: core.DistributedContext
) -> dict[str, Any]:
    """Reduce an evaluation's metrics over batches and ranks; only rank 0 gets the result.

    Every rank calls it; ranks without metrics are left out.

    Args:
        metrics: metrics of this rank's batches.
        reducer: the result of ``evaluation_reducer``: one reducer, or one per metric.
        distributed: the ranks.

    Raises:
        InvalidExperimentException: if the reducers are not Determined's, or not one per metric.
    """
    of_rank = {}
    for name in metrics[0] if metrics else ():
        values = np.stack([batch[name] for batch in metrics], axis=0)
        of_rank[name] = _reduced(_reducer_of(name, reducer, metrics[0]), values, None)
    of_ranks = [values for values in distributed.gather((of_rank, len(metrics))) or () if values[1]]
    names = of_ranks[0][0] if of_ranks else {}
    counts = [count for _, count in of_ranks]
    if distributed.size == 1:
        return of_rank
    return {
        name: _reduced(
            _reducer_of(name, reducer, names), np.array([each[name] for each, _ in of_ranks]), counts
        )
        for name in names
    }


def _reducer_of(name: str, reducer: Any, names: Mapping[str, Any]) -> pytorch.Reducer:
    if isinstance(reducer, dict) and reducer.keys() != names.keys():
        raise det.errors.InvalidExperimentException(
            "Please provide a single evaluation reducer or provide a reducer for every validation metric."
            f" Expected keys: {list(names)}, provided keys: {list(reducer)}."
        )
    chosen = reducer[name] if isinstance(reducer, dict) else reducer
    if not isinstance(chosen, pytorch.Reducer):
        what = "Please select `determined.pytorch.Reducer` for reducing validation metrics."
        raise det.errors.InvalidExperimentException(what)
    return chosen


def _reduced(reducer: pytorch.Reducer, values: Any, counts: list[int] | None) -> Any:
    if reducer == pytorch.Reducer.AVG:
        return np.average(values, weights=counts)
    function: Any = {pytorch.Reducer.SUM: np.sum, pytorch.Reducer.MAX: np.max, pytorch.Reducer.MIN: np.min}
    return function[reducer](values)


def write_scalars(context: Any, step: int, metrics: Mapping[str, Any], is_validation: bool) -> None:
    """Write numeric metrics for TensorBoard, under Determined's tags, unless TensorBoard is off.

    Args:
        context: the trial's context.
        step: optimizer steps done.
        metrics: metrics by name.
        is_validation: whether names get the prefix ``val_``.
    """
    if not context.get_enable_tensorboard_logging():
        return
    writer = context.get_tensorboard_writer()
    for name, value in metrics.items():
        if det.util.is_numerical_scalar(value):
            prefix = "val_" if is_validation and not name.startswith("val") else ""
            writer.add_scalar(f"Determined/{prefix}{name}", value, step)


def write_training(context: Any, steps: int, workload: Mapping[str, Any], calls_per_step: int) -> None:
    """Write the metrics of each step for TensorBoard, and the reducers' metrics at the last step.

    Args:
        context: the trial's context.
        steps: optimizer steps done.
        workload: ``batch_metrics`` of each micro-batch; ``avg_metrics``, also with the reducers' metrics.
        calls_per_step: micro-batches in ``batch_metrics`` per step, to be averaged.
    """
    batches, averages = workload["batch_metrics"], workload["avg_metrics"]
    first = steps - len(batches) // calls_per_step
    for index in range(0, len(batches), calls_per_step):
        of_step = det.util.make_metrics(None, batches[index : index + calls_per_step])["avg_metrics"]
        write_scalars(context, first + index // calls_per_step, of_step, is_validation=False)
    reduced = {name: value for name, value in averages.items() if name not in (batches[0] if batches else ())}
    write_scalars(context, steps, reduced, is_validation=False)
