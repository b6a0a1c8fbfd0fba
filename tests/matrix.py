"""The matrix: every mode, network and feature as a row, and the runs of a row that tests look at.

A new mode is a row of ``ROWS``. Each row is trained straight through, stopped by a SIGTERM and resumed, in one
process and in two; ``test_matrix.py`` asserts of all rows what every training promises.
"""

import json
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from folders import save
from PIL import Image
from ruamel.yaml import YAML
from sklearn.datasets import load_digits
from support import LATEST, PROJECT, Run, overrides, run

import shards
from classify.models import net_file
from net import Net

DEEPSPEED = "hyperparameters__overwrite_deepspeed_args__"
BATCH, EPOCH = (
    288,
    5,
)  # images a step, steps an epoch: the last one has 285, which no number of ranks divides evenly
STEPS, STOP = 8, 4  # a run's length, and the step of the SIGTERM


@dataclass(frozen=True)
class Row:
    """A training.

    Attributes:
        arguments: of the program; ``{photos}``, ``{shards}``, ``{table}``, ``{weights}``, ``{others}``, ``{teacher}``
            stand for files.
        ranks: the numbers of processes that can run it; 1 is a process without a launcher.
        like: a row with the same losses within ``tolerance``.
        tolerance: relative; the losses differ by rounding.
        onward: rows, with ranks, that continue the row's stopped run of two ranks.
        resumed_with: further arguments of the resumed run, which change nothing.
        of_ranks: the losses depend on the number of ranks, beyond rounding: each rank draws numbers (the gate's
            noise, the shares of mixed images) or normalizes its micro-batches.
        program: what trains.
        stage: of ZeRO.
        dtype: of the engine.
        soak: whether only `make soak` trains it.
    """

    arguments: tuple[str, ...]
    ranks: tuple[int, ...] = (1, 2)
    steps: int = STEPS
    stop: int = STOP
    like: str = ""
    tolerance: float = 1e-5
    onward: tuple[tuple[str, int], ...] = ()
    resumed_with: tuple[str, ...] = ()
    of_ranks: bool = False
    program: str = "train.py"
    stage: int = 0
    dtype: str = "float32"
    soak: bool = False


def row(config: str, stage: int | None = None, *, steps: int = STEPS, stop: int = STOP, **values: Any) -> Row:
    """A short training on the digits; ``values`` are fields of the experiment file, DeepSpeed's begin with ``ds_``."""
    chosen: dict[str, Any] = {
        "data__dataset": "digits",
        "scheduling_unit": 1,
        "min_validation_period": "{epochs: 1}",
        "hyperparameters__max_length": f"{{batches: {steps}}}",
        f"{DEEPSPEED}train_batch_size": BATCH,
        f"{DEEPSPEED}optimizer__params__lr": 0.001,
        f"{DEEPSPEED}scheduler__params__warmup_num_steps": 4,
    }
    if stage is not None:
        chosen[f"{DEEPSPEED}zero_optimization__stage"] = stage
    fields = {"ranks", "like", "tolerance", "onward", "resumed_with", "of_ranks", "soak"} & values.keys()
    of_row = {name: values.pop(name) for name in fields}
    for name, value in values.items():
        path = f"{DEEPSPEED}{name[3:]}" if name.startswith("ds_") else name
        if "__" not in path and path not in (
            "data",
            "searcher",
            "min_checkpoint_period",
            "checkpoint_policy",
        ):
            path = f"hyperparameters__{path}"
        chosen = {key: kept for key, kept in chosen.items() if not key.startswith(f"{path}__")}
        chosen[path] = json.dumps(value) if isinstance(value, (dict, list)) else value
    file = YAML(typ="safe").load((PROJECT / f"experiments/{config}.yaml").read_text())
    deepspeed = file["hyperparameters"]["overwrite_deepspeed_args"]
    of_row["stage"] = deepspeed.get("zero_optimization", {}).get("stage", 0) if stage is None else stage
    of_row["dtype"] = "bfloat16" if "bf16" in deepspeed else "float16" if "fp16" in deepspeed else "float32"
    arguments = ("--config", f"experiments/{config}.yaml", *overrides(**chosen))
    return Row(arguments, steps=steps, stop=stop, **of_row)


