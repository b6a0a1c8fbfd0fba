"""Write the manifest of a training under Kubernetes: a Job, or a TrainJob of Kubeflow's Trainer v2.

    python3 -m workbench.kubernetes --config FILE --image IMAGE [--nodes N] [--claim NAME] > job.yaml
    kubectl apply -f job.yaml

The manifest contains the experiment file and the command, and lets Kubernetes replace lost pods. Several
pods need --claim: the PersistentVolumeClaim of a folder that they share. `checkpoint_storage` stores
checkpoints in S3 or GCS. Manual: docs/kubernetes.md. Exit codes: 0 done, 2 invalid value.

Sources: https://kubernetes.io/docs/concepts/workloads/controllers/job,
https://github.com/kubeflow/trainer/tree/master/manifests/base/crds
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from classify.config import command_line, experiment_file
from deepspeed_trial import redaction
from deepspeed_trial.errors import ErrorList, InvalidInput, print_errors
from deepspeed_trial.experiment import Experiment

KINDS = ("job", "trainjob")
SHARED, FILES = "/mnt/shared", "/mnt/experiment"  # the claim's and the experiment file's folders in a pod
PORT = 29400  # the port of the first pod at which the pods meet
GRACE = 120  # seconds for a checkpoint after a SIGTERM
RESTARTS = 5  # Determined's default of max_restarts
# A pod that joins later gets no address of torchrun's shared store: RendezvousStoreInfo of torch 2.14
_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE - 10)}
_ENVIRONMENT = [{"name": name, "value": value} for name, value in _VARIABLES.items()]
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")  # leaves room for the suffixes of pods


@dataclass(frozen=True)
class Request:
    """A training under Kubernetes.

    Attributes:
        name: the name of the Kubernetes objects.
        image: the container image with the project in ``workdir``, and its packages.
        workdir: the working directory of the command.
        config: the experiment configuration.
        nodes: the minimum and maximum number of pods.
        processes: the number of processes in each pod.
        restarts: the maximum number of restarts.
        claim: the PersistentVolumeClaim of the shared folder; if empty, the folder is deleted with the pod.
        secret: the Secret with environment variables; empty for none.
        on_cpu: whether a process gets a core instead of a GPU.
    """

    name: str
    image: str
    workdir: str
    config: Mapping[str, Any]
    nodes: tuple[int, int]
    processes: int
    restarts: int
    claim: str
    secret: str
    on_cpu: bool

    @property
    def program(self) -> list[str]:
        """The command that trains, without the launcher."""
        output = f"{SHARED}/runs/{self.name}"
        return ["train.py", "--config", f"{FILES}/experiment.yaml", "--output", output, "--resume", "auto"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line.parser(__doc__, "const.yaml")
    add = parser.add_argument
    add("--kind", choices=KINDS, default="job", help="(default: %(default)s)")
    add("--name", help="name of the Kubernetes objects (default: the experiment's name)")
    add("--image", required=True, help="container image with the project and its packages")
    add(
        "--workdir",
        default="/workspace",
        metavar="FOLDER",
        help="folder of the project in the image (default: %(default)s)",
    )
    add(
        "--nodes",
        default="1",
        metavar="N|MIN:MAX",
        help="number of pods; MIN:MAX: at least MIN train if pods are lost (default: %(default)s)",
    )
    add("--claim", default="", metavar="NAME", help=f"PersistentVolumeClaim, mounted at {SHARED}")
    add("--secret", default="", metavar="NAME", help="Secret with credentials as environment variables")
    add("--cpu", action="store_true", help="give each process a core instead of a GPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the manifest; return the exit code."""
    args = parse(argv)
    try:
        experiment = experiment_file.load(args.config, args.overrides)
        request = request_of(args, experiment)
    except InvalidInput as error:
        return print_errors("kubernetes", error)
    if not (request.claim or experiment.config.get("checkpoint_storage")):
        lost = "Kubernetes deletes the checkpoints with the pod; give --claim NAME, or set checkpoint_storage"
        print(f"kubernetes: note: {lost}", file=sys.stderr)
    objects = {"job": job, "trainjob": train_job}[args.kind](request)
    yaml = YAML()
    yaml.dump_all([config_map(request), *objects], sys.stdout)
    return 0


