"""Train a ``CIFARTrial``: on a Determined cluster, on GPUs, or on the CPU cores of this machine.

    one process:       python3 train.py --config const.yaml
    one host, N ranks: deepspeed --num_gpus N train.py --config distributed.yaml     (GPUs or CPU cores)
                       torchrun --nproc-per-node N train.py --config distributed.yaml
    a cluster:         det experiment create const.yaml .                            (runs this file there)

    another value:     --set data.dataset=digits
                       --set hyperparameters.overwrite_deepspeed_args.optimizer.params.lr=0.01
    one batch:         --test
    cross-validation:  --folds K [--slots N]   (scores, mean and spread: OUTPUT/folds.csv and folds.html)
    find the fastest:  --tune [--slots N]      (ZeRO stages, micro-batches: OUTPUT/tuned.yaml)
    learning rate:     --find-lr               (a short ramp of the learning rate: OUTPUT/found-lr.yaml)
    look at steps:     --profile               (OUTPUT/profile.txt, and a trace for TensorBoard)
    short forms:       --epochs 20 --lr 0.001 --batch-size 64 --net resnet18
    only check:        --check [--slots N]     (prints the resulting DeepSpeed configuration)
                       --check images          (opens every image, too)
    every key:         --keys                  (docs/reference.md; --keys json: a JSON Schema for an editor)

The run's folder (--output) holds summary.json, metrics.jsonl, the checkpoints, and net.pt: the trained
weights as a plain fp32 state_dict. After a signal the run saves a checkpoint and stops; --resume latest
--output FOLDER continues it. Exit codes: 0 done, 2 bad configuration or data, 130 interrupted, 1 anything
else.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from classify.config import command_line  # other imports follow the first printed line: torch takes seconds

if TYPE_CHECKING:
    from classify.engine.trial_config import TrialConfig
    from deepspeed_trial.experiment import Experiment
    from deepspeed_trial.trainer import FitResult
    from model_def import CIFARTrial


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    return parser().parse_args(argv)


def parser(config: str | None = "const.yaml", what: str = "experiment file") -> argparse.ArgumentParser:
    """Return the parser of all options; ``command_line.parser`` describes the arguments."""
    parser = command_line.parser(__doc__, config, what)
    add = parser.add_argument
    command_line.add_short_forms(parser)
    add(
        "--resume",
        metavar="latest|auto|UUID",
        help="continue the run in --output; auto: start a run if there is none",
    )
    add(
        "--output",
        type=command_line.folder,
        metavar="FOLDER",
        help="run's folder (default: a new one in runs/)",
    )
    add("--test", action="store_true", help="train on one batch, validate on one, save a checkpoint")
    meaning = "check, print the DeepSpeed configuration, train nothing; images: open every image, too"
    add("--check", nargs="?", const="settings", choices=("settings", "images"), help=meaning)
    forms = ("text", "markdown", "json")
    add("--keys", nargs="?", const="text", choices=forms, help="print every key of an experiment file")
    add("--profile", action="store_true", help="record a few steps with torch's profiler")
    add(
        "--tune",
        action="store_true",
        help="find the fastest ZeRO stage and micro-batch, and write a file with them",
    )
    add(
        "--find-lr",
        action="store_true",
        help="train briefly at rising learning rates, and write a file with a good rate",
    )
    add(
        "--folds",
        type=int,
        metavar="K",
        help="cross-validate: split the images into K folds, train K times without one",
    )
    add("--slots", type=int, metavar="N", help="the number of processes for --check, --tune or --folds")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return start(parse(argv))


@command_line.as_program("train", "interrupted; earlier checkpoints are unchanged")
def start(args: argparse.Namespace) -> int:
    """Do what parsed arguments say; return the exit code."""
    if args.keys:
        return print_keys(args.keys)
    if errors := errors_in(args):
        from deepspeed_trial.errors import InvalidInput

        raise InvalidInput(errors)
    if not args.check and (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
        print("starting: importing torch, DeepSpeed and Determined", flush=True)
    with command_line.importing():
        from deepspeed_trial.meeting import check_ranks
        from deepspeed_trial.out_of_memory import explain_out_of_memory

    check_ranks()
    advice = "use a smaller network or data.image_size"
    with explain_out_of_memory(lambda: "outside of training", lambda: advice):
        if args.folds is not None:
            return cross_validate(args)
        does = check if args.check else tune if args.tune else find_lr if args.find_lr else run
        return does(args)


def errors_in(args: argparse.Namespace) -> list[str]:
    """Return a line for each option that no training can use, before any slow import."""
    errors = command_line.errors_in(args)
    for option in ("resume", "test", "tune", "find_lr", "profile", "check"):
        if args.folds is not None and getattr(args, option):
            what = (
                "with the same --output, --folds continues" if option == "resume" else "give one of the two"
            )
            shown = option.replace("_", "-")
            errors.append(f"--folds: {args.folds}: does not work with --{shown}; {what}")
    if args.slots is not None and not (args.check or args.tune or args.folds):
        remedy = "is for --check, --tune and --folds; torchrun or deepspeed starts the processes"
        errors.append(f"--slots: {args.slots}: {remedy}")
    if args.resume and not args.output and not args.folds:
        errors.append(f"--resume: {args.resume}: needs --output, the folder of the run")
    return errors


def say(line: str) -> None:
    """Print a line on stderr, after the name of the program."""
    print(f"{command_line.called('train')}: {line}", file=sys.stderr)


def print_keys(form: str) -> int:
    """Print the reference of all keys as text, Markdown or a JSON Schema; return the exit code."""
    from classify.config import experiment_fields, reference
    from classify.config.hyperparameters import Hyperparameters
    from classify.images.settings import DataSettings

    sections = {"hyperparameters.": Hyperparameters.keys(), "data.": DataSettings.keys()}
    sections |= {f"{name}.": keys for name, keys in experiment_fields.SECTIONS.items()}
    print(reference.FORMS[form]({"": experiment_fields.FIELDS, **sections}))
    return 0


def load(args: argparse.Namespace) -> Experiment:
    """Read the experiment file, and report the errors of all its sections."""
    from classify.config import experiment_fields, experiment_file
    from deepspeed_trial.errors import InvalidInput, add_new

    profile = ["profiling.enabled=true"] if args.profile else []
    config = experiment_file.read(
        args.config,
        [*args.overrides, *profile],
        lambda hyperparameters: command_line.short_overrides(args, hyperparameters),
    )
    if args.check:
        print_notes(experiment_fields.cluster_notes(config))
    try:
        return experiment_fields.check(config)
    except InvalidInput as error:
        from classify.engine.trial_config import section_errors  # takes seconds

        hparams = config.get("hyperparameters")
        if not isinstance(hparams, dict):
            raise
        experiment_fields.take_constants("hyperparameters", hparams, search=False)
        raise InvalidInput(add_new(error.errors, section_errors(hparams, config))) from None


def check(args: argparse.Namespace) -> int:
    """Check the experiment file for a number of processes, and print the DeepSpeed configuration."""
    from deepspeed_trial import redaction
    from deepspeed_trial.errors import printable

    experiment = load(args)
    with command_line.importing():  # after the check of the file: imports take seconds
        from classify.engine import memory
        from classify.engine.deepspeed_keys import MICRO_BATCH
        from classify.engine.trial_config import TrialConfig
        from classify.reports.overview import describe_images, describe_length, describe_passed_over
        from deepspeed_trial.machine import memory_limit
        from deepspeed_trial.processes import device_type

    slots = slots_of(args, experiment)
    config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, slots, device_type())
    if args.check == "images":
        config.source.check_images()
    print_notes(notes(experiment, config))
    if config.tries:
        chosen = "benchmarks choose it before the first step; the largest possible value is shown"
        print_notes([f"{MICRO_BATCH}: 'auto': {chosen}"])
    say(f"images {printable(describe_images(config))}")
    if passed_over := describe_passed_over(config.source.passed_over):
        say(f"files {passed_over}")
    if config.hyper.minutes:
        say(f"length {describe_length(config)}")
    for line in config.described_groups:
        say(f"parameters {printable(line)}")
    for line in memory.describe(config, memory_limit(slots, config.device)):
        say(f"memory {printable(line)}")
    print(json.dumps(redaction.values(config.deepspeed), indent=2))
    return 0


def slots_of(args: argparse.Namespace, experiment: Experiment) -> int:
    """Return the number of processes, from ``--slots`` or the experiment file."""
    return args.slots or experiment.slots


def tune(args: argparse.Namespace) -> int:
    """Benchmark configurations in new processes, and write the experiment file of the fastest one."""
    experiment = load(args)
    slots = slots_of(args, experiment)
    from deepspeed_trial.local.folder import default_output
    from model_def import CIFARTrial
    from workbench import tune

    tune.tune(CIFARTrial, experiment, slots, args.output or default_output(f"tune-{args.config}"))
    return 0


def find_lr(args: argparse.Namespace) -> int:
    """Train a ramp of the learning rate, and write an experiment file with one rate."""
    experiment = load(args)
    from deepspeed_trial.local.folder import default_output
    from model_def import CIFARTrial
    from workbench import find_lr

    find_lr.find_lr(CIFARTrial, experiment, args.output or default_output(f"lr-{args.config}"))
    return 0


def cross_validate(args: argparse.Namespace) -> int:
    """Train once for each fold, and print the mean and the spread of the folds' scores."""
    from deepspeed_trial.local.folder import default_output

    experiment = load(args)
    with command_line.importing():
        from workbench import folds

    output = args.output or default_output(args.config)
    folds.run(experiment, args.folds, slots_of(args, experiment), output)
    return 0