# ------------------------------------------------------------------------------------------------------ the table

SGD: Any = {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}}
ADAMW: Any = {"type": "AdamW", "params": {"lr": 0.0005, "amsgrad": True}}
MUON: Any = {
    "type": "Muon",
    "params": {"lr": 0.02, "adam_lr": 0.002, "momentum": 0.9, "weight_decay": 0.01, "eps": 1e-8},
}
# The loss scale doubles after every two steps, so before and after the stop
RISING_SCALE: Any = {"ds_fp16__loss_scale_window": 2}
LINE: Any = {"type": "LinearLR", "params": {"start_factor": 1, "end_factor": 0}}
CYCLE: Any = {"type": "OneCycleLR", "params": {"cycle_momentum": True, "pct_start": 0.4}}
VIT: Any = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
TIMM_VIT: Any = {"depth": 2, "embed_dim": 64, "num_heads": 4}
SMALL_VIT: Any = {
    "net": "timm/vit_tiny_patch16_224",
    "net_args": TIMM_VIT,
    "data": {"dataset": "digits", "normalize": "weights"},
}
COMPILED: Any = {"compile": True, "tolerance": 1e-4, "soak": True}
# Learning rate, decay and frozen weights by name
GROUPS: dict[str, Any] = {
    "ds_optimizer": {**SGD, "params": {**SGD["params"], "lr": 0.05}},
    "ds_scheduler": LINE,
    "ds_gradient_clipping": 0.2,
    "weight_decay_on": "weights",
    "parameter_groups": [
        {"match": "bias", "lr_factor": 3, "weight_decay": 0.1},
        {"match": r"^conv1\.weight", "frozen": True},
    ],
}
HEAD: Any = {**GROUPS, "parameter_groups": [], "head_only": {"batches": 5}, "layer_decay": 0.5}
FROM_FILE: Any = {
    "weights": "{weights}",
    "resumed_with": tuple(overrides(hyperparameters__weights="{others}")),
}
MUON_VIT: Any = {
    "net": "vit_b_16",
    "net_args": VIT,
    "ds_optimizer": MUON,
    "ds_scheduler": LINE,
    "ds_gradient_clipping": 0,
    "weight_decay_on": "weights",
    "parameter_groups": [
        {"match": r"conv_proj\.weight", "lr_factor": 0.5},
        {"match": "in_proj_weight", "muon": False},
    ],
}
TEACHER: Any = {
    "net": {"name": "net", "num_classes": 10},
    "classes": [str(digit) for digit in range(10)],
    "input": {"height": 32, "width": 32, "resize": [32, 32], "mean": [0.4] * 3, "std": [0.6] * 3},
    "dtype": "float32",
    "provenance": {"steps": 1},
}
AUTOCAST: Any = {"ds_torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
# The network and the images of the CIFAR-10 recipes
AIRBENCH: dict[str, Any] = {
    "data": {
        "dataset": "digits",
        "image_size": 24,
        "normalize": "dataset",
        "augment": {"crop": 2, "edge": "reflection", "flip": "alternating"},
    },
    "net_args": {"width": 4, "eps": 1e-3, "bf16_whitening": True},  # the digits are grey
    "progressive_resizing": {"scale": 0.75, "until": 0.7},
    "ds_torch_autocast": "null",
    "ds_scheduler": LINE,
    "ds_optimizer__params__lr": 0.05,
}
# Of a network that takes longer: small batches, few steps
NETWORK: dict[str, Any] = {"ds_train_batch_size": 32, "ds_scheduler": "null", "steps": 4, "stop": 2}
AUGMENT: Any = {
    "dataset": "digits",
    "augment": {"flip": True, "crop": 4, "cutout": 8, "transforms": ["TrivialAugmentWide"]},
}
PHOTOS: Any = {
    "dataset": "imagefolder",
    "root": "{photos}",
    "image_size": 32,
    "validation": 0.2,
    "sampling": "balanced",
}
FOLDER: Any = {
    "dataset": "imagefolder",
    "root": "{photos}",
    "image_size": 32,
    "augment": {"flip": True},
    "decode": "once",
}
LABELLED: Any = {
    "dataset": "table",
    "root": "{table}",
    "image_size": 32,
    "several_labels": ";",
    "validation": 0.2,
}
CACHE: Any = {"folder": "{cache}"}
STREAMED: Any = {**FOLDER, "dataset": "webdataset", "root": "{shards}", "decode": "stream", "cache": CACHE}
PHOTO_ROW: dict[str, Any] = {"ds_train_batch_size": 48, "ds_scheduler": "null", "steps": 8}

ROWS: dict[str, Row] = {
    # Every ZeRO stage, as Adam trains by it
    "zero0": row("digits", 0),
    "zero1": row("zero1", like="zero0", onward=(("zero3", 1),)),
    "zero2": row("zero2", like="zero0", onward=(("zero0", 3),)),
    "zero3": row("zero3", like="zero0", onward=(("zero1", 2), ("round robin", 2))),
    "round robin": row(
        "digits",
        2,
        ds_zero_optimization__round_robin_gradients=True,
        like="zero0",
        ranks=(2,),
        onward=(("zero0", 1),),
    ),
    # Every other file of experiments/
    "bf16": row("bf16", onward=(("bf16 zero3", 2),)),
    "bf16 zero3": row("bf16", 3),
    "fp16": row("fp16", **RISING_SCALE, onward=(("fp16 zero2", 1),)),
    "fp16 zero2": row("fp16", 2, **RISING_SCALE, onward=(("fp16", 2),)),
    "accumulate": row("accumulate", like="zero0", onward=(("zero0", 1),)),
    "accumulate zero2": row("accumulate", 2, like="zero0"),
    "offload": row("offload", like="zero0", onward=(("zero2", 2),)),
    "moe": row("moe", of_ranks=True, onward=(("experts", 2),)),
    "moe-residual": row("moe-residual", of_ranks=True),
    "experts": row("moe", 2, ep_world_size=2, ranks=(2,), onward=(("moe", 1),)),
    "pipeline": row("pipeline", like="zero0", ranks=(2,), onward=(("zero2", 1),)),
    "pipeline zero0": row("pipeline", 0, like="zero0", ranks=(2,), onward=(("pipeline of layers", 2),)),
    "pipeline of layers": row("pipeline", partition_method="uniform", like="zero0", ranks=(2,)),
    # Optimizers and schedules
    "sgd": row("digits", 0, ds_optimizer=SGD, ds_scheduler="null", onward=(("sgd zero3", 2),)),
    "sgd zero3": row("digits", 3, ds_optimizer=SGD, ds_scheduler="null", like="sgd", onward=(("sgd", 1),)),
    "adamw": row("digits", 0, ds_optimizer=ADAMW, ranks=(1,)),
    "adamw zero1": row("digits", 1, ds_optimizer=ADAMW, like="adamw", onward=(("adamw", 1),)),
    "one cycle": row("digits", 1, ds_scheduler=CYCLE),
    "muon": row("digits", 0, **MUON_VIT, tolerance=1e-4, onward=(("muon", 1), ("muon zero2", 2))),
    "muon zero1": row("digits", 1, **MUON_VIT, like="muon", tolerance=1e-4, ranks=(2,)),
    "muon zero2": row("digits", 2, **MUON_VIT, like="muon", tolerance=1e-4, onward=(("muon zero3", 1),)),
    "muon zero3": row("digits", 3, **MUON_VIT, like="muon", tolerance=1e-4, ranks=(2,)),
    "muon accumulate": row(
        "digits", 2, **MUON_VIT, ds_gradient_accumulation_steps=4, like="muon", tolerance=1e-4, ranks=(1,)
    ),
    # Parameter groups
    "groups": row("digits", 0, **GROUPS, **FROM_FILE, onward=(("groups zero3", 2),)),
    "groups zero1": row("digits", 1, **GROUPS, **FROM_FILE, like="groups", ranks=(2,)),
    "groups zero2": row("digits", 2, **GROUPS, **FROM_FILE, like="groups", onward=(("groups", 1),)),
    "groups zero3": row("digits", 3, **GROUPS, **FROM_FILE, like="groups", onward=(("groups zero2", 1),)),
    "groups bf16": row("bf16", 3, **GROUPS, **FROM_FILE, ranks=(2,)),
    "groups moe": row("moe", 2, of_ranks=True, **GROUPS),
    "groups pipeline": row("pipeline", 1, **GROUPS, **FROM_FILE, like="groups", ranks=(2,)),
    "head": row("digits", 0, **HEAD, **FROM_FILE),
    "head zero2": row("digits", 2, **HEAD, **FROM_FILE, like="head", ranks=(2,)),
    "head zero3": row("digits", 3, **HEAD, **FROM_FILE, like="head"),
    "head bf16": row("bf16", 1, **HEAD, **FROM_FILE, ranks=(1,)),
    "head moe": row("moe", 2, **HEAD, ranks=(2,)),
    "head pipeline": row("pipeline", 1, **HEAD, **FROM_FILE, like="head", ranks=(2,)),
    # Averages of the weights
    "average": row("digits", 0, weight_average={"decay": 0.3}, like="zero0", ranks=(1,)),
    "average zero2": row("digits", 2, weight_average={"decay": 0.3}, like="zero0", onward=(("average", 1),)),
    "average zero3": row("digits", 3, weight_average={"decay": 0.6, "every": 2}, like="zero0"),
    "average round robin": row(
        "digits",
        2,
        ds_zero_optimization__round_robin_gradients=True,
        weight_average={"decay": 0.3},
        like="zero0",
        ranks=(2,),
    ),
    "average bf16": row("bf16", weight_average={"decay": 0.6, "every": 2}, like="bf16", ranks=(2,)),
    "average offload": row("offload", weight_average={"decay": 0.6, "every": 2}, like="zero0", ranks=(1,)),
    "average experts": row(
        "moe", 2, ep_world_size=2, weight_average={"decay": 0.3}, like="experts", ranks=(2,)
    ),
    "average pipeline": row("pipeline", weight_average={"decay": 0.6, "every": 2}, like="zero0", ranks=(2,)),
    "average of some steps": row(
        "fp16",
        ds_fp16__initial_scale_power=21,
        ds_fp16__hysteresis=1,
        weight_average={"decay": 0.3},
        ranks=(1,),
    ),
    "lookahead": row("fp16", weight_average={"decay": 0.5, "every": 2, "lookahead": True}, ranks=(1,)),
    "lookahead zero3": row(
        "digits", 3, weight_average={"decay": 0.9, "every": 3, "lookahead": True, "rising": True}, ranks=(2,)
    ),
    # Losses, mixed and changed images, images of files and shards
    "mixup": row("digits", 1, of_ranks=True, mixup=0.2, cutmix=1, label_smoothing=0.1),
    "focal": row("digits", 0, loss={"focal": {"gamma": 1}}, class_weights="balanced", mixup=0.2, ranks=(1,)),
    "bce": row("digits", 2, loss="bce", ranks=(2,)),
    "teacher": row("digits", 0, teacher="{teacher}", onward=(("teacher zero3", 2),)),
    "teacher zero3": row("digits", 3, teacher="{teacher}", like="teacher", ranks=(2,)),
    "augment": row(
        "digits", 0, data=AUGMENT, resumed_with=tuple(overrides(data__workers=0)), ds_train_batch_size=96
    ),
    "photos": row(
        "digits",
        2,
        **PHOTO_ROW,
        data={**PHOTOS, "fit": "pad", "unreadable": "skip", "group": "([0-9])[.]png"},
        early_stopping={"patience": 9},
        test_time_augmentation={"mirror": True},
        weight_average={"decay": 0.9},
        searcher={"name": "single", "metric": "macro_recall", "smaller_is_better": False},
    ),
    "folder": row("digits", 0, **PHOTO_ROW, data=FOLDER, ranks=(1,)),
    "shards": row("digits", 0, **PHOTO_ROW, data=STREAMED, like="folder", ranks=(1,)),
    "windows": row("digits", 1, **PHOTO_ROW, data={**STREAMED, "window": 1}),
    # Several labels an image
    "labels": row("digits", 0, **PHOTO_ROW, data=LABELLED, ranks=(1,)),
    "labels zero1": row("digits", 1, **PHOTO_ROW, data=LABELLED, like="labels", ranks=(2,)),
    "labels zero2": row("digits", 2, **PHOTO_ROW, data=LABELLED, like="labels", ranks=(2,)),
    "labels zero3": row("digits", 3, **PHOTO_ROW, data=LABELLED, like="labels", ranks=(2,)),
    "labels pipeline": row("pipeline", 0, **PHOTO_ROW, data=LABELLED, like="labels", ranks=(2,)),
    # Networks
    "resnet18": row("digits", 0, of_ranks=True, net="resnet18", **NETWORK),
    "resnet18 zero3": row(
        "digits",
        3,
        net="resnet18",
        **NETWORK,
        ranks=(2,),
        like="resnet18",
        tolerance=1e-3,
        onward=(("resnet18", 2),),
    ),
    "resnet18 bf16": row("bf16", 2, net="resnet18", **NETWORK),
    "average resnet18": row(
        "digits", 2, net="resnet18", weight_average={"decay": 0.9}, **NETWORK, ranks=(1,)
    ),
    "mobilenet": row("digits", 2, net="mobilenet_v3_small", **NETWORK, ranks=(1,)),
    "vit zero3": row("digits", 3, net="vit_b_16", net_args=VIT, **NETWORK, ranks=(2,)),
    "alexnet pipeline": row(
        "pipeline",
        0,
        net="alexnet",
        data={"dataset": "digits", "image_size": 64},
        ds_optimizer__params__lr=1e-4,  # its loss jumps at more: it has no normalization
        **NETWORK,
        ranks=(2,),
    ),
    "timm resnet": row("digits", 0, net="timm/resnet10t", **NETWORK, ranks=(2,)),
    "timm vit": row(
        "digits",
        3,
        **SMALL_VIT,
        checkpoint_activations=True,
        **NETWORK,
        ranks=(1,),
    ),
    "timm mobilenet": row(
        "digits", 3, net="timm/mobilenetv3_small_050", checkpoint_activations=True, **NETWORK, ranks=(2,)
    ),
    # Networks that torch.compile has translated
    "compiled": row("digits", 0, **COMPILED, like="zero0", ranks=(1,)),
    "compiled zero1": row("digits", 1, **COMPILED, like="zero0"),
    "compiled zero2": row("digits", 2, **COMPILED, like="zero0", onward=(("zero3", 1),)),
    "compiled bf16": row("bf16", 2, **COMPILED, weight_average={"decay": 0.9}),
    "compiled resnet18": row("digits", 0, net="resnet18", **NETWORK, **COMPILED, ranks=(1,)),
    "compiled resnet18 zero2": row("digits", 2, net="resnet18", **NETWORK, **COMPILED, ranks=(2,)),
    "compiled vit": row("digits", 0, **SMALL_VIT, **NETWORK, **COMPILED, like="timm vit", ranks=(1,)),
    "compiled vit zero1": row("digits", 1, **SMALL_VIT, **NETWORK, **COMPILED, like="timm vit", ranks=(2,)),
    # The recipes of CIFAR-10
    "recipe": row("cifar10-90", of_ranks=True, **{**AIRBENCH, **AUTOCAST}),
    "recipe zero0": row("cifar10-90", 0, **AIRBENCH, ds_gradient_accumulation_steps=2, ranks=(1,)),
    "recipe zero2": row("cifar10-90", 2, **AIRBENCH, like="recipe zero0", tolerance=1e-4, ranks=(2,)),
    "recipe zero3": row(
        "cifar10-90",
        3,
        **AIRBENCH,
        ds_gradient_accumulation_steps=2,
        like="recipe zero0",
        tolerance=1e-4,
        ranks=(1,),
    ),
}
# A trial of no images: tests/deepspeed_trial/line_trial.py, in every form that a trial may have
for form in ("plain", "tensor", "two engines", "manual", "pipeline", "zero2"):
    ROWS[f"line {form}"] = Row(
        ("--form", form),
        ranks=(1,) if form == "pipeline" else (1, 2),
        steps=20,
        stop=9,
        program="tests/line.py",
    )


# ------------------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Runs:
    """The runs of all rows, made when a test asks for them, once for all workers of pytest.

    Attributes:
        folder: shared by the workers.
    """

    folder: pathlib.Path

    def straight(self, name: str, ranks: int) -> Run:
        """A row's run from begin to end."""
        return self._run(name, ranks, "straight", lambda output: train(ROWS[name], ranks, output, self.files))

    def stopped(self, name: str, ranks: int) -> Run:
        """A row's run that a SIGTERM to the last rank ends in the row's ``stop``."""
        fault: Any = {"FAULT": "SIGTERM", "RANK_AT_FAULT": str(ranks - 1), "STEP": str(ROWS[name].stop)}
        return self._run(
            name, ranks, "stopped", lambda output: train(ROWS[name], ranks, output, self.files, **fault)
        )

    def resumed(self, name: str, ranks: int) -> Run:
        """The rest of a stopped run."""
        more = (*ROWS[name].resumed_with, *LATEST)
        self.stopped(name, ranks)
        return self._run(
            name,
            ranks,
            "resumed",
            lambda output: train(ROWS[name], ranks, self._copy(name, ranks, output), self.files, more),
        )

    def onward(self, name: str, other: str, ranks: int) -> Run:
        """The rest of a run that two ranks began, as another row in other ranks."""
        self.stopped(name, 2)
        return self._run(
            name,
            ranks,
            f"as {other}",
            lambda output: train(ROWS[other], ranks, self._copy(name, 2, output), self.files, (*LATEST,)),
        )

    @property
    def files(self) -> dict[str, pathlib.Path]:
        """Images and weights that rows name in braces."""
        with FileLock(self.folder / ".files"):
            files = {name: self.folder / name for name in ("photos", "shards", "cache", "table")}
            files |= {name: self.folder / f"{name}.pt" for name in ("weights", "others", "teacher")}
            if not files["others"].exists():
                write_photos(files["photos"])
                write_table(files["table"], files["photos"])
                assert (
                    shards.main(["write", str(files["photos"]), str(files["shards"]), "--size-limit", "20KB"])
                    == 0
                )
                net_file.write(files["teacher"], Net().state_dict(), TEACHER)
                for seed, name in enumerate(("weights", "others")):
                    torch.manual_seed(seed)
                    torch.save(Net().state_dict(), files[name])
        return files

    def _copy(self, name: str, ranks: int, output: pathlib.Path) -> pathlib.Path:
        return shutil.copytree(self.stopped(name, ranks).output, output)

    def _run(self, name: str, ranks: int, kind: str, make: Callable[[pathlib.Path], Run]) -> Run:
        place = self.folder / f"{name} {ranks} {kind}"
        kept = place.with_suffix(".json")
        with FileLock(place.with_suffix(".lock")):
            if not kept.exists():
                made = make(place)
                kept.write_text(json.dumps([made.code, made.stdout, made.stderr]))
        code, stdout, stderr = json.loads(kept.read_text())
        return Run(code, stdout, stderr, place)


def train(
    row: Row,
    ranks: int,
    output: pathlib.Path,
    files: dict[str, pathlib.Path],
    more: tuple[str, ...] = (),
    **fault: Any,
) -> Run:
    """Train a row."""
    arguments = [*row.arguments, *more, "--output", str(output)]
    for name, file in files.items():
        arguments = [each.replace(f"{{{name}}}", str(file)) for each in arguments]
    program = "tests/faulty.py" if fault else row.program
    fault |= {"PROGRAM": row.program} if fault else {}
    return run([program, *arguments], output, processes=ranks if ranks > 1 else 0, **fault)


def write_photos(root: pathlib.Path) -> None:
    """Write photographs of the digits 0 to 3; 0 is rare."""
    digits = load_digits()
    for label in range(4):
        pictures = digits.images[digits.target == label]
        for index, picture in enumerate(pictures[: 60 if label else 12]):
            part = "test" if index % 4 == 3 else "train"
            grey = Image.fromarray((picture * 15.9).astype(np.uint8))
            save(root / part / f"digit {label}" / f"{index}.png", grey.resize((40, 33)))


def write_table(root: pathlib.Path, photos: pathlib.Path) -> None:
    """Write a table that gives the photographs of ``write_photos`` several labels; a 1 has none."""
    root.mkdir()
    labels = ("curved;even;loop", "", "curved;even;prime", "curved;prime")
    for part in ("train", "test"):
        rows = [
            f"{file},{labels[int(file.parent.name[-1])]}" for file in sorted((photos / part).rglob("*.png"))
        ]
        (root / f"{part}.csv").write_text("\n".join(["path,label", *rows, ""]))
