"""A plain PyTorch program for comparison: the same network and images, without DeepSpeed.

    one process:  python3 baseline.py
    N processes:  torchrun --nproc-per-node N baseline.py     (DistributedDataParallel, on GPUs or CPU cores)

The defaults come from the PyTorch tutorial "Training a Classifier": SGD, batch 4, 2 epochs.
Source: https://pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html

Several processes train with ``DistributedDataParallel``. ``DataParallel`` is obsolete: it uses threads of one
process, which share Python's global interpreter lock, and copies the network to every GPU in every step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import data
from classify.config import command_line, experiment_fields, experiment_file
from classify.config.rules import RATE, Rule, is_number, number, whole
from classify.images.loader import MicroBatchDataset, whole_micro_batch
from classify.images.order import Order
from classify.images.pixels import ImageSet
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.models import dry_run, registry, state_dicts
from classify.models.registry import NetSpec
from classify.reports import summary
from classify.reports.metrics import ClassificationMetrics
from deepspeed_trial import messages
from deepspeed_trial.errors import ErrorList, InvalidInput, one_line, printable
from deepspeed_trial.events import Patience
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local.folder import default_output, why_unusable
from deepspeed_trial.meeting import check_ranks, meet
from net import Net

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = {
    **dict.fromkeys(("epochs", "max_steps", "batch_size", "accumulate", "patience"), whole(1)),
    "lr": RATE,
    "momentum": number(0, 1),
    "min_improvement": Rule(is_number, "must be a number of at least 0"),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line.parser(__doc__, "const.yaml", "the images and the seed")
    add = parser.add_argument
    add(
        "--output",
        type=pathlib.Path,
        metavar="FOLDER",
        help="the run's folder (default: runs/baseline-<time>)",
    )
    add("--epochs", type=int, default=2, help="number of epochs (default: %(default)s)")
    add("--max-steps", type=int, help="stop after N optimizer steps", metavar="N")
    add(
        "--batch-size", type=int, default=4, help="images per step, over all processes (default: %(default)s)"
    )
    add(
        "--accumulate",
        type=int,
        default=1,
        help="micro-batches per step in each process (default: %(default)s)",
    )
    add("--optimizer", choices=("SGD", "Adam"), default="SGD", help="(default: %(default)s)")
    add("--lr", type=float, default=0.001, help="learning rate (default: %(default)s)")
    add("--momentum", type=float, default=0.9, help="momentum of SGD (default: %(default)s)")
    add(
        "--schedule",
        choices=("constant", "step", "cosine"),
        default="constant",
        help="(default: %(default)s)",
    )
    add("--amp", choices=tuple(DTYPES), help="mixed precision")
    add("--patience", type=int, help="stop after N epochs without a lower validation loss", metavar="N")
    add(
        "--min-improvement",
        type=float,
        default=0.0,
        help="the smallest decrease of the loss that counts for --patience (default: %(default)s)",
    )
    add("--weights", metavar="FILE", help="start from this state_dict")
    return parser.parse_args(argv)


@command_line.as_program("baseline")
def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit code."""
    train(parse(argv))
    return 0


