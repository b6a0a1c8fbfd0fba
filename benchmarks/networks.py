"""Which networks of timm do what here: a table in benchmarks/RESULTS.md, from real runs of a few steps.

    python3 -m benchmarks.networks                        10 minutes on two cores
    python3 -m benchmarks.networks resnet10t levit_128s   these alone

Each is trained for two steps at ZeRO stage 0 and 3, exported from its checkpoint, gone on with to the bits of
a longer run, and trained with recomputed activations; and its layers are asked for as those of a pipeline.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

import checkpoint
from benchmarks import report, runs
from classify.models import registry
from classify.models.registry import NetSpec
from classify.models.stages import layers_of
from deepspeed_trial import machine

SECTION = "Networks of timm"
# A small one of each family.
NETS = """
    resnet10t resnetv2_18 nf_resnet26 regnetx_002 hardcorenas_a
    repvgg_a0 dla46_c mobilenetv3_small_050 efficientnet_b0 ghostnet_100
    lcnet_050 convnext_atto poolformer_s12 mixer_s32_224 vit_tiny_patch16_224
    deit_tiny_distilled_patch16_224 swin_tiny_patch4_window7_224 levit_128s xcit_nano_12_p16_224 mobilevit_xxs
    eva02_tiny_patch14_224 crossvit_tiny_240 fastvit_t8
""".split()
COLUMNS = (
    "network",
    "pixels",
    "parameters",
    "ZeRO 0",
    "ZeRO 3",
    "exports",
    "resumes",
    "recomputes",
    "pipeline",
)
EXPLANATION = """\
By `python3 -m benchmarks.networks`: each has trained on a folder of 16 images in micro-batches of 4, one
process, with random weights. *exports*: `checkpoint.py export`, as `.pt` and ONNX; *resumes*: from a
checkpoint to the bits of a run that was not stopped; *recomputes*: `checkpoint_activations`, to the losses
of a run without within 1e-4; *pipeline*: whether it is a sequence of layers that stages could share.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a row for each, and writes the table into the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nets", nargs="*", default=NETS, help="of timm")
    parser.add_argument("--results", type=pathlib.Path, default=runs.PROJECT / "benchmarks/RESULTS.md")
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        write_images(root / "images")
        for name in args.nets:
            rows.append(row(f"timm/{name}", root / name))
            shutil.rmtree(root / name)
            print(" | ".join(map(str, rows[-1])), flush=True)
    table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    text = [*EXPLANATION.split("\n"), *(f"| {' | '.join(map(str, cells))} |" for cells in table)]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    report.put_section(args.results, SECTION, "\n".join([*text, "", f"Versions: {versions}, timm {timm()}"]))
    return 0


def timm() -> str:
    """Its version."""
    import timm

    return timm.__version__


def write_images(root: pathlib.Path) -> None:
    """Writes 8 images each of two classes, to train and to test."""
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for label in range(2):
            (root / part / str(label)).mkdir(parents=True)
            for index in range(8):
                pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / str(label) / f"{index}.png")


def row(name: str, folder: pathlib.Path) -> list[str]:
    """What one network does."""
    size = registry.input_size(name)
    assert size
    outline = registry.on_meta_device(NetSpec(name, 2, size))
    count = sum(each.numel() for each in outline.parameters())
    plain = tried(name, folder / "zero0")
    exported = plain and all(
        runs.quiet(checkpoint.main, ["export", str(folder / "zero0"), str(folder / f"net.{kind}")])[0] == 0
        for kind in ("pt", "onnx")
    )
    tried(name, folder / "resumed", max_length={"batches": 1})
    again = tried(name, folder / "resumed", more=["--resume", "latest"])
    recomputed = tried(name, folder / "recomputed", checkpoint_activations=True)
    close = recomputed and np.allclose(losses(folder / "zero0"), losses(folder / "recomputed"), rtol=1e-4)
    # At the end, for it leaves DeepSpeed's own linear layers to the rest of the process, with other bits
    sharded = tried(name, folder / "zero3", stage=3)
    does = (plain, sharded, exported, again and again == plain, close, layers_of(outline) is not None)
    return [name, f"{size[0]}", f"{count / 1e6:.1f} M", *("yes" if each else "no" for each in does)]


def tried(
    name: str, output: pathlib.Path, stage: int = 0, more: Sequence[str] = (), **hyperparameters: Any
) -> str | None:
    """The digest of the weights after a short run; None if it failed, whose words are then printed."""
    deepspeed = {
        "train_batch_size": 4,
        "scheduler": None,
        "optimizer": {"type": "SGD", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": stage},
    }
    chosen = {"net": name, "max_length": {"batches": 2}, "deepspeed_config": "ds_config.json"}
    sections = {
        "hyperparameters": {**chosen, "overwrite_deepspeed_args": deepspeed, **hyperparameters},
        "data": {"dataset": "imagefolder", "root": str(output.parent.parent / "images")},
        "scheduling_unit": 1,
    }
    try:
        return runs.trained("experiments/photos.yaml", sections, output, more)["weights_sha256"]
    except RuntimeError as error:
        print(f"{name}, {output.name}: {error}", file=sys.stderr)
        return None


def losses(output: pathlib.Path) -> list[float]:
    """Those of a run's steps."""
    entries = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if entry["group"] == "training"]


if __name__ == "__main__":
    sys.exit(main())
