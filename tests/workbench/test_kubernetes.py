"""Manifests for Kubernetes: their content, refusals, and pods played by processes in network namespaces."""

import contextlib
import os
import pathlib
import re
import sys
import time

import psutil
import pytest
from hosts import CHIEF, SHORT, THIRD, _place, joined_namespaces, processes_on, wait_for_step
from matrix import DEEPSPEED
from ruamel.yaml import YAML
from support import PROJECT, Run, environment, overrides, time_limit, train_many

from workbench import kubernetes

IMAGE = ["--image", "me/project"]
TWO_PODS = ["--nodes", "2", "--claim", "shared"]


def manifest(capsys, *arguments):
    """The objects by kind."""
    assert kubernetes.main([*IMAGE, *arguments]) == 0
    return {each["kind"]: each for each in YAML(typ="safe").load_all(capsys.readouterr().out)}


def pod_of(found):
    if "Job" in found:
        return found["Job"]["spec"]["template"]["spec"]
    (node,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("kind", kubernetes.KINDS)
def test_a_manifest_has_the_experiment_and_all_that_its_pods_need(kind, capsys):
    sets = overrides(resources__slots_per_trial=8, max_restarts=3, data__dataset="digits")
    found = manifest(capsys, "--config", "const.yaml", "--kind", kind, *TWO_PODS, "--secret", "keys", *sets)
    assert {each["metadata"]["name"] for each in found.values()} == {"cifar10-deepspeed"}
    config = YAML(typ="safe").load(found["ConfigMap"]["data"]["experiment.yaml"])
    assert config["data"]["dataset"] == "digits" and config["max_restarts"] == 3
    pod = pod_of(found)
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    if kind == "job":
        spec, command = found["Job"]["spec"], container["command"]
        assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (2, 2, 6)
        assert command[command.index("--nproc-per-node") + 1] == "4"
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
        assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    else:
        trainer = found["TrainJob"]["spec"]["trainer"]
        command = trainer["command"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
        assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
        assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]
    output = command[command.index("--output") + 1]
    assert output.startswith(f"{mounts['shared']}/") and command[-2:] == ["--resume", "auto"]


def test_a_note_tells_that_checkpoints_end_with_the_pod(capsys):
    storage = ["--set", "checkpoint_storage={type: s3, bucket: b}"]
    for options, noted in (([], True), (["--claim", "c"], False), (storage, False)):
        assert kubernetes.main(["--image", "i", "--cpu", *options]) == 0
        assert ("deletes the checkpoints" in capsys.readouterr().err) == noted


def test_the_image_copies_files_that_exist():
    text = (PROJECT / "examples/kubernetes.Dockerfile").read_text()
    for line in re.findall("^COPY (.*) .*$", text, re.MULTILINE):
        assert all(any(PROJECT.glob(source)) for source in line.split())


@pytest.mark.parametrize(
    "slots, options, launcher",
    [
        (1, [], ["python3"]),
        (4, [], ["torchrun", "--standalone", "--nproc-per-node", "4"]),
        (4, ["--nodes", "1:2", "--claim", "c"], ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "2"]),
    ],
)
def test_the_launcher_fits_the_processes_and_the_pods(slots, options, launcher, capsys):
    found = manifest(capsys, "--cpu", *options, *overrides(resources__slots_per_trial=slots))
    (container,) = pod_of(found)["containers"]
    assert container["command"][: len(launcher)] == launcher
    assert container["command"][container["command"].index("train.py") :][:2] == ["train.py", "--config"]
    assert container["resources"] == {"requests": {"cpu": str(slots // (2 if options else 1))}}


SECRETS = "{type: s3, bucket: b, access_key: planted_, secret_key: planted_}"
REFUSED = {
    "name": (["--name", "My_Run"], ["--name: 'My_Run': must be"]),
    "nodes": (["--nodes", "0"], ["--nodes: '0': must be N or MIN:MAX"]),
    "no division": (
        ["--nodes", "3", "--claim", "c"],
        ["--nodes: 3: resources.slots_per_trial is 1, not a multiple of 3"],
    ),
    "no claim": (["--nodes", "2"], ["--claim: '': 2 pods need a folder that all share"]),
    "elastic": (["--nodes", "1:1", "--kind", "trainjob", "--set", "max_restarts=-1"], ["max_restarts: -1"]),
    "a fixed number": (["--nodes", "1:2", "--kind", "trainjob"], ["a TrainJob has a fixed number of pods"]),
    "credentials": (
        ["--set", f"checkpoint_storage={SECRETS}", "--set", "data.root=https://me:planted_@host/a"],
        [
            "checkpoint_storage.access_key: ***: may be",
            "checkpoint_storage.secret_key: ***",
            "data.root: ***",
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_in_one_line_each(name, capsys):
    arguments, said = REFUSED[name]
    assert kubernetes.main([*IMAGE, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and all(line in err for line in said) and "planted_" not in err, err


# ------------------------------------------------------------------------------------------- pods, played

# In the pod's network, with its name, its entries of the cluster's DNS, and its volumes
ENTER = """hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /mnt && mkdir /mnt/shared /mnt/experiment &&
mount --bind "$2" /mnt/shared && mount --bind "$3" /mnt/experiment && shift 3 && exec "$@" """


class Pods:
    """The pods of a manifest; one that fails is replaced, as Kubernetes does."""

    def __init__(self, folder: pathlib.Path, found, addresses):
        self.folder, self.addresses, self.failed = folder, addresses, 0
        self.variables: dict[str, str] = {}  # of Kubeflow
        self.running: dict[int, psutil.Popen] = {}
        name = found["ConfigMap"]["metadata"]["name"]
        (container,) = pod_of(found)["containers"]
        if "Job" in found:
            self.limit, self.command = found["Job"]["spec"]["backoffLimit"], container["command"]
            self.names = [f"{name}-{index}" for index in range(len(addresses))]
            variables = container["env"]
        else:
            trainer = found["TrainJob"]["spec"]["trainer"]
            (node,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
            self.limit, self.command = node["template"]["spec"]["backoffLimit"], trainer["command"]
            self.names = [f"{name}-node-0-{index}" for index in range(len(addresses))]
            variables = trainer["env"]
            self.variables = {
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_MASTER_ADDR": f"{self.names[0]}.{name}",
                "PET_MASTER_PORT": "29500",
            }
        self.variables |= {each["name"]: each["value"] for each in variables}
        lines = [f"{each} {pod}.{name} {pod}" for each, pod in zip(addresses, self.names, strict=True)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for each in "shared", "experiment":
            (folder / each).mkdir()
        (folder / "experiment/experiment.yaml").write_text(found["ConfigMap"]["data"]["experiment.yaml"])
        self.output = folder / "shared/runs" / name

    def start(self, index):
        network, _ = _place(self.addresses[index])
        places = [str(self.folder / each) for each in ("hosts", "shared", "experiment")]
        words = ["nsenter", f"--net={network}", "unshare", "--uts", "--mount", "sh", "-c", ENTER]
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        env = environment(**self.variables, PET_NODE_RANK=str(index), PATH=path, DS_ACCELERATOR="cpu")
        if "PET_NNODES" not in env:
            del env["PET_NODE_RANK"]
        with open(self.folder / f"{index}.log", "a") as log:
            command = [*words, self.names[index], *places, *self.command]
            self.running[index] = psutil.Popen(command, cwd=PROJECT, env=env, stdout=log, stderr=log)

    def kill(self, index):
        for pid in processes_on(self.addresses[index]):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()

    def play(self):
        """Until each pod has ended well."""
        deadline, ended = time.monotonic() + 2 * time_limit(), set[int]()
        while len(ended) < len(self.addresses):
            for index, process in self.running.items():
                code = process.poll()
                if code == 0:
                    ended.add(index)
                elif code is not None:
                    self.failed += 1
                    self.start(index)
                    break
            log = (self.folder / "0.log").read_text() + (self.folder / "1.log").read_text()
            assert self.failed <= self.limit and time.monotonic() < deadline, log[-9000:]
            time.sleep(0.05)


@pytest.fixture
def pods(tmp_path):
    made: list[Pods] = []

    def start(found, addresses):
        made.append(Pods(tmp_path, found, addresses))
        for index in range(len(addresses)):
            made[0].start(index)
        return made[0]

    with joined_namespaces(CHIEF, THIRD):
        yield start
        for each in made:
            for index in range(len(each.addresses)):
                each.kill(index)
            for process in each.running.values():
                process.wait()


@pytest.mark.soak
@pytest.mark.parametrize("kind", kubernetes.KINDS)
def test_a_killed_pod_s_training_continues_to_the_same_bits(kind, pods, tmp_path, capsys):
    row = ["--config", "experiments/zero2.yaml", *SHORT, *overrides(**{f"{DEEPSPEED}train_batch_size": 32})]
    row += overrides(min_checkpoint_period="{batches: 10}", resources__slots_per_trial=2, max_restarts=4)
    straight = train_many(tmp_path / "one", {"straight": row}, 2)["straight"]
    assert straight.code == 0, straight.stderr
    found = manifest(capsys, *row, "--kind", kind, "--cpu", *TWO_PODS)
    played = pods(found, [CHIEF, THIRD])
    wait_for_step(15, played.output, list(played.running.values()))
    played.kill(1)
    played.play()
    done = Run(0, "", "", played.output)
    assert played.failed == 1 and done.summary["steps"] == 40 and done.summary["world_size"] == 2
    assert done.summary["weights_sha256"] == straight.summary["weights_sha256"]
