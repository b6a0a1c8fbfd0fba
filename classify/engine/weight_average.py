"""A moving average of the trained weights, in fp32, at any ZeRO stage and parallelism.

Each rank averages the fp32 weights that its optimizer updates, so the average is partitioned like the
optimizer's state. Running statistics are averaged, too, as in timm's EMA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import deepspeed
import torch
from torch import Tensor
from torch.optim import swa_utils

from classify.config.options import WeightAverage as Options
from deepspeed_trial.checkpoints import pieces
from deepspeed_trial.engines import broadcast_buffers
from deepspeed_trial.full_weights import (
    exchange_masters,
    gather_full_state_dict,
    master_weights,
    update_network,
)
from deepspeed_trial.plan import Plan


class WeightAverage:
    """The average of an engine's weights; every rank must call each method.

    Args:
        engine: the engine; the average starts with its weights.
        options: decay, interval and lookahead.
        plan: the plan of the training's steps.
        stage_layers: names of a pipeline's layers.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        options: Options,
        plan: Plan,
        stage_layers: Sequence[str] | None = None,
    ) -> None:
        self.engine, self.options = engine, options
        self.plan, self.stage_layers = plan, stage_layers
        self._masters = [weight.detach().clone() for weight in master_weights(engine)]
        self._buffers = {n: buffer.detach().float().clone() for n, buffer in self._engine_buffers().items()}
        self._steps = self._steps_done()

    def update(self) -> None:
        """Update the average every ``options.every`` optimizer steps; steps that fp16 skips do not count.

        With lookahead, the engine's weights then become the average.
        """
        steps, before = self._steps_done(), self._steps
        self._steps = steps
        if steps == before or steps % self.options.every:
            return
        buffers = self._engine_buffers()
        weights = [*master_weights(self.engine), *(buffer.float() for buffer in buffers.values())]
        done = self.plan.position(steps - 1) + 1 if self.options.rising else steps
        average = swa_utils.get_ema_multi_avg_fn(self.options.decay_after(done, self.plan.total or 1))
        average([*self._masters, *self._buffers.values()], weights, None)
        if self.options.lookahead:
            with torch.no_grad():
                _copy(self._masters, master_weights(self.engine))
                _copy(self._buffers.values(), buffers.values())
            update_network(self.engine)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average and the first rank's running statistics in the network during the block."""
        buffers = self._engine_buffers()
        trained = [buffer.clone() for buffer in buffers.values()]
        exchange_masters(self.engine, self._masters)
        _copy(self._buffers.values(), buffers.values())
        update_network(self.engine)
        broadcast_buffers(self.engine)
        yield  # no try: an error ends the training, and the other ranks would not take part in an exchange
        exchange_masters(self.engine, self._masters)
        _copy(trained, buffers.values())
        update_network(self.engine)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by parameter name, on the CPU in fp32, gathered from all ranks."""
        exchange_masters(self.engine, self._masters)
        whole = gather_full_state_dict(self.engine, self.stage_layers, self._buffers)
        whole = {name: weight.clone() for name, weight in whole.items()}  # the engine may own the tensors
        exchange_masters(self.engine, self._masters)
        return whole

    def by_weight(self) -> dict[Tensor, Tensor]:
        """Return this rank's averages, keyed by the engine's master weights and buffers."""
        buffers = self._engine_buffers()
        of_buffers = {buffers[name]: average for name, average in self._buffers.items()}
        return {**dict(zip(master_weights(self.engine), self._masters, strict=True)), **of_buffers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a result of ``state_dict``, saved by any number of ranks at any ZeRO stage."""
        averages = self.by_weight()
        for name, _, piece, _ in pieces.named(self.engine, self.stage_layers):
            if piece.owner in averages:
                part = piece.of(averages[piece.owner])
                part.copy_(state[name].flatten().narrow(0, piece.start, piece.numel).view(part.shape))
        for name, average in self._buffers.items():
            average.copy_(state[pieces.plain_name(self.engine, name, self.stage_layers)])

    def on_loaded(self) -> None:
        """Continue counting from the steps of the loaded checkpoint."""
        self._steps = self._steps_done()

    def _steps_done(self) -> int:
        return self.engine.global_steps - self.engine.skipped_steps

    def _engine_buffers(self) -> dict[str, Tensor]:
        """Return the engine's floating-point buffers; counts are not averaged."""
        return {name: b for name, b in pieces.buffers(self.engine.module) if b.is_floating_point()}


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for origin, copy in zip(source, target, strict=True):
        copy.copy_(origin)
