"""Averages of the weights: by their formula in every mode, and with running statistics."""

import json
import shutil

import pytest
import torch
from matrix import ROWS, STEPS, STOP
from support import DIGITS, LATEST, checkpoints, overrides, run
from test_matrix import each
from torch.nn import functional as F

import data
from classify.config.options import WeightAverage
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.models import net_file, registry

AVERAGES = {name: row for name, row in ROWS.items() if name.startswith("average") and "resnet" not in name}
KEPT = overrides(min_checkpoint_period="{batches: 1}", checkpoint_storage__save_trial_latest=STEPS)
NO_AVERAGE = overrides(hyperparameters__weight_average="null")


def network(folder):
    if (folder / "model0").exists():
        return net_file.of_checkpoint(folder)
    return torch.load(folder / "net.pt", weights_only=True)


def options(name) -> WeightAverage:
    (chosen,) = (each for each in ROWS[name].arguments if each.startswith("hyperparameters.weight_average="))
    return WeightAverage.parse("", json.loads(chosen.partition("=")[2]))


def trained(name, ranks, output):
    """The weights after each step of a row without its average, and the number of skipped steps."""
    arguments = [*ROWS[name].arguments, *NO_AVERAGE, *KEPT, "--output", str(output)]
    made = run(["train.py", *arguments], output, processes=ranks if ranks > 1 else 0)
    assert made.code == 0, made.stderr
    weights = {}
    for step, folder in checkpoints(made).items():
        engine = torch.load(folder / "det_state_dict_rank0.pth", weights_only=False)["engines"][0]
        weights[step] = network(folder), engine["counts"]["skipped_steps"]
    assert sorted(weights) == list(range(1, STEPS + 1))
    return weights


def averaged(weights, how, last, start=1):
    """The average after a step by the formula; the first step has a rate of 0 and changes no weight."""
    average = {key: weight.double() for key, weight in weights[start][0].items()}
    done = start - weights[start][1]
    for step in range(start + 1, last + 1):
        before, done = done, step - weights[step][1]
        if done == before or done % how.every:
            continue
        decay = how.decay_after(done, STEPS)
        average = {
            key: decay * average[key] + (1 - decay) * weights[step][0][key].double() for key in average
        }
    return average


def assert_close(found, expected, tolerance):
    """The tolerance is relative to the largest weight of a tensor."""
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        difference = (weight.double() - expected[name].double()).abs().max()
        assert difference <= tolerance * expected[name].abs().max(), name


@each(AVERAGES)
def test_the_average_follows_the_weights_of_the_same_training(runs, tmp_path, name, ranks):
    made, how, weights = runs.straight(name, ranks), options(name), trained(name, ranks, tmp_path)
    assert json.loads((made.output / "net.json").read_text())["provenance"]["weight_average"] == vars(how)
    assert "\naverage  of the weights, for validations and exports: " in made.stdout
    ((stopped, checkpoint),) = checkpoints(runs.stopped(name, ranks)).items()
    assert (0 < weights[STEPS][1] < STOP) == (name == "average of some steps")  # fp16 skips the others
    for step, folder in ((stopped, checkpoint), (STEPS, made.output)):
        assert_close(network(folder), averaged(weights, how, step), 1e-6)


def test_an_average_is_switched_on_and_off_by_a_resume(runs, tmp_path):
    """A new average starts from the checkpoint's weights."""
    decay, made = 0.6, {}
    on = overrides(hyperparameters__weight_average=f"{{decay: {decay}}}")
    for name, more in (("zero0", on), ("average", NO_AVERAGE)):
        output = shutil.copytree(runs.stopped(name, 1).output, tmp_path / name)
        made[name] = run(["train.py", *ROWS[name].arguments, *more, *LATEST, "--output", str(output)], output)
        assert made[name].code == 0, made[name].stderr
    weights = trained("zero0", 1, tmp_path / "trained")
    expected = averaged(weights, WeightAverage.parse("", {"decay": decay}), STEPS, STOP)
    assert_close(network(made["zero0"].output), expected, 1e-6)
    plain = runs.straight("zero0", 1).summary
    assert made["average"].summary["weights_sha256"] == plain["weights_sha256"]


LOOKAHEAD = {"decay": 0.5, "every": 2, "lookahead": True}
RISING = {"decay": 0.9, "every": 3, "lookahead": True, "rising": True}
# Network, average, ZeRO stage and processes of a training that a plain loop repeats
LOOPS: dict[str, tuple[str, dict, int, int]] = {
    "lookahead": ("net", LOOKAHEAD, 0, 0),
    "rising zero3": ("net", RISING, 3, 2),
    "statistics": ("shufflenet_v2_x0_5", {"decay": 0.9}, 0, 0),
    "statistics of lookahead": ("shufflenet_v2_x0_5", LOOKAHEAD, 0, 0),
}


def plain_loop(net, how, images, lr):
    """Trains a network by bare torch; gives the average of its weights and running statistics."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    average = {name: weight.clone() for name, weight in net.state_dict().items()}
    order = images.training_order(32, 1)
    for step, (_, indices, *_) in zip(range(1, STEPS + 1), order.micro_batches(0), strict=False):
        optimizer.zero_grad()
        inputs = images.inputs(images.train.images[indices], False)
        F.cross_entropy(net(inputs), images.train.labels[indices]).backward()
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


@pytest.mark.parametrize("name", LOOPS)
def test_it_equals_that_of_a_plain_loop(tmp_path, name):
    """The run validates and keeps the average, running statistics included."""
    net_name, how, stage, processes = LOOPS[name]
    settings = DataSettings.parse({"dataset": "digits"})
    images = data.Images(DataPlan.resolve(settings), 0, torch.device("cpu"))
    torch.manual_seed(1)
    net = registry.build(registry.NetSpec(net_name, 10, (32, 32)))
    torch.save(net.state_dict(), tmp_path / "first.pt")
    lr = 0.02 if net_name == "net" else 1e-7  # at which rounding does not grow
    hparams = {
        "net": net_name,
        "weights": str(tmp_path / "first.pt"),
        "weight_average": how,
        "train_batch_size": 32,
        "optimizer": {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}},
        "gradient_clipping": 0,  # which DeepSpeed otherwise takes for 1
        "zero_optimization": {"stage": stage},
        "channels_last": False,
        "max_length": {"batches": STEPS},
    }
    row = [*DIGITS, *overrides(hyperparameters=json.dumps(hparams), scheduling_unit=1)]
    made = run(["train.py", *row, "--output", str(tmp_path / "run")], tmp_path / "run", processes=processes)
    assert made.code == 0, made.stderr
    expected = plain_loop(net, how, images, lr)
    assert_close(network(made.output), expected, 1e-5 if "statistics" in name else 1e-6)
    net.load_state_dict(expected)
    with torch.no_grad():
        outputs = net.eval()(images.inputs(images.test.images, False))
    loss = F.cross_entropy(outputs, images.test.labels).item()
    assert made.summary["validation"]["loss"] == pytest.approx(loss, rel=1e-5)
