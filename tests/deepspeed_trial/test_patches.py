"""The patches of DeepSpeed: the installed release still has each fault, and a guard refuses code that it does not know.

Each function below shows one fault in DeepSpeed's own code, in a process without patches. When such a test
fails with a new release, that release may not need the patch.
"""

import ast
import dataclasses
import inspect
import os
import pathlib
import pickle
import re
import types
from datetime import timedelta

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import build_shm_op
from deepspeed.runtime import utils
from deepspeed.runtime.zero import stage_1_and_2
from support import PROJECT, run
from torch import nn

from deepspeed_trial import patches
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.patches import engine, muon, pipeline, process, zero  # noqa: F401 - they register


class AttrDict(dict):
    """The type of a configuration in Determined's examples."""


SGD = {"type": "SGD", "params": {"lr": 0.01}}


def join(backend="gloo", size=1):
    """Begin a process group of this process alone, or rank 0 of several whose collectives do nothing."""
    os.environ.update(RANK="0", WORLD_SIZE=str(size), LOCAL_RANK="0")
    process.reduce_over_gloo()  # or DeepSpeed compiles for half a minute
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def new_engine(stage=0, groups=1, net=None, optimizer=SGD, **config):
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2), nn.Linear(2, 1))
    parameters = list(net.parameters())
    given = [{"params": parameters[index::groups]} for index in range(groups)] if groups > 1 else parameters
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, **config}
    config |= {"zero_optimization": {"stage": stage, **config.get("zero_optimization", {})}}
    config |= {"zero_allow_untested_optimizer": True}
    made, *_ = deepspeed.initialize(model=net, model_parameters=given, config=config)
    return made


def loss_of(*engines):
    x = torch.ones(4, 2, dtype=next(engines[0].parameters()).dtype)
    for net in engines:
        x = net(x)
    return x.square().mean()


def scale_fp16_loss_without_zero():
    get_accelerator().is_fp16_supported = lambda: True
    join()
    made = new_engine(fp16={"enabled": True, "initial_scale_power": 8})
    first = next(made.module.parameters())
    (expected,) = torch.autograd.grad(loss_of(made.module), first)
    made.backward(loss_of(made))
    torch.testing.assert_close(first.grad, expected)
    assert made.optimizer.loss_scale_config.cur_scale == 2**8


def let_other_losses_pass():
    join()
    generator, discriminator = new_engine(net=nn.Linear(2, 2)), new_engine()
    with pytest.raises(RuntimeError, match="Please use engine"):
        generator.backward(loss_of(generator, discriminator))


def keep_gradient_norm():
    join()
    made = new_engine(gradient_clipping=0.1)
    made.backward(loss_of(made))
    made.step()
    assert made.get_global_grad_norm() is None


def skip_reductions_over_one_rank():
    join()
    made, reductions = new_engine(), []
    made.allreduce_gradients = lambda *_, **__: reductions.append(1)
    made.backward(loss_of(made))
    assert reductions


def save_plain_configuration():
    join()
    given = AttrDict(
        train_micro_batch_size_per_gpu=4, optimizer=SGD, comet={"enabled": False, "api_key": "K"}
    )
    made, *_ = deepspeed.initialize(model=nn.Linear(2, 1), config=given)
    assert type(made.config) is AttrDict and made.config["comet"]["api_key"] == "K"
    made.save_checkpoint("saved")
    (saved,) = pathlib.Path("saved").rglob("*model_states.pt")
    with pytest.raises(pickle.UnpicklingError, match="AttrDict"):
        torch.load(saved, weights_only=True)
    assert torch.load(saved, weights_only=False)["ds_config"]["comet"]["api_key"] == "K"


def follow_engine():
    join()
    for made in new_engine(), new_engine(stage=1):
        assert not hasattr(made, "register_step_pre_hook") and not hasattr(made, "register_backward_pre_hook")


def follow_instructions():
    from deepspeed.runtime.pipe.engine import PipelineEngine

    source = inspect.getsource(PipelineEngine._exec_schedule)
    assert "self._INSTRUCTION_MAP[type(cmd)]" in source and "hook" not in source


