"""The plain PyTorch program, and that moving to DeepSpeed in Determined changes nothing."""

import json
import math

import pytest
import torch
from support import DIGITS, INSTRUCTIONS, Run, execute, launcher, overrides, train_many

import baseline
from classify.config import experiment_file
from classify.images.image_set import ImageSet
from classify.images.sampler import MicroBatchSampler
from harness.callbacks import Patience
from net import Net


def run_baseline(output, *arguments, config=DIGITS):
    code = baseline.main([*config, *arguments, "--output", str(output)])
    return Run(code, "", "", output)


def losses(run):
    return [entry["loss"] for entry in run.metrics if entry["group"] == "training"]


def weights_of(run):
    return torch.load(run.output / "net.pt", weights_only=True)


def assert_same_weights(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=0, atol=tolerance), name


# The baseline's optimizer, and the same in DeepSpeed's terms (whose Adam would decay weights apart from the gradient).
OPTIMIZERS = {
    "SGD": (["--lr", "0.02"], {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}),
    "Adam": (["--lr", "0.002"], {"type": "Adam", "params": {"lr": 0.002, "adam_w_mode": False}}),
}


@pytest.mark.parametrize("instructions", ["", *INSTRUCTIONS])
def test_the_trial_gives_the_baselines_losses_and_weights(tmp_path, instructions):
    environment = INSTRUCTIONS.get(instructions, {})
    rows = {}
    for name, (_, optimizer) in OPTIMIZERS.items():
        hparams = {
            "train_batch_size": 16,
            "optimizer": optimizer,
            "gradient_clipping": 0,  # which DeepSpeed otherwise takes for 1
            "channels_last": False,  # or convolutions are rounded otherwise, on some CPUs from the first step
            "max_length": {"batches": 100},
        }
        rows[name] = [*DIGITS, *overrides(scheduling_unit=1, hyperparameters=json.dumps(hparams))]
    for name, trial in train_many(tmp_path, rows, environment=environment).items():
        assert trial.code == 0, trial.stderr
        arguments = ["--batch-size", "16", "--max-steps", "100", "--optimizer", name, *OPTIMIZERS[name][0]]
        output = tmp_path / f"plain {name}"
        command = [*launcher("python", 1), "baseline.py", *DIGITS, *arguments, "--output", str(output)]
        plain = execute(command, output, **environment)
        assert len(losses(plain)) == 100
        assert losses(plain)[-1] < 0.5 * losses(plain)[0]
        assert losses(trial) == pytest.approx(losses(plain), abs=1e-6), name
        assert_same_weights(weights_of(trial), weights_of(plain), 1e-5)
        for key in ("accuracy", "loss"):
            assert trial.summary["validation"][key] == pytest.approx(
                plain.summary["validation"][key], abs=1e-5
            ), key


FIFTY = ["--batch-size", "16", "--max-steps", "50", "--lr", "0.02"]  # at which rounding does not grow


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run_baseline(tmp_path_factory.mktemp("plain"), *FIFTY)


def test_two_processes_train_as_one(tmp_path, plain):
    command = [*launcher("torchrun", 2), "baseline.py", *DIGITS, *FIFTY, "--output", str(tmp_path)]
    two = execute(command, tmp_path)
    assert two.code == 0, two.stderr
    assert two.summary["world_size"] == 2
    assert two.summary["validation"]["images"] == 360
    assert_same_weights(weights_of(two), weights_of(plain), 1e-5)
    assert "  0            " in two.stdout
    assert two.stdout.splitlines()[-1] == f"accuracy {two.summary['validation']['accuracy']:.4f}"


def test_ranks_see_every_image_once():
    """The pixels of an image tell which it is."""
    images = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1).expand(100, 3, 32, 32).contiguous()
    source = ImageSet(images, torch.arange(100), ("a", "b"))
    seen: list[int] = []
    for rank in range(3):
        sampler = MicroBatchSampler(100, 12, 3, seed=5)
        labels = [y for _, y in baseline.batches(source, sampler, rank, 3, torch.device("cpu"))]
        seen += torch.cat(labels).tolist()
    assert sorted(seen) == list(range(100))


