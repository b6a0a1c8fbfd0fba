"""Test-time augmentation: the scores of views, and trainings that it leaves as they are."""

import json

import pytest
import torch
from folders import table
from matrix import ROWS, Runs, train
from support import DIGITS, error_line, overrides
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_matrix import of_group
from torch.nn import functional as F

import checkpoint
from classify.config.options import TestTimeAugmentation as Views
from classify.images.views import check_shift, parse, view_scores, views


def mirrored(net, inputs):
    return 0.5 * net(inputs) + 0.5 * net(inputs.flip(-1))


def by_airbench(net, inputs):
    """The views of cifar10-airbench: the image counts half, and its shifts by a pixel the other half."""
    padded, size = F.pad(inputs, (1,) * 4, "reflect"), inputs.shape[-1]
    shifted = [padded[:, :, :size, :size], padded[:, :, 2:, 2:]]
    translated = torch.stack([mirrored(net, each) for each in shifted]).mean(0)
    return 0.5 * mirrored(net, inputs) + 0.5 * translated


def by_places(net, inputs):
    """Shift by 3 pixels, with each pixel's place computed, and reflected at the edge."""

    def shifted(by):
        sizes = inputs.shape[2:]
        rows, columns = ([n - 1 - abs(n - 1 - abs(each + by)) for each in range(n)] for n in sizes)
        return inputs[:, :, rows][:, :, :, columns]

    return 0.5 * net(inputs) + 0.25 * net(shifted(3)) + 0.25 * net(shifted(-3))


@table(
    "how, expected, count",
    mirror=(Views(mirror=True), mirrored, 2),
    shift=(Views(shift=3), by_places, 3),
    both=(Views(mirror=True, shift=1), by_airbench, 6),
)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_the_scores_of_views(how, expected, count, form):
    torch.manual_seed(0)
    inputs = torch.randn(5, 3, 8, 8).to(memory_format=form)
    inputs = inputs if how.mirror and how.shift else inputs[:, :, :, :6]
    height, width = inputs.shape[2:]
    features = torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()
    net = torch.nn.Sequential(*features, torch.nn.Linear(4 * (height - 2) * (width - 2), 10)).double()
    seen = []

    def classify(each):
        seen.append(each)
        torch.rand(1)  # some networks draw
        return net(each.double())

    with torch.no_grad():
        torch.manual_seed(1)
        plain, mean = view_scores(classify, inputs, how)
        after = torch.rand(1)
        assert torch.equal(plain, net(inputs.double()))
        assert torch.allclose(mean, expected(lambda each: net(each.double()), inputs))
        torch.manual_seed(1)
        assert view_scores(classify, inputs, None)[1].equal(plain)
    assert torch.equal(torch.rand(1), after)
    assert len(seen) == count + 1
    assert all(each.shape == inputs.shape for each in seen)
    assert sum(weight for _, weight in views(inputs, how)) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "mirrr": "--tta.mirrr: True: unknown key; did you mean 'mirror'?",
        "mirror=maybe": "--tta.mirror: 'maybe': must be true or false",
        "shift": "--tta.shift: True: must be a whole number of at least 0",
        "shift=-1": "--tta.shift: '-1': must be a whole number of at least 0",
        "shift=0": "--tta: adds no view to the image; ",
        "": "--tta.: True: unknown key; use one of mirror, shift",
        "shift=8": "--tta.shift: 8: the shorter side of the images has 8 pixels; use at most 7",
    }.items(),
)
def test_invalid_views_are_refused(text, said):
    assert error_line(lambda: check_shift("--tta", parse(text, "--tta"), (8, 9))).startswith(said)


TTA = "accuracy_tta"
ON = overrides(
    hyperparameters__test_time_augmentation="{mirror: true, shift: 1}",
    hyperparameters__early_stopping=f"{{metric: {TTA}, patience: 9}}",
    searcher__metric=TTA,
)


def test_it_adds_an_accuracy_and_changes_no_other_metric(runs: Runs, tmp_path, capsys):
    """The program counts as the training does, in batches of other sizes."""
    plain = runs.straight("zero0", 2)
    run = train(ROWS["zero0"], 2, tmp_path / "views", runs.files, tuple(ON))
    assert run.code == 0, run.stderr
    validation = run.summary["validation"]
    accuracy, others = validation[TTA], {k: v for k, v in validation.items() if k != TTA}
    assert others == plain.summary["validation"]
    assert run.summary["weights_sha256"] == plain.summary["weights_sha256"]
    found = of_group(run, "validation")
    assert [each.pop(TTA) for each in found][-1] == accuracy
    assert found == of_group(plain, "validation")
    last = [f"accuracy {validation['accuracy']:.4f}", f"{TTA} {accuracy:.4f}"]
    assert run.stdout.splitlines()[-2:] == last and TTA not in plain.stdout
    events = EventAccumulator(str(run.output)).Reload()
    assert events.Scalars("accuracy/validation_tta")[-1].value == pytest.approx(accuracy)
    folders = [str(each.output) for each in (plain, run)]
    assert checkpoint.main(["report", *folders, "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert f"<td>accuracy (TTA)</td><td>-</td><td>{accuracy:.4f}</td>" in page
    capsys.readouterr()
    command = ["evaluate", str(run.output / "net.pt"), *DIGITS, "--tta", "mirror,shift=1"]
    assert checkpoint.main(command) == 0
    assert sorted(capsys.readouterr().out.splitlines()[-2:]) == sorted(last)
    assert checkpoint.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[TTA] == accuracy
