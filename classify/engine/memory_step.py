"""A step of DeepSpeed's engines on fake tensors: what each holds, in the order in which it does.

The buffers are those of DeepSpeed 0.19's ``stage_1_and_2.py``, ``stage3.py``, ``bf16_optimizer.py`` and
``unfused_optimizer.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from classify.engine.combinations import dtype_name, offloads
from classify.engine.deepspeed_keys import ACCUMULATION
from classify.engine.fake_optimizer import fake_optimizer
from classify.engine.memory_tape import HOLES, Event, Tape
from classify.engine.parameter_groups import freeze
from classify.engine.trial_config import TrialConfig
from classify.models import recompute, registry

FP32 = 4  # bytes of a number
ALLREDUCE = 500_000_000  # numbers that DeepSpeed sums over ranks at a time without ZeRO


def keeps_freed_memory(config: TrialConfig) -> bool:
    """Whether the C library keeps what a step frees; not where many sizes would add up."""
    return config.zero_stage < 3 and not config.hyper.checkpoint_activations


def record(config: TrialConfig, micro_batch: int) -> list[Event]:
    """What a process allocates and frees for network, engine and a step, later than the first.

    Args:
        config: the trial's.
        micro_batch: images.
    """
    # If a process's first backward pass is one on fake tensors, torch begins threads that no fork can have
    torch.ones((), requires_grad=True).backward()
    net = outline(config)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(), Tape(config.device == "cpu") as tape:
        _Step(config, tape).run(net, micro_batch)
    return tape.events


def outline(config: TrialConfig) -> nn.Module:
    """The network on torch's meta device, as it is trained."""
    net = registry.on_meta_device(config.net)
    freeze(net.named_parameters(), config.groups)
    if config.hyper.checkpoint_activations:
        recompute.enable(net)
    return net.train()


def _give_fake_weights(net: nn.Module, dtype: torch.dtype) -> None:
    """Puts a network of torch's meta device on the CPU, where ``FakeTensorMode`` is on."""
    fakes: dict[Tensor, Tensor] = {}
    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fakes[tensor] = fakes[tensor] if tensor in fakes else _fake(tensor, dtype)
                    tensors[name] = fakes[tensor]  # type: ignore[assignment]


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


