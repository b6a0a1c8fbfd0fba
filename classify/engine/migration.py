"""DeepSpeed configurations of other years and programs, written anew, and the ``"auto"`` in them resolved.

``"auto"`` is of Hugging Face's integration: https://huggingface.co/docs/transformers/deepspeed
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from classify.engine.replaced_keys import replaced_errors, today
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import refused, regular_file

AUTO = "auto"
LEARNING_RATE, CLIPPING, BATCH, WARMUP = 0.001, 1.0, 16, 0.1  # where nothing else is said


def resolve_auto(config: dict[str, Any]) -> list[str]:
    """Puts values where a configuration says ``"auto"``, and gives the paths of those keys.

    A learning rate becomes 0.001, as in ``ds_config.json``, gradient clipping 1, the batch what
    ``train_batch_size`` says, else 16; a schedule has its peak at the learning rate and the training's
    length, a tenth of it warm-up. All else is what DeepSpeed takes by default: no accumulation, fp32.
    """
    said = sorted(_drop_autos(config))
    for path, value in (
        ("optimizer.params.lr", LEARNING_RATE),
        ("scheduler.params.warmup_num_steps", WARMUP),
        ("gradient_clipping", CLIPPING),
    ):
        if path in said:
            *sections, key = path.split(".")
            inner = config
            for section in sections:
                inner = inner[section]
            inner[key] = value
    batch = {"train_batch_size", "train_micro_batch_size_per_gpu"}
    if batch & set(said) and not batch & config.keys():
        config["train_batch_size"] = BATCH
    return said


def _drop_autos(config: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from _drop_autos(value, f"{path}{key}.")
        elif value == AUTO:
            del config[key]
            yield f"{path}{key}"


def migrated(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A configuration in today's keys, and a line for each change.

    What has no form here is left out. Where there is no optimizer, which other programs make themselves, Adam
    is put in.
    """
    lines, new = replaced_errors(config), today(config)
    autos = resolve_auto(new)
    if autos:
        lines.append(f"{', '.join(autos)}: 'auto': resolved")
    if "optimizer" not in new:
        new["optimizer"] = {"type": "Adam", "params": {"lr": LEARNING_RATE}}
        lines.append(f"optimizer: missing; Adam with a learning rate of {LEARNING_RATE} is put in")
    return new, lines


def migrate_file(path: str) -> list[str]:
    """Writes a DeepSpeed configuration anew, if anything changes, and gives a line for each change.

    What it was stays beside it, as ``NAME.before``.

    Raises:
        InvalidInput: if it cannot be read or written, or there is such a file already.
    """
    at = f"--migrate: {path}"
    file = pathlib.Path(path)
    before = file.with_name(f"{file.name}.before")
    try:
        config = json.loads(regular_file(file).read_text())
    except FileNotFoundError:
        raise InvalidInput(f"{at}: no such file; give a DeepSpeed configuration's") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidInput(f"{at}: not a JSON file ({one_line(error)}); mend it") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{at}: holds no JSON object; mend it")
    new, lines = migrated(config)
    if not lines:
        return []
    if before.exists():
        raise InvalidInput(f"{at}: {before} exists, in which the file would be kept; move it")
    with refused(at):
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(json.dumps(new, indent=2) + "\n")
        os.link(file, before)
        os.replace(partial, file)
    return lines
