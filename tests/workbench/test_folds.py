"""``train.py --folds``: K trainings, with another K-th of the images held out of each."""

import csv
import json
import signal
import statistics

import pytest
from folders import table
from sources import copied
from support import overrides, run, started, time_limit, wait_until

import train as program
from workbench import folds

SHORT = [
    *("--config", "experiments/digits.yaml"),
    *overrides(
        hyperparameters__net="airbench",
        hyperparameters__net_args="{width: 2}",
        hyperparameters__max_length="{batches: 4}",
        hyperparameters__overwrite_deepspeed_args__train_batch_size=16,
        data__dataset="imagefolder",
        data__image_size=32,
        data__validation="auto",
    ),
]


@pytest.fixture
def whole(image_folder, tmp_path):
    """The training images alone, in a folder for each class."""
    return copied(image_folder / "train", tmp_path / "Größe")


def test_a_finished_cross_validation_is_a_table_and_a_page(whole, tmp_path, capsys):
    output, arguments = tmp_path / "cv", [*SHORT, *overrides(data__root=whole)]
    summaries = []
    for number in (1, 2):
        folder = output / "folds" / str(number)
        fold = overrides(data__fold=f"[{number}, 2]")
        made = run(["train.py", *arguments, *fold, "--output", str(folder)], folder)
        assert made.code == 0, made.stderr
        summaries.append(made.summary)
    assert sum(summary["test"]["images"] for summary in summaries) == 160
    assert program.main([*arguments, "--folds", "2", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    scores = [summary["test"]["accuracy"] for summary in summaries]
    shown = f"{100 * statistics.mean(scores):.2f} % ± {100 * statistics.stdev(scores):.2f} %"
    assert printed.splitlines()[-1] == f"accuracy {shown} (mean and standard deviation of 2 folds)"
    assert f"fold 2 of 2: accuracy {100 * scores[1]:.2f} %\n" in printed and "0 to train" not in printed
    assert printed.count(f" {100 * scores[0]:.2f} % ") >= 1  # in the table
    rows = list(csv.DictReader((output / folds.TABLE).read_text().splitlines()))
    assert [float(row["accuracy"]) for row in rows] == scores
    assert [row["fold"] for row in rows] == ["1", "2"]
    page = (output / folds.PAGE).read_text()
    assert shown in page and "digit 3" in page and "160" in page
    assert f"<td>{100 * scores[0]:.2f} %</td>" in page
    assert program.main([*arguments, "--folds", "3", "--output", str(output)]) == 2
    line = f"train.py: --output: {output}: holds another cross-validation; give another folder"
    assert capsys.readouterr().err.splitlines()[-1] == line


@table(
    "arguments, line",
    one=(["--folds", "1"], "--folds: 1: must be from 2 to 1,000"),
    resume=(["--folds", "3", "--resume", "latest"], "--folds: 3: does not work with --resume; with the same --output, --folds continues"),
    check=(["--folds", "3", "--check"], "--folds: 3: does not work with --check; give one of the two"),
    find_lr=(["--folds", "3", "--find-lr"], "--folds: 3: does not work with --find-lr; give one of the two"),
    tune=(["--folds", "3", "--tune"], "--folds: 3: does not work with --tune; give one of the two"),
    too_many=(["--folds", "99"], "data.fold: the class 'digit 0' has 40 images, too few for 99 folds; add some, or use"),
    test=(["--folds", "3", *overrides(data__test=0.3)], "data.test: 0.3: data.fold holds out the test images; remove"),
)  # fmt: skip
def test_folds_that_cannot_be_are_refused(whole, tmp_path, arguments, line, capsys):
    given = [*SHORT, *overrides(data__root=whole), *arguments, "--output", str(tmp_path / "cv")]
    assert program.main(given) == 2
    assert line in capsys.readouterr().err


@pytest.mark.soak
def test_folds_stop_with_a_checkpoint_and_continue_to_the_same_weights(whole, tmp_path):
    data = overrides(data__root=whole, hyperparameters__max_length="{batches: 300}")

    def weights(output, interrupt):
        arguments = ["train.py", *SHORT, *data, "--folds", "2", "--output", str(output)]
        if interrupt:
            with started(arguments) as program:
                log = output / "folds/2/metrics.jsonl"
                wait_until(lambda: log.exists() and log.stat().st_size, program)
                program.send_signal(signal.SIGTERM)
                assert program.wait(time_limit()) == 130
            assert (output / "folds/1/summary.json").exists()
            assert any((output / "folds/2/checkpoints").iterdir())
        made = run(arguments, output)
        assert made.code == 0, made.stderr
        assert ("resumes checkpoint" in (output / "folds/2.log").read_text()) == interrupt
        summaries = [json.loads((output / f"folds/{n}/summary.json").read_text()) for n in (1, 2)]
        return [summary["weights_sha256"] for summary in summaries]

    first, second = weights(tmp_path / "stopped", True)
    assert weights(tmp_path / "at once", False) == [first, second] and first != second
