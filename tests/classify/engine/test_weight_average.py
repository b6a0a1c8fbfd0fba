"""Averages of the weights: by their formula in every mode, the same for any ranks, and after a resume."""

import json
import shutil

import pytest
import torch
from modes import DEEPSPEED, losses, mode_rows
from support import DIGITS, LATEST, checkpoints, overrides, train_many
from torch.nn import functional as F

import data
from classify.config.options import WeightAverage
from classify.images.settings import DataSettings
from classify.models import registry
from data import as_inputs

STEPS, STOP = 8, 5
EMA = {"decay": 0.3}
PAIRS = {"decay": 0.6, "every": 2}  # of steps, so that a run may stop between two updates
LOOKAHEAD = {"decay": 0.5, "every": 2, "lookahead": True}
RISING = {"decay": 0.9, "every": 3, "lookahead": True, "rising": True}

# Mode and average of a run, by its number of processes.
CASES = {
    1: {
        "digits": ("digits", EMA),
        "fp16": ("fp16", EMA),
        "fp16 lookahead": ("fp16", LOOKAHEAD),
        "offload": ("offload", PAIRS),
        "zero3": ("zero3", PAIRS),
    },
    2: {
        "zero2": ("zero2", EMA),
        "zero3": ("zero3", PAIRS),
        "zero3 lookahead": ("zero3", RISING),
        "bf16": ("bf16", PAIRS),
        "experts": ("experts on two ranks", EMA),
        "pipeline": ("pipeline", PAIRS),
    },
}
# Those that go on with 2 processes instead, and with 1.
ELASTIC = {1: ("digits", "zero3"), 2: ("zero2", "zero3")}


def averaging(options):
    return overrides(hyperparameters__weight_average=json.dumps(options))


def rows_of(processes):
    modes = mode_rows(processes)
    # fp16 skips some steps, which do not count
    skips = overrides(**{f"{DEEPSPEED}fp16__initial_scale_power": 21, f"{DEEPSPEED}fp16__hysteresis": 1})
    return {
        name: [
            *modes[mode],
            *overrides(hyperparameters__max_length=f"{{batches: {STEPS}}}"),
            *(skips if mode == "fp16" else []),
            *averaging(options),
        ]
        for name, (mode, options) in CASES[processes].items()
    }


def network(folder):
    return torch.load(folder / "net.pt", weights_only=True)


@pytest.fixture(scope="module", params=CASES)
def straight(request, tmp_path_factory):
    """Runs with an average, and as many without, with a checkpoint of every step."""
    processes, folder = request.param, tmp_path_factory.mktemp("straight")
    kept = overrides(min_checkpoint_period="{batches: 1}", checkpoint_storage__save_trial_latest=STEPS)
    rows = {name: [*row, *kept] for name, row in rows_of(processes).items()}
    plain = {
        f"plain {name}": [*row, *overrides(hyperparameters__weight_average="null")]
        for name, row in rows.items()
        if "lookahead" not in name
    }
    # A pipeline comes last, for DeepSpeed keeps its stages for the rest of the process
    runs = train_many(
        folder, dict(sorted({**plain, **rows}.items(), key=lambda each: "pipeline" in each[0])), processes
    )
    for name, run in runs.items():
        assert run.code == 0, f"{name}: {run.stderr}"
    return processes, runs


def test_the_average_follows_the_weights_of_the_same_training(straight):
    processes, runs = straight
    for name, (_, chosen) in CASES[processes].items():
        run, how = runs[name], WeightAverage.parse("", chosen)
        assert json.loads((run.output / "net.json").read_text())["provenance"]["weight_average"] == vars(how)
        averages = {step: network(folder) for step, folder in checkpoints(run).items()}
        assert len(averages) == STEPS, name
        assert "\naverage  of the weights, which is validated and kept: " in run.stdout
        if how.lookahead:
            continue
        plain = runs[f"plain {name}"]
        assert losses(run) == losses(plain), name
        done, skipped = 0, 0
        for step, folder in sorted(checkpoints(plain).items()):
            counts = json.loads((folder / "identity.json").read_text())["progress"]["engines"][0]
            is_update = counts["skipped_steps"] == skipped and (done + 1) % how.every == 0
            done, skipped = step - counts["skipped_steps"], counts["skipped_steps"]
            if step == 1:
                continue  # of the weights before which nothing tells
            for key, weight in network(folder).items():
                before = averages[step - 1][key].double()
                decay = how.decay_after(done, STEPS) if is_update else 1.0
                expected = decay * before + (1 - decay) * weight.double()
                assert torch.allclose(averages[step][key].double(), expected, rtol=1e-6, atol=1e-7), (
                    name,
                    key,
                )
        assert skipped if name == "fp16" else not skipped
        assert averages[STEPS].keys() == network(plain.output).keys()
        assert run.summary["weights_sha256"] != plain.summary["weights_sha256"]
        assert run.summary["validation"]["loss"] != plain.summary["validation"]["loss"], name