def test_accumulation_is_one_larger_batch(tmp_path, plain):
    accumulated = run_baseline(tmp_path, *FIFTY, "--accumulate", "4")
    assert len(losses(accumulated)) == 50
    assert losses(accumulated) == pytest.approx(losses(plain), abs=1e-5)
    assert_same_weights(weights_of(accumulated), weights_of(plain), 1e-5)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_is_near_full_and_keeps_fp32_weights(tmp_path, plain, amp):
    mixed = run_baseline(tmp_path, *FIFTY, "--amp", amp)
    assert losses(mixed) != losses(plain)
    assert losses(mixed)[:10] == pytest.approx(losses(plain)[:10], abs=0.02)
    assert losses(mixed)[-1] < 0.9 * losses(mixed)[0]
    assert all(weight.dtype == torch.float32 for weight in weights_of(mixed).values())


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ("constant", lambda step: 0.5),
        ("step", lambda step: 0.5 * 0.1 ** (step // 10)),
        ("cosine", lambda step: 0.25 * (1 + math.cos(math.pi * step / 30))),
    ],
)
def test_schedule(schedule, rate):
    args = baseline.parse(["--schedule", schedule, "--lr", "0.5", "--epochs", "3"])
    optimizer = baseline.make_optimizer(args, Net())
    scheduler = baseline.make_schedule(args, optimizer, epoch=10)
    for step in range(30):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate(step)), step
        optimizer.step()
        scheduler.step()


def test_early_stopping(tmp_path):
    """Waits for so many epochs in a row without improvement, and not for so little of it."""
    waiting = Patience(patience=2, min_improvement=0.1)
    assert [waiting.update(loss) for loss in (1.0, 0.95, 0.85, 0.8, 0.84)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    still = run_baseline(tmp_path, "--lr", "0", "--batch-size", "256", "--epochs", "9", "--patience", "2")
    assert still.summary["epochs"] == 3


def test_weights_go_to_a_trial_and_back(tmp_path, plain):
    """A trial that learns nothing hands on what it was given: the logits are the same bits."""
    settings = overrides(
        hyperparameters__weights=plain.output / "net.pt",
        hyperparameters__max_length="{batches: 1}",
        hyperparameters__overwrite_deepspeed_args__optimizer__params="{lr: 0, weight_decay: 0}",
    )
    trial = train_many(tmp_path, {"trial": [*DIGITS, *settings]})["trial"]
    assert trial.code == 0, trial.stderr
    given = trial.output / "net.pt"
    back = run_baseline(tmp_path / "back", "--weights", str(given), "--lr", "0", "--max-steps", "1")
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    logits = []
    for run in (plain, trial, back):
        net = Net()
        net.load_state_dict(weights_of(run))
        logits.append(net(x))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert (
        trial.summary["weights_sha256"] == plain.summary["weights_sha256"] == back.summary["weights_sha256"]
    )
    assert trial.summary["validation"]["accuracy"] == plain.summary["validation"]["accuracy"]


def test_bad_input(tmp_path, capsys):
    text = tmp_path / "text.pt"
    text.write_text("no weights")
    other = tmp_path / "other.pt"
    torch.save({**Net(3).state_dict(), "conv1.weight": torch.zeros(6, 3, 3, 3)}, other)
    truncated = tmp_path / "truncated.pt"
    truncated.write_bytes(other.read_bytes()[:1000])
    for arguments, named in [
        (["--weights", str(text)], "text.pt"),
        (["--weights", str(tmp_path / "none.pt")], "none.pt"),
        (["--weights", str(truncated)], "truncated.pt"),
        (["--weights", str(other)], "conv1.weight is (6, 3, 3, 3), but (6, 3, 5, 5)"),
        (["--batch-size", "6", "--accumulate", "4"], "use a multiple of 4"),
        (["--epochs", "0"], "--epochs"),
        (["--lr", "-1"], "--lr: -1.0: must be a number from 0"),
        (["--momentum", "-1"], "--momentum: -1.0:"),
        (["--set", "data.dataset=mnist"], "'mnist'"),
    ]:
        assert run_baseline(tmp_path / "run", *arguments).code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("baseline.py: ") and named in lines[0], lines
    wrong = ["--set", "data.dataset=mnist", "--set", "nam=x", "--epochs", "0", "--lr", "-1"]
    assert run_baseline(tmp_path / "run", *wrong, "--weights", str(text)).code == 2
    keys = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert sorted(keys) == ["--epochs", "--lr", "--weights", "data.dataset", "nam"]
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").touch()
    for output, named in [(tmp_path / "run", "holds a run"), (text, "cannot be made")]:
        assert run_baseline(output).code == 2
        assert f"--output: {output}: {named}" in capsys.readouterr().err


def test_the_tutorials_recipe_is_the_default():
    args = baseline.parse([])
    assert (args.optimizer, args.lr, args.momentum, args.batch_size, args.epochs) == ("SGD", 0.001, 0.9, 4, 2)
    assert (args.schedule, args.accumulate, args.amp, args.patience) == ("constant", 1, None, None)
    assert experiment_file.load(args.config).config["data"]["dataset"] == "cifar10"
