"""Checks that a network can process the images: forward passes on tensors without data."""

from __future__ import annotations

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
    """Run a network's forward passes, in training and in evaluation mode, on torch's meta device.

    If that fails, the passes run on the CPU, in case the network needs the values of its tensors.

    Args:
        spec: the network.
        micro_batch: the number of images in the smallest micro-batch of the training.
        channels_last: whether images have the memory format channels_last.
        smaller: height and width of ``progressive_resizing``'s smaller images; None for the full size.

    Raises:
        InvalidInput: if the network fails on such images, does not return a score for each class, has lazy
            layers, or has no parameter to train.
    """
    if spec.name == MOE:
        spec = spec._replace(name="net", args=None)
    net, reason = on_meta_device(spec), ""
    if any(isinstance(parameter, UninitializedParameter) for parameter in net.parameters()):
        reason = "has lazy layers, whose weights have no shape yet; give the layers their sizes"
    elif not any(parameter.requires_grad for parameter in net.parameters()):
        reason = "has no parameter to train; add one, or use another network"
    if reason:
        raise InvalidInput(f"hyperparameters.net: {spec.name!r}: {reason}")
    shape = micro_batch, 3, *(smaller or spec.image_size)
    try:
        with torch.device("meta"):
            _run(spec, net, shape, channels_last)
    except InvalidInput:  # the network has an error, or needs values, e.g. for item() or bool()
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            _run(spec, build(spec), shape, channels_last)


def why_unfit(net: nn.Module, size: tuple[int, int], classes: int, device: str) -> str | None:
    """Return the reason why a trained network fails on images of a size; None if it works.

    Args:
        net: the network, in evaluation mode.
        size: height and width.
        classes: the number of scores per image.
        device: the network's device.
    """
    try:
        with torch.device(device), torch.no_grad():
            outputs = logits(net(torch.zeros(2, 3, *size)))
    except Exception as error:  # networks raise different types
        if is_out_of_memory(error):
            raise
        return one_line(error)
    return None if _shape(outputs) == (2, classes) else f"it returns {_shape(outputs)} for 2 images"


def _shape(outputs: object) -> object:
    return tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__


def _run(spec: NetSpec, net: nn.Module, shape: tuple[int, ...], channels_last: bool) -> None:
    """Run the passes on random images of a shape (B, 3, H, W); raise ``InvalidInput`` like ``check``."""
    images = torch.randn(shape)
    turned = images.contiguous(memory_format=torch.channels_last)
    try:
        outputs = logits(net(images))
        with torch.no_grad():
            net.eval()(turned if prefers_channels_last(spec.name) else images)
    except NotImplementedError:  # a custom operator, which the meta device lacks
        return
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InvalidInput(_why_it_fails(spec, shape, one_line(error))) from error
    if channels_last:
        try:
            net.train()(turned)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            what = f"{spec.name} fails on channels_last images ({one_line(error)})"
            remedy = "set channels_last to false, or use reshape instead of view"
            raise InvalidInput(f"hyperparameters.channels_last: True: {what}; {remedy}") from error
    wanted = shape[0], spec.num_classes
    if (found := _shape(outputs)) != wanted:
        asked = f"{shape[0]} images and {spec.num_classes} classes"
        raise InvalidInput(
            f"hyperparameters.net: {spec.name!r}: returns {found} for {asked}; let it return {wanted}"
        )


def _why_it_fails(spec: NetSpec, shape: tuple[int, ...], reason: str) -> str:
    micro_batch, _, height, width = shape
    if "Expected more than 1 value per channel" in reason:
        small = f"the smallest micro-batch is too small for {spec.name}'s batch normalization"
        remedy = "use a size that gives every micro-batch of an epoch at least 2 images"
        return f"train_micro_batch_size_per_gpu: {micro_batch}: {small}; {remedy}"
    if (height, width) != spec.image_size:
        fails = f"{height}x{width}: {spec.name} fails on images of this size ({reason})"
        remedy = "remove progressive_resizing, or use a greater scale"
        return f"hyperparameters.progressive_resizing: {fails}; {remedy}"
    if spec.name in own.NETS and spec.name != "net":
        fails = f"hyperparameters.net: {spec.name!r}: fails on images of {height}x{width} ({reason})"
        return f"{fails}; fix the network, or change data.image_size"
    return f"data.image_size: {height}x{width}: {spec.name} fails on this size ({reason}); use another size"