def test_a_resume_gives_the_same_bits_also_between_two_updates(straight, tmp_path):
    """With other processes the same but for rounding; switched on, it starts from the checkpoint's weights."""
    processes, runs = straight
    rows = rows_of(processes)
    for name, run in train_many(tmp_path, rows, processes, sigterm_at=STOP).items():
        assert run.code == 130, f"{name}: {run.stderr}"
    for name in ELASTIC[processes]:
        shutil.copytree(tmp_path / name, tmp_path / f"{name} elsewhere")
    # An average switched on, and another switched off, one step before the end
    first = next(iter(rows))
    changed = {}
    for name, (source, more) in {
        "on": (f"plain {first}", []),
        "off": (first, overrides(hyperparameters__weight_average="null")),
    }.items():
        shutil.copytree(runs[source].output, tmp_path / name)
        uuid = checkpoints(runs[source])[STEPS - 1].name
        changed[name] = [*rows[first], *more, "--resume", uuid]
    resumed = {**changed, **{name: [*row, *LATEST] for name, row in rows.items()}}
    done = train_many(tmp_path, resumed, processes)
    for name, run in done.items():
        assert run.code == 0, f"{name}: {run.stderr}"
    before, after = (network(checkpoints(runs[f"plain {first}"])[step]) for step in (STEPS - 1, STEPS))
    decay = EMA["decay"]
    expected = {name: decay * before[name] + (1 - decay) * after[name] for name in after}
    assert_close(network(done.pop("on").output), expected, 1e-6)
    plain = runs[f"plain {first}"].summary
    assert done.pop("off").summary["weights_sha256"] == plain["weights_sha256"]
    for name, run in done.items():
        assert losses(run) == losses(runs[name]), name
        assert run.summary["validation"] == runs[name].summary["validation"], name
        assert run.summary["weights_sha256"] == runs[name].summary["weights_sha256"], name
    elsewhere = {f"{name} elsewhere": [*rows[name], *LATEST] for name in ELASTIC[processes]}
    for name, run in train_many(tmp_path, elsewhere, 3 - processes).items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert_close(network(run.output), network(runs[name.split()[0]].output), 1e-5)


def assert_close(found, expected, tolerance):
    """The same but for so much of the largest of a tensor's weights."""
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        difference = (weight.double() - expected[name].double()).abs().max()
        assert difference <= tolerance * expected[name].abs().max(), name


PLAIN = {
    "train_batch_size": 32,
    "gradient_clipping": 0,  # which DeepSpeed otherwise takes for 1
    "channels_last": False,
    "max_length": {"batches": STEPS},
}
AVERAGES = {"ema": {"decay": 0.9, "every": 2}, "lookahead": LOOKAHEAD, "rising": RISING}


def plain_loop(net, how, images, lr):
    """Trains a network by bare torch; gives the average of its weights and running statistics."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    average = {name: weight.clone() for name, weight in net.state_dict().items()}
    loader = images.training_loader(images.training_sampler(32, 1)).get_data_loader()
    for step, (inputs, labels) in zip(range(1, STEPS + 1), loader, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(net(as_inputs(inputs)), labels).backward()
        optimizer.step()
        if step % how.get("every", 1):
            continue
        updates = step // how.get("every", 1)
        decay = how["decay"] if how.get("lookahead") else min(how["decay"], updates / (9 + updates))
        decay *= (step / STEPS) ** 3 if how.get("rising") else 1
        for name, weight in net.state_dict().items():
            if weight.is_floating_point():
                average[name].mul_(decay).add_(weight, alpha=1 - decay)
                if how.get("lookahead"):
                    weight.copy_(average[name])
            else:
                average[name] = weight.clone()
    return average


def test_it_equals_that_of_a_plain_loop(tmp_path):
    """The average is that which is validated and kept, at ZeRO 3 in two processes as at ZeRO 0 in one."""
    settings = DataSettings.parse({"dataset": "digits"})
    images = data.Images(settings, settings.open_source(), 0, torch.device("cpu"))
    rows, expected, expected_losses = {}, {}, {}
    for name, net_name, chosen in [
        *((name, "net", chosen) for name, chosen in AVERAGES.items()),
        ("statistics", "shufflenet_v2_x0_5", {"decay": 0.9}),
        ("statistics gone back to", "shufflenet_v2_x0_5", LOOKAHEAD),
    ]:
        torch.manual_seed(1)
        net = registry.build(registry.NetSpec(net_name, 10, (32, 32)))
        torch.save(net.state_dict(), tmp_path / f"{name}.pt")
        lr = 0.02 if net_name == "net" else 1e-7  # at which rounding does not grow
        optimizer = {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}}
        hparams = {
            **PLAIN,
            "optimizer": optimizer,
            "net": net_name,
            "weights": str(tmp_path / f"{name}.pt"),
            "weight_average": chosen,
        }
        rows[name] = [*DIGITS, *overrides(hyperparameters=json.dumps(hparams))]
        expected[name] = plain_loop(net, chosen, images, lr)
        net.load_state_dict(expected[name])
        with torch.no_grad():
            outputs = net.eval()(as_inputs(images.test.images))
        expected_losses[name] = F.cross_entropy(outputs, images.test.labels).item()
    zero3 = overrides(hyperparameters__zero_optimization="{stage: 3}")
    two = {f"{name} zero3": [*rows[name], *zero3] for name in AVERAGES}
    for name, run in [*train_many(tmp_path, rows).items(), *train_many(tmp_path, two, 2).items()]:
        assert run.code == 0, f"{name}: {run.stderr}"
        of = name.removesuffix(" zero3")
        assert_close(network(run.output), expected[of], 1e-5 if "statistics" in name else 1e-6)
        assert run.summary["validation"]["loss"] == pytest.approx(expected_losses[of], rel=1e-5), name
