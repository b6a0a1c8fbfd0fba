"""A Ray cluster that runs the trials of a search.

Each trial is an actor that starts ``train.py`` on a node of Ray's choice. Ray's documentation of actors:
https://docs.ray.io/en/latest/ray-core/actors.html
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from classify.config.rules import is_count
from deepspeed_trial.errors import InvalidInput, TrainingStopped, one_line, printable
from deepspeed_trial.local import metrics_log
from deepspeed_trial.stops import STOP_WITH_PID
from workbench.search.node import News, NodeProcess
from workbench.search.specification import Search
from workbench.search.trial_run import STDIN, TrialRun

ANSWER = 60  # seconds that a cluster has to answer
RESTARTS = 5  # Determined's default of max_restarts
OBJECTS = 80 * 2**20  # bytes of a local Ray's object store, about the smallest that Ray accepts
NONE_HERE = "Could not find any running Ray instance"  # Ray's message without a cluster on this machine


class RayCluster:
    """The Ray cluster at ``RAY_ADDRESS``, else the cluster of this machine, else a new cluster on it.

    A process of a trial takes a GPU if a node has GPUs, and ``OMP_NUM_THREADS`` CPUs (default 1).

    Args:
        search: the search whose trials run on the cluster.

    Attributes:
        device: ``cuda`` or ``cpu``, on which trials train.

    Raises:
        InvalidInput: if Ray is not installed or does not answer, or no node has room for a trial.
    """

    def __init__(self, search: Search) -> None:
        self.search, self.slots, config = search, search.experiment.slots, search.experiment.config
        restarts = config.get("max_restarts")
        self.restarts: int = RESTARTS if restarts is None else restarts
        if not is_count(self.restarts, 0):
            raise InvalidInput(f"max_restarts: {restarts!r}: must be a whole number of at least 0")
        self.storage = config.get("checkpoint_storage") or {}
        self.ray = _connected()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        self.threads = max(1, int(threads)) if threads.isdecimal() else 1
        kind = "GPU" if any("GPU" in node for node in self._nodes()) else "CPU"
        self.device = "cuda" if kind == "GPU" else "cpu"
        self.needs = {"CPU": self.slots * self.threads} | ({"GPU": self.slots} if kind == "GPU" else {})
        if not self._fits():
            most = max(int(node.get(kind, 0)) for node in self._nodes())
            self.close()
            remedy = f"Ray's largest node has {most} {kind}s, and a trial runs on one node; use fewer slots"
            threads = f" of {self.threads} threads" if self.threads > 1 else ""
            raise InvalidInput(f"resources.slots_per_trial: {self.slots}{threads}: {remedy}")

    @property
    def room(self) -> int:
        """The number of trials that fit on the living nodes, at most the search's limit."""
        return min(self.search.concurrent, max(1, self._fits()))

    def _nodes(self) -> list[dict[str, float]]:
        """Return the resources of each living node."""
        try:
            return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        except self.ray.exceptions.RayError as error:
            raise lost_cluster(error) from error

    def _fits(self) -> int:
        """Return the number of trials that the living nodes have resources for."""
        return sum(
            min(int(node.get(kind, 0) // count) for kind, count in self.needs.items())
            for node in self._nodes()
        )

    def start(
        self, folder: pathlib.Path, config: pathlib.Path, overrides: Sequence[str], whole: str
    ) -> TrialRun:
        """Start a trial; ``TrialRun`` describes the arguments."""
        run = RayRun(self, folder, config, overrides, whole)
        run.start({})
        return run

    def close(self) -> None:
        """Leave the cluster, and end it if it started here."""
        self.ray.shutdown()


class RayRun(TrialRun):
    """A trial on a node of Ray's choice. A trial that loses its node resumes on another node.

    ``TrialRun`` describes the other arguments.

    Args:
        cluster: the cluster that runs the trial.
    """

    def __init__(
        self,
        cluster: RayCluster,
        folder: pathlib.Path,
        config: pathlib.Path,
        overrides: Sequence[str],
        whole: str,
    ) -> None:
        super().__init__(folder, STDIN, overrides, cluster.slots, whole or config.read_text())
        self.cluster, self.ray, self.shared = cluster, cluster.ray, config
        self.news = News("", None, {})
        self.texts: dict[str, str] = {}
        self.losses = 0
        self.is_placed = self.is_stopping = False
        self.actor: Any = None
        self.look: Any = None  # the pending answer; None after the end

    def start(self, environment: dict[str, str]) -> None:
        """Start the trial or resume it from its last checkpoint; do nothing if it has finished."""
        resumes = self.folder.is_dir()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.summary:
            self._submit(resumes)

    def _submit(self, resumes: bool) -> None:
        """Let Ray start the trial on a node that has room."""
        files = [self.folder / name for name in (metrics_log.FILE, "summary.json")]
        arguments = [*self.arguments(), *(["--resume", "auto"] if resumes else [])]
        environment = {"OMP_NUM_THREADS": str(self.cluster.threads)}
        if self.cluster.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        needs = self.cluster.needs
        actor = self.ray.remote(NodeProcess).options(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))
        self.actor = actor.remote(os.getcwd(), self.folder, files, self.log)
        shared = None if self.cluster.storage else self.shared
        self.look = self.actor.start.remote(arguments, self.whole, environment, shared, STOP_WITH_PID)
        self.is_placed = False

    @property
    def has_ended(self) -> bool:
        """Whether the trial's processes have ended, by the latest report of the node.

        Raises:
            InvalidInput: if the node cannot run the trial.
        """
        if self.look is not None and self.ray.wait([self.look], timeout=0)[0]:
            self._take()
        return self.look is None

    def _take(self) -> None:
        """Take the pending answer of the node, and ask for the next one unless the process has ended."""
        errors = self.ray.exceptions
        try:
            news = self.ray.get(self.look)
        except errors.RayTaskError as error:
            raise self._refused(one_line(error.cause)) from error
        except errors.RayActorError as error:
            if error.actor_init_failed:
                raise self._refused(str(error).strip().splitlines()[-1]) from error
            return self._resume_elsewhere()
        except errors.RayError as error:
            raise lost_cluster(error) from error
        self.is_placed, self.news = True, news
        self.texts |= news.texts
        self.look = self.actor.look.remote() if self.news.code is None else None
        if self.look is None:
            self.actor = None  # the end of the actor frees the node's resources

    def _refused(self, reason: str) -> InvalidInput:
        remedy = "the project and the environment need the same path on each node"
        return InvalidInput(f"--on: ray: no node can start trial {int(self.folder.name)}: {reason}; {remedy}")

    def _resume_elsewhere(self) -> None:
        self.losses += 1
        if self.is_stopping or self.losses > self.cluster.restarts:
            self.look = self.actor = None
            return
        node = printable(self.news.node or "a node")
        print(
            f"search.py: note: trial {int(self.folder.name)}: lost {node}; resumes on another node",
            file=sys.stderr,
        )
        self._submit(True)

    def stop(self) -> None:
        """Ask the trial to save a checkpoint and end."""
        if self.look is None or self.is_stopping:
            return
        self.is_stopping = True
        if self.is_placed:
            self.actor.stop.remote()
        else:  # the trial waits for a node
            self.kill()

    def kill(self) -> None:
        """Kill all processes of the trial."""
        if self.look is not None:
            if self.is_placed:
                with contextlib.suppress(self.ray.exceptions.RayError):
                    self.ray.get(self.actor.kill.remote(), timeout=5)
            self.ray.kill(self.actor)
            self.look = self.actor = None

    def read(self, file: pathlib.Path) -> str:
        """Return the text of one of the trial's files, as the node has sent it."""
        return self.texts[str(file)] if str(file) in self.texts else super().read(file)

    @property
    def exit_code(self) -> int:
        """The exit code of the trial's process after its end; negative after a signal."""
        return self.news.code or 0

    def failure(self) -> tuple[str, str]:
        """Return the outcome of a trial without a summary, ``invalid`` or ``failed``, and the reason."""
        if self.losses > self.cluster.restarts:
            return "failed", f"lost its node {self.losses} times; max_restarts is {self.cluster.restarts}"
        return super().failure()


def lost_cluster(error: Exception) -> TrainingStopped:
    """Return the error of a cluster that no longer answers."""
    return TrainingStopped(
        f"Ray's cluster is lost ({one_line(error)}); the same command continues the search"
    )


def _connected() -> Any:
    """Connect to the cluster, or start a new cluster, which listens only on the loopback interface.

    Raises:
        InvalidInput: if Ray is not installed or the cluster does not answer.
    """
    if importlib.util.find_spec("ray") is None:
        raise InvalidInput("--on: ray: needs the package ray; pip install ray")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    given = os.environ.get("RAY_ADDRESS")
    address = given or ("auto" if _answers("auto") else "local")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the address of this node is 127.0.0.1
        options |= {"include_dashboard": False, "object_store_memory": OBJECTS}
    elif given and not _answers(given):
        raise InvalidInput(f"RAY_ADDRESS: {address}: no Ray cluster runs here; start one: ray start --head")
    import ray
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None  # Ray prints lost nodes despite log_to_driver
    ray.init(address=address, **options)
    return ray


def _answers(address: str) -> bool:
    """Try to connect in another process: Ray's client prints lines and may end its process.

    Returns:
        Whether there is a cluster. The answer is False only for ``auto``, if this machine is in no cluster.

    Raises:
        InvalidInput: if the cluster does not answer.
    """
    name = f"RAY_ADDRESS: {address}"
    remedy = "give the HOST:PORT of `ray start --head` and its RAY_AUTH_MODE, or `local` for a new cluster"
    if address.startswith("ray://"):
        raise InvalidInput(f"{name}: is for Ray's remote client; {remedy}")
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), 10).close()
        code = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
        command = [sys.executable, "-c", code, address]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{name}: no Ray cluster answers ({one_line(error)}); {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise InvalidInput(f"{name}: no Ray cluster answered within {ANSWER} seconds; {remedy}") from error
    last = (tried.stderr.strip().splitlines() or [""])[-1]
    if tried.returncode and NONE_HERE not in last:
        raise InvalidInput(f"{name}: no Ray cluster answers ({last}); {remedy}")
    return not tried.returncode
