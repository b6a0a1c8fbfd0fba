"""Parameter groups: their parameters, and their rates and decays in every mode."""

import json
import shutil

import pytest
import torch
from matrix import DEEPSPEED, GROUPS, LINE, ROWS, STEPS
from ruamel.yaml import YAML
from support import DIGITS, LATEST, checkpoints, error_line, overrides, rates, run, train_many
from test_matrix import each, losses

from classify.config.hyperparameters import Hyperparameters
from classify.engine.parameter_groups import assign, summarise
from classify.models import net_file, registry
from classify.models.registry import NetSpec

LR = GROUPS["ds_optimizer"]["params"]["lr"]


def groups_of(net, **hyper):
    chosen = Hyperparameters.parse({"net": net, **hyper}, registry.check_name)
    outline = registry.on_meta_device(NetSpec(net, 10, (224, 224)))
    return assign(outline, chosen)


def test_each_parameter_is_in_one_group():
    assert [len(group.parameters) for group in groups_of("resnet18")] == [62]
    chosen = [{"match": r"bn.*\.bias", "lr_factor": 64}, {"match": "^conv1", "frozen": True}]
    found = groups_of("resnet18", weight_decay_on="weights", parameter_groups=chosen)
    assert [(g.name, len(g.parameters), g.lr_factor, g.weight_decay, g.frozen) for g in found] == [
        ("others", 20, 1, None, False),
        ("others (no decay)", 24, 1, 0.0, False),
        (r"bn.*\.bias (no decay)", 17, 64, 0.0, False),
        ("^conv1", 1, 1, None, True),
    ]
    parameters = registry.build(NetSpec("resnet18", 10, (224, 224))).parameters()
    assert sum(group.weights for group in found) == sum(each.numel() for each in parameters)
    plain, decayed = (groups_of("vit_b_16", weight_decay_on=on) for on in ("all", "weights"))
    (without,) = (group for group in decayed if group.weight_decay == 0)
    assert "class_token" in without.parameters and "encoder.pos_embedding" not in without.parameters
    # Muon trains hidden matrices; Adam trains the others at another rate
    muon = {"lr": 0.02, "adam_lr": 0.001}
    hyper = Hyperparameters.parse({"net": "vit_b_16"}, registry.check_name)
    vit = registry.on_meta_device(NetSpec("vit_b_16", 10, (224, 224)))
    hidden, rest = assign(vit, hyper, 10, muon)
    assert (hidden.muon, hidden.lr_factor, rest.muon, rest.lr_factor) == (True, 1, False, 0.05)
    of_adam = {"class_token", "encoder.pos_embedding", "heads.head.weight", "conv_proj.bias"}
    assert of_adam < {*rest.parameters}
    assert {"conv_proj.weight", "encoder.layers.encoder_layer_0.mlp.0.weight"} < {*hidden.parameters}
    assert len(hidden.parameters) == 1 + 12 * 4
    # A resume wants the same groups, at any rates
    assert summarise(plain) is None
    for others, is_same in (([{**chosen[0], "lr_factor": 2}, chosen[1]], True), (chosen[:1], False)):
        grouped = groups_of("resnet18", weight_decay_on="weights", parameter_groups=others)
        assert (summarise(found) == summarise(grouped)) == is_same


def test_ranks_have_the_same_groups():
    names = "{net: net-moe, ep_world_size: 2, parameter_groups: [{match: experts.1, frozen: true}]}"
    hyper = Hyperparameters.parse(YAML(typ="safe").load(names), registry.check_name)
    from classify.models.net_moe import NetMoE

    with torch.device("meta"):
        assert "match all, or none" in error_line(assign, NetMoE(), hyper)


def test_rates_fall_from_layer_to_layer_and_the_body_may_wait():
    (only,) = (each for each in groups_of("resnet18", head_only=True) if not each.frozen)
    assert only.parameters == ("fc.weight", "fc.bias")
    found = groups_of("resnet18", layer_decay=0.5, weight_decay_on="weights")
    factors = {name: each.lr_factor for each in found for name in each.parameters}
    assert factors["fc.bias"] == 1 and factors["layer4.1.conv2.weight"] == 0.5
    assert factors["conv1.weight"] == factors["bn1.weight"] == 0.5**9
    assert len(found) == 20 and len(groups_of("vit_b_16", layer_decay=0.75, weight_decay_on="weights")) == 28
    biases = [{"match": "bias", "lr_factor": 64}]
    found = groups_of("net", layer_decay=0.5, parameter_groups=biases)
    both = {name: each.lr_factor for each in found for name in each.parameters}
    assert both["fc3.bias"] == 64 and both["fc1.bias"] == 16 and both["fc1.weight"] == 0.25
    outline = registry.on_meta_device(NetSpec("net", 10, (32, 32)))
    hyper = Hyperparameters.parse({"net": "net"}, registry.check_name)
    head, body = assign(outline, hyper, 10, waits=7)
    assert (body.starts_after, head.starts_after, head.parameters) == (7, 0, ("fc3.weight", "fc3.bias"))
    assert body.describe({"lr": 0.1}) == (
        "others: 8 parameters, 61,156 weights, learning rate 0.1, after 7 steps, weight decay 0"
    )


