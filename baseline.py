"""The plain PyTorch program that people come from: the same net and images, without DeepSpeed or Determined's trainer.

    one process:  python3 baseline.py
    N processes:  torchrun --nproc-per-node N baseline.py     (DistributedDataParallel, on GPUs or CPU cores)

The defaults are those of the PyTorch tutorial "Training a Classifier": SGD, batch 4, 2 epochs.
Source: https://pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html

Several processes train under ``DistributedDataParallel``. ``DataParallel`` is obsolete: it keeps to one process, whose
threads take turns at Python's lock, copies the network to every GPU in every step, and stays on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
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
import experiment
import loaders
import nets
import weights
from callbacks import Patience
from errors import InvalidInput, one_line
from local_run import run_fault
from metrics import ClassificationMetrics, summary_of
from net import Net
from rules import Rule, is_count, is_number

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COUNT: Rule = (lambda v: is_count(v, 1), "must be at least 1")
OPTIONS = {
    **dict.fromkeys(("epochs", "max_steps", "batch_size", "accumulate", "patience"), _COUNT),
    "lr": (lambda v: is_number(v, 0, 1e6), "must be a number from 0 to 1e6"),
    "momentum": (lambda v: is_number(v, 0, 1), "must be a number from 0 to below 1"),
    "min_improvement": (is_number, "must be a number of at least 0"),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="const.yaml", metavar="FILE", help="the images and the seed (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides", help="replace it")
    parser.add_argument("--output", metavar="FOLDER", help="the run's folder (runs/baseline-<time>)")
    parser.add_argument("--epochs", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--max-steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--batch-size", type=int, default=4, help="images a step, over all processes (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step on each process (%(default)s)")
    parser.add_argument("--optimizer", choices=("SGD", "Adam"), default="SGD", help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate (%(default)s)")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (%(default)s)")
    parser.add_argument("--schedule", choices=("constant", "step", "cosine"), default="constant", help="(%(default)s)")
    parser.add_argument("--amp", choices=tuple(DTYPES), help="mixed precision")
    parser.add_argument("--patience", type=int, help="stop after so many epochs without a lower validation loss")
    parser.add_argument("--min-improvement", type=float, default=0.0, help="by which it has to be lower (%(default)s)")
    parser.add_argument("--weights", metavar="FILE", help="start from this state_dict")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says and gives the exit code."""
    try:
        train(parse(argv))
    except InvalidInput as error:
        if int(os.environ.get("RANK", 0)) == 0:
            for fault in error.faults:
                print(f"baseline.py: {fault}", file=sys.stderr)
        return 2
    return 0


def train(args: argparse.Namespace) -> None:
    """Trains in the five steps of the tutorial: data, network, loss and optimizer, training, evaluation."""
    loaded = experiment.load(args.config, args.overrides)
    config = data.DataConfig.parse(loaded.config.get("data"))
    nets.check("net", 10, config.image_size, None, 2)
    rank, world_size, device = start(args)
    torch.manual_seed(loaded.seed)

    # 1. Data.
    train_set, test_set = data.load(config, "train"), data.load(config, "test")
    sampler = loaders.MicroBatchSampler(len(train_set), args.batch_size, world_size * args.accumulate, loaded.seed)

    # 2. Network.
    plain = Net(len(train_set.classes))
    if args.weights:
        label = f"--weights: {args.weights}"
        replaced = weights.start_from(plain, weights.read(args.weights, label), label)
        if replaced and rank == 0:
            print(weights.said(replaced, label), file=sys.stderr)
    plain.to(device)
    net: nn.Module = DistributedDataParallel(plain) if world_size > 1 else plain

    # 3. Loss and optimizer.
    criterion = nn.CrossEntropyLoss()
    optimizer = make_optimizer(args, net)
    schedule = make_schedule(args, optimizer, len(sampler.step_sizes))
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")

    if rank == 0:
        own_folder(args)
    losses: list[Tensor] = []
    waiting = Patience(args.patience, args.min_improvement)
    training_seconds, started = 0.0, time.perf_counter()
    for epoch in range(args.epochs):
        # 4. Training.
        epoch_started = time.perf_counter()
        net.train()
        for inputs, labels in batches(train_set, sampler, rank, world_size, device):
            with autocast(args, device):
                loss = criterion(net(inputs), labels)
            scaler.scale(loss / args.accumulate).backward()
            losses.append(loss.detach())
            if len(losses) % args.accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                if rank == 0 and len(losses) % 2000 == 0:  # as often as the tutorial
                    print(
                        f"epoch {epoch + 1}/{args.epochs}  micro-batch {len(losses)}  {mean(losses[-2000:])}",
                        flush=True,
                    )
                if len(losses) == (args.max_steps or 0) * args.accumulate:
                    break
        training_seconds += time.perf_counter() - epoch_started

        # 5. Evaluation.
        validation = evaluate(net, test_set, rank, world_size, device)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  loss {validation['loss']:.4f}  ", end="")
            print(f"accuracy {validation['accuracy']:.4f}", flush=True)
        if waiting.stops(validation["loss"]) or len(losses) == (args.max_steps or 0) * args.accumulate:
            break

    if rank == 0:
        steps = len(losses) // args.accumulate
        images = sum(sampler.step_sizes) * steps / len(sampler.step_sizes)
        summary = {
            "steps": steps,
            "epochs": epoch + 1,
            "world_size": world_size,
            "zero_stage": 0,
            "dtype": str(DTYPES.get(args.amp, torch.float32)).removeprefix("torch."),
            "seconds": time.perf_counter() - started,
            "images_per_second": images / max(training_seconds, 1e-9),
            "validation": validation,
            "weights_sha256": weights.sha256(weights.of_module(plain)),
            "checkpoint": None,
        }
        save(args, plain, torch.stack(losses).view(-1, args.accumulate).mean(1).tolist(), summary)


