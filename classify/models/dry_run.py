"""A dry run of a network with tensors that have no data, before any image is decoded."""

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
    """Run a network's training and validation steps on torch's meta device.

    Args:
        spec: the network.
        micro_batch: the smallest micro-batch in training.
        channels_last: whether images have that memory format.
        smaller: height and width of ``progressive_resizing``'s smaller images; None for the full size.

    Raises:
        InvalidInput: if the network fails on such images, or does not return a score for each class.
    """
    if spec.name == MOE:
        spec = spec._replace(name="net", args=None)
    net = on_meta_device(spec)
    if any(isinstance(parameter, UninitializedParameter) for parameter in net.parameters()):
        reason = "has lazy layers, which no engine takes; give the layers their sizes"
        raise InvalidInput(f"hyperparameters.net: {spec.name!r}: {reason}")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        reason = "has no parameter to train; add one, or use another network"
        raise InvalidInput(f"hyperparameters.net: {spec.name!r}: {reason}")
    try:
        _Run(spec, net, micro_batch, channels_last, smaller)("meta")
    except InvalidInput:  # an error of the network, or it needs values, e.g. by item() or bool()
        with torch.random.fork_rng(devices=[]):
            _Run(spec, build(spec), micro_batch, channels_last, smaller)("cpu")


def why_unfit(net: nn.Module, size: tuple[int, int], classes: int, device: str) -> str | None:
    """Return the reason why a trained network fails on images of a size; None if it works.

    Args:
        net: the network, in evaluation mode.
        size: height and width.
        classes: the number of scores per image.
        device: of the network.
    """
    try:
        with torch.device(device), torch.no_grad():
            outputs = logits(net(torch.zeros(2, 3, *size)))
    except Exception as error:  # networks raise different types
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
        """Train on one micro-batch and validate it on a device; raise as ``check`` does."""
        with torch.device(device):
            images = torch.randn(self.micro_batch, 3, *(self.smaller or self.spec.image_size))
            turned = images.contiguous(memory_format=torch.channels_last)
            try:
                outputs = logits(self.net(images))
                with torch.no_grad():
                    self.net.eval()(turned if prefers_channels_last(self.spec.name) else images)
            except NotImplementedError:  # a custom operator, which the meta device lacks
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
                f"hyperparameters.net: {self.spec.name!r}: gives {found} for {asked}; make it give {wanted}"
            )

    def _try_channels_last(self, images: Tensor) -> None:
        try:
            self.net.train()(images)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            what = f"{self.spec.name} fails on channels_last images ({one_line(error)})"
            remedy = "set channels_last to false, or use reshape instead of view"
            raise InvalidInput(f"hyperparameters.channels_last: True: {what}; {remedy}") from error

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
            remedy = "remove progressive_resizing, or use a greater scale"
            return InvalidInput(
                f"hyperparameters.progressive_resizing: {size}: {name} fails on images of this size"
                f" ({reason}); {remedy}"
            )
        if name in own.NETS and name != "net":
            fails = f"hyperparameters.net: {name!r}: fails on images of {size} ({reason})"
            return InvalidInput(f"{fails}; fix the network, or change data.image_size")
        return InvalidInput(
            f"data.image_size: {size}: {name} fails on this size ({reason}); use another size"
        )
