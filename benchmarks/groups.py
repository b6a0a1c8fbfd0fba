"""How many learning rates slow a ZeRO step: as many parameter groups, each with a partition of its own.

    python3 -m benchmarks.groups                                       ViT and ResNet-18, 1 and 2 processes
    python3 -m benchmarks.groups --nets resnet18 --processes 2 --steps 40

Both engines take turns, step by step, so that what else the machine does touches them alike. The least
processor time of a step depends least on other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

NETS = {"vit_b_16": {"num_layers": 4, "num_heads": 4, "hidden_dim": 192, "mlp_dim": 768, "patch_size": 4}}
RATES, WARM_UP = 26, 4


def measure(net: str, batch: int, steps: int) -> dict[str, Any]:
    """Times steps of a rank's two engines; one process of several."""
    import deepspeed_trial  # noqa: F401 - before deepspeed

    # isort: split
    import deepspeed
    import torch

    from classify.models import registry
    from classify.models.registry import NetSpec
    from deepspeed_trial.patches.engine import patch_engine
    from deepspeed_trial.patches.process import prepare_process

    prepare_process()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    deepspeed.init_distributed("gloo", verbose=False)

    def engine_of(rates: int) -> Any:
        torch.manual_seed(0)
        made = registry.build(NetSpec(net, 10, (32, 32), NETS.get(net)))
        parameters = list(made.parameters())
        groups = [
            {"params": parameters[index::rates], "lr": 0.001 * (1 + index / rates)} for index in range(rates)
        ]
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "optimizer": {"type": "SGD", "params": {"lr": 0.001, "momentum": 0.9}},
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "timers": {"throughput": {"enabled": False}},
        }
        engine, *_ = deepspeed.initialize(model=made, model_parameters=groups, config=config)
        patch_engine(engine)
        return engine

    engines = {rates: engine_of(rates) for rates in (1, RATES)}
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    wall: dict[int, list[float]] = {rates: [] for rates in engines}
    processor: dict[int, list[float]] = {rates: [] for rates in engines}
    for _ in range(WARM_UP + steps):
        for rates, each in engines.items():
            torch.distributed.barrier()
            started, used = time.perf_counter(), time.process_time()
            each.backward(torch.nn.functional.cross_entropy(each(images), labels))
            each.step()
            processor[rates].append(time.process_time() - used)
            wall[rates].append(time.perf_counter() - started)
    return {
        name: {rates: values[WARM_UP:] for rates, values in times.items()}
        for name, times in (("wall", wall), ("processor", processor))
    }


def main() -> int:
    """Starts the ranks and prints a line for each network and number of processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", nargs="+", default=["vit_b_16", "resnet18"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", type=int, default=16, help="images of a process (16)")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if "RANK" in os.environ:
        # A single write, for both ranks have the pipe
        sys.stdout.write(json.dumps(measure(args.nets[0], args.batch, args.steps)) + "\n")
        return 0
    for net in args.nets:
        for processes in args.processes:
            launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
            own = ["-m", "benchmarks.groups", "--nets", net, f"--batch={args.batch}", f"--steps={args.steps}"]
            done = subprocess.run(
                [*launch, "--master-port=29877", *own], capture_output=True, text=True, check=True
            )
            ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            print(f"{net}, {processes} processes, {args.batch} images each: {compared(ranks)}", flush=True)
    return 0


def compared(ranks: list[dict[str, Any]]) -> str:
    """The ratio of many rates to one: by the median and the least of a rank's times, and its processor's."""
    one, many = (statistics.median(ranks[0]["wall"][rates]) for rates in ("1", str(RATES)))
    quickest = min(ranks[0]["wall"][str(RATES)]) / min(ranks[0]["wall"]["1"])
    used = [min(ranks[0]["processor"][rates]) for rates in ("1", str(RATES))]
    return (
        f"a step {1000 * one:.0f} ms with one rate, {1000 * many:.0f} with {RATES}: {many / one:.2f} times;"
        f" the quickest {quickest:.2f} times, processor time {used[1] / used[0]:.2f} times"
    )


if __name__ == "__main__":
    sys.exit(main())
