"""Parameter groups: who is in which, and what the engine makes of them in every mode."""

import json

import pytest
import torch
from modes import losses
from ruamel.yaml import YAML
from support import DIGITS, LATEST, checkpoints, error_line, overrides, train_many

from classify.config.hyperparameters import Hyperparameters
from classify.engine.parameter_groups import assign, summarise
from classify.models import registry
from classify.models.registry import NetSpec
from net import Net

STEPS, STOP, LR = 12, 7, 0.05
GROUPS = [
    {"match": "bias", "lr_factor": 3, "weight_decay": 0.1},
    {"match": r"^conv1\.weight", "frozen": True},
]
MODES: dict[str, dict] = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "bf16 zero3": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "moe": {"zero_optimization": {"stage": 2}},
    "pipeline": {"zero_optimization": {"stage": 1}},
}


def groups_of(net, **hyper):
    chosen = Hyperparameters.parse({"net": net, **hyper}, registry.check_name)
    outline = registry.on_meta_device(NetSpec(net, 10, (224, 224)))
    return assign(outline, chosen)


def test_each_parameter_is_in_one_group():
    assert [len(group.parameters) for group in groups_of("resnet18")] == [62]
    chosen = [{"match": r"bn.*\.bias", "lr_factor": 64}, {"match": "^conv1", "frozen": True}]
    found = groups_of("resnet18", weight_decay_on="weights", parameter_groups=chosen)
    assert [
        (each.name, len(each.parameters), each.lr_factor, each.weight_decay, each.frozen) for each in found
    ] == [
        ("others", 20, 1, None, False),
        ("others (no decay)", 24, 1, 0.0, False),
        (r"bn.*\.bias (no decay)", 17, 64, 0.0, False),
        ("^conv1", 1, 1, None, True),
    ]
    assert sum(each.weights for each in found) == sum(
        each.numel() for each in registry.build(NetSpec("resnet18", 10, (224, 224))).parameters()
    )
    plain, decayed = (groups_of("vit_b_16", weight_decay_on=on) for on in ("all", "weights"))
    (without,) = (each for each in decayed if each.weight_decay == 0)
    assert "class_token" in without.parameters and "encoder.pos_embedding" not in without.parameters
    # Muon has hidden matrices; the others are Adam's, at a rate of their own
    muon = {"lr": 0.02, "adam_lr": 0.001}
    hyper = Hyperparameters.parse({"net": "vit_b_16"}, registry.check_name)
    vit = registry.on_meta_device(NetSpec("vit_b_16", 10, (224, 224)))
    hidden, rest = assign(vit, hyper, 10, muon)
    assert (hidden.muon, hidden.lr_factor, rest.muon, rest.lr_factor) == (True, 1, False, 0.05)
    assert {"class_token", "encoder.pos_embedding", "heads.head.weight", "conv_proj.bias"} < {
        *rest.parameters
    }
    assert {"conv_proj.weight", "encoder.layers.encoder_layer_0.mlp.0.weight"} < {*hidden.parameters}
    assert len(hidden.parameters) == 1 + 12 * 4
    # What a resume asks for is who is with whom, not at which rate
    assert summarise(plain) is None
    faster = [{**chosen[0], "lr_factor": 2}, chosen[1]]
    assert summarise(found) == summarise(
        groups_of("resnet18", weight_decay_on="weights", parameter_groups=faster)
    )
    assert summarise(found) != summarise(
        groups_of("resnet18", weight_decay_on="weights", parameter_groups=chosen[:1])
    )


def test_a_schedule_reaches_the_optimizer_that_zero_makes_anew(tmp_path):
    adagrad = {"type": "Adagrad", "params": {"lr": LR}}
    weights = tmp_path / "first.pt"
    torch.save(Net().state_dict(), weights)
    more = {"weight_decay_on": "all", "optimizer": adagrad}
    rows = {mode: row(mode, weights, [], **more) for mode in ("zero0", "zero2", "zero3")}
    runs = train_many(tmp_path, rows)
    assert [run.code for run in runs.values()] == [0] * 3, runs["zero2"].stderr
    for run in runs.values():
        assert losses(run) == pytest.approx(losses(runs["zero0"]), rel=1e-4)


def test_ranks_have_the_same_groups():
    names = "{net: net-moe, ep_world_size: 2, parameter_groups: [{match: experts.1, frozen: true}]}"
    hyper = Hyperparameters.parse(YAML(typ="safe").load(names), registry.check_name)
    from classify.models.net_moe import NetMoE

    with torch.device("meta"):
        assert "match all, or none" in error_line(assign, NetMoE(), hyper)


