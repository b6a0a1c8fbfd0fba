"""The test at the end of a training: Determined's validation, over other data, reported apart.

A trial that has ``build_test_data_loader`` is tested once, when its training is done; nothing goes by the
result. It reaches a cluster's master as metrics of the group ``test``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.hangs.place import TEST
from deepspeed_trial.hooks import Callback
from deepspeed_trial.random_state import random_state, set_random_state

GROUP = "test"

logger = logging.getLogger("deepspeed_trial")


class TestData(NamedTuple):
    """What a rank tests on.

    Attributes:
        loader: of its micro-batches; None on a rank that reads none.
        batches: how often ``evaluate_batch`` is called.
        batch_size: images, or whatever there is, in the first of them.
    """

    loader: Any
    batches: int
    batch_size: int


def make_data(controller: det_ds.DeepSpeedTrialController) -> TestData | None:
    """Build the trial's test data as Determined builds validation data; None if it has none.

    Every rank has to call it.

    Raises:
        InvalidInput: if a rank gets no batch.
    """
    build, context = getattr(controller.trial, "build_test_data_loader", None), controller.context
    made = build() if build and context._mpu.should_build_data_loader else None
    loader, batches, size = None, None, 0
    if made is not None:
        mpu, calls = context._mpu, context.get_num_micro_batches_per_slot()
        calls = calls if context.use_pipeline_parallel else 1
        ranks = {"num_replicas": mpu.data_parallel_world_size, "rank": mpu.data_parallel_rank}
        loader = made.get_data_loader(repeat=False, skip=0, **ranks)
        before = random_state(context.device)  # for the first batch may draw, as augmentation does
        first = next(iter(loader), None)
        set_random_state(before, context.device)
        batches = len(loader) // calls
        size = 0 if first is None else pytorch.data_length(first) * calls
    of_ranks = [each for each in context.distributed.allgather(batches) if each is not None]
    if not of_ranks:
        return None
    least, most = min(of_ranks), max(of_ranks)
    if not least:
        raise InvalidInput("test data: a rank gets no batch; use more, fewer processes or smaller batches")
    if least < most and controller.is_chief:
        logger.warning(f"ranks have {least} to {most} batches of test data; every rank tests on {least}")
    return TestData(loader, least, size)


@contextlib.contextmanager
def testing(controller: det_ds.DeepSpeedTrialController, data: TestData) -> Iterator[None]:
    """Has the controller's validation be the test: over its data, with its callbacks, for the master too."""
    callbacks = [each for each in controller.callbacks.values() if isinstance(each, Callback)]
    core_context, logs = controller.core_context, controller.context.get_enable_tensorboard_logging()
    changed = {
        "validation_loader": data.loader,
        "num_validation_batches": data.batches,
        "validation_batch_size": data.batch_size,
        "callbacks": {"test": _Around(callbacks)},
        "checkpoint_policy": "none",
        "validates_as": TEST,
    }
    kept = {name: getattr(controller, name) for name in changed}
    train = core_context.train
    vars(controller).update(changed)
    controller.context.set_enable_tensorboard_logging(False)  # which would take it for a validation
    core_context.train = _Reports(train)
    try:
        yield
    finally:
        vars(controller).update(kept)
        controller.context.set_enable_tensorboard_logging(logs)
        core_context.train = train


class _Around(pytorch.PyTorchCallback):
    """Tells callbacks of a test what Determined tells of a validation."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self.around = callbacks

    @override
    def on_validation_start(self) -> None:
        for each in self.around:
            each.on_test_start()

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        for each in self.around:
            each.on_test_end(metrics)


class _Reports:
    """What reports a validation as a test, and all else as it was."""

    def __init__(self, train: Any) -> None:
        self._train = train

    def __getattr__(self, name: str) -> Any:
        return getattr(self._train, name)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self._train.report_metrics(GROUP, steps_completed, dict(metrics))
