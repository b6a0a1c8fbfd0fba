"""Memory that runs out is explained, freed memory is kept, images may be larger than memory."""

import json
import resource
import sys

import numpy as np
import pytest
import torch
from modes import DEEPSPEED, FIXED, NET_STEPS, SMALL
from PIL import Image
from support import all_at_once, execute, launcher, overrides

from classify.engine import memory


@pytest.mark.parametrize(("decoded", "room"), [(True, 2**27), (False, 2**24)], ids=["step", "images"])
def test_no_memory_left_ends_with_what_to_change(tmp_path, decoded, room):
    """A limit on data that a step of a large micro-batch exceeds, or its images: the real allocator fails."""
    script = (
        "import resource, sys; import train; from harness.trainer import Trainer\n"
        "import sklearn.datasets, sklearn.model_selection\n"  # whose libraries would wait for memory for ever
        "fit = Trainer.fit\n"
        "def limited(trainer, *rest, **more):\n"
        f"    {decoded} and (trainer.trial.images.train, trainer.trial.images.test)\n"
        "    used = int(open('/proc/self/statm').read().split()[5]) * 4096\n"
        f"    resource.setrlimit(resource.RLIMIT_DATA, (used + {room}, -1))\n"
        "    return fit(trainer, *rest, **more)\n"
        "Trainer.fit = limited\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    command = [*launcher("python", 1), "-c", script, *FIXED, "--output", str(tmp_path / "run")]
    big = overrides(
        hyperparameters__net="resnet18", data__image_size=64, **{f"{DEEPSPEED}train_batch_size": 256}
    )
    run = execute([*command, *big], tmp_path / "run")
    assert run.code == 1, run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert f"no memory left {'in step 1' if decoded else 'before the first step'}" in last
    assert "train_micro_batch_size_per_gpu: 128 with gradient_accumulation_steps: 2" in last
    assert last.index("train_micro_batch") < last.index("checkpoint_activations")


def test_no_memory_for_the_engine_ends_with_what_to_change(tmp_path):
    script = (
        "import resource, sys; import train, model_def\n"
        "build = model_def.build_network\n"
        "def limited(*arguments):\n"
        "    net = build(*arguments)\n"
        "    used = int(open('/proc/self/statm').read().split()[5]) * 4096\n"
        "    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**27, -1))\n"  # alexnet's weights alone take 217 MiB
        "    return net\n"
        "model_def.build_network = limited\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    command = [*launcher("python", 1), "-c", script, *FIXED, "--output", str(tmp_path / "run")]
    large = {
        "hyperparameters__net": "alexnet",
        "data__image_size": 64,
        f"{DEEPSPEED}zero_optimization.stage": 2,
    }
    run = execute([*command, *overrides(**large)], tmp_path / "run")
    assert run.code == 1, run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert "no memory left before the first step" in last and "bf16.enabled: true (weights" in last
    assert "train_micro_batch" not in last  # of which no image has been seen


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_blocks_are_kept_for_the_next_step_or_returned():
    def page_errors(kept):
        memory.keep_freed_memory(kept)
        for _ in range(50):  # until all that the forked heap had free has been written to
            torch.ones(2**22)  # 16 MiB
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(2**22)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def compare():
        returned = page_errors(kept=False)  # first: what is kept once is used before more is asked for
        assert page_errors(kept=True) < returned / 10

    all_at_once(compare)


def test_images_larger_than_a_limit_of_memory_train_under_it(tmp_path):
    """Under a limit on the process's own memory of a quarter of the decoded images, which are mapped and not loaded."""
    script = (
        "import resource, sys; import train, harness, torch\n"
        "from model_def import CIFARTrial\n"
        "train_batch = CIFARTrial.train_batch\n"
        "def limited(self, iterator, epoch, step):\n"
        "    metrics = train_batch(self, iterator, epoch, step)\n"
        "    if step == 2:\n"
        "        used = int(open('/proc/self/statm').read().split()[5]) * 4096\n"
        "        room = self.images.train.images.nbytes // 4\n"
        "        resource.setrlimit(resource.RLIMIT_DATA, (used + room, -1))\n"
        "        try:\n"
        "            torch.ones(2 * room, dtype=torch.uint8)\n"
        "        except RuntimeError:\n"
        "            print('limited')\n"
        "    return metrics\n"
        "CIFARTrial.train_batch = limited\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    random = np.random.default_rng(0)
    for index in range(1500):
        folder = tmp_path / "data" / ("train" if index % 6 else "test") / str(index // 6 % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    chosen = overrides(
        data__dataset="imagefolder",
        data__root=tmp_path / "data",
        data__image_size=448,
        hyperparameters__net="vit_b_32",
        hyperparameters__net_args=json.dumps(SMALL),
        **{f"{DEEPSPEED}train_batch_size": 4},
    )
    command = [*launcher("python", 1), "-c", script, *FIXED, "--output", str(tmp_path / "run")]
    run = execute([*command, *chosen], tmp_path / "run")
    assert run.code == 0, run.stderr
    assert "limited" in run.stdout
    assert run.summary["steps"] == NET_STEPS