def row(mode, weights, groups=GROUPS, **more):
    """The arguments of a short run that starts from a file's weights."""
    hyper = {
        "train_batch_size": 32,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9, "weight_decay": 0.01}},
        "scheduler": {"type": "LinearLR", "params": {"start_factor": 1, "end_factor": 0}},
        "gradient_clipping": 0.2,
        "max_length": {"batches": STEPS},
        "weight_decay_on": "weights",
        "parameter_groups": groups,
        "weights": str(weights),
        **MODES[mode],
        **({"pipe_parallel_size": 2} if mode == "pipeline" else {}),
        **({"net": "net-moe", "weights": None} if mode == "moe" else {}),
        **more,
    }
    return [*DIGITS, *overrides(scheduling_unit=1, hyperparameters=json.dumps(hyper))]


def settings_of(checkpoint):
    """Rate and decay of every parameter group that an engine has saved, on any rank."""

    def find(value):
        if isinstance(value, dict):
            for each in value.get("param_groups", []):
                yield each["name"], (each["lr"], each["weight_decay"])
            for inner in value.values():
                yield from find(inner)

    files = [torch.load(file, weights_only=False) for file in sorted(checkpoint.glob("model0/*.pt"))]
    return dict(found for file in files for found in find(file))


@pytest.fixture(scope="module", params=[1, 2])
def grouped(request, tmp_path_factory):
    """Runs in every mode, and the same that were stopped and go on from other weights."""
    folder, processes = tmp_path_factory.mktemp("groups"), request.param
    files = [folder / "first.pt", folder / "other.pt"]
    for file in files:
        torch.save(Net().state_dict(), file)
    modes = [mode for mode in MODES if processes == 2 or mode != "pipeline"]
    for name in ("straight", "stopped"):
        (folder / name).mkdir()
    straight = train_many(folder / "straight", {mode: row(mode, files[0]) for mode in modes}, processes)
    stopped = train_many(
        folder / "stopped", {mode: row(mode, files[0]) for mode in modes}, processes, sigterm_at=STOP
    )
    return processes, torch.load(files[0]), files[1], straight, stopped


def test_groups_in_every_mode(grouped):
    _, first, _, straight, _ = grouped
    for mode, run in straight.items():
        assert run.code == 0, f"{mode}: {run.stderr}"
        last = settings_of(checkpoints(run)[STEPS])
        rates = [entry["learning_rate"] for entry in run.metrics if entry["group"] == "training"]
        assert rates == pytest.approx([LR * (1 - step / STEPS) for step in range(STEPS)]), mode
        assert run.summary["parameter_groups"][0].startswith("others: "), mode
        if mode == "moe":
            continue
        weights = torch.load(run.output / "net.pt")
        kept = first["conv1.weight"]
        assert torch.equal(weights["conv1.weight"], kept.bfloat16().float() if "bf16" in mode else kept), mode
        assert not torch.equal(weights["conv2.weight"], first["conv2.weight"]), mode
        for name, setting in {"0 others": (0.0, 0.01), "1 bias": (0.0, 0.1)}.items():
            assert last[name] == pytest.approx(setting, abs=1e-9), mode
        if mode.startswith(("zero", "pipeline")):
            assert losses(run) == pytest.approx(losses(straight["zero0"]), rel=1e-4), mode


def test_groups_and_frozen_weights_survive_a_resume(grouped):
    """From other weights, so that a frozen one that a checkpoint lacks would show."""
    processes, _, other, straight, stopped = grouped
    slower = [{**GROUPS[0], "lr_factor": 1.5}, GROUPS[1]]
    for mode, run in stopped.items():
        assert run.code == 130, f"{mode}: {run.stderr}"
        (step,) = checkpoints(run)
        share = 1 - step / STEPS
        saved = settings_of(checkpoints(run)[step])
        if mode != "moe":
            assert saved["0 others"] == pytest.approx((LR * share, 0.01)), mode
            assert saved["1 bias"] == pytest.approx((3 * LR * share, 0.1)), mode
    refused = {
        "zero2": row("zero2", other, GROUPS[:1]),
        "zero0": row("zero0", other, [{"match": "^fc", "lr_factor": 2}]),
    }
    folder = stopped["zero0"].output.parent
    for mode, run in train_many(folder, {m: [*r, *LATEST] for m, r in refused.items()}, processes).items():
        assert run.code == 2, f"{mode}: {run.stderr}"
        assert "parameter_groups and weight_decay_on: " in run.stderr and len(run.stderr.splitlines()) == 1
    rest = {mode: [*row(mode, other), *LATEST] for mode in stopped}
    rest["zero1"] = [*row("zero1", other, slower), *LATEST]
    for mode, run in train_many(folder, rest, processes).items():
        assert run.code == 0, f"{mode}: {run.stderr}"
        is_same = run.summary["weights_sha256"] == straight[mode].summary["weights_sha256"]
        assert is_same == (mode != "zero1"), mode


