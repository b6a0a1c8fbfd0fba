"""A recipe of ``experiments/`` with Muon as a bare PyTorch loop: no DeepSpeed, no Determined, no trial.

    python3 -m benchmarks.bare_recipe --set data.dataset=digits        prints 100 losses

The loop shares the network, the images, their order and their augmentation with the trial. The loop's
optimizer and schedule are in this file.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import data
from classify.config import command_line, experiment_file
from classify.engine.trial_config import TrialConfig
from classify.models import registry

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315


def losses(config: TrialConfig) -> Iterator[Tensor]:
    """Train; yield the mean loss of each step, a scalar.

    Args:
        config: a configuration for one process without accumulation: the network ``airbench``, the optimizer
            Muon, and a learning rate that falls linearly to 0.
    """
    device, hyper, params = torch.device("cpu"), config.hyper, config.deepspeed["optimizer"]["params"]
    images = data.Images(config.source, config.seed, device)
    torch.manual_seed(config.seed)
    net: Any = registry.build(config.net)
    net.initialize_from_images(images.sample())
    net.train()
    filters = [each for each in net.parameters() if each.ndim == 4 and each.requires_grad]
    muon = Muon(filters, params["lr"], params["momentum"], params["weight_decay"])
    others = [each for each in net.parameters() if each.ndim < 4 and each.requires_grad]
    adam = torch.optim.AdamW(
        others, params["adam_lr"], betas=params["betas"], eps=params["eps"], weight_decay=0
    )
    last = config.steps or 1
    falls = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.0, last) for each in (muon, adam)]
    order = images.training_order(config.batch, 1)
    step = 0
    for epoch in itertools.count():
        for _, chosen, *_ in order.micro_batches(epoch):
            pixels, labels = images.train.images[chosen], images.train.labels[chosen]
            if images.augmenter:
                pixels = images.augmenter(pixels, chosen, epoch)
            inputs = images.inputs(pixels, config.channels_last, config.input_size(step))
            with torch.autocast("cpu", torch.bfloat16, enabled=config.autocasts):
                scores = net(inputs).float()
            loss = F.cross_entropy(scores, labels, label_smoothing=hyper.label_smoothing)
            loss.backward()
            for optimizer, fall in zip((muon, adam), falls, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                fall.step()
            step += 1
            yield loss.detach()


class Muon(torch.optim.Optimizer):
    """Muon: SGD with momentum; five Newton-Schulz steps make each update matrix nearly orthogonal.

    Source: https://kellerjordan.github.io/posts/muon/

    Args:
        filters: the weights of convolutions, each (filters, channels, height, width).
        lr: the learning rate.
        momentum: the share of the old value in the gradients' running mean, with Nesterov's look-ahead.
        weight_decay: the decoupled weight decay, which is multiplied by the learning rate.
    """

    def __init__(
        self, filters: Sequence[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(filters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(mean, group["momentum"]).flatten(1))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update.view_as(weight), alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a nearly orthogonal matrix close to ``matrix``, times sqrt(max(1, rows / columns))."""
    a, b, c = NEWTON_SCHULZ
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if rows > columns else x) * max(1, rows / columns) ** 0.5


def main() -> int:
    """Print the losses of the first 100 steps; return the exit code."""
    args = command_line.parser(__doc__, "experiments/cifar10-90.yaml").parse_args()
    experiment = experiment_file.load(args.config, args.overrides)
    config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, 1, "cpu")
    print(json.dumps([loss.item() for loss in itertools.islice(losses(config), 100)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
