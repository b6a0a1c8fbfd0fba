"""The teacher of a distillation: its scores, the loss, its errors, its place in a run's identity."""

import shutil

import pytest
import torch
from folders import table
from matrix import ROWS, TEACHER
from support import DIGITS, LATEST, overrides, run
from torch.nn import functional as F

import data
import train
from classify.config.hyperparameters import Hyperparameters
from classify.models import net_file
from classify.models.losses import Loss
from classify.models.teacher import Teacher
from net import Net

DIGIT_NAMES = [str(digit) for digit in range(10)]
RANDOM = torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The file of a network whose normalization is not the digits'."""
    torch.manual_seed(1)
    net_file.write(path := tmp_path_factory.mktemp("teacher") / "net.pt", Net().state_dict(), TEACHER)
    return path


def test_a_teacher_scores_inputs_of_another_normalization_and_size_as_its_own(teacher):
    loaded, images = (
        Teacher(str(teacher), DIGIT_NAMES),
        torch.randint(0, 256, (5, 3, 32, 32), generator=RANDOM),
    )
    images, wanted = images.to(torch.uint8), None
    for mean, std in (([0.4] * 3, [0.6] * 3), ([0.1, 0.2, 0.9], [1.0, 0.5, 0.3])):
        loaded.prepare(torch.device("cpu"), torch.float32, mean, std)
        inputs = data.as_inputs(images, mean, std)
        scores = loaded(inputs)
        wanted = loaded.net(inputs) if wanted is None else wanted
        assert torch.allclose(scores, wanted, atol=1e-4) and wanted.std() > 0.01
        large = F.interpolate(inputs, scale_factor=2)
        assert loaded(large).shape == (5, 10) and not scores.requires_grad


def test_the_loss_is_the_weighted_sum_of_the_teachers_and_the_labels():
    logits, taught = torch.randn(2, 6, 4, generator=RANDOM)
    labels = torch.randint(0, 4, (6,), generator=RANDOM)
    for weight, temperature in ((0.3, 4.0), (1.0, 1.0)):
        hyper = Hyperparameters(teacher="x", teacher_weight=weight, teacher_temperature=temperature)
        found = Loss(hyper, "abcd", lambda: labels)(logits, labels, taught)
        theirs = (taught / temperature).softmax(1)
        divergence = (theirs * (theirs.log() - (logits / temperature).softmax(1).log())).sum(1).mean()
        wanted = weight * temperature**2 * divergence + (1 - weight) * F.cross_entropy(logits, labels)
        assert found == pytest.approx(float(wanted), rel=1e-5)


@table(
    "settings, line",
    missing=(["teacher={tmp}/none.pt"], "teacher: {tmp}/none.json: is missing; none.pt needs it"),
    damaged=(["teacher={tmp}/cut.pt"], "teacher: {tmp}/cut.pt: not a readable state_dict"),
    other_classes=(["teacher={tmp}/few.pt"], "teacher: {tmp}/few.pt: its classes (a, b) differ"),
    no_path=(["teacher=3"], "teacher: 3: must be the path of an exported network"),
    no_share=(["teacher={net}", "teacher_weight=0"], "teacher_weight: 0: must be a number above 0"),
    cold=(["teacher={net}", "teacher_temperature=0"], "teacher_temperature: 0: must be a number from 0.1"),
    alone=(["teacher_weight=0.9"], "teacher_weight: 0.9: has no effect without hyperparameters.teacher"),
    pipeline=(["teacher={net}", "pipe_parallel_size=2"], "teacher: {net}: does not work with a pipeline"),
)  # fmt: skip
def test_a_wrong_teacher_is_one_line(settings, line, teacher, tmp_path, capsys):
    few = {**TEACHER, "net": {"name": "net", "num_classes": 2}, "classes": ["a", "b"]}
    net_file.write(tmp_path / "few.pt", Net(2).state_dict(), few)
    (tmp_path / "cut.pt").write_bytes(teacher.read_bytes()[:1000])
    shutil.copy(teacher.with_suffix(".json"), tmp_path / "cut.json")
    names = {"tmp": tmp_path, "net": teacher}
    chosen = [part for each in settings for part in ("--set", f"hyperparameters.{each.format(**names)}")]
    assert train.main([*DIGITS, *chosen, "--check", "--slots", "2"]) == 2
    (said,) = [each for each in capsys.readouterr().err.splitlines() if "note" not in each]
    assert said.startswith(f"train.py: hyperparameters.{line.format(**names)}")


def test_a_resume_needs_the_same_teacher(runs, tmp_path, teacher):
    """The digest of the weights counts, and not the file's name."""
    copy = shutil.copytree(runs.stopped("teacher", 1).output, tmp_path / "copy")
    described = net_file.read_description(next(copy.glob("checkpoints/*/net.json")).with_suffix(".pt"))
    provenance = described["provenance"]["teacher"]
    assert provenance["weights_sha256"] == Teacher(str(runs.files["teacher"]), DIGIT_NAMES).digest
    arguments = [
        each.format(**runs.files) if "{teacher}" in each else each for each in ROWS["teacher"].arguments
    ]
    other = overrides(hyperparameters__teacher=teacher)
    resumed = run(["train.py", *arguments, *other, "--output", str(copy), *LATEST], copy)
    assert resumed.code == 2
    assert "hyperparameters.teacher: {'weights_sha256'" in resumed.stderr
