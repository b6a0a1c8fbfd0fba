"""The micro-batch for ``auto``, and the configuration that ``--tune`` finds: the rules, and real runs."""

import json
import sys

import pytest
from support import DIGITS, error_line, execute, overrides, run, train_many

import train
from classify.config import experiment_file
from classify.engine.trial_config import TrialConfig
from classify.tuning import fastest, micro_batch
from classify.tuning.fastest import RECOMPUTE, STAGE, Tries, changed, halves
from deepspeed_trial import attempts
from deepspeed_trial.attempts import NO_MEMORY, Attempt
from deepspeed_trial.errors import TrainingStopped
from workbench import tune

ARGS = "hyperparameters__overwrite_deepspeed_args"
AUTO = {f"{ARGS}__train_micro_batch_size_per_gpu": "auto"}
MICRO = "train_micro_batch_size_per_gpu"
SMALL_VIT = "{num_layers: 1, hidden_dim: 32, num_heads: 2, mlp_dim: 32}"
VIT = {"hyperparameters__net": "vit_b_16", "hyperparameters__net_args": SMALL_VIT}


def result_of(rates, experiment, processes):
    """The attempt at an experiment by (stage, micro-batch): images a second, or an attempt that failed."""
    resolved = TrialConfig.resolve(experiment.hyperparameters, experiment.config, processes, "cpu")
    key = resolved.zero_stage, resolved.micro_batch
    result = rates.get((*key, "recomputed") if resolved.hyper.checkpoint_activations else key, 1)
    if isinstance(result, Attempt):
        return resolved, result
    seconds = resolved.micro_batch * processes / result  # the optimizer's step costs none
    return resolved, Attempt(seconds, seconds, 100.0)


