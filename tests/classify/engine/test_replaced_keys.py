"""DeepSpeed configurations of other years and programs: they load, or each wrong key has its line."""

import json
from typing import Any

import pytest
from support import error_line

from classify.engine.combinations import FOR_GPUS
from classify.engine.deepspeed_config import resolve_auto
from classify.engine.deepspeed_keys import REMOVED, REPLACED, key_errors
from classify.engine.optimizer_rules import COMPRESSED
from classify.engine.trial_config import TrialConfig

BASE = {"train_batch_size": 32, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}
WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
# As the page of Hugging Face's integration shows a whole one.
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(WARMUP, "auto")},
    "zero_optimization": {
        "stage": 3,
        **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
}


def with_key(path, value):
    """The configuration with a value at a path."""
    config = json.loads(json.dumps(BASE))
    *sections, key = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {"stage": 3} if section == "zero_optimization" else {})
    inner[key] = value
    return config


def resolve(config, tmp_path, device="cpu"):
    (tmp_path / "ds.json").write_text(json.dumps(config))
    hparams = {"max_length": {"batches": 200}, "deepspeed_config": str(tmp_path / "ds.json")}
    experiment = {"data": {"dataset": "digits"}, "hyperparameters": hparams}
    return TrialConfig.resolve(hparams, experiment, 1, device).deepspeed


@pytest.mark.parametrize("path", REPLACED)
def test_a_key_without_effect_has_one_line_with_the_remedy(path):
    value = 500_000 if path == "allgather_size" else {"enabled": True}
    (line,) = key_errors(with_key(path, value))
    assert line.startswith(f"{path}: {value}: ") and line.endswith(REPLACED[path])


@pytest.mark.parametrize("path", REMOVED)
def test_a_removed_feature_is_refused_in_one_line_where_it_is_on(path):
    (line,) = key_errors(with_key(path, {"enabled": True}))
    assert line.startswith(f"{path}: {{'enabled': True}}: ")


@pytest.mark.parametrize("path", REMOVED)
@pytest.mark.parametrize("value", [{"enabled": False}, False])
def test_a_removed_feature_that_is_off_is_let_pass(tmp_path, path, value):
    assert path not in resolve(with_key(path, value), tmp_path)


UNTESTED = {"aio.use_gds"}  # DeepSpeed itself refuses it on a CPU


@pytest.mark.parametrize("path", sorted(set(FOR_GPUS) - UNTESTED))
def test_what_only_a_gpu_can_run_is_refused_on_a_cpu_by_name(tmp_path, path):
    config = with_key(path, {"topk_ratio": 0.1} if "zenflow" in path else True)
    config["zero_optimization"] = {"stage": 3, **config.get("zero_optimization", {})}
    if "offload_optimizer" in path:
        config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    line = error_line(resolve, config, tmp_path)
    assert line.startswith(f"{path}: ") and "needs a GPU" in line


def test_a_monitor_without_its_package_is_one_line(tmp_path):
    line = error_line(resolve, {**BASE, "comet": {"enabled": True}}, tmp_path)
    assert line == "comet.enabled: True: needs a package; pip install comet_ml, or set enabled: false"


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_an_optimizer_that_compresses_is_named_with_the_one_to_use(kind):
    params = {"lr": 0.01, "freeze_step": 100, "cuda_aware": False}
    config = {**BASE, "optimizer": {"type": kind, "params": params}}
    (line,) = key_errors(config)
    other = COMPRESSED[kind.lower()]
    assert line.startswith(f"optimizer.type: {kind!r}: compresses") and line.endswith(f"use {other}")


def test_auto_is_resolved_as_hugging_faces_trainer_does(tmp_path):
    found = resolve(HUGGING_FACE, tmp_path)
    assert found["optimizer"]["params"]["lr"] == 0.001 and "betas" not in found["optimizer"]["params"]
    assert found["train_batch_size"] == found["train_micro_batch_size_per_gpu"] == 16
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (1, 1.0)
    schedule = {"warmup_max_lr": 0.001, "warmup_num_steps": 20, "total_num_steps": 200}
    assert found["scheduler"]["params"].items() >= schedule.items()
    assert "auto" not in json.dumps(found)
    given = {**json.loads(json.dumps(HUGGING_FACE)), "train_micro_batch_size_per_gpu": 4}
    assert "train_micro_batch_size_per_gpu" not in resolve_auto(given) and "train_batch_size" not in given


def test_old_offloads_are_written_in_todays_keys(tmp_path):
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}
    resolved = resolve({**BASE, "zero_optimization": zero}, tmp_path)["zero_optimization"]
    assert resolved["offload_optimizer"] == resolved["offload_param"] == {"device": "cpu"}
    assert not {"cpu_offload", "cpu_offload_params"} & resolved.keys()
    resolved = resolve({**BASE, "zero_optimization": dict.fromkeys(zero, False) | {"stage": 1}}, tmp_path)
    assert resolved["zero_optimization"] == {"stage": 1}


LAMB = {"type": "Lamb", "params": {"lr": 0.001, "bias_correction": False}}
LEFT_ALONE: dict[str, dict[str, Any]] = {
    "a default of DeepSpeed's own": {"zero_optimization": {"stage": 1, "legacy_stage1": False}},
    "a parameter of DeepSpeed's Lamb": {"optimizer": LAMB},
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_other_meanings_are_left_alone(what):
    assert key_errors({**BASE, **LEFT_ALONE[what]}) == []


def test_sections_of_the_first_releases_have_their_line():
    """ZeRO was a switch until 0.3."""
    old = {**BASE, "zero_optimization": True, "allgather_size": 500_000}
    lines = sorted(line.split(":")[0] for line in key_errors(old))
    assert lines == ["allgather_size", "zero_optimization"]


# As Microsoft's CIFAR example and Determined's examples have them (cifar10_moe has the keys of the first).
EXAMPLES: dict[str, dict[str, Any]] = {
    "DeepSpeedExamples' cifar": {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 0, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False},
    },
    "Determined's pipeline parallelism": {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}},
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_examples_load(tmp_path, name):
    resolved = resolve(EXAMPLES[name], tmp_path)
    assert resolved["train_batch_size"] == EXAMPLES[name]["train_batch_size"]


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("device", "params", "zero", "expected"),
    [
        ("cpu", {}, {"stage": 0}, {"torch_adam": True}),
        ("cuda", {}, {"stage": 0}, {"torch_adam": True, "fused": True}),
        ("cuda", {"foreach": True}, {"stage": 0}, {"torch_adam": True, "foreach": True}),
        ("cuda", {"torch_adam": False, "fused": True}, {"stage": 0}, {"torch_adam": False}),
        ("cuda", {}, OFFLOAD, {"torch_adam": True}),
        ("cuda", {"torch_adam": False}, OFFLOAD, {"torch_adam": False}),
    ],
)
def test_adam_is_torchs_unless_the_file_says_otherwise(tmp_path, device, params, zero, expected):
    """DeepSpeed's own Adam would need nvcc, which torch's wheels lack."""
    optimizer = {"type": "Adam", "params": {"lr": 0.01, **params}}
    found = resolve({**BASE, "optimizer": optimizer, "zero_optimization": zero}, tmp_path, device)
    assert found["optimizer"]["params"] == {"lr": 0.01, **expected}
    offloads_torchs = zero is OFFLOAD and expected["torch_adam"]
    assert found.get("zero_force_ds_cpu_optimizer", True) is not offloads_torchs
