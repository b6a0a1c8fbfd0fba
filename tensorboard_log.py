"""What TensorBoard shows of a run, on a cluster and off it, through the writer of Determined's context."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from determined import pytorch
from typing_extensions import override

import engines
import pictures
from errors import one_line

PICTURES_SHARE = 20  # pictures are drawn when at least so many times what they took has passed since
LARGEST_GRAPH = 30_000_000  # parameters of a network that is made once more to be drawn
FIRST_PICTURES = 3.0  # seconds that the first take, for matplotlib has to be imported


class TensorBoardLog(pytorch.PyTorchCallback):
    """Writes scalars with every report and validation, pictures with validations, and once the graph.

    Nothing is written within a step. Pictures that would take more than a twentieth of the time are left out, but for
    the last ones: so training is under way before the first.

    Args:
        trial: a ``CIFARTrial``.
        steps: gives the optimizer steps done.
        chief: whether this rank writes.
    """

    def __init__(self, trial: Any, steps: Callable[[], int], chief: bool) -> None:
        self.trial, self.steps, self.chief = trial, steps, chief
        self._drawn_step = self._validated_step = -1
        self._drawn, self._took = time.monotonic(), FIRST_PICTURES
        self._graph_is_missing = False

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter`` of Determined's context."""
        return self.trial.context.get_tensorboard_writer()

    @override
    def on_training_start(self) -> None:
        self._drawn = time.monotonic()
        self._graph_is_missing = not self.steps()

    @override
    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        if not self.chief:
            return
        engine = self.trial.model_engine
        scalars = {
            "loss/train": avg_metrics.get("loss"),
            "learning_rate": batch_metrics[-1].get("learning_rate") if batch_metrics else None,
            "images_per_second": avg_metrics.get("images_per_second"),
            "gradient_norm": engine.get_global_grad_norm(),
            "loss_scale": engines.loss_scale(engine),
        }
        self._add(scalars)

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if not self.chief:
            return
        scalars = {"loss/validation": metrics["loss"], "accuracy/validation": metrics["accuracy"]}
        self._add(
            {**scalars, **{f"accuracy_of_class/{n}": metrics[f"accuracy/{n}"] for n in self.trial.metrics.classes}}
        )
        self._validated_step = self.steps()
        if time.monotonic() - self._drawn >= PICTURES_SHARE * self._took:
            self._draw()
        self.writer.flush()

    @override
    def on_trial_shutdown(self) -> None:
        if self.chief and self._validated_step > self._drawn_step:
            self._draw()
            self.writer.flush()

    def _add(self, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(name, float(value), self.steps())

    def _draw(self) -> None:
        since = time.monotonic()
        if self._graph_is_missing:
            self._add_graph()
            self._graph_is_missing = False
        reducer, source = self.trial.metrics, self.trial.test_set
        images = [source.images[each["image"]].permute(1, 2, 0).cpu().numpy() for each in reducer.mistakes]
        for name, figure in {
            "confusion_matrix": pictures.confusion_figure(reducer.confusion, reducer.classes),
            "hardest_mistakes": pictures.mistakes_figure(reducer.mistakes, images, reducer.classes),
        }.items():
            self.writer.add_image(name, _pixels(figure), self._validated_step, dataformats="HWC")
        self._drawn_step, self._drawn = self._validated_step, time.monotonic()
        self._took = self._drawn - since

    def _add_graph(self) -> None:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # one operator, which torch cannot trace
        try:
            if sum(each.numel() for each in self.trial.outline().parameters()) > LARGEST_GRAPH:
                return
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own writer uses what torch is about to remove
                inputs = torch.zeros(1, 3, *self.trial.image_size)
                traced: Any = torch.jit.trace(self.trial.plain_net().eval(), inputs, check_trace=False)
                self.writer.add_graph(traced, inputs)
        except Exception as error:  # a network of one's own may not be traceable, and trains all the same
            print(f"TensorBoard: no graph of the network ({one_line(error)})", file=sys.stderr)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def _pixels(figure: Any) -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]