def tries_of(rates, processes=1, **values) -> Tries:
    """Tries of the digits in batches of 32."""
    experiment = experiment_file.load("experiments/digits.yaml", overrides(**values)[1::2])
    config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, processes, "cpu")

    def attempt(changed, needs):
        resolved, result = result_of(rates, changed, processes)
        accumulation = min(2, 32 // processes // resolved.micro_batch)
        assert resolved.batch == resolved.micro_batch * accumulation * processes
        assert resolved.hyper.max_length == {"batches": 1000}
        assert needs > 0
        return result

    tries = Tries(config, experiment, attempt, lambda tried: None)
    return tries


FULL = Attempt(reason=f"{NO_MEMORY} (killed)")
ALL = (32, 16, 8, 4, 2, 1)
ROWS: dict[str, tuple[dict, int, list[int]]] = {
    "half is not slower": ({(0, 32): 10, (0, 16): 12, (0, 8): 11.9, (0, 4): 5}, 16, [32, 16, 8, 4]),
    "half fits": ({(0, 32): FULL, (0, 16): FULL, (0, 8): 3, (0, 4): 1}, 8, [32, 16, 8, 4]),
    "all are as fast": ({(0, n): 5 for n in ALL}, 32, [32, 16, 8]),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_fastest_micro_batch_that_fits(name):
    rates, wanted, tried = ROWS[name]
    tries = tries_of(rates)
    best = tries.best_micro_batch({})
    assert best and (best.micro_batch, best.accumulation) == (wanted, 32 // wanted)
    assert best.images_per_second == pytest.approx(rates[0, wanted])
    assert [each.micro_batch for each in tries.done] == tried


def test_an_error_says_why_no_micro_batch_trains():
    tries = tries_of({(0, n): FULL for n in ALL})
    assert tries.best_micro_batch({}) is None
    with pytest.raises(TrainingStopped, match=r"auto: no memory left \(killed\) with 1; use less$"):
        tries.fail("use less")
    refused = Attempt(reason="x", errors=("net: 'a': must be b",))
    tries = tries_of({(0, n): refused for n in ALL})
    assert tries.best_micro_batch({}) is None
    assert error_line(tries.fail, "") == "net: 'a': must be b"


def test_halves_of_any_number_are_its_divisors():
    assert list(halves(96)) == [96, 48, 24, 12, 6, 3, 1]
    assert list(halves(50)) == [50, 25, 10, 5, 2, 1]
    assert list(halves(50, 20)) == [10, 5, 2, 1]


def test_every_form_of_hyperparameters_takes_the_changes():
    found, batch = {STAGE: 2, RECOMPUTE: True}, {MICRO: 4}
    before, after = {"overlap_comm": False}, {"stage": 2, "overlap_comm": False}
    file: dict = {"deepspeed_config": "ds.json", "overwrite_deepspeed_args": {"zero_optimization": before}}
    section = {**batch, "zero_optimization": after}
    wanted = {"deepspeed_config": "ds.json", RECOMPUTE: True, "overwrite_deepspeed_args": section}
    assert changed(file, found, batch) == wanted
    inline: dict = {"zero_optimization": {"stage": 1, **before}, "net": "net"}
    assert changed(inline, found, batch) == {"net": "net", RECOMPUTE: True, **section}
    assert inline["zero_optimization"]["stage"] == 1


RATES = {(0, 16): 10, (0, 8): 20, (0, 4): 1, (1, 8): 15, (2, 8): 30, (3, 8): 4}


def test_tuning_tries_stages_at_the_best_micro_batch_and_recomputes_where_memory_is_short():
    tries = tries_of(RATES, 2, **VIT)
    best = fastest.find(tries)
    assert best and (best.changes, best.micro_batch) == ({STAGE: 2}, 8)
    assert len(tries.done) == 6
    # Where the largest does not fit, it is tried with each stage, too, and in the end with recomputed activations
    full = {(0, 16): FULL, (1, 16): 21, (2, 16): FULL, (3, 16): FULL, (2, 16, "recomputed"): 40}
    best = fastest.find(tries_of({**RATES, **full}, 2, **VIT))
    assert best and (best.changes, best.micro_batch) == ({STAGE: 2, RECOMPUTE: True}, 16)


def test_tuning_writes_its_tries_and_the_fastest_file(tmp_path, monkeypatch, capfd):
    """Figures stand in for the steps of the tried processes."""
    ranks = []

    def attempt(trial_class, experiment, given, threads, needs):
        ranks.append([each["RANK"] for each in given.environments])
        return result_of(RATES, experiment, len(given.environments))[1]

    monkeypatch.setattr(attempts, "attempt", attempt)
    arguments = [*DIGITS, "--tune", "--slots", "2", "--output", str(tmp_path / "t")]
    arguments += ["--set", "environment={environment_variables: [PASSWORD=planted_]}"]
    assert train.main(arguments) == 0
    assert ranks == [["0", "1"]] * 6
    shown, noted = capfd.readouterr()
    assert "train.py: note: tuned.yaml: *** hides a possible credential; " in noted
    assert "planted_" not in (tmp_path / "t" / tune.TUNED).read_text()
    assert f"\nfastest: {STAGE} 2, {MICRO} 8, gradient_accumulation_steps 2\n" in shown
    assert "\nZeRO 2, micro-batch 8, accumulation 2: 30 images/s, 100 MiB\n" in shown
    tried = json.loads((tmp_path / "t" / tune.TRIED).read_text())
    found = {(each["changes"].get(STAGE, 0), each["micro_batch"]): each for each in tried}
    assert {key: each["images_per_second"] for key, each in found.items()} == pytest.approx(RATES)
    assert train.main(["--config", str(tmp_path / "t" / tune.TUNED), "--check", "--slots", "2"]) == 0
    resolved = json.loads(capfd.readouterr().out)
    assert (resolved[MICRO], resolved["zero_optimization"]["stage"]) == (8, 2)
    assert train.main(arguments) == 2  # it replaces no file
    assert capfd.readouterr().err.endswith("tuned.yaml: exists; give another folder\n")


def test_contradictions_to_trying_are_refused(monkeypatch, capfd):
    auto = [*DIGITS, *overrides(**AUTO)]
    sizes = overrides(**{f"{ARGS}__train_batch_size": 16, f"{ARGS}__gradient_accumulation_steps": "auto"})
    assert train.main([*auto, *sizes, "--check", "--slots", "2"]) == 0
    pipeline = ["--config", "experiments/pipeline.yaml", *overrides(**AUTO, data__dataset="digits")]
    assert train.main([*pipeline, *sizes, "--check", "--slots", "2"]) == 2
    assert "pipelines and experts need a fixed size; give a number" in capfd.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main([*DIGITS, "--tune"]) == 2
    assert "run python3 train.py --tune --slots N" in capfd.readouterr().err


def test_a_resumed_run_takes_the_micro_batch_of_its_file(tmp_path, monkeypatch):
    experiment = experiment_file.load("experiments/digits.yaml", overrides(**AUTO)[1::2])
    monkeypatch.setattr(attempts, "attempt", lambda *_: FULL)
    for chosen, kept in ((8, 8), (5, 0), ("8", 0)):
        file = {"processes": 1, "train_batch_size": 32, MICRO: chosen}
        (tmp_path / micro_batch.FILE).write_text(json.dumps(file))
        choice = micro_batch.choose(object, experiment, tmp_path)
        assert choice and choice.micro_batch == kept and bool(choice.error) == (not kept)


# ------------------------------------------------------------------------------------------------- real runs


SMALL = overrides(**AUTO, **{f"{ARGS}__train_batch_size": 4}, hyperparameters__max_length="{batches: 2}")


def test_ranks_choose_together_and_train_to_the_same_bits_as_by_hand(tmp_path):
    made = train_many(tmp_path, {"auto": [*DIGITS, *SMALL]}, 2)["auto"]
    assert made.code == 0, made.stderr
    tried = [line for line in made.stdout.splitlines() if "micro-batch 2: " in line]
    assert len(tried) == 1 and "images/s" in tried[0]
    found = json.loads((made.output / "tried.json").read_text())
    chosen = found[MICRO]
    assert found["processes"] == 2 and chosen in (2, 1)
    assert f"micro-batch {chosen} x accumulation {2 // chosen}" in made.stdout
    by_hand = [*DIGITS, *SMALL, *overrides(**{f"{ARGS}__{MICRO}": chosen})]
    hand = train_many(tmp_path, {"hand": by_hand}, 2)["hand"]
    assert hand.summary["weights_sha256"] == made.summary["weights_sha256"]


@pytest.mark.soak
def test_a_tuned_file_trains(tmp_path):
    small = overrides(**{f"{ARGS}__train_batch_size": 8}, hyperparameters__max_length="{batches: 2}")
    made = run(["train.py", *DIGITS, *small, "--tune", "--slots", "2", "--output", str(tmp_path)], tmp_path)
    assert made.code == 0, made.stderr
    tried = json.loads((tmp_path / tune.TRIED).read_text())
    best = max(tried, key=lambda each: each["images_per_second"])
    assert {each["changes"].get(STAGE, 0) for each in tried} == {0, 1, 2, 3}
    assert f"fastest: {''.join(f'{key} {value}, ' for key, value in best['changes'].items())}" in made.stdout
    (trained,) = train_many(tmp_path, {"run": ["--config", str(tmp_path / tune.TUNED)]}, 2).values()
    assert trained.code == 0, trained.stderr
    assert trained.summary["zero_stage"] == best["changes"].get(STAGE, 0)


@pytest.mark.soak
def test_auto_halves_in_little_memory(tmp_path):
    """900 MiB hold fewer than 192 images of 96 pixels in a ResNet-18, which needs 4.6 MB for each."""
    limited = (
        "import resource, runpy, sys, model_def;"
        "used = [int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmData')];"
        "limit = used[0] * 1024 + 900 * 2**20; resource.setrlimit(resource.RLIMIT_DATA, (limit, limit));"
        "sys.argv.pop(0); runpy.run_path('train.py', run_name='__main__')"
    )
    net = {"hyperparameters__net": "resnet18", "data__image_size": 96, f"{ARGS}__train_batch_size": 192}
    row = ["train.py", *DIGITS, *overrides(**net, **AUTO, hyperparameters__max_length="{batches: 2}")]
    made = execute([sys.executable, "-c", limited, *row, "--output", str(tmp_path)], tmp_path)
    assert made.code == 0, made.stdout + made.stderr
    lines = [line for line in made.stdout.splitlines() if line.startswith("micro-batch ")]
    assert lines[0].startswith("micro-batch 192: no memory left (") and "MiB by estimate" in lines[0]
    assert "images/s" in lines[-1]
    chosen = json.loads((tmp_path / "tried.json").read_text())[MICRO]
    assert chosen < 192 and f"micro-batch {chosen} x accumulation {192 // chosen}" in made.stdout