def test_errors_of_layer_decay_and_head_only():
    for hyper, line in [
        ({"layer_decay": 1}, "layer_decay: 1: must be a number between 0 and 1"),
        (
            {"head_only": {"steps": 3}},
            "head_only: {'steps': 3}: must be true, or the length of a first phase",
        ),
        ({"head_only": 3}, "head_only: 3: must be true, or the length of a first phase, {epochs: N}"),
    ]:
        found = error_line(Hyperparameters.parse, hyper, registry.check_name)
        assert found.startswith(f"hyperparameters.{line}")


def settings_of(checkpoint):
    """Rate and decay of every parameter group that an engine has saved, on any rank."""
    ranks = [torch.load(file, weights_only=False) for file in checkpoint.glob("det_state_dict_rank*.pth")]
    groups = [group for rank in ranks for group in rank["engines"][0]["groups"]]
    return {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}


def rows_like(word):
    return each({name: row for name, row in ROWS.items() if name.split()[0] == word and name != "head moe"})


@rows_like("groups")
def test_groups_in_every_mode(runs, name, ranks):
    straight, stopped = runs.straight(name, ranks), runs.stopped(name, ranks)
    assert rates(straight) == pytest.approx([LR * (1 - step / STEPS) for step in range(STEPS)])
    assert straight.summary["parameter_groups"][0].startswith("others: ")
    ((step, checkpoint),) = checkpoints(stopped).items()
    before, after = net_file.of_checkpoint(checkpoint), torch.load(straight.output / "net.pt")
    assert {key for key, weight in after.items() if torch.equal(weight, before[key])} == {"conv1.weight"}
    if name != "groups moe":
        first = torch.load(runs.files["weights"])["conv1.weight"]
        assert torch.equal(after["conv1.weight"], first.bfloat16().float() if "bf16" in name else first)
        saved, rate = settings_of(checkpoint), LR * (1 - step / STEPS)
        assert saved["0 others"] == pytest.approx((rate, 0.01))
        assert saved["1 bias"] == pytest.approx((3 * rate, 0.1))


@rows_like("head")
def test_the_body_waits_in_every_mode(runs, name, ranks):
    (checkpoint,) = checkpoints(runs.stopped(name, ranks)).values()
    waited = net_file.of_checkpoint(checkpoint)
    files = runs.files["weights"], runs.straight(name, ranks).output / "net.pt"
    first, last = (torch.load(file) for file in files)
    for key, weight in waited.items():
        kept = first[key].bfloat16().float() if "bf16" in name else first[key]
        assert torch.equal(weight, kept) == (not key.startswith("fc3")), key
        assert not torch.equal(last[key], kept), key


def test_layers_train_at_their_own_rates(runs, tmp_path):
    """The losses of the other modes equal this row's, as test_matrix.py asserts."""
    file = overrides(hyperparameters__weights=runs.files["weights"])
    kept = overrides(min_checkpoint_period="{batches: 1}", checkpoint_storage="{save_trial_latest: 9}")
    made = run(["train.py", *ROWS["head"].arguments, *file, *kept, "--output", str(tmp_path)], tmp_path)
    assert made.code == 0, made.stderr
    for step, checkpoint in checkpoints(made).items():
        found = settings_of(checkpoint)
        assert len(found) == 10  # with decay, and without
        for name, (rate, decay) in found.items():
            layer = int(name.partition("layer ")[2][0])
            share = 0.5 ** (4 - layer) if step >= 5 or layer == 4 else 0
            assert rate == pytest.approx(LR * (1 - step / STEPS) * share), f"{step}: {name}"
            assert decay == (0 if "no decay" in name else 0.01), name


def test_a_resume_wants_the_same_groups_and_takes_other_rates(runs, tmp_path):
    def resumed(**changed):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(runs.stopped("groups", 1).output, tmp_path / "run")
        chosen = {"hyperparameters__weights": runs.files["weights"], **changed}
        arguments = ["train.py", *ROWS["groups"].arguments, *overrides(**chosen), *LATEST]
        return run([*arguments, "--output", str(tmp_path / "run")], tmp_path / "run")

    biases, frozen = GROUPS["parameter_groups"]
    for other in ([biases], [{"match": "^fc", "lr_factor": 2}]):
        made = resumed(hyperparameters__parameter_groups=json.dumps(other))
        assert made.code == 2, made.stderr
        assert "parameter_groups and weight_decay_on: " in made.stderr and len(made.stderr.splitlines()) == 1
    made = resumed(hyperparameters__parameter_groups=json.dumps([{**biases, "lr_factor": 1.5}, frozen]))
    assert made.code == 0, made.stderr
    assert made.summary["weights_sha256"] != runs.straight("groups", 1).summary["weights_sha256"]


def test_a_schedule_reaches_the_optimizer_that_zero_makes_itself(tmp_path):
    adagrad = json.dumps({"type": "Adagrad", "params": {"lr": LR}})
    chosen = {
        f"{DEEPSPEED}optimizer": adagrad,
        f"{DEEPSPEED}scheduler": json.dumps(LINE),
        "scheduling_unit": 1,
    }
    common = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 6}", **chosen)]
    stages = {stage: overrides(**{f"{DEEPSPEED}zero_optimization__stage": stage}) for stage in (0, 2, 3)}
    made = train_many(tmp_path, {f"zero{stage}": [*common, *more] for stage, more in stages.items()})
    assert [run.code for run in made.values()] == [0] * 3, made["zero2"].stderr
    for trained in made.values():
        assert losses(trained) == pytest.approx(losses(made["zero0"]), rel=1e-4)
