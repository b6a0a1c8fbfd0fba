"""Trains a ``CIFARTrial``: on a Determined cluster, on GPUs, or on the CPU cores of this machine.

    one process:       python3 train.py --config const.yaml
    one host, N ranks: deepspeed --num_gpus N train.py --config distributed.yaml     (GPUs or CPU cores)
                       torchrun --nproc-per-node N train.py --config distributed.yaml
    a cluster:         det experiment create const.yaml .     (runs this file under determined.launch.deepspeed)

    another value:     --set data.dataset=digits --set hyperparameters.overwrite_deepspeed_args.optimizer.params.lr=0.01
    one batch:         --test
    look at steps:     --profile            (OUTPUT/profile.txt, and a trace in OUTPUT/tensorboard)
    only check:        --check [--slots N]     (prints the DeepSpeed configuration that would be used)

The run's folder (--output) holds summary.json, metrics.jsonl, the checkpoints, and net.pt: the trained weights as a
plain fp32 state_dict. A signal ends the run with a checkpoint; --resume latest --output FOLDER goes on from it.
Exit codes: 0 done, 2 bad configuration or data, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import experiment
from errors import InvalidInput, TrainingStopped, one_line

DEFAULT_CONFIG = "const.yaml"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=DEFAULT_CONFIG, metavar="FILE", help="experiment file (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides", help="replace it")
    parser.add_argument("--resume", metavar="latest|UUID", help="go on from a checkpoint of --output")
    parser.add_argument("--output", metavar="FOLDER", help="the run's folder (runs/<config>-<time>)")
    parser.add_argument("--test", action="store_true", help="train, validate and save one batch")
    parser.add_argument("--check", action="store_true", help="check, print the DeepSpeed configuration, train nothing")
    parser.add_argument("--profile", action="store_true", help="record a few steps with torch's profiler")
    parser.add_argument("--slots", type=int, metavar="N", help="with --check: for N processes")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # from the deepspeed launcher
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says and gives the exit code."""
    args = parse(argv)
    try:
        if args.check:
            return check(args)
        if args.slots is not None:
            raise InvalidInput(f"--slots: {args.slots}: goes with --check; torchrun or deepspeed starts the processes")
        return run(args)
    except InvalidInput as error:
        if int(os.environ.get("RANK", 0)) == 0:  # every rank finds the same faults
            for fault in error.faults:
                print(f"train.py: {fault}", file=sys.stderr)
        return 2
    except TrainingStopped as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"train.py: {one_line(error)}; make room, then --resume latest goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted; what was saved before is as it was", file=sys.stderr)
        return 130


def check(args: argparse.Namespace) -> int:
    """Checks the experiment file for a number of processes and prints the resolved DeepSpeed configuration."""
    if args.slots is not None and args.slots < 1:
        raise InvalidInput(f"--slots: {args.slots}: must be at least 1")
    loaded = experiment.load(args.config, args.overrides)
    print(json.dumps(resolved(loaded, args.slots or loaded.slots), indent=2))
    return 0


def resolved(loaded: experiment.Experiment, slots: int) -> dict[str, Any]:
    """The DeepSpeed configuration of an experiment for a number of processes.

    Raises:
        InvalidInput: with a line for each thing that is wrong with it, or if the data is not there.
    """
    import processes

    from data import DataConfig
    from engine_config import resolve
    from model_def import check_metrics, check_net, steps_of

    data_config, hparams = DataConfig.parse(loaded.config.get("data")), loaded.hyperparameters
    steps = steps_of(hparams["max_length"], data_config)
    config = resolve(hparams, slots, processes.device_type(), steps)
    check_metrics(loaded.config.get("searcher") or {}, hparams, data_config)
    check_net(hparams, data_config, max(2, config["train_micro_batch_size_per_gpu"]))  # an epoch's last may be smaller
    return config


def run(args: argparse.Namespace) -> int:
    """Trains, and off a cluster writes the summary and prints the accuracy."""
    profile = ["profiling.enabled=true"] if args.profile else []
    loaded = experiment.from_cluster() or experiment.load(args.config, [*args.overrides, *profile])
    import harness
    import memory
    from model_def import CIFARTrial

    if args.resume and not args.output:
        raise InvalidInput(f"--resume: {args.resume}: of which run? give its folder as --output")
    output = pathlib.Path(
        args.output or f"runs/{pathlib.Path(args.config).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    )
    if not experiment.on_cluster() and int(os.environ.get("RANK", 0)) == 0:
        for note in loaded.notes():
            print(f"train.py: note: {note}", file=sys.stderr)
    with harness.trial_context(loaded, output, bool(args.resume)) as context:
        checkpoint = harness.checkpoint_to_resume(context, args.resume)
        trial = CIFARTrial(context)
        started = time.perf_counter()
        controller = harness.fit(trial, context, loaded, checkpoint, args.test)
        if harness.stopped(context):
            if controller.local:
                print(f"stopped; go on with --resume latest --output {context.output}", file=sys.stderr)
            return 130
        # All wait for the chief's last pictures: Determined's launcher can take a rank that ends long before for dead.
        peaks = context.distributed.allgather(round(memory.peak(), 1))
        summary = summarize(trial, controller, time.perf_counter() - started)
        if controller.local:
            summary["peak_memory_mib"] = peaks  # of each rank
            (context.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            print(f"accuracy {summary['validation']['accuracy']:.4f}")
    return 0


def summarize(trial: Any, controller: Any, seconds: float) -> dict[str, Any]:
    """Writes ``net.pt`` and gives what ``summary.json`` says.

    Every rank has to call it, for the weights are gathered from all of them.
    """
    import net_file
    import weights
    from metrics import summary_of

    whole = weights.consolidate(trial.model_engine, trial.layer_names)
    if not controller.local:
        return {}
    steps = controller.state.batches_trained
    net_file.write(controller.context.output / "net.pt", whole, net_file.describe(trial, steps))
    return {
        "steps": steps,
        "epochs": controller.state.epochs_trained,
        "world_size": controller.context.distributed.size,
        "zero_stage": trial.model_engine.zero_optimization_stage(),
        "dtype": str(trial.dtype).removeprefix("torch."),
        "seconds": seconds,
        "images_per_second": trial.throughput.of_run(),
        "validation": summary_of(controller.local.validation, trial.train_set.classes),
        "weights_sha256": weights.sha256(whole),
        "checkpoint": controller.watch.checkpoint,
    }


if __name__ == "__main__":
    sys.exit(main())