def follow_remade_optimizer():
    join()
    made = new_engine(stage=1, optimizer={"type": "Adagrad", "params": {"lr": 0.01}})
    assert made.optimizer.optimizer is not made.basic_optimizer


def find_weights_in_round_robin():
    join("fake", size=2)
    made = new_engine(stage=2, zero_optimization={"round_robin_gradients": True})
    optimizer, wrong = made.optimizer, 0
    order = [id(each) for each in optimizer.round_robin_bit16_groups[0]]
    assert order != [id(each) for each in optimizer.bit16_groups[0]]
    for weight in made.module.parameters():
        if weight._hp_mapping is not None:
            held = weight._hp_mapping.get_hp_fragment()
            part = weight._hp_mapping.lp_fragment_address
            mine = weight.flatten()[part.start : part.start + part.numel]
            wrong += not torch.equal(held.flatten(), mine.detach())
    assert wrong


def sums_of_norms(made):
    optimizer, sums = made.optimizer, []
    made.backward(loss_of(made))
    optimizer._model_parallel_all_reduce = lambda tensor, op: sums.append(op)
    optimizer.scaled_global_norm()
    return sums


def join_norms_of_uneven_stages():
    join()
    assert len(sums_of_norms(new_engine(stage=1, groups=2))) == 2


def join_collectives_of_groups():
    join("fake", size=2)
    made, waits = new_engine(stage=1, groups=2), []
    made.backward(loss_of(made))
    gather = utils.dist.all_gather_into_tensor

    def gathering(*args, async_op=False, **kwargs):
        waits.append(async_op)
        return gather(*args, async_op=async_op, **kwargs)

    utils.dist.all_gather_into_tensor = gathering
    made.step()
    assert waits == [False, False]
    assert "for i, group in enumerate(self.bit16_groups)" in inspect.getsource(
        stage_1_and_2.DeepSpeedZeroOptimizer.scaled_global_norm
    )


def clip_stages_together():
    join()
    deepspeed.init_distributed("gloo", verbose=False)
    world = torch.distributed.group.WORLD
    second = types.SimpleNamespace(get_model_parallel_rank=lambda: 1, get_model_parallel_group=lambda: world)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    assert float(utils.clip_grad_norm_([weight], 1.0, mpu=second)) == 0
    weight.model_parallel = True  # type: ignore[attr-defined]
    assert float(utils.clip_grad_norm_([weight], 1.0, mpu=second)) == pytest.approx(2**0.5)


def patch_muon_on_demand():
    net = nn.Linear(2, 2)
    net.weight.use_muon = False  # type: ignore[attr-defined]
    deepspeed.set_optimizer_flags(types.SimpleNamespace(optimizer_name="muon", optimizer_params={}), net)
    assert net.weight.use_muon  # type: ignore[attr-defined]


def flatten_filters():
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="size of tensor"):
        muon_update(torch.ones(4, 3, 2, 2), torch.zeros(4, 3, 2, 2))


def compute_in_fp32():
    from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

    assert ns_compute_dtype("standard") is torch.bfloat16


def compute_uncompiled():
    from deepspeed.runtime.zero.muon.original_muon import zeropower_via_newtonschulz5

    assert hasattr(zeropower_via_newtonschulz5, "_torchdynamo_orig_callable")


def keep_given_groups():
    weight = nn.Parameter(torch.ones(2, 2))
    weight.use_muon = True  # type: ignore[attr-defined]
    given = [{"params": [weight], "use_muon": True, "lr_factor": 0.5}]
    groups = deepspeed.DeepSpeedEngine._muon_param_groups(given, {"lr": 0.1})
    assert not any("lr_factor" in group for group in groups)


def allow_fp16_on_cpu():
    torch.ones(2, 2).half() @ torch.ones(2, 2).half()
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        assert not get_accelerator().is_fp16_supported()


def reduce_over_gloo():
    asked: list[str] = []
    builder = get_accelerator().create_op_builder
    assert builder("ShareMemCommBuilder") is not None
    get_accelerator().create_op_builder = asked.append
    build_shm_op()
    assert asked == ["ShareMemCommBuilder"]


