"""The micro-batch for ``auto``, and what ``--tune`` finds: the rule, and real runs."""

import json
import sys

import pytest
from support import DIGITS, LATEST, error_line, execute, launcher, overrides, train_many

import train
from classify.config import experiment_file
from classify.engine.trial_config import TrialConfig
from classify.tuning import fastest, tune
from classify.tuning.fastest import RECOMPUTE, STAGE, Tries, changed, halves
from harness.attempts import NO_MEMORY, Attempt
from harness.errors import TrainingStopped

ARGS = "hyperparameters__overwrite_deepspeed_args"
AUTO = {f"{ARGS}__train_micro_batch_size_per_gpu": "auto"}


def tries_of(rates, processes=1, **values) -> Tries:
    """Tries of the digits in batches of 32: images a second of each (stage, micro-batch), or why it fails."""
    experiment = experiment_file.load("experiments/digits.yaml", overrides(**values)[1::2])
    config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, processes, "cpu")

    def attempt(changed, number, needs):
        resolved = TrialConfig.resolve(changed.hyperparameters, changed.config, processes, "cpu")
        accumulation = min(2, 32 // processes // resolved.micro_batch)
        assert resolved.batch == resolved.micro_batch * accumulation * processes
        assert resolved.hyper.max_length == {"batches": 1000}
        assert number == len(tries.done) and needs > 0
        key = resolved.zero_stage, resolved.micro_batch
        result = rates.get((*key, "recomputed") if resolved.hyper.checkpoint_activations else key, 1)
        if isinstance(result, Attempt):
            return result
        seconds = (
            resolved.micro_batch * processes / result
        )  # of a micro-batch; the optimizer's step costs none
        return Attempt(seconds, seconds, 100.0)

    tries = Tries(config, experiment, attempt, lambda tried: None)
    return tries


FULL = Attempt(reason=f"{NO_MEMORY} (killed)")


def micro_batches(tries):
    return [tried.micro_batch for tried in tries.done]


ROWS: dict[str, tuple[dict, int, list[int]]] = {
    "as long as less is not slower": (
        {(0, 32): 10, (0, 16): 12, (0, 8): 11.9, (0, 4): 5},
        16,
        [32, 16, 8, 4],
    ),
    "half after each that does not fit": (
        {(0, 32): FULL, (0, 16): FULL, (0, 8): 3, (0, 4): 1},
        8,
        [32, 16, 8, 4],
    ),
    "the largest, if all are as fast": ({(0, n): 5 for n in (32, 16, 8, 4, 2, 1)}, 32, [32, 16, 8]),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_fastest_micro_batch_that_fits(name):
    rates, wanted, tried = ROWS[name]
    tries = tries_of(rates)
    best = tries.best_micro_batch({})
    assert best and (best.micro_batch, best.accumulation) == (wanted, 32 // wanted)
    assert best.images_per_second == pytest.approx(rates[0, wanted])
    assert micro_batches(tries) == tried


def test_none_that_trains_is_said_with_what_would():
    tries = tries_of({(0, n): FULL for n in (32, 16, 8, 4, 2, 1)})
    assert tries.best_micro_batch({}) is None
    with pytest.raises(TrainingStopped, match=r"auto: no memory left \(killed\) with 1; use less$"):
        tries.fail("use less")
    refused = Attempt(reason="x", errors=("net: 'a': must be b",))
    tries = tries_of({(0, n): refused for n in (32, 16, 8, 4, 2, 1)})
    assert tries.best_micro_batch({}) is None
    assert error_line(tries.fail, "") == "net: 'a': must be b"


def test_shares_that_are_no_power_of_two():
    assert list(halves(96)) == [96, 48, 24, 12, 6, 3, 1]
    assert list(halves(50)) == [50, 25, 10, 5, 2, 1]
    assert list(halves(50, 20)) == [10, 5, 2, 1]


def test_what_is_found_goes_into_any_form():
    found = {STAGE: 2, RECOMPUTE: True}
    batch = {"train_micro_batch_size_per_gpu": 4}
    zero = {"stage": 2, "overlap_comm": False}
    file: dict = {
        "deepspeed_config": "ds.json",
        "overwrite_deepspeed_args": {"zero_optimization": {"overlap_comm": False}},
    }
    assert changed(file, found, batch) == {
        "deepspeed_config": "ds.json",
        RECOMPUTE: True,
        "overwrite_deepspeed_args": {**batch, "zero_optimization": zero},
    }
    inline: dict = {"zero_optimization": {"stage": 1, "overlap_comm": False}, "net": "net"}
    assert changed(inline, found, batch) == {
        "net": "net",
        RECOMPUTE: True,
        **batch,
        "zero_optimization": zero,
    }
    assert inline["zero_optimization"]["stage"] == 1


def test_tuning_tries_stages_at_the_best_micro_batch_and_recomputes_where_memory_is_short():
    rates = {(0, 16): 10, (0, 8): 20, (0, 4): 1, (1, 8): 15, (2, 8): 30, (3, 8): 4}
    net = {"hyperparameters__net": "resnet18"}
    tries = tries_of(rates, processes=2, **net)
    best = fastest.find(tries)
    assert best and (best.changes, best.micro_batch) == ({STAGE: 2}, 8)
    assert len(tries.done) == 6
    # Where the largest does not fit, each stage is tried with it, too, and recomputed activations at last
    tries = tries_of(
        {**rates, (0, 16): FULL, (1, 16): 21, (2, 16): FULL, (3, 16): FULL, (2, 16, "recomputed"): 40},
        2,
        **net,
    )
    best = fastest.find(tries)
    assert best and (best.changes, best.micro_batch) == ({STAGE: 2, RECOMPUTE: True}, 16)


MORE = overrides(
    hyperparameters__max_length="{batches: 3}", hyperparameters__net="resnet18", data__image_size=96
)
MORE += overrides(
    **{f"{ARGS}__train_batch_size": 192}, searcher__metric="loss", searcher__smaller_is_better=True
)


def test_auto_halves_in_little_memory_and_trains_to_the_same_bits_as_by_hand(tmp_path):
    """900 MiB: too little for 192 images of 96 pixels in a ResNet-18, which needs 4.6 MB for each."""
    limited = (
        "import resource, runpy, sys, model_def;"
        "used = [int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmData')];"
        "limit = used[0] * 1024 + 900 * 2**20; resource.setrlimit(resource.RLIMIT_DATA, (limit, limit));"
        "sys.argv.pop(0); runpy.run_path('train.py', run_name='__main__')"
    )
    row = ["train.py", *DIGITS, *MORE, *overrides(**AUTO, hyperparameters__max_length="{batches: 2}")]
    run = execute(
        [sys.executable, "-c", limited, *row, "--output", str(tmp_path / "auto")], tmp_path / "auto"
    )
    assert run.code == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("micro-batch ")]
    assert (
        lines[0].startswith("micro-batch 192: no memory left (")
        and "MiB by forecast" in lines[0]
        and "images/s" in lines[-1]
    )
    found = json.loads((run.output / "tried.json").read_text())
    chosen = found["train_micro_batch_size_per_gpu"]
    assert chosen < 192 and f"micro-batch {chosen} x accumulation {192 // chosen}" in run.stdout
    # A resumed run takes the same, without trying
    by_hand = overrides(**{f"{ARGS}__train_micro_batch_size_per_gpu": chosen})
    runs = train_many(
        tmp_path,
        {
            "auto": [*DIGITS, *MORE, *overrides(**AUTO), *LATEST],
            "hand": [*DIGITS, *MORE, *by_hand],
        },
    )
    assert [each.code for each in runs.values()] == [0, 0], [each.stderr for each in runs.values()]
    assert "micro-batch 192:" not in runs["auto"].stdout
    assert runs["auto"].summary["weights_sha256"] == runs["hand"].summary["weights_sha256"]


@pytest.mark.parametrize("name", ["torchrun", "deepspeed"])
def test_ranks_of_a_launcher_choose_together(name, tmp_path):
    small = {**AUTO, f"{ARGS}__train_batch_size": 8, "hyperparameters__max_length": "{batches: 2}"}
    row = ["train.py", *DIGITS, *overrides(**small)]
    run = execute([*launcher(name, 2), *row, "--output", str(tmp_path / "run")], tmp_path / "run")
    assert run.code == 0, run.stderr
    tried = [line for line in run.stdout.splitlines() if "micro-batch 4: " in line]
    assert len(tried) == 1 and "images/s" in tried[0]
    found = json.loads((run.output / "tried.json").read_text())
    assert found["processes"] == 2 and found["train_micro_batch_size_per_gpu"] in (4, 2, 1)


def test_a_tuned_file_trains(tmp_path, capfd):
    small = [*DIGITS, *overrides(**{f"{ARGS}__train_batch_size": 8})]
    arguments = ["train.py", *small, "--tune", "--slots", "2", "--output", str(tmp_path / "t")]
    run = execute([sys.executable, *arguments], tmp_path / "t")
    assert run.code == 0, run.stderr
    tried = json.loads((tmp_path / "t" / tune.TRIED).read_text())
    best = max(tried, key=lambda each: each["images_per_second"])
    assert {each["changes"].get(STAGE, 0) for each in tried} == {0, 1, 2, 3}
    assert f"fastest: {''.join(f'{key} {value}, ' for key, value in best['changes'].items())}" in run.stdout
    assert train.main(["--config", str(tmp_path / "t" / tune.TUNED), "--check", "--slots", "2"]) == 0
    resolved = json.loads(capfd.readouterr().out)
    assert resolved["train_micro_batch_size_per_gpu"] == best["micro_batch"]
    assert resolved.get("zero_optimization", {}).get("stage", 0) == best["changes"].get(STAGE, 0)
    # Nothing is written over
    assert train.main(arguments[1:]) == 2
    assert capfd.readouterr().err.endswith("tuned.yaml: is there already; give another folder\n")


def test_what_cannot_be_tried_is_refused(monkeypatch, capfd):
    rows = {
        "pipelines and experts are built for one size; give a number": [
            "--config",
            "experiments/pipeline.yaml",
        ],
        "": DIGITS,
    }
    sizes = {f"{ARGS}__train_batch_size": 16, f"{ARGS}__gradient_accumulation_steps": "auto"}
    for what, config in rows.items():
        arguments = [
            *config,
            *overrides(**AUTO, data__dataset="digits", **sizes),
            "--check",
            "--slots",
            "2",
        ]
        code = train.main(arguments)
        assert (code, what in capfd.readouterr().err) == (2 if what else 0, True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main([*DIGITS, "--tune"]) == 2
    assert "run python3 train.py --tune --slots N" in capfd.readouterr().err
