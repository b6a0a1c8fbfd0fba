"""Whether a network goes with the data: it is run once without computing, before any image is decoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

import net as own
from classify.models.registry import MOE, NetSpec, build, logits, on_meta_device, prefers_channels_last
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.out_of_memory import is_out_of_memory


def check(
    spec: NetSpec, micro_batch: int, channels_last: bool = False, smaller: tuple[int, int] | None = None
) -> None:
    """Runs a network on torch's meta device, as training and validation will run it.

    Args:
        spec: the network.
        micro_batch: the fewest images that it will be given at a time in training.
        channels_last: whether in that memory format.
        smaller: height and width of images that ``progressive_resizing`` makes, to be checked instead.

    Raises:
        InvalidInput: if it does not take such images, or gives no scores for the classes.
    """
    if spec.name == MOE:
        spec = spec._replace(name="net", args=None)
    net = on_meta_device(spec)
    if any(isinstance(each, UninitializedParameter) for each in net.parameters()):
        reason = "has layers without a size, which no engine takes; give it"
        raise InvalidInput(f"hyperparameters.net: {spec.name!r}: {reason}")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        reason = "has no parameter to train; give it one, or another net"
        raise InvalidInput(f"hyperparameters.net: {spec.name!r}: {reason}")
    try:
        _Run(spec, net, micro_batch, channels_last, smaller)("meta")
    except InvalidInput:  # by an error of its own, or because it needs the values, as by item() or bool()
        with torch.random.fork_rng(devices=[]):
            _Run(spec, build(spec), micro_batch, channels_last, smaller)("cpu")


def why_unfit(net: nn.Module, size: tuple[int, int], classes: int, device: str) -> str | None:
    """Return why a trained network gives no scores for images of this height and width; None if it does.

    Args:
        net: the network, in evaluation mode.
        size: height and width.
        classes: how many scores it has to give for an image.
        device: the network's.
    """
    try:
        with torch.device(device), torch.no_grad():
            outputs = logits(net(torch.zeros(2, 3, *size)))
    except Exception as error:  # which differ between networks
        if is_out_of_memory(error):
            raise
        return one_line(error)
    return None if _shape(outputs) == (2, classes) else f"it gives {_shape(outputs)} for 2 images"


def _shape(outputs: object) -> object:
    return tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__


@dataclass
class _Run:
    spec: NetSpec
    net: nn.Module
    micro_batch: int
    channels_last: bool
    smaller: tuple[int, int] | None

    def __call__(self, device: str) -> None:
        """Trains on and validates one micro-batch on a device; raises as ``check`` does."""
        with torch.device(device):
            images = torch.randn(self.micro_batch, 3, *(self.smaller or self.spec.image_size))
            turned = images.contiguous(memory_format=torch.channels_last)
            try:
                outputs = logits(self.net(images))
                with torch.no_grad():
                    self.net.eval()(turned if prefers_channels_last(self.spec.name) else images)
            except NotImplementedError:  # an operator of one's own, which only a real device has
                return
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise self._why_it_fails(one_line(error)) from error
            if self.channels_last:
                self._try_channels_last(turned)
        wanted = (self.micro_batch, self.spec.num_classes)
        if (found := _shape(outputs)) != wanted:
            asked = f"{self.micro_batch} images and {self.spec.num_classes} classes"
            raise InvalidInput(
                f"hyperparameters.net: {self.spec.name!r}: gives {found} for {asked}; it must give {wanted}"
            )

    def _try_channels_last(self, images: Tensor) -> None:
        try:
            self.net.train()(images)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            what = f"{self.spec.name} does not take it ({one_line(error)})"
            mend = "set it to false, or use reshape instead of view"
            raise InvalidInput(f"hyperparameters.channels_last: True: {what}; {mend}") from error

    def _why_it_fails(self, reason: str) -> InvalidInput:
        name, (height, width) = self.spec.name, self.smaller or self.spec.image_size
        size = f"{height}x{width}"
        if "Expected more than 1 value per channel" in reason:
            return InvalidInput(
                f"train_micro_batch_size_per_gpu: {self.micro_batch}: the smallest micro-batch is too small"
                f" for {name}'s batch normalization; use one that leaves 2 images or more in an epoch's last"
                " step"
            )
        if self.smaller:
            mend = "remove it, or use a greater scale"
            return InvalidInput(
                f"hyperparameters.progressive_resizing: {size}: {name} does not take images of this size"
                f" ({reason}); {mend}"
            )
        if name in own.NETS and name != "net":
            fails = f"hyperparameters.net: {name!r}: fails on images of {size} ({reason})"
            return InvalidInput(f"{fails}; mend it, or change data.image_size")
        return InvalidInput(f"data.image_size: {size}: {name} does not take it ({reason}); use another")