class _Step:
    def __init__(self, config: TrialConfig, tape: Tape) -> None:
        self.config, self.tape, self.on_gpu = config, tape, config.device == "cuda"
        self.stage, self.ranks, self.width = config.zero_stage, config.replicas, config.dtype.itemsize
        zero = config.deepspeed.get("zero_optimization") or {}
        self.overlaps = zero.get("overlap_comm") in (True, None if self.stage == 3 else True)
        self.bucket = int(zero.get("reduce_bucket_size", 5e8))
        self.sub_group = int(zero.get("sub_group_size", 1e9))
        self.live = int(zero.get("stage3_max_live_parameters", 1e9))
        self.gathers = self.stage == 3 and self.ranks > 1
        self.flat: list[Tensor] = []
        self.optimizers: list[tuple[torch.optim.Optimizer, list[Tensor]]] = []
        self.prefetched = int(zero.get("stage3_prefetch_bucket_size", 5e7))
        self.offloads = offloads(config.deepspeed, "offload_optimizer")
        self.offloads_weights = offloads(config.deepspeed, "offload_param")
        sums = (config.deepspeed.get("data_types") or {}).get("grad_accum_dtype")
        self.sums = FP32 if sums == "fp32" else self.width  # bytes of a number to which gradients are added
        name = dtype_name(config.deepspeed)
        self.is_bf16_engine = self.stage == 1 and name == "bf16" and self.sums == FP32
        self.bucketed = 0  # bytes of the bucket that were written to
        self.blocks: list[int] = []  # to be freed at the end of a backward pass
        self.partition: list[int] = []  # of gradients, to be freed in the step
        self.is_last = True  # of a step's micro-batches

    def run(self, net: nn.Module, micro_batch: int) -> None:
        """Makes everything, the optimizer's state, and then the step."""
        config = self.config
        with self.tape.of("weights"):
            _give_fake_weights(net, self.config.dtype)
            named = dict(net.named_parameters())
            groups = [group for group in self.config.groups if not group.frozen]
            self.weights = [[named[name] for name in group.parameters] for group in groups]
        self.size = sum(each.numel() for group in self.weights for each in group)
        self.share = -(-self.size // self.ranks)
        for group, weights in zip(groups, self.weights, strict=True):
            for stepped in self._build(weights):
                self.optimizers.append((fake_optimizer(config, group, stepped), stepped))
        self._make_buffers()
        self._optimize(is_first=True)
        if self.config.hyper.weight_average:
            with self.tape.of("average", self.offloads):
                self.average = [torch.empty(each.shape) for _, group in self.optimizers for each in group]
        for weights in self.weights:
            for parameter in weights:
                parameter.register_post_accumulate_grad_hook(self._reduce)
        count = min(2, self.config.deepspeed[ACCUMULATION])
        for index in range(count):
            self.is_last = index == count - 1
            self._pass(net, micro_batch)
        self._optimize(is_first=False)

    # ------------------------------------------------------------------------------------------- the engine

    def _build(self, weights: Sequence[nn.Parameter]) -> list[list[Tensor]]:
        """Makes of a group the flat weights of an engine that partitions; gives what its optimizers step."""
        if self.stage == 0 and self.width == FP32:
            return [list(weights)]
        size = sum(each.numel() for each in weights)
        share = -(-size // self.ranks)
        if self.stage:
            with self.tape.of("weights", self.offloads_weights):
                self.flat.append(torch.empty(share if self.stage == 3 else size, dtype=self.config.dtype))
            start = 0
            for each in weights:
                shape, count = each.shape, each.numel()
                if self.gathers:  # when it is computed with, into blocks that are counted there
                    each.data = torch.empty(1, dtype=each.dtype).expand(shape)
                else:
                    each.data = self.flat[-1].narrow(0, start, count).view(shape)
                start += count
            self._leave_holes(weights)
        with self.tape.of("optimizer", self.offloads):
            if self.stage == 0:
                return [[torch.empty(each.shape) for each in weights]]
            most = -(-self.sub_group // self.ranks)
            sizes = [min(most, share - first) for first in range(0, share, most)]
            return [[torch.empty(each)] for each in (sizes if self.stage == 3 else [share])]

    def _make_buffers(self) -> None:
        """What an engine holds beside them all the time."""
        if self.stage == 3:
            self.tape.allocate("gradients", self.sums * self.share, self.offloads)
            written = self.bucket if self.on_gpu else min(self.bucket, self.size)
            self.tape.allocate("buckets", self.width * written)
        elif self.is_bf16_engine:
            self.tape.allocate("gradients", FP32 * self.size)
        elif self.stage == 2 and self.ranks == 1 and not self.offloads:
            self.tape.allocate("gradients", self.width * self.size)
        if self.offloads:
            self.tape.allocate("gradients", FP32 * self.share, True)
            if self.stage == 2:
                self.tape.allocate("buckets", self.width * self.share, True)

    def _leave_holes(self, weights: Sequence[nn.Parameter]) -> None:
        """The places of weights that are elsewhere now, into which few blocks fit."""
        if not self.on_gpu and keeps_freed_memory(self.config):
            for each in weights:
                self.tape.allocate(HOLES, self.width * each.numel())

    # ---------------------------------------------------------------------------- forward and backward pass

    def _pass(self, net: nn.Module, micro_batch: int) -> None:
        config, tape = self.config, self.tape
        gathered = self.width * min(self.size, self.live) if self.gathers else 0
        whole = tape.allocate("weights", gathered)
        self._transient(gathered and self.width * min(self.size // 2, self.prefetched, self.live))
        with tape.of("images"):
            images = torch.empty(micro_batch, 3, *config.data.image_size, dtype=torch.uint8)
            inputs = images.float()
            del images
            if config.channels_last:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            inputs = inputs.to(config.dtype)
            labels = torch.zeros(micro_batch, dtype=torch.int64)
        autocast: Any = contextlib.nullcontext()
        if config.autocasts:
            dtype = config.deepspeed["torch_autocast"].get("dtype", "bfloat16").removeprefix("torch.")
            autocast = torch.autocast("cpu", {"fp16": torch.float16}.get(dtype, torch.bfloat16))
        with autocast:
            outputs = registry.logits(net(inputs))
        F.cross_entropy(outputs.float(), labels).backward()
        del outputs
        self._end_of_backward()
        tape.free(whole)

    def _transient(self, size: float) -> None:
        self.tape.free(self.tape.allocate("buckets", size))

    def _reduce(self, parameter: Tensor) -> None:
        """What an engine does with a gradient as soon as it is there."""
        assert parameter.grad is not None
        self.tape.relabel(parameter.grad, "gradients")
        if self.is_bf16_engine or self.stage == 3:
            parameter.grad = None
        elif self.stage == 2 or (self.stage == 1 and self.is_last and self.overlaps):
            self._bucket(parameter)

    def _bucket(self, parameter: Tensor) -> None:
        parameter.grad = None
        most = self.width * self.bucket * (2 if self.overlaps else 1)
        # A GPU has all of it, the CPU what was written to
        size = most if self.on_gpu else self.width * parameter.numel()
        size = min(size, most - self.bucketed)
        self.bucketed += size
        self.blocks.append(self.tape.allocate("buckets", size))

    def _end_of_backward(self) -> None:
        tape = self.tape
        if self.stage == 0 and self.is_last and self.ranks > 1:
            numbers = min(self.size, ALLREDUCE)
            same = self.config.deepspeed.get("communication_data_type") in (
                None,
                dtype_name(self.config.deepspeed),
            )
            self._transient((self.width + (0 if same else FP32)) * numbers)
        elif self.stage == 3:
            self._transient(2 * self.width * min(self.size, self.bucket))
        elif self.stage and not self.is_bf16_engine and (self.stage == 2 or self.is_last):
            if self.stage == 1 and not self.overlaps:
                for group in self.weights:
                    for each in group:
                        self._bucket(each)
            if not self.partition and not self.offloads:
                self.partition.append(tape.allocate("gradients", self.sums * self.share))
            if self.ranks > 1:
                self._transient(self.width * min(self.share, self.bucket))
            for key in self.blocks:
                tape.free(key)
            self.blocks, self.bucketed = [], 0

    # ----------------------------------------------------------------------------------------- the optimizer

    def _optimize(self, is_first: bool) -> None:
        """The optimizer's step; in the first it makes its state."""
        for optimizer, stepped in self.optimizers:
            # Of a bf16 engine, and in the host's memory, the gradients are there already
            is_there = self.is_bf16_engine or self.offloads
            with self.tape.of("gradients"):
                for each in stepped:
                    if each.grad is None:
                        each.grad = torch.empty(1).expand(each.shape) if is_there else torch.empty(each.shape)
            for key in self.partition:
                self.tape.free(key)
            self.partition = []
            with self.tape.of("optimizer" if is_first else "step", self.offloads):
                optimizer.step()
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        self.tape.relabel(value, "optimizer")
            for each in stepped:
                each.grad = None
        if not is_first:
            for group in self.weights:
                for each in group:
                    each.grad = None
