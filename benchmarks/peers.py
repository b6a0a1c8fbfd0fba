"""Programs for comparison: two tutorials, changed only to use any dataset's images, and a plain loop.

    python3 -m benchmarks.peers pytorch-tutorial FOLDER
    torchrun ... or deepspeed --num_gpus 1 --module benchmarks.peers deepspeed-tutorial FOLDER
    python3 -m benchmarks.peers plain-loop FOLDER

``FOLDER`` holds ``train.npz`` and ``test.npz`` (``pixels`` uint8 (N, 32, 32, 3) and ``labels``), and for
the plain loop ``recipe.json``. Each program prints ``training`` when it begins to train, and a
``validation`` line with its accuracy.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from net import Net


class Pictures(Dataset):
    """A dataset like torchvision's CIFAR10: PIL image, ``ToTensor``, ``Normalize``, one image at a time."""

    def __init__(self, pixels: np.ndarray, labels: list[int]) -> None:
        self.pixels, self.labels = pixels, labels
        steps = [transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]
        self.transform = transforms.Compose(steps)

    @classmethod
    def read(cls, file: pathlib.Path) -> Pictures:
        """Read a split from an ``.npz`` file."""
        with np.load(file) as kept:
            return cls(kept["pixels"], kept["labels"].tolist())

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def pytorch_tutorial(folder: pathlib.Path) -> None:
    """Run PyTorch's tutorial: SGD, batch 4, 2 epochs, 2 workers.

    Source: https://pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html
    """
    train, test = Pictures.read(folder / "train.npz"), Pictures.read(folder / "test.npz")
    trainloader = DataLoader(train, batch_size=4, shuffle=True, num_workers=2)
    testloader = DataLoader(test, batch_size=4, shuffle=False, num_workers=2)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    net = Net(len(set(train.labels))).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    print("training", flush=True)
    for _ in range(2):
        running_loss = 0.0
        for batch in trainloader:
            inputs, labels = batch[0].to(device), batch[1].to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    correct = 0
    with torch.no_grad():
        for images, labels in testloader:
            correct += (net(images.to(device)).argmax(1) == labels.to(device)).sum().item()
    print(f"validation  accuracy {correct / len(test):.4f}", flush=True)


def deepspeed_tutorial(folder: pathlib.Path) -> None:
    """Run DeepSpeed's ``cifar10_deepspeed.py`` in fp32, ZeRO 0: Adam, batch 16, 1 epoch, the engine's loader.

    On a CPU it uses ``torch_adam``: DeepSpeed would first compile its Adam for over a minute.
    Source: https://github.com/deepspeedai/DeepSpeedExamples/blob/master/training/cifar/cifar10_deepspeed.py
    """
    import deepspeed

    deepspeed.init_distributed()
    train, test = Pictures.read(folder / "train.npz"), Pictures.read(folder / "test.npz")
    net = Net(len(set(train.labels)))
    config = json.loads((pathlib.Path(__file__).parent.parent / "ds_config.json").read_text())
    if not torch.cuda.is_available():
        config["optimizer"]["params"]["torch_adam"] = True
    parameters = [each for each in net.parameters() if each.requires_grad]
    engine, _, trainloader, _ = deepspeed.initialize(
        model=net, model_parameters=parameters, training_data=train, config=config
    )
    print("training", flush=True)
    for _ in range(1):
        running_loss = 0.0
        for batch in trainloader:
            inputs, labels = batch[0].to(engine.device), batch[1].to(engine.device)
            loss = F.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            running_loss += loss.item()
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=4, shuffle=False, num_workers=0):
            correct += (engine(images.to(engine.device)).argmax(1) == labels.to(engine.device)).sum().item()
    print(f"validation  accuracy {correct / len(test):.4f}", flush=True)


def plain_loop(folder: pathlib.Path) -> None:
    """Run a minimal PyTorch loop with the recipe of ``cifar10-67.yaml`` and all images in memory."""
    from classify.images.augment import Augmentation, Augmenter
    from classify.images.order import Order
    from data import as_inputs

    # isort: split
    from deepspeed.runtime import lr_schedules

    recipe = json.loads((folder / "recipe.json").read_text())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    splits = {}
    for split in ("train", "test"):
        with np.load(folder / f"{split}.npz") as kept:
            pixels = torch.from_numpy(kept["pixels"]).permute(0, 3, 1, 2).contiguous()
            splits[split] = pixels.to(device), torch.from_numpy(kept["labels"]).to(device)
    (images, labels), (test_images, test_labels) = splits["train"], splits["test"]
    test_inputs = as_inputs(test_images, *recipe["normalization"])
    torch.manual_seed(recipe["seed"])
    net = Net(recipe["classes"]).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), **recipe["optimizer"])
    schedule = getattr(lr_schedules, recipe["scheduler"]["type"])(optimizer, **recipe["scheduler"]["params"])
    size = images.shape[2], images.shape[3]
    augmenter = Augmenter(Augmentation(**recipe["augment"]), len(labels), size, size, recipe["seed"])
    order = Order(len(labels), recipe["batch"], 1, seed=recipe["seed"]).rows
    form = torch.channels_last if recipe["channels_last"] else torch.contiguous_format
    print("training", flush=True)
    step, last = 0, recipe["epochs"] * -(-len(labels) // recipe["batch"])
    for epoch in range(recipe["epochs"]):
        for chosen in order(epoch).to(device).split(recipe["batch"]):
            inputs = as_inputs(augmenter(images[chosen], chosen, epoch), *recipe["normalization"])
            inputs = inputs.contiguous(memory_format=form)
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels[chosen]).backward()
            if recipe["clip"]:
                torch.nn.utils.clip_grad_norm_(net.parameters(), recipe["clip"])
            optimizer.step()
            schedule.step()
            step += 1
            if step % recipe["validate_every"] == 0 or step == last:
                with torch.no_grad():
                    logits = torch.cat([net(part) for part in test_inputs.split(500)])
                print(
                    f"validation  accuracy {(logits.argmax(1) == test_labels).float().mean():.4f}", flush=True
                )


PROGRAMS = {
    "pytorch-tutorial": pytorch_tutorial,
    "deepspeed-tutorial": deepspeed_tutorial,
    "plain-loop": plain_loop,
}

if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if not each.startswith("--local_rank")]
    PROGRAMS[arguments[0]](pathlib.Path(arguments[1]))
