"""One interface for the services of a local run and of a Determined cluster."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

import determined as det
from determined import core, tensorboard
from determined.common import util
from determined.common.api import authentication, certs
from typing_extensions import override

from deepspeed_trial.cluster import SINGLE, cluster_info
from deepspeed_trial.events import Code
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local import metrics_log
from deepspeed_trial.local.progress import LocalMetrics, Progress
from deepspeed_trial.stops import Signals, Vote

TO_THE_END = (SINGLE, "random", "grid")  # searchers that stop no trial
RECORDED_WITHIN = 10.0  # seconds that the master may take to record a validation

logger = logging.getLogger("deepspeed_trial")


class Services:
    """Metrics, checkpoints, stops and progress of a training.

    ``core`` has the interface of Determined's Core API, on a cluster and locally; the methods add the rest.

    Args:
        core_context: context of the Core API, for reports and checkpoints.
        experiment: the experiment's configuration.

    Attributes:
        trial_id: the trial's number in its checkpoints.
        vote: the ranks' agreement on the last step.
        progress: shows the training, on the chief of a local run.
    """

    trial_id = 0

    def __init__(self, core_context: core.Context, experiment: Experiment) -> None:
        self.core, self.experiment = core_context, experiment
        self.is_chief = core_context.distributed.rank == 0
        self.vote, self.progress = Vote(core_context.distributed), Progress()

    def is_asked_to_stop(self) -> bool:
        """Return whether this rank received a signal, or the chief a request from the master."""
        raise NotImplementedError

    def copy_code(self, code: Code, path: pathlib.Path) -> None:
        """Copy the trial's code into a checkpoint's folder, on the chief."""
        raise NotImplementedError

    def is_last(self, step: int, meets: bool) -> bool:
        """Return whether all ranks stop after this step; see ``Vote.is_last``."""
        if self.is_asked_to_stop():
            self.vote.ask()
        return self.vote.is_last(step, meets)

    def stoppable(self) -> contextlib.AbstractContextManager[None]:
        """During the block, a stop request ends the training after the current step."""
        return contextlib.nullcontext()

    def last_validation(self) -> int | None:
        """Return the step of the last validation before this process started; None without one.

        Every rank calls it.
        """
        return None

    def has_search_stopped(self, steps: int) -> bool:
        """Return whether the search has stopped this trial after the validation at ``steps`` steps.

        Every rank calls it.
        """
        return False

    def upload_tensorboard(self) -> None:
        """Upload TensorBoard's files."""

    def metrics(self) -> list[dict[str, Any]] | None:
        """Return the run's reports from before this process started; None if unknown."""
        return None

    def best_checkpoint(self) -> tuple[str, int] | None:
        """Return the UUID and step of the best checkpoint by ``searcher.metric``; None if not known."""
        return None

    def keep_profile(self, table: str) -> None:
        """Store the profile of a few steps."""


class LocalServices(Services):
    """Services of this machine: a folder for checkpoints and metrics, a terminal, and signals.

    Args:
        core_context: context of the Core API, for reports and checkpoints.
        experiment: the experiment's configuration.
        output: the run's folder; None neither writes nor shows metrics.
    """

    def __init__(
        self, core_context: core.Context, experiment: Experiment, output: pathlib.Path | None = None
    ) -> None:
        super().__init__(core_context, experiment)
        self.output, self.signals = output, Signals(self.is_chief)
        if self.is_chief and isinstance(core_context.train, LocalMetrics):
            self.progress = core_context.train

    @override
    def is_asked_to_stop(self) -> bool:
        return self.signals.requested

    @override
    def stoppable(self) -> contextlib.AbstractContextManager[None]:
        return self.signals.gracefully() if self.output else contextlib.nullcontext()

    @override
    def copy_code(self, code: Code, path: pathlib.Path) -> None:
        """Copy the code without runs, dangling links, and the paths in ``.detignore`` and ``excluded``."""
        excluded = {folder.resolve() for folder in code.excluded}
        by_detignore = det.util.detignore.make_shutil_ignore(code.folder)

        def ignored(folder: str, names: list[str]) -> set[str]:
            paths = {name: pathlib.Path(folder, name) for name in names}
            more = {name for name, file in paths.items() if file.resolve() in excluded or not _is_code(file)}
            return more.union(by_detignore(folder, names))

        shutil.copytree(code.folder, path / "code", ignore=ignored)

    @override
    def metrics(self) -> list[dict[str, Any]] | None:
        return metrics_log.read(self.output) if self.output else None

    @override
    def best_checkpoint(self) -> tuple[str, int] | None:
        checkpoints: Any = self.core.checkpoint
        names = checkpoints.best() if self.is_chief else []
        return (names[0], checkpoints.get_metadata(names[0])["steps_completed"]) if names else None

    @override
    def keep_profile(self, table: str) -> None:
        if self.output:
            (self.output / "profile.txt").write_text(table)


class ClusterServices(Services):
    """Services of a Determined cluster: its master and its checkpoint storage."""

    def __init__(self, core_context: core.Context, experiment: Experiment) -> None:
        super().__init__(core_context, experiment)
        info = cluster_info()
        self.trial_id = info.trial.trial_id
        master = authentication.login_from_task(info.master_url, certs.default_load(info.master_url))
        self._master = master.with_retry(util.get_max_retries_config())
        self.is_preempted = False

    @override
    def is_asked_to_stop(self) -> bool:
        if self.is_chief and not self.is_preempted:
            self.is_preempted = self.core.preempt.should_preempt()
        return self.is_preempted

    @override
    def copy_code(self, code: Code, path: pathlib.Path) -> None:
        det.util.write_user_code(path, True)  # the cluster has made a clean copy of the code

    @override
    def last_validation(self) -> int | None:
        step: int | None = self._validated(self._trial()) if self.is_chief else None
        step = self.core.distributed.broadcast(step)
        return step

    @override
    def has_search_stopped(self, steps: int) -> bool:
        if self.experiment.searcher in TO_THE_END:
            return False
        is_stopped = self.is_chief and self._is_marked(steps)
        return bool(self.core.distributed.broadcast(is_stopped))

    @override
    def upload_tensorboard(self) -> None:
        self.core.train.upload_tensorboard_files(
            (lambda _: True) if self.is_chief else (lambda path: not path.match("*tfevents*")),
            tensorboard.util.get_rank_aware_path,
        )

    def _is_marked(self, steps: int) -> bool:
        """Ask the master, after it has recorded a validation, whether it has marked this trial as stopped.

        Determined 0.38 marks a trial that its search stops, but does not notify the container.
        """
        deadline = time.monotonic() + RECORDED_WITHIN
        try:
            while time.monotonic() < deadline:
                trial = self._trial()
                if "STOPPING" in trial["state"]:
                    logger.info(f"the search has stopped this trial after step {steps}: {trial['state']}")
                    return True
                if (self._validated(trial) or 0) >= steps:
                    return False  # the master marks a trial before it records the validation
                time.sleep(0.1)
        except Exception:  # a master that does not answer ends no training, as in Determined's own watcher
            logger.warning("cannot ask the master whether the search has stopped this trial", exc_info=True)
        return False

    def _trial(self) -> dict[str, Any]:
        return dict(self._master.get(f"/api/v1/trials/{self.trial_id}").json()["trial"])

    def _validated(self, trial: Mapping[str, Any]) -> int | None:
        steps = (trial.get("latestValidation") or {}).get("totalBatches")
        return None if steps is None else int(steps)


def _is_code(path: pathlib.Path) -> bool:
    is_run = (path / "run.json").exists()
    return path.is_file() or (path.is_dir() and not is_run)
