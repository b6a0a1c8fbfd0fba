"""What a trial may tell this package beyond Determined's callbacks."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from determined import pytorch
from typing_extensions import override


@dataclass(frozen=True)
class Code:
    """What a local checkpoint keeps as its code.

    Attributes:
        folder: what is copied, but for what its ``.detignore`` names.
        excluded: files and folders within to leave out, such as images.
    """

    folder: pathlib.Path
    excluded: Sequence[pathlib.Path] = ()


class Callback(pytorch.PyTorchCallback):
    """Determined's callback, with what this package calls around the test at the end of a training."""

    def on_test_start(self) -> None:
        """Called on every rank before the trained network is tested."""

    def on_test_end(self, metrics: dict[str, Any]) -> None:
        """Called on every rank when it has been.

        Args:
            metrics: those of the test, which may be changed before they are reported.
        """


class StepCounter(Callback):
    """A callback that knows how many optimizer steps are done.

    Args:
        context: the trial's.

    Attributes:
        steps: optimizer steps since the start of training, up to the last report.
    """

    def __init__(self, context: Any) -> None:
        self.context, self.steps = context, 0

    @override
    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.steps = first_batch_idx

    @override
    def on_training_workload_end(
        self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        self.steps = self.context.current_train_batch() + 1


class TrialHooks(StepCounter):
    """A callback with more hooks; return one from ``build_callbacks`` under any name.

    To add files to a checkpoint, override Determined's ``on_checkpoint_write_end``; every rank calls it.
    """

    def on_optimizer_step(self) -> None:
        """Called on every rank after every optimizer step, and before what a period has come for."""

    def on_checkpoint_load_end(self, checkpoint_dir: pathlib.Path) -> None:
        """Called on every rank when the engines have loaded a checkpoint.

        Args:
            checkpoint_dir: its folder, as it was written.
        """

    def identity(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings that must match on resume, beside the engine's own.

        Returns:
            JSON values by what to call them in an error line, in three groups: ``net``, without which the
            weights are of no use; ``mode``, without which DeepSpeed's own files are not, but the weights go
            on in another form; and ``position``, without which the place in the data is not.
        """
        return {}

    def layer_names(self) -> Sequence[str] | None:
        """What a pipeline's layers are called in the plain network; by their numbers if None.

        With them a pipeline goes on from a checkpoint of the plain network, and the other way.
        """
        return None

    def advise_on_memory(self) -> str:
        """What would need less memory, in a line that is printed when there is none left."""
        return "use a smaller micro-batch"

    def code(self) -> Code:
        """What a local checkpoint keeps as its code; the working directory as in Determined."""
        return Code(pathlib.Path.cwd())