def train(args: argparse.Namespace) -> None:
    """Train in the five steps of the tutorial: data, network, loss and optimizer, training, evaluation."""
    experiment, source, weights = check(args)
    rank, world_size, device = start()
    make_folder(args, rank)
    torch.manual_seed(experiment.seed)

    # 1. Data.
    train_set, test_set = (source.load(split) for split in ("train", source.validation))
    parts = world_size * args.accumulate
    order = Order(len(train_set), args.batch_size, parts, experiment.seed)

    # 2. Network.
    plain = Net(len(train_set.classes))
    load_weights(plain, weights, args.weights, rank)
    plain.to(device)
    net: nn.Module = DistributedDataParallel(plain) if world_size > 1 else plain

    # 3. Loss and optimizer.
    criterion = nn.CrossEntropyLoss()
    optimizer = make_optimizer(args, net)
    schedule = make_schedule(args, optimizer, len(order.step_sizes))
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    losses: list[Tensor] = []
    last = (args.max_steps or 0) * args.accumulate
    patience = Patience(args.patience, args.min_improvement)
    training_seconds, started = 0.0, time.perf_counter()
    for epoch in range(args.epochs):
        where = f"epoch {epoch + 1}/{args.epochs}"
        # 4. Training.
        epoch_started = time.perf_counter()
        net.train()
        for inputs, labels in batches(train_set, order, epoch, rank, world_size, device):
            with autocast(args, device):
                loss = criterion(net(inputs), labels)
            scaler.scale(loss / args.accumulate).backward()
            losses.append(loss.detach())
            if len(losses) % args.accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                if rank == 0 and len(losses) % 2000 == 0:  # the tutorial's interval
                    mean = torch.stack(losses[-2000:]).mean()
                    print(f"{where}  micro-batch {len(losses)}  loss {mean:.4f}", flush=True)
                if len(losses) == last:
                    break
        training_seconds += time.perf_counter() - epoch_started

        # 5. Evaluation.
        scores = evaluate(net, test_set, rank, world_size, device)
        if rank == 0:
            print(f"{where}  loss {scores['loss']:.4f}  accuracy {scores['accuracy']:.4f}", flush=True)
        if patience.update(scores["loss"]) or len(losses) == last:
            break

    if rank == 0:
        images = sum(order.step_sizes) / len(order.step_sizes) * (len(losses) // args.accumulate)
        rate = images / max(training_seconds, 1e-9)
        save(args, plain, losses, scores, epoch + 1, time.perf_counter() - started, rate)


def check(args: argparse.Namespace) -> tuple[Experiment, DataPlan, dict[str, Tensor] | None]:
    """Check the options before decoding images; return the experiment, its data and the initial weights.

    Raises:
        InvalidInput: with a line for each invalid option; if all are valid, with a line for each option
            that does not fit the images.
    """
    check_ranks()
    errors = ErrorList()
    config = experiment_file.read(args.config, args.overrides)
    with errors.collecting():
        experiment = experiment_fields.check(config)
    with errors.collecting():
        settings = DataSettings.parse(config.get("data"))
        source = DataPlan.resolve(settings)
        classes = len(source.classes)
    for option, rule in OPTIONS.items():
        value = getattr(args, option)
        if value is not None and not rule.is_valid(value):
            errors.lines.append(f"--{option.replace('_', '-')}: {value}: {rule.message}")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if not errors.lines and args.batch_size % (parts := world_size * args.accumulate):
        factors = f"{world_size} processes x {args.accumulate} micro-batches"
        reason = f"is not a multiple of {parts}, which is {factors}; use e.g. {parts}"
        errors.lines.append(f"--batch-size: {args.batch_size}: {reason}")
    label, weights = f"--weights: {args.weights}", None
    with errors.collecting():
        weights = state_dicts.read(args.weights, label) if args.weights else None
    errors.raise_any()
    spec = NetSpec("net", classes, settings.image_size)
    with errors.collecting():
        dry_run.check(spec, micro_batch=2)
    with errors.collecting():
        if weights is not None:
            state_dicts.load_pretrained(registry.on_meta_device(spec), weights, label)
    errors.raise_any()
    return experiment, source, weights


def start() -> tuple[int, int, torch.device]:
    """Join torchrun's processes; return the rank, the number of processes, and the device."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world_size > 1 and not torch.distributed.is_initialized():
        meet()
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world_size, device


def make_folder(args: argparse.Namespace, rank: int) -> None:
    """Create the run's folder on rank 0; raise ``InvalidInput`` if this fails or the folder has a run."""
    if rank != 0:
        return
    args.output = args.output or default_output("baseline")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        reason = why_unusable(args.output, resumes=False)
    except OSError as error:
        what = f"cannot be created ({one_line(error)}); give another folder"
        raise InvalidInput(f"--output: {args.output}: {what}") from error
    if reason:
        raise InvalidInput(reason)


def load_weights(net: nn.Module, weights: dict[str, Tensor] | None, file: str, rank: int) -> None:
    """Load the weights, if any; print the names of the network's weights that they lack."""
    if weights is None:
        return
    label = f"--weights: {file}"
    skipped = state_dicts.load_pretrained(net, weights, label)
    if skipped and rank == 0:
        print(printable(state_dicts.describe_skipped_weights(skipped, label)), file=sys.stderr)


def make_optimizer(args: argparse.Namespace, net: nn.Module) -> optim.Optimizer:
    """Return SGD with momentum, or Adam."""
    if args.optimizer == "SGD":
        return optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum)
    return optim.Adam(net.parameters(), lr=args.lr)


