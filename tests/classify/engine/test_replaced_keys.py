"""DeepSpeed configurations of other years and programs: each old key has its line, and a file is rewritten."""

import json
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from support import DIGITS, error_line, run

import train
from classify.engine.deepspeed_keys import key_errors, known_keys
from classify.engine.migration import migrate_file, migrated, resolve_auto
from classify.engine.replaced_keys import COMPRESSED, FOR_GPUS, REPLACED
from classify.engine.trial_config import TrialConfig
from deepspeed_trial.errors import InvalidInput

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


def is_refused_by_deepspeed(path):
    """Whether DeepSpeed itself does not know a key, or refuses it; then the table is right to name it."""
    section, _, key = path.rpartition(".")
    if not section and path not in known_keys():
        return True
    try:
        DeepSpeedConfig(with_key(path, {"enabled": True}))
    except Exception:
        return True
    return bool(section) and section not in ("zero_optimization",) and key not in known_keys(section)


ALLOWED = ("tensor_parallel", "datastates_ckpt")  # DeepSpeed takes them, and fails in training


@pytest.mark.parametrize("path", REPLACED)
def test_a_replaced_key_has_one_line_that_says_what_stands_for_it(path):
    value = {"allgather_size": 500_000, "deepcompile": True}.get(path, {"enabled": True})
    (line,) = key_errors(with_key(path, value))
    assert line == f"{path}: {value}: {REPLACED[path]}"
    assert path in ALLOWED or is_refused_by_deepspeed(path)


@pytest.mark.parametrize("path", [path for path in REPLACED if "." not in path])
@pytest.mark.parametrize("value", [{"enabled": False}, False])
def test_a_replaced_key_that_switches_nothing_on_is_let_pass(tmp_path, path, value):
    assert path not in resolve(with_key(path, value), tmp_path)


# DeepSpeed itself refuses the first on a CPU; the second's value is a mapping that may be empty.
UNTESTED = {"aio.use_gds", "zero_optimization.zeropp_loco_param"}


@pytest.mark.parametrize("path", sorted(FOR_GPUS.keys() - UNTESTED))
def test_what_only_a_gpu_can_run_is_refused_on_a_cpu_by_name(tmp_path, path):
    config = with_key(path, {"topk_ratio": 0.1} if "zenflow" in path else True)
    config["zero_optimization"] = {"stage": 3, **config.get("zero_optimization", {})}
    if "offload_optimizer" in path:
        config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    line = error_line(resolve, config, tmp_path)
    assert line.startswith(f"{path}: ") and "needs a GPU" in line


def test_a_monitor_without_its_package_is_one_line(tmp_path):
    line = error_line(resolve, {**BASE, "comet": {"enabled": True}}, tmp_path)
    assert line == "comet.enabled: True: needs a package; pip install comet_ml, or set it to false"


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_an_optimizer_that_compresses_is_named_with_the_one_to_use(kind):
    params = {"lr": 0.01, "freeze_step": 100, "cuda_aware": False}
    config = {**BASE, "optimizer": {"type": kind, "params": params}}
    (line,) = key_errors(config)
    other = COMPRESSED[kind.lower()]
    assert line.startswith(f"optimizer.type: {kind!r}: compresses") and line.endswith(f"use {other}")
    assert migrated(config)[0]["optimizer"] == {"type": other, "params": {"lr": 0.01}}


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


def test_old_keys_are_moved_to_where_they_stand_today():
    old = {
        "train_batch_size": 32,
        "fp32_allreduce": True,
        "allgather_size": 500_000,
        "amp": {"enabled": True, "opt_level": "O1"},
        "zero_optimization": {"stage": 3, "cpu_offload_params": True},
        "elasticity": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "max_grad_norm": 2.0, "bias_correction": True}},
    }
    new, lines = migrated(old)
    assert new == {
        "train_batch_size": 32,
        "communication_data_type": "fp32",
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 3, "allgather_bucket_size": 500_000, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "gradient_clipping": 2.0,
    }  # fmt: skip
    named = """allgather_size amp elasticity fp32_allreduce optimizer.params.bias_correction
        optimizer.params.max_grad_norm zero_optimization.cpu_offload_params"""
    assert sorted(line.split(":")[0] for line in lines) == named.split()
    assert key_errors(new) == [] and migrated(new) == (new, [])


LAMB = {"type": "Lamb", "params": {"lr": 0.001, "bias_correction": False}}
LEFT_ALONE: dict[str, dict[str, Any]] = {
    "a default of DeepSpeed's own": {"zero_optimization": {"stage": 1, "legacy_stage1": False}},
    "a key of another section that is off": {"zero_optimization": {"stage": 1, "cpu_offload_params": False}},
    "a parameter of DeepSpeed's Lamb": {"optimizer": LAMB},
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_other_meanings_are_left_alone(what):
    assert key_errors({**BASE, **LEFT_ALONE[what]}) == []


def test_sections_of_the_first_releases_have_their_line():
    """ZeRO was a switch until 0.3: no traceback, in a check or a migration."""
    old = {**BASE, "zero_optimization": True, "allgather_size": 500_000}
    named = [line.split(":")[0] for line in key_errors(old)]
    assert named == ["allgather_size", "zero_optimization"]
    assert migrated(old)[0]["zero_optimization"] is True
    amp = {**BASE, "amp": {"enabled": True}, "torch_autocast": {"enabled": False}}
    assert migrated(amp)[0]["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    zero = {"optimizer": BASE["optimizer"], "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    assert "train_batch_size" not in migrated(zero)[0]  # but missing, as it was


def test_a_file_is_rewritten_and_trains(tmp_path, capsys):
    """A copy of the old file stays; a second migration changes nothing."""
    file, output = tmp_path / "old.json", tmp_path / "run"
    old = {"train_batch_size": "auto", "progressive_layer_drop": {"enabled": True}, "fp16": {"enabled": False}}  # fmt: skip
    file.write_text(json.dumps(old))
    settings = ["--set", f"hyperparameters={{deepspeed_config: {file}, max_length: {{batches: 2}}}}"]
    assert train.main([*DIGITS, *settings, "--check", "--migrate", str(file)]) == 0
    checked = capsys.readouterr()
    said = [line.split(":")[1].strip() for line in checked.err.splitlines()]
    assert {"progressive_layer_drop", "train_batch_size", "optimizer"} <= set(said)
    assert json.loads(checked.out)["train_batch_size"] == 16
    assert json.loads((tmp_path / "old.json.before").read_text()) == old
    assert migrate_file(str(file)) == []
    made = run(["train.py", *DIGITS, *settings, "--output", str(output)], output)
    assert made.code == 0 and made.summary["steps"] == 2, made.stderr


def test_a_file_that_cannot_be_rewritten_stays_as_it_is(tmp_path):
    file = tmp_path / "old.json"
    for text, why in (("{", "not a JSON file"), ("[]", "holds no JSON object")):
        file.write_text(text)
        assert why in error_line(migrate_file, str(file)) and file.read_text() == text
    assert "no such file" in error_line(migrate_file, str(tmp_path / "none.json"))
    file.write_text('{"amp": {"enabled": true}}')
    (tmp_path / "old.json.before").write_text("mine")
    with pytest.raises(InvalidInput, match=r"old\.json\.before exists"):
        migrate_file(str(file))
    assert file.read_text() == '{"amp": {"enabled": true}}'
    assert (tmp_path / "old.json.before").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "old.json.before"]