def request_of(args: argparse.Namespace, experiment: Experiment) -> Request:
    """Check the options and the experiment, and return the training to describe in a manifest.

    Raises:
        InvalidInput: with a line for each wrong value.
    """
    errors, slots = ErrorList(), experiment.slots
    name = args.name or re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-")
    if not _NAME.fullmatch(name):
        what = "must be at most 52 lower-case letters, digits and hyphens, and begin with a letter"
        errors.lines.append(f"--name: {name!r}: {what}; give another --name")
    found = re.fullmatch(r"(?:(\d{1,4}):)?(\d{1,4})", args.nodes)
    least, most = (int(found[1] or found[2]), int(found[2])) if found else (0, 0)
    if not 1 <= least <= most:
        errors.lines.append(f"--nodes: {args.nodes!r}: must be N or MIN:MAX, each at least 1")
    elif slots % most:
        what = f"resources.slots_per_trial is {slots}, not a multiple of {most}"
        errors.lines.append(f"--nodes: {args.nodes}: {what}; change one of the two")
    if args.kind == "trainjob" and least < most:
        what = "a TrainJob has a fixed number of pods"
        errors.lines.append(f"--nodes: {args.nodes}: {what}; give --nodes {most}, or --kind job")
    if most > 1 and not args.claim:
        what = f"{most} pods need a folder that all share"
        errors.lines.append(f"--claim: {args.claim!r}: {what}; give a claim with access mode ReadWriteMany")
    for path in _credentials(experiment.config):
        what = "may be a credential, which the manifest would show"
        remedy = "remove this key, and give the credential by --secret NAME"
        errors.lines.append(f"{path}: {redaction.MARK}: {what}; {remedy}")
    restarts = experiment.config.get("max_restarts")
    restarts = RESTARTS if restarts is None else restarts
    if type(restarts) is not int or restarts < 0:
        errors.lines.append(f"max_restarts: {restarts!r}: must be a whole number of at least 0")
    errors.raise_any()
    return Request(
        name=name,
        image=args.image,
        workdir=args.workdir,
        config=experiment.config,
        nodes=(least, most),
        processes=slots // most,
        restarts=restarts,
        claim=args.claim,
        secret=args.secret,
        on_cpu=args.cpu,
    )


def _credentials(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of values that ``redaction.values`` hides."""
    if not isinstance(value, Mapping):
        if redaction.values(value) != value:
            yield path
        return
    for key, shown in redaction.values(value).items():
        inner = f"{path}.{key}".removeprefix(".")
        if shown == redaction.MARK:
            yield inner
        else:
            yield from _credentials(value[key], inner)


def config_map(request: Request) -> dict[str, Any]:
    """Return the object with the experiment file."""
    yaml, text = YAML(), io.StringIO()
    yaml.dump(json.loads(json.dumps(request.config)), text)
    data = {"experiment.yaml": LiteralScalarString(text.getvalue())}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": request.name}, "data": data}


def job(request: Request) -> list[dict[str, Any]]:
    """Return an indexed Job, and a Service that gives the other pods the first pod's address.

    A pod that Kubernetes evicts does not count as a restart. Exit code 2 (bad input) ends the Job.
    """
    name, most = request.name, request.nodes[1]
    container = {**_container(request), "command": _command(request, f"{name}-0.{name}"), "env": _ENVIRONMENT}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": most,
        "parallelism": most,
        "backoffLimit": request.restarts * most,
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {"spec": {"subdomain": name, **_pod(request, container)}},
    }
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec},
    ]


def train_job(request: Request) -> list[dict[str, Any]]:
    """Return a TrainJob and its TrainingRuntime."""
    name, version = request.name, "trainer.kubeflow.org/v1alpha1"
    container = _container(request)
    resources = container.pop("resources")
    of_pods = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {
            "backoffLimit": request.restarts * request.nodes[1],
            "template": {"spec": _pod(request, container)},
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": request.nodes[1], "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": of_pods}]}},
    }
    trainer = {
        "image": request.image,
        "numNodes": request.nodes[1],
        "numProcPerNode": request.processes,
        "resourcesPerNode": resources,
        "command": _command(request, f"{name}-node-0-0.{name}"),
        "env": _ENVIRONMENT,
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    labels = {"trainer.kubeflow.org/framework": "torch"}
    return [
        {
            "apiVersion": version,
            "kind": "TrainingRuntime",
            "metadata": {"name": name, "labels": labels},
            "spec": runtime,
        },
        {
            "apiVersion": version,
            "kind": "TrainJob",
            "metadata": {"name": name},
            "spec": {"runtimeRef": reference, "trainer": trainer},
        },
    ]


def _command(request: Request, first: str) -> list[str]:
    """Return the command of a pod; ``first`` is the host name of the first pod, where all pods meet."""
    least, most = request.nodes
    if most == request.processes == 1:
        return ["python3", *request.program]
    processes = ["--nproc-per-node", str(request.processes)]
    if most == 1:
        return ["torchrun", "--standalone", *processes, *request.program]
    nodes = str(most) if least == most else f"{least}:{most}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", request.name]
    restarts = ["--max-restarts", str(request.restarts)]
    return ["torchrun", "--nnodes", nodes, *processes, *restarts, *meeting, *request.program]


def _container(request: Request) -> dict[str, Any]:
    mounts = {"shared": SHARED, "experiment": FILES, "memory": "/dev/shm"}
    amount = {"cpu" if request.on_cpu else "nvidia.com/gpu": str(request.processes)}
    secret = [{"secretRef": {"name": request.secret}}] if request.secret else []
    return {
        "name": "node",
        "image": request.image,
        "workingDir": request.workdir,
        "resources": {"requests" if request.on_cpu else "limits": amount},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
        **({"envFrom": secret} if secret else {}),
    }


def _pod(request: Request, container: Mapping[str, Any]) -> dict[str, Any]:
    shared = {"persistentVolumeClaim": {"claimName": request.claim}} if request.claim else {"emptyDir": {}}
    volumes = [
        {"name": "shared", **shared},
        {"name": "experiment", "configMap": {"name": request.name}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # shared memory for the data loader's workers
    ]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "containers": [dict(container)],
        "volumes": volumes,
    }


if __name__ == "__main__":
    sys.exit(main())
