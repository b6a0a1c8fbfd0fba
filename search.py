"""Run the search of an experiment file on this machine, as a cluster would, with Optuna.

    on this machine:   python3 search.py --config experiments/search-asha.yaml
    on a cluster:      det experiment create experiments/search-asha.yaml .

    several trials:    --parallel N                    (at a time)
    on a Ray cluster:  --on ray                        (RAY_ADDRESS names it; pip install ray)
    another value:     --set data.dataset=digits --set searcher.max_trials=12
    to continue:       the same command with the same --output
    an HTML page:      python3 checkpoint.py report OUTPUT     (also during the search)
    plots:             optuna-dashboard sqlite:///OUTPUT/search.db  (pip install optuna-dashboard)
    guided by results: --set searcher.name=tpe                 (only on this machine)

Every trial is a run of train.py in its own processes, in OUTPUT/trials/NUMBER. OUTPUT also holds search.db
(the state) and trials.csv (a row for each trial). After a signal the trials save checkpoints and stop. Exit
codes: 0 done, 2 bad configuration, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from classify.config import command_line
from classify.images.plan import DataPlan
from deepspeed_trial.errors import InvalidInput, TrainingStopped, one_line, printable
from deepspeed_trial.local.folder import default_output, locked_folder
from workbench.search import specification
from workbench.search.ray_cluster import RayCluster
from workbench.search.results import quiet_optuna
from workbench.search.runner import SearchRunner
from workbench.search.trial_run import ThisMachine


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line.parser(__doc__, "experiments/search-asha.yaml")
    parser.add_argument(
        "--output",
        type=command_line.folder,
        metavar="FOLDER",
        help="the search's folder (default: runs/<config>-<time>)",
    )
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="trials at a time (default: 1; with --on ray: all that fit)"
    )
    parser.add_argument("--on", choices=["ray"], help="run the trials on the nodes of a Ray cluster")
    return parser.parse_args(argv)


@command_line.as_program("search")
def main(argv: Sequence[str] | None = None) -> int:
    """Search; return the exit code."""
    args = parse(argv)
    output = args.output or default_output(args.config)
    quiet_optuna()
    if errors := command_line.errors_in(args):
        raise InvalidInput(errors)
    try:
        parallel = 1 if args.parallel is None and not args.on else args.parallel
        search = specification.load(args.config, args.overrides, parallel)
        assert search.data
        source = DataPlan.resolve(search.data)
        machine = RayCluster(search) if args.on else ThisMachine(search)
        with contextlib.closing(machine), locked_folder(output, "search"):
            runner = SearchRunner(search, output, source, machine)
            runner.refuse_if_all_invalid()
            for split in source.names:  # decode once for all trials
                source.load(split)
            return runner.run()
    except BrokenPipeError:
        raise  # of stdout: as_program ends the program
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        reason = one_line(getattr(error, "orig", None) or error)
        line = f"{output}: cannot store the state of the search ({reason}); repair the disk or the file"
        line += f", then continue with the same command and --output {output}"
        raise TrainingStopped(line) from error
    except KeyboardInterrupt:
        remedy = f"continue with the same command and --output {printable(output)}"
        raise KeyboardInterrupt(f"interrupted; {remedy}") from None


if __name__ == "__main__":
    sys.exit(main())