def notes(experiment: Experiment, config: TrialConfig) -> list[str]:
    """Return a line for each valid setting that may surprise a user."""
    steps = config.steps
    on_length = [] if steps is None else experiment.length_notes(steps, config.epoch_steps, config.batch)
    return [*experiment.notes(), *config.notes, *on_length]


def print_notes(lines: list[str]) -> None:
    """Print notes on stderr."""
    from deepspeed_trial.errors import printable

    for line in lines:
        say(f"note: {printable(line)}")


def run(args: argparse.Namespace) -> int:
    """Train, and write the summary of a local run; return the exit code."""
    from deepspeed_trial.cluster import cluster_experiment
    from deepspeed_trial.errors import printable
    from deepspeed_trial.local.folder import default_output

    experiment = cluster_experiment() or load(args)
    with command_line.importing():  # after the check of the file: imports take seconds
        import torch._dynamo  # noqa: F401 - torch's first optimizer would import it

        from classify.images.plan import UNREADABLE
        from classify.reports import summary
        from classify.tuning import micro_batch
        from deepspeed_trial.machine import peak_memory
        from deepspeed_trial.trainer import Trainer, find_checkpoint, init
        from model_def import CIFARTrial

    choice = micro_batch.choose(CIFARTrial, experiment, args.output if args.resume else None)
    with init(
        experiment.hyperparameters,
        experiment.config,
        output=args.output or default_output(args.config),
        resumes=None if args.resume == "auto" else bool(args.resume),
        writes=(*summary.RUN_FILES, micro_batch.FILE, UNREADABLE),
        enable_tensorboard_logging=False,  # the trial writes its reports
    ) as context:
        checkpoint = find_checkpoint(context, args.resume)
        if choice:
            choice.give(context)
        trial = CIFARTrial(context)
        announce(trial, experiment, checkpoint, args.test)
        # Train
        fit = Trainer(trial, context).fit(
            **experiment.fit_arguments(trial.model_engine.train_batch_size(), trial.config.steps),
            latest_checkpoint=checkpoint,
            test_mode=args.test,
        )
        is_chief, output = context.distributed.rank == 0, context.output
        if fit.interrupted:
            if is_chief:
                again = f"--resume latest --output {shlex.quote(printable(output))}"
                print(f"stopped with a checkpoint; continue with {again}", file=sys.stderr)
            return 130
        # Wait for the chief's last metrics: Determined's launcher treats a rank that has ended as dead
        peaks = context.distributed.allgather(round(peak_memory(), 1))
        if output:
            summarise(trial, fit, experiment.metric, peaks)
        elif context.tracking.names:
            # On a cluster the checkpoint has the network, and the master the metrics
            context.tracking.add_files(summary.network_file(trial.hooks.write_network, is_chief))
    return 0