def test_rates_fall_from_layer_to_layer_and_the_body_may_wait():
    (only,) = (each for each in groups_of("resnet18", head_only=True) if not each.frozen)
    assert only.parameters == ("fc.weight", "fc.bias")
    found = groups_of("resnet18", layer_decay=0.5, weight_decay_on="weights")
    factors = {name: each.lr_factor for each in found for name in each.parameters}
    assert factors["fc.bias"] == 1 and factors["layer4.1.conv2.weight"] == 0.5
    assert factors["conv1.weight"] == factors["bn1.weight"] == 0.5**9
    assert len(found) == 20 and len(groups_of("vit_b_16", layer_decay=0.75, weight_decay_on="weights")) == 28
    biases = [{"match": "bias", "lr_factor": 64}]
    both = {name: each.lr_factor for each in groups_of("net", layer_decay=0.5, parameter_groups=biases)
            for name in each.parameters}  # fmt: skip
    assert both["fc3.bias"] == 64 and both["fc1.bias"] == 16 and both["fc1.weight"] == 0.25
    outline = registry.on_meta_device(NetSpec("net", 10, (32, 32)))
    hyper = Hyperparameters.parse({"net": "net"}, registry.check_name)
    head, body = assign(outline, hyper, 10, waits=7)
    assert (body.starts_after, head.starts_after, head.parameters) == (7, 0, ("fc3.weight", "fc3.bias"))
    assert body.describe({"lr": 0.1}) == (
        "others: 8 parameters, 61,156 weights, learning rate 0.1, after 7 steps, weight decay 0"
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_the_head_trains_first_and_layers_at_their_own_rates(tmp_path, processes):
    """In every mode, and to the same bits after a stop while the body waits."""
    weights, first = tmp_path / "first.pt", Net()
    torch.save(first.state_dict(), weights)
    how = {"head_only": {"batches": 5}, "layer_decay": 0.5}
    modes = [mode for mode in MODES if processes == 2 or mode != "pipeline"]
    kept = overrides(min_checkpoint_period="{batches: 5}", checkpoint_storage="{save_trial_latest: 9}")
    rows = {"head": row("zero2", weights, [], head_only=True)}
    rows |= {mode: [*row(mode, weights, [], **how), *kept] for mode in modes}
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight = train_many(tmp_path / "straight", rows, processes)
    stopped = train_many(tmp_path / "stopped", rows, processes, sigterm_at=3)
    rest = train_many(
        tmp_path / "stopped", {name: [*each, *LATEST] for name, each in rows.items()}, processes
    )
    for mode, run in straight.items():
        assert (run.code, stopped[mode].code, rest[mode].code) == (0, 130, 0), f"{mode}: {run.stderr}"
        assert rest[mode].summary["weights_sha256"] == run.summary["weights_sha256"], mode
        if mode == "moe":
            continue
        before = {
            name: each.bfloat16().float() if "bf16" in mode else each
            for name, each in first.state_dict().items()
        }
        saved = checkpoints(run)
        waited = torch.load((saved[5] if mode != "head" else run.output) / "net.pt")
        for name, weight in waited.items():
            assert torch.equal(weight, before[name]) == (not name.startswith("fc3")), f"{mode}: {name}"
        if mode == "head":
            continue
        last = torch.load(run.output / "net.pt")
        assert not any(torch.equal(last[name], before[name]) for name in last), mode
        if mode.startswith(("zero", "pipeline")):
            assert losses(run) == pytest.approx(losses(straight["zero0"]), rel=1e-4), mode
            rates = {name: rate / LR * STEPS / 2 for name, (rate, _) in settings_of(saved[10]).items()}
            assert len(rates) == 10, mode  # with decay, and without
            for name, rate in rates.items():
                layer = int(name.partition("layer ")[2][0])
                assert rate == pytest.approx(0.5 ** (4 - layer)), f"{mode}: {name}"


def test_what_cannot_be_rated_is_said():
    for hyper, line in [
        ({"layer_decay": 1}, "hyperparameters.layer_decay: 1: must be a number between 0 and 1"),
        (
            {"head_only": {"steps": 3}},
            "hyperparameters.head_only: {'steps': 3}: must be true, or for how long",
        ),
        (
            {"head_only": 3},
            "hyperparameters.head_only: 3: must be true, or for how long at first: {epochs: N}",
        ),
    ]:
        assert error_line(Hyperparameters.parse, hyper, registry.check_name).startswith(line)
