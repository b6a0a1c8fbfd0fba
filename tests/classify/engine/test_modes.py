"""Every engine mode, trained for real with 1 and 2 processes."""

import json

import pytest
from modes import MODES, STEPS, losses
from support import PROJECT, overrides, train_many

from classify.config.hyperparameters import Hyperparameters
from classify.engine import deepspeed_config
from classify.engine.optimizer_rules import TORCH_SCHEDULES
from classify.models import registry


def test_every_experiment_is_in_the_table():
    files = {file.stem for file in PROJECT.glob("experiments/*.yaml")}
    assert {name for name in files if not name.startswith(("search-", "cifar10-", "photos"))} == set(MODES)


def test_modes(mode_runs):
    """One test a number of processes, for the runs share a launch; a failure names the mode."""
    processes, _, runs = mode_runs
    for mode, run in runs.items():
        stage, dtype, _ = MODES.get(mode, (2, "float32", None))
        assert run.code == 0, f"{mode}: {run.stderr}"
        summary = run.summary
        assert (summary["zero_stage"], summary["dtype"], summary["world_size"]) == (
            stage,
            dtype,
            processes,
        ), mode
        assert (summary["steps"], summary["validation"]["images"]) == (STEPS, 360), mode
        assert len(summary["validation"]["per_class_accuracy"]) == 10, mode
        first, last = losses(run)[:5], losses(run)[-5:]
        assert sum(last) < 0.97 * sum(first), f"{mode}: {first} {last}"
        assert "load_balancing_loss" in run.metrics[0] or not mode.startswith(("moe", "experts"))
        assert not run.stderr, f"{mode}: {run.stderr}"


# Adam and unclipped steps blow rounding up: where gradients vanish, and where it decides between equals in a pool.
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
PARITY_STEPS = 30
PARITY = {
    "train_batch_size": 32,
    "optimizer": SGD,
    "gradient_clipping": 0.2,
    "max_length": {"batches": PARITY_STEPS},
}


def parity_rows(processes):
    variants: dict[str, dict] = {
        f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)
    }
    if processes == 1:
        variants |= {f"accumulate{n}": {"gradient_accumulation_steps": n} for n in (2, 4)}
    else:
        variants |= {
            f"pipeline{s}": {"pipe_parallel_size": 2, "zero_optimization": {"stage": s}} for s in (0, 1)
        }
    start = ["--config", "const.yaml", *overrides(data__dataset="digits", scheduling_unit=1)]
    return {
        name: [*start, *overrides(hyperparameters=json.dumps({**PARITY, **v}))]
        for name, v in variants.items()
    }


def test_parity_in_fp32(tmp_path_factory):
    """One seed, one global batch: ZeRO, processes, accumulation and a pipeline leave every step's loss as it is."""
    one, two = (train_many(tmp_path_factory.mktemp("parity"), parity_rows(n), n) for n in (1, 2))
    for name, run in [*one.items(), *two.items()]:
        assert run.code == 0, f"{name}: {run.stderr}"
    plain = losses(one["zero0"])
    assert len(plain) == PARITY_STEPS
    assert plain[-1] < plain[0] - 0.1
    for runs in (one, two):
        for name, run in runs.items():
            tolerance = 1e-5 if name.startswith("accumulate") else 1e-4
            assert losses(run) == pytest.approx(plain, rel=tolerance), name
            assert run.summary["validation"]["accuracy"] == one["zero0"].summary["validation"]["accuracy"], (
                name
            )


SCHEDULES = {
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_num_steps": 4},
    "WarmupCosineLR": {"warmup_num_steps": 4},
    "OneCycle": {},
    "OneCycleLR": {"pct_start": 0.25},
    "LinearLR": {"start_factor": 1, "end_factor": 0},
    "PolynomialLR": {"power": 2},
    "CosineAnnealingLR": {},
}
RATE = 0.0123


def forms(folder, schedule):
    """One schedule and learning rate, said in each of the three forms; the base file's rate is another."""
    optimizer = {"type": "Adam", "params": {"lr": RATE, "betas": [0.8, 0.999]}}
    scheduler = {"type": schedule, "params": SCHEDULES[schedule]}
    file = folder / f"{schedule}.json"
    file.write_text(json.dumps({"train_batch_size": 32, "optimizer": optimizer, "scheduler": scheduler}))
    override = {"optimizer": {"params": {"lr": RATE}}, "scheduler": scheduler}
    return {
        "file": {"deepspeed_config": str(file)},
        "override": {"deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": override},
        "inline": {"train_batch_size": 32, "optimizer": optimizer, "scheduler": scheduler},
    }


def test_the_least_rate_keeps_its_share_of_the_peak():
    def cycle(**chosen):
        hparams = {"deepspeed_config": "experiments/cifar10-67.json", "overwrite_deepspeed_args": chosen}
        hyper = Hyperparameters.parse(hparams, registry.check_name)
        resolved = deepspeed_config.resolve(deepspeed_config.merge(hyper), hyper, 1, "cpu", lambda *_: 7038)
        params = resolved["scheduler"]["params"]
        return params["cycle_min_lr"], params["cycle_max_lr"]

    half = {"params": {"lr": 0.003}}
    assert cycle() == (0.002, 0.006)
    assert cycle(optimizer=half) == pytest.approx((0.001, 0.003))
    assert cycle(optimizer=half, scheduler={"params": {"cycle_min_lr": 0.0001}}) == (0.0001, 0.003)


def test_every_schedule_peaks_at_the_optimizers_learning_rate(tmp_path):
    rows = {}
    for schedule in SCHEDULES:
        given = forms(tmp_path, schedule)
        if schedule in TORCH_SCHEDULES:  # one form will do: what differs is who makes the schedule
            del given["file"], given["inline"]
        for form, hparams in given.items():
            chosen = json.dumps({**hparams, "max_length": {"batches": 12}})
            rows[f"{schedule}-{form}"] = [
                *("--config", "experiments/digits.yaml", "--set", f"hyperparameters={chosen}"),
                *overrides(scheduling_unit=1),
            ]
    for name, run in train_many(tmp_path, rows).items():
        assert run.code == 0, f"{name}: {run.stderr}"
        rates = [entry["learning_rate"] for entry in run.metrics if entry["group"] == "training"]
        assert max(rates) == pytest.approx(RATE, rel=1e-6), name
        # The lengths follow the training's: what decays has decayed by its end, what does not has not.
        assert (rates[-1] < 0.5 * RATE) == (not name.startswith("WarmupLR")), f"{name}: {rates}"