def make_schedule(
    args: argparse.Namespace, optimizer: optim.Optimizer, epoch: int
) -> optim.lr_scheduler.LRScheduler:
    """Return a schedule: constant, divided by 10 after every ``epoch`` steps, or a cosine to 0."""
    if args.schedule == "step":
        return optim.lr_scheduler.StepLR(optimizer, step_size=epoch, gamma=0.1)
    if args.schedule == "cosine":
        return optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.max_steps or args.epochs * epoch)
    return optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def autocast(args: argparse.Namespace, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context for the forward pass: with ``--amp``, autocast to 16 bits."""
    return torch.autocast(device.type, dtype=DTYPES[args.amp]) if args.amp else contextlib.nullcontext()


def batches(
    source: ImageSet, order: Order, epoch: int, rank: int, world_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's micro-batches of one epoch, the same as in the trial."""
    mine: list[Any] = list(order.micro_batches(epoch))[rank::world_size]
    loader = DataLoader(MicroBatchDataset(source), batch_sampler=mine, collate_fn=whole_micro_batch)
    for images, labels in loader:
        yield data.as_inputs(images.to(device)), labels.to(device)


@torch.no_grad()
def evaluate(
    net: nn.Module, test_set: ImageSet, rank: int, world_size: int, device: torch.device
) -> dict[str, Any]:
    """Return accuracy, loss and per-class accuracy over the test images of all ranks."""
    net.eval()
    counts = ClassificationMetrics(test_set.classes)
    order = Order(len(test_set), 256 * world_size, world_size)
    for inputs, labels in batches(test_set, order, 0, rank, world_size, device):
        counts.update(net(inputs), labels)
    counted = counts.per_slot_reduce()
    everyone = messages.all_gather(counted) if world_size > 1 else [counted]
    return summary.metrics_summary(counts.cross_slot_reduce(everyone), test_set.classes)


def save(
    args: argparse.Namespace,
    net: nn.Module,
    losses: list[Tensor],
    validation: dict[str, Any],
    epochs: int,
    seconds: float,
    images_per_second: float,
) -> None:
    """Write the run's files in the form of ``train.py``, and print the accuracies."""
    weights = state_dicts.of_module(net)
    torch.save(weights, args.output / "net.pt")
    of_steps = torch.stack(losses).view(-1, args.accumulate).mean(1).tolist()
    entries = [
        {"group": "training", "steps_completed": i, "loss": loss} for i, loss in enumerate(of_steps, 1)
    ]
    (args.output / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for name, accuracy in validation["per_class_accuracy"].items():
        print(f"  {printable(name):<12} {accuracy:7.2%}")
    summarized = {
        "steps": len(of_steps),
        "epochs": epochs,
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "zero_stage": 0,
        "dtype": str(DTYPES.get(args.amp, torch.float32)).removeprefix("torch."),
        "seconds": seconds,
        "images_per_second": images_per_second,
        "validation": validation,
        "weights_sha256": state_dicts.sha256(weights),
        "checkpoint": None,
    }
    summary.write(args.output, summarized)


if __name__ == "__main__":
    sys.exit(main())
