"""Train a ``LineTrial``: ``python3 tests/line.py --form FORM --output FOLDER [--resume latest]``."""

import argparse
import hashlib
import json
import pathlib
import sys
from typing import Any

from determined import pytorch
from line_trial import LineTrial

from deepspeed_trial.trainer import Trainer, find_checkpoint, init

CONFIG = {"checkpoint_storage": {"save_trial_latest": 9}, "reproducibility": {"experiment_seed": 3}}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--form")
    parser.add_argument("--resume")
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args(argv)
    hparams: dict[str, Any] = {"form": args.form}
    if args.form == "zero2":
        hparams["deepspeed_config"] = {"zero_optimization": {"stage": 2}}
    with init(hparams, CONFIG, output=args.output, resumes=bool(args.resume)) as context:
        checkpoint = find_checkpoint(context, args.resume) if args.resume else None
        trial = LineTrial(context)
        fit = Trainer(trial, context).fit(
            pytorch.Batch(20),
            validation_period=pytorch.Batch(5),
            reporting_period=pytorch.Batch(1),
            latest_checkpoint=checkpoint,
        )
        if fit.interrupted:
            return 130
        if context.distributed.rank == 0:
            weights = b"".join(each.detach().cpu().numpy().tobytes() for each in trial.weights())
            summary = {
                "steps": fit.steps,
                "validation": fit.validation,
                "weights_sha256": hashlib.sha256(weights).hexdigest(),
                "places": trial.places,
            }
            (args.output / "summary.json").write_text(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
