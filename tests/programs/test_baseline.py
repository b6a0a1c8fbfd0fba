"""The plain PyTorch program, and the trial's agreement with it."""

import json
import math

import pytest
import torch
from support import DIGITS, Run, losses, overrides, run

import baseline
from classify.config import experiment_file
from classify.images.order import Order
from classify.images.pixels import ImageSet
from deepspeed_trial.events import Patience
from net import Net

FIFTY = ["--batch-size", "16", "--max-steps", "50", "--lr", "0.02"]  # rounding does not grow at this rate
# The baseline's optimizer, and DeepSpeed's of the same steps. DeepSpeed's Adam decays weights like AdamW by default.
OPTIMIZERS = {
    "SGD": (["--lr", "0.02"], {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}),
    "Adam": (["--lr", "0.002"], {"type": "Adam", "params": {"lr": 0.002, "adam_w_mode": False}}),
}


def run_baseline(output, *arguments):
    code = baseline.main([*DIGITS, *arguments, "--output", str(output)])
    return Run(code, "", "", output)


def weights_of(run):
    return torch.load(run.output / "net.pt", weights_only=True)


def assert_same_weights(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=0, atol=tolerance), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trial_has_the_losses_and_weights_of_the_baseline(tmp_path, name):
    options, optimizer = OPTIMIZERS[name]
    hyperparameters = {
        "train_batch_size": 16,
        "optimizer": optimizer,
        "gradient_clipping": 0,  # DeepSpeed's default is 1
        "channels_last": False,  # the other memory format rounds convolutions otherwise, on some CPUs in step 1
        "max_length": {"batches": 100},
    }
    settings = overrides(scheduling_unit=1, hyperparameters=json.dumps(hyperparameters))
    steps = ["--batch-size", "16", "--max-steps", "100", "--optimizer", name, *options]
    trial, plain = (
        run([program, *DIGITS, *arguments, "--output", str(tmp_path / program)], tmp_path / program)
        for program, arguments in (("train.py", settings), ("baseline.py", steps))
    )
    assert (trial.code, plain.code) == (0, 0), trial.stderr + plain.stderr
    assert len(losses(plain)) == 100
    assert losses(plain)[-1] < 0.5 * losses(plain)[0]
    assert losses(trial) == pytest.approx(losses(plain), abs=1e-6)
    assert_same_weights(weights_of(trial), weights_of(plain), 1e-5)
    for key in ("accuracy", "loss"):
        assert trial.summary["validation"][key] == pytest.approx(plain.summary["validation"][key], abs=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run_baseline(tmp_path_factory.mktemp("plain"), *FIFTY)


def test_two_processes_train_like_one(tmp_path, plain):
    two = run(["baseline.py", *DIGITS, *FIFTY, "--output", str(tmp_path)], tmp_path, processes=2)
    assert two.code == 0, two.stderr
    assert two.summary["world_size"] == 2
    assert two.summary["validation"]["images"] == 360
    assert_same_weights(weights_of(two), weights_of(plain), 1e-5)
    assert "  0            " in two.stdout
    assert two.stdout.splitlines()[-1] == f"accuracy {two.summary['validation']['accuracy']:.4f}"


def test_ranks_see_every_image_once():
    """The pixels of an image are its number."""
    images = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1).expand(100, 3, 32, 32).contiguous()
    source = ImageSet(images, torch.arange(100), ("a", "b"))
    seen: list[int] = []
    for rank in range(3):
        order = Order(100, 12, 3, seed=5)
        labels = [y for _, y in baseline.batches(source, order, 0, rank, 3, torch.device("cpu"))]
        seen += torch.cat(labels).tolist()
    assert sorted(seen) == list(range(100))


def test_accumulated_micro_batches_are_one_batch(tmp_path, plain):
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


def test_early_stopping_waits_for_epochs_without_enough_improvement(tmp_path):
    waiting = Patience(patience=2, min_improvement=0.1)
    assert [waiting.update(loss) for loss in (1.0, 0.95, 0.85, 0.8, 0.84)] == [False] * 4 + [True]
    still = run_baseline(tmp_path, "--lr", "0", "--batch-size", "256", "--epochs", "9", "--patience", "2")
    assert still.summary["epochs"] == 3


def test_weights_go_to_a_trial_and_back(tmp_path, plain):
    """A trial at learning rate 0 returns the weights that it was given, bit for bit."""
    settings = overrides(
        hyperparameters__weights=plain.output / "net.pt",
        hyperparameters__max_length="{batches: 1}",
        hyperparameters__overwrite_deepspeed_args__optimizer__params="{lr: 0, weight_decay: 0}",
    )
    output = tmp_path / "trial"
    trial = run(["train.py", *DIGITS, *settings, "--output", str(output)], output)
    assert trial.code == 0, trial.stderr
    back = run_baseline(tmp_path / "back", "--weights", f"{output}/net.pt", "--lr", "0", "--max-steps", "1")
    for made in (trial, back):
        assert_same_weights(weights_of(made), weights_of(plain), 0)
        assert made.summary["weights_sha256"] == plain.summary["weights_sha256"]
        assert made.summary["validation"]["accuracy"] == plain.summary["validation"]["accuracy"]


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
        (["--batch-size", "6", "--accumulate", "4"], "is not a multiple of 4, which is"),
        (["--epochs", "0"], "--epochs"),
        (["--lr", "-1"], "--lr: -1.0: must be a number from 0"),
        (["--momentum", "-1"], "--momentum: -1.0:"),
        (["--set", "data.dataset=mnist"], "'mnist'"),
    ]:
        assert run_baseline(tmp_path / "run", *arguments).code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("baseline.py: ") and named in line
    wrong = ["--set", "data.dataset=mnist", "--set", "nam=x", "--epochs", "0", "--lr", "-1"]
    assert run_baseline(tmp_path / "run", *wrong, "--weights", str(text)).code == 2
    keys = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert sorted(keys) == ["--epochs", "--lr", "--weights", "data.dataset", "nam"]
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").touch()
    for output, named in [(tmp_path / "run", "holds a run"), (text, "cannot be created")]:
        assert run_baseline(output).code == 2
        assert f"--output: {output}: {named}" in capsys.readouterr().err


def test_the_defaults_are_the_recipe_of_the_tutorial():
    args = baseline.parse([])
    assert (args.optimizer, args.lr, args.momentum, args.batch_size, args.epochs) == ("SGD", 0.001, 0.9, 4, 2)
    assert (args.schedule, args.accumulate, args.amp, args.patience) == ("constant", 1, None, None)
    assert experiment_file.load(args.config).config["data"]["dataset"] == "cifar10"