def limit_waiting():
    join()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=7), verbose=False)
    group = deepspeed.comm.new_group([0])
    limit = group._get_backend(torch.device("cpu")).options._timeout
    assert limit != timedelta(seconds=7), limit


@pytest.mark.parametrize("name", sorted(patches.REGISTRY))
def test_deepspeed_needs_the_patch(name, tmp_path):
    done = run(["-c", f"import test_patches; test_patches.{name}()"], tmp_path, cwd=tmp_path)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize("entry", patches.REGISTRY.values(), ids=lambda entry: entry.name)
def test_a_guard_refuses_changed_code_in_one_line(entry):
    if not entry.guards:
        return
    changed = dataclasses.replace(entry, digests=("0" * 12,))
    with pytest.raises(InvalidInput) as refusal:
        changed.check()
    (line,) = refusal.value.errors
    assert line.startswith(f"deepspeed 0.19.8: {entry.target} differs") and entry.name in line
    assert line.endswith("install deepspeed==0.19.8")


def test_a_release_that_scales_the_loss_itself_is_refused(monkeypatch):
    """The scale would count twice; an fp32 engine is not affected."""

    def backward(self, loss):
        return self.optimizer.backward(loss)

    fp16 = types.SimpleNamespace(fp16_enabled=lambda: True, zero_optimization=lambda: False)
    fp32 = types.SimpleNamespace(fp16_enabled=lambda: False, zero_optimization=lambda: False)
    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "backward", backward)
    patches.digest.cache_clear()
    with pytest.raises(InvalidInput, match="backward differs from the code"):
        engine.scale_fp16_loss_without_zero(fp16)
    engine.scale_fp16_loss_without_zero(fp32)
    patches.digest.cache_clear()


def test_an_older_release_does_without_newer_patches(monkeypatch):
    monkeypatch.setattr(patches, "installed", lambda package: "0.13.1")
    needed = {name for name, entry in patches.REGISTRY.items() if entry.is_needed()}
    assert {"keep_gradient_norm", "find_weights_in_round_robin", "limit_waiting"} <= needed
    assert needed.isdisjoint(
        {"scale_fp16_loss_without_zero", "join_collectives_of_groups", "flatten_filters"}
    )


@pytest.mark.parametrize(("release", "warnings"), [("0.19.8", 0), ("0.13.4", 0), ("0.20.0", 1)])
def test_an_unknown_release_is_named_once(monkeypatch, caplog, release, warnings):
    monkeypatch.setattr(patches, "installed", lambda package: release)
    monkeypatch.setenv("RANK", "0")
    patches.warn_of_unknown_release.__wrapped__()
    assert [release in record.getMessage() for record in caplog.records] == [True] * warnings


def test_the_page_lists_every_patch():
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*) \|$", (PROJECT / "docs/patches.md").read_text(), re.M
    )
    page = {name: (versions, upstream, why) for name, versions, upstream, why in rows}
    assert page.keys() == patches.REGISTRY.keys()
    for name, entry in patches.REGISTRY.items():
        versions, upstream, why = page[name]
        shown = re.sub(r"\[(.*)\]\(.*\)", r"\1", upstream)
        assert (versions, shown, why) == (entry.versions, entry.report, entry.why.replace("``", "`")), name


def test_names_of_deepspeed_are_replaced_in_the_registry_alone():
    """Assignments to an attribute of DeepSpeed's modules and classes, by the names that a file imports."""
    wrong = []
    for file in [*PROJECT.glob("deepspeed_trial/**/*.py"), *PROJECT.glob("classify/**/*.py")]:
        tree, imported = ast.parse(file.read_text()), {"deepspeed"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deepspeed."):
                imported |= {alias.asname or alias.name for alias in node.names}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            wrong += [
                f"{file.relative_to(PROJECT)}: {ast.unparse(target)}"
                for target in targets
                if isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in imported
            ]
    outside = [each for each in wrong if "/patches/" not in each]
    assert not outside, outside
