"""``Net`` with layers of experts, which DeepSpeed provides. The layers need a process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from net import Net


class NetMoE(Net):
    """``Net`` with layers of experts between ``fc2`` and the last layer, ``fc4``.

    Source: https://www.deepspeed.ai/tutorials/mixture-of-experts/ and the DeepSpeed CIFAR-10 tutorial.

    Args:
        num_classes: the number of classes.
        num_experts: the number of experts of each MoE layer.
        ep_world_size: the number of ranks that share the experts of a layer.
        mlp_type: ``standard``, or ``residual`` to add a fixed layer to the experts
            (https://arxiv.org/abs/2201.05596).
        top_k: the number of experts that process an image, 1 or 2.
        min_capacity: the minimum capacity of an expert, in images of a micro-batch.
        noisy_gate_policy: ``RSample``, ``Jitter`` or None.
        micro_batch: smaller micro-batches are padded to this size, so that ranks exchange equal amounts.

    Attributes:
        load_balancing_loss: the loss of the last forward pass, summed over the layers; a scalar. It is
            minimal if all experts get the same number of images (https://arxiv.org/abs/2006.16668, section
            2.2).
    """

    def __init__(
        self,
        num_classes: int = 10,
        num_experts: Sequence[int] = (2,),
        ep_world_size: int = 1,
        mlp_type: str = "standard",
        top_k: int = 1,
        min_capacity: int = 0,
        noisy_gate_policy: str | None = None,
        micro_batch: int = 0,
    ) -> None:
        from deepspeed.moe.layer import MoE  # here: the import takes seconds

        super().__init__(num_classes)
        del self.fc3
        self.micro_batch = micro_batch
        self.moe_layer_list = nn.ModuleList(
            MoE(
                hidden_size=84,
                expert=nn.Linear(84, 84),
                num_experts=experts,
                ep_size=ep_world_size,
                k=top_k,
                eval_capacity_factor=experts,  # validation drops no image
                min_capacity=min_capacity,
                use_residual=mlp_type == "residual",
                noisy_gate_policy=noisy_gate_policy,
            )
            for experts in num_experts
        )
        self.fc4 = nn.Linear(84, num_classes)
        self.load_balancing_loss = torch.zeros(())

    def train(self, mode: bool = True) -> NetMoE:
        """Set the mode: training samples the second expert, validation uses the second most probable one."""
        super().train(mode)
        for name, module in self.moe_layer_list.named_modules():
            if name.endswith("gate"):
                module.top2_2nd_expert_sampling = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores, and set ``load_balancing_loss``; the shapes are as in ``Net.forward``."""
        images = len(x)
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = F.relu(self.fc2(x))
        x = F.pad(x, (0, 0, 0, max(0, self.micro_batch - images)))
        self.load_balancing_loss = x.new_zeros((), dtype=torch.float32)
        for layer in self.moe_layer_list:
            x, balance, _ = layer(x)
            self.load_balancing_loss = self.load_balancing_loss + balance.float()
        return self.fc4(x)[:images]