def start(args: argparse.Namespace) -> tuple[int, int, torch.device]:
    """Joins the processes that torchrun started, and gives this one's rank, their number and its device.

    Raises:
        InvalidInput: if an option cannot be meant, or the batch does not divide among the processes.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    parts = world_size * args.accumulate
    for option, (holds, must) in OPTIONS.items():
        value = getattr(args, option)
        if value is not None and not holds(value):
            raise InvalidInput(f"--{option.replace('_', '-')}: {value}: {must}")
    if args.batch_size % parts:
        raise InvalidInput(
            f"--batch-size: {args.batch_size}: does not divide among {world_size} processes x {args.accumulate}"
            f" micro-batches; use a multiple of {parts}"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    if world_size > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device else "gloo")
    return rank, world_size, device or torch.device("cpu")


def own_folder(args: argparse.Namespace) -> None:
    """Makes the run's folder; raises ``InvalidInput`` where that cannot be, or where a run would be replaced."""
    args.output = args.output or f"runs/baseline-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    output = pathlib.Path(args.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        fault = run_fault(output, resumes=False)
    except OSError as error:
        raise InvalidInput(f"--output: {output}: cannot be made ({one_line(error)}); give another folder") from error
    if fault:
        raise InvalidInput(fault)


def make_optimizer(args: argparse.Namespace, net: nn.Module) -> optim.Optimizer:
    """SGD with momentum, or Adam."""
    if args.optimizer == "SGD":
        return optim.SGD(net.parameters(), lr=args.lr, momentum=args.momentum)
    return optim.Adam(net.parameters(), lr=args.lr)


def make_schedule(args: argparse.Namespace, optimizer: optim.Optimizer, epoch: int) -> optim.lr_scheduler.LRScheduler:
    """A learning rate that stays, falls to a tenth after each ``epoch`` steps, or falls along a cosine to 0."""
    if args.schedule == "step":
        return optim.lr_scheduler.StepLR(optimizer, step_size=epoch, gamma=0.1)
    if args.schedule == "cosine":
        return optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.max_steps or args.epochs * epoch)
    return optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def mean(losses: list[Tensor]) -> str:
    """The mean of the last losses, for a line of progress; waits for the device."""
    return f"loss {torch.stack(losses).mean().item():.4f}"


def autocast(args: argparse.Namespace, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Lets torch choose which operations of the forward pass run in 16 bits, if mixed precision is asked for."""
    return torch.autocast(device.type, dtype=DTYPES[args.amp]) if args.amp else contextlib.nullcontext()


def batches(
    source: data.ImageSet, sampler: loaders.MicroBatchSampler, rank: int, world_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches of one epoch, as the trial's ranks see them."""
    mine = [indices for i, indices in enumerate(sampler) if i % world_size == rank]
    for images, labels in DataLoader(loaders.Batches(source), batch_sampler=mine, collate_fn=loaders.as_fetched):
        yield data.as_inputs(images.to(device)), labels.to(device)


@torch.no_grad()
def evaluate(
    net: nn.Module, test_set: data.ImageSet, rank: int, world_size: int, device: torch.device
) -> dict[str, Any]:
    """Accuracy, loss and per-class accuracy over every test image, counted on all ranks."""
    net.eval()
    counts = ClassificationMetrics(test_set.classes)
    sampler = loaders.MicroBatchSampler(len(test_set), 256 * world_size, world_size)
    for inputs, labels in batches(test_set, sampler, rank, world_size, device):
        counts.update(net(inputs), labels)
    everyone: list[Any] = [counts.per_slot_reduce()] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(everyone, counts.per_slot_reduce())
    return summary_of(counts.cross_slot_reduce(everyone), test_set.classes)


def save(args: argparse.Namespace, net: nn.Module, losses: list[float], summary: dict[str, Any]) -> None:
    """Writes the run's folder as ``train.py`` does, and prints the accuracies."""
    output = pathlib.Path(args.output)
    torch.save(weights.of_module(net), output / "net.pt")
    entries = [{"group": "training", "steps_completed": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    (output / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for name, accuracy in summary["validation"]["per_class_accuracy"].items():
        print(f"  {name:<12} {accuracy:7.2%}")
    print(f"accuracy {summary['validation']['accuracy']:.4f}")


if __name__ == "__main__":
    sys.exit(main())
