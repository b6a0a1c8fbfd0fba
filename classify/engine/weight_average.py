"""An average of the weights beside those that are trained, in every mode, in fp32.

Each rank averages the fp32 weights that its own optimizer steps, so the average is partitioned as they are.
Running statistics are averaged, too, as timm's EMA does: they belong to the weights of their step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import deepspeed
import torch
from torch import Tensor
from torch.optim import swa_utils

from classify.config import options
from deepspeed_trial.engines import broadcast_buffers
from deepspeed_trial.full_weights import (
    exchange_masters,
    gather_full_state_dict,
    kept_buffers,
    master_weights,
    plain_name,
    scatter_full_state_dict,
    update_network,
)
from deepspeed_trial.plan import Plan


class WeightAverage:
    """Follows an engine's weights; every rank has to make each call.

    Args:
        engine: the engine, with the weights from which the average starts.
        how: the options.
        plan: of the steps of the training.
        stage_layers: the names of a pipeline's layers.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        how: options.WeightAverage,
        plan: Plan,
        stage_layers: Sequence[str] | None = None,
    ) -> None:
        self.engine, self.how = engine, how
        self.plan, self.stage_layers = plan, stage_layers
        self._masters = [weight.detach().clone() for weight in master_weights(engine)]
        self._buffers = {name: each.detach().float().clone() for name, each in self._engine_buffers().items()}
        self._steps = self._steps_done()

    def update(self) -> None:
        """Takes in the weights after an optimizer step, where it is time; skipped ones do not count."""
        steps, before = self._steps_done(), self._steps
        self._steps = steps
        if steps == before or steps % self.how.every:
            return
        buffers = self._engine_buffers()
        weights = [*master_weights(self.engine), *(each.float() for each in buffers.values())]
        done = self.plan.position(steps - 1) + 1 if self.how.rising else steps
        average = swa_utils.get_ema_multi_avg_fn(self.how.decay_after(done, self.plan.total or 1))
        average([*self._masters, *self._buffers.values()], weights, None)
        if self.how.lookahead:
            with torch.no_grad():
                _copy(self._masters, master_weights(self.engine))
                _copy(self._buffers.values(), buffers.values())
            update_network(self.engine)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Has the network compute with the average inside, the first rank's running statistics among it."""
        buffers = self._engine_buffers()
        trained = [each.clone() for each in buffers.values()]
        exchange_masters(self.engine, self._masters)
        _copy(self._buffers.values(), buffers.values())
        update_network(self.engine)
        broadcast_buffers(self.engine)
        yield  # what fails inside ends the training, and the ranks no longer wait for each other
        exchange_masters(self.engine, self._masters)
        _copy(trained, buffers.values())
        update_network(self.engine)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole average by the network's names, on the CPU in fp32, gathered from all ranks."""
        exchange_masters(self.engine, self._masters)
        whole = gather_full_state_dict(self.engine, self.stage_layers, self._buffers)
        whole = {name: weight.clone() for name, weight in whole.items()}  # they may be the engine's own
        exchange_masters(self.engine, self._masters)
        return whole

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from an average that ``state_dict`` gave, for whatever ranks and ZeRO stage."""
        exchange_masters(self.engine, self._masters)
        scatter_full_state_dict(self.engine, state, self.stage_layers)
        exchange_masters(self.engine, self._masters)
        for name, average in self._buffers.items():
            average.copy_(state[plain_name(self.engine, name, self.stage_layers)])
        self._steps = self._steps_done()

    def _steps_done(self) -> int:
        return self.engine.global_steps - self.engine.skipped_steps

    def _engine_buffers(self) -> dict[str, Tensor]:
        """Running statistics and the like; counts are not averaged."""
        return {name: each for name, each in kept_buffers(self.engine.module) if each.is_floating_point()}


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