def announce(trial: CIFARTrial, experiment: Experiment, checkpoint: str | None, is_test: bool) -> None:
    """Print the first lines and the notes of a run, and the list of unreadable images; all ranks call it."""
    from classify.images.plan import UNREADABLE
    from classify.reports import overview
    from deepspeed_trial.schedules import learning_rate

    context, config = trial.context, trial.config
    lines = overview.describe(config, trial.model_engine.module, context, checkpoint, is_test)
    if context.distributed.rank != 0:
        return
    print(*lines, sep="\n", flush=True)
    print_notes(notes(experiment, config))
    if context.output and (left_out := config.source.left_out):
        (context.output / UNREADABLE).write_text("".join(f"{line}\n" for line in left_out))
    if is_test and not learning_rate(trial.model_engine):
        print_notes(["--test: the schedule begins with a learning rate of 0; the step changes no weight"])


def summarise(trial: CIFARTrial, fit: FitResult, metric: str, peaks: list[float]) -> None:
    """Write the network and the summary into the run's folder, and print the scores; all ranks call this.

    Args:
        trial: the trained trial.
        fit: the result of ``Trainer.fit``.
        metric: the metric in the last printed line.
        peaks: peak memory of each rank in MiB.
    """
    from classify.models import state_dicts
    from classify.reports import summary, utilisation
    from deepspeed_trial.errors import printable
    from deepspeed_trial.local.folder import shown

    config, context, output = trial.config, trial.context, trial.context.output
    seconds = time.perf_counter() - trial.hooks.started
    weights = trial.hooks.write_network(output / "net.pt")
    rate = trial.throughput.of_run()
    used = utilisation.summary(config, rate, context.distributed, context.device)
    if context.distributed.rank != 0:
        return
    folder = printable(shown(output))
    print(f"done: {folder}; report: {command_line.typed('checkpoint', 'report', folder)}")
    values = {
        "steps": fit.steps,
        "epochs": fit.epochs,
        "world_size": context.distributed.size,
        "zero_stage": config.zero_stage,
        "dtype": str(config.dtype).removeprefix("torch."),
        "seconds": seconds,
        **({"budget": fit.budget} if fit.budget else {}),
        "images_per_second": rate,
        **used,
        "validation": summary.metrics_summary(fit.validation, config.source.classes),
        "chosen_on": config.source.chosen_on,
        **({"test": summary.metrics_summary(fit.test, config.source.classes)} if fit.test else {}),
        "weights_sha256": state_dicts.sha256(weights),
        "checkpoint": fit.checkpoint,
        "peak_memory_mib": peaks,
        "parameter_groups": config.described_groups,
    }
    summary.write(output, values, metric)
    if context.tracking.names:
        from workbench.reports import html_report  # not in the upload to a cluster

        context.tracking.add_files(html_report.tracked_files(output))


if __name__ == "__main__":
    sys.exit(main())
