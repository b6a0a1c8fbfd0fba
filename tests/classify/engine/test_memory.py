"""Errors without memory say what to change, freed memory is kept, images may be larger than memory."""

import json
import sys

import numpy as np
import pytest
import torch
from matrix import DEEPSPEED, VIT
from PIL import Image
from support import DIGITS, PROJECT, execute, overrides, run
from torch import nn

import checkpoint
import net as own
import train
from deepspeed_trial.out_of_memory import is_out_of_memory

# The limit is set late, inside a function of the program; the real allocator fails
LIMITED = """
import resource, sys, train, model_def, torch
from deepspeed_trial.trainer import Trainer

def limit(room):
    used = int(open("/proc/self/statm").read().split()[5]) * 4096
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, -1))

def fit_without_room_for_a_step(trainer, *rest, **more):
    trainer.trial.images.train, trainer.trial.images.test
    limit(2**25)
    return fit(trainer, *rest, **more)

def fit_without_room_for_images(trainer, *rest, **more):
    limit(2**24)
    return fit(trainer, *rest, **more)

def build_without_room(*arguments):
    net = build(*arguments)
    limit(2**27)
    return net

def build_in_no_room(*arguments):
    limit(2**26)
    return build(*arguments)

def train_without_room_for_images(trial, iterator, epoch, step):
    metrics = train_batch(trial, iterator, epoch, step)
    if step == 2:
        room = trial.images.train.images.nbytes // 2
        limit(room)
        try:
            torch.ones(2 * room, dtype=torch.uint8)
        except RuntimeError:
            print("limited")
    return metrics

fit, build, train_batch = Trainer.fit, model_def.build_network, model_def.CIFARTrial.train_batch
"""


def limited(change, output, **chosen):
    fixed = {
        "hyperparameters__max_length": "{batches: 4}",
        "scheduling_unit": 1,
        f"{DEEPSPEED}scheduler": "null",
        "data__image_size": 64,
        **chosen,
    }
    code = f"{LIMITED}\n{change}\nsys.exit(train.main(sys.argv[1:]))"
    return run(["-c", code, *DIGITS, *overrides(**fixed), "--output", str(output / "run")], output / "run")


def last_line(made):
    assert made.code == 1, made.stderr
    return made.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("what", ["a_step", "images"])
def test_no_memory_left_ends_with_what_to_change(tmp_path, what):
    big = {"hyperparameters__net": "resnet18", f"{DEEPSPEED}train_batch_size": 64}
    line = last_line(limited(f"Trainer.fit = fit_without_room_for_{what}", tmp_path, **big))
    assert f"no memory left {'in step 1' if what == 'a_step' else 'before the first step'}" in line
    assert "train_micro_batch_size_per_gpu: 32 with gradient_accumulation_steps: 2" in line
    assert line.index("train_micro_batch") < line.index("checkpoint_activations")


@pytest.mark.parametrize("build", ["build_in_no_room", "build_without_room"])
def test_no_memory_for_the_network_or_the_engine_ends_with_what_to_change(tmp_path, build):
    """The weights of alexnet alone take 217 MiB."""
    large = {"hyperparameters__net": "alexnet", f"{DEEPSPEED}zero_optimization__stage": 2}
    line = last_line(limited(f"model_def.build_network = {build}", tmp_path, **large))
    assert "no memory left before the first step" in line and "bf16.enabled: true (weights" in line
    assert "train_micro_batch" not in line  # the network has seen no image


class Large(nn.Module):
    """A network that asks for its values, which torch's meta device has not, and for 8 PiB."""

    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(3, classes)

    def forward(self, images):
        assert images.sum().item() < 1e9
        return torch.empty(2**51)


def test_no_memory_for_a_network_is_no_bad_hyperparameter(monkeypatch, capsys):
    monkeypatch.setitem(own.NETS, "large", Large)
    config = [*DIGITS, *overrides(hyperparameters__net="large")]
    assert train.main([*config, "--check"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "note:" not in line]
    assert line.startswith("train.py: no memory left outside of training (DefaultCPUAllocator: can't")


def test_no_memory_for_an_exported_network_is_one_line(runs, monkeypatch, capsys, image_folder):
    net = runs.straight("zero0", 1).output / "net.pt"
    monkeypatch.setitem(own.NETS, "net", lambda classes: torch.empty(2**51))
    assert checkpoint.main(["predict", str(net), str(image_folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("checkpoint.py: no memory left in predict (") and "more memory" in line


def test_an_older_torch_has_no_name_for_the_error_of_a_gpu(monkeypatch):
    monkeypatch.delattr(torch, "OutOfMemoryError", raising=False)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(ValueError("out of memory"))


FREED = """
import resource, torch
from classify.engine import memory
def page_errors(kept, size):
    memory.keep_freed_memory(kept)
    for _ in range(50):
        torch.ones(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for size in (2**22, 2**24):  # 16 MiB, and more than glibc's limit of 32 MiB
    returned = page_errors(False, size)  # first: the allocator reuses kept blocks
    assert page_errors(True, size) < returned / 10, size
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_blocks_are_kept_for_the_next_step_or_returned(tmp_path):
    done = execute([sys.executable, "-c", FREED], tmp_path, PYTHONPATH=str(PROJECT))
    assert done.code == 0, done.stderr


def test_images_larger_than_a_limit_of_memory_train_under_it(tmp_path):
    """Under a limit of half of the decoded images, which are mapped and not loaded."""
    random = np.random.default_rng(0)
    for index in range(300):
        folder = tmp_path / "data" / ("train" if index % 6 else "test") / str(index // 6 % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    made = limited(
        "model_def.CIFARTrial.train_batch = train_without_room_for_images",
        tmp_path,
        data__dataset="imagefolder",
        data__root=tmp_path / "data",
        data__image_size=448,
        hyperparameters__net="vit_b_32",
        hyperparameters__net_args=json.dumps(VIT),
        **{f"{DEEPSPEED}train_batch_size": 4},
    )
    assert made.code == 0, made.stderr
    assert "limited" in made.stdout
    assert made.summary["steps"] == 4
