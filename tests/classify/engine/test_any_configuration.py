"""Any configuration runs or is refused."""

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DIGITS

import train

GOOD: dict = {
    "deepspeed_config": "ds_config.json",
    "max_length": {"batches": 2},
    "overwrite_deepspeed_args": {
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
    },
}


CHOSEN: list[Any] = [None, True, False, 0, 1, 2, 3, -1, 0.5, 1e9, "", "cpu", "none", "SGD", "AdamW"]
CHOSEN += ["WarmupCosineLR", "OneCycle", [], [1, 2], {}, {"enabled": True}, {"device": "cpu"}, {"stage": 2}]
VALUES = st.one_of(
    st.sampled_from(CHOSEN),
    st.integers(-2, 40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("abc.{}[]'\"=: ", max_size=4),
)
KNOWN = """moe num_experts top_k stage lr type params offload_param prescale_gradients communication_data_type
    pipe_parallel_size gradient_accumulation_steps""".split()
KEYS = st.one_of(st.sampled_from(KNOWN), st.text("abcdefgh_.", min_size=1, max_size=6))


def paths(config, prefix=()):
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


@st.composite
def mutated(draw):
    """A good configuration with one to three entries replaced, removed or added."""
    config = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(sorted(paths(config))))
        inner = config
        for key in parents:
            inner = inner[key]
        change = draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "remove":
            del inner[last]
        elif change == "replace":
            inner[last] = copy.deepcopy(draw(VALUES))
        else:
            (inner[last] if isinstance(inner[last], dict) else inner)[draw(KEYS)] = copy.deepcopy(
                draw(VALUES)
            )
    return config


def runs_or_is_refused(tmp_path_factory, capfd, hparams):
    output = tmp_path_factory.mktemp("any")
    chosen = f"hyperparameters={json.dumps(hparams)}"
    code = train.main([*DIGITS, "--test", "--set", chosen, "--output", str(output)])
    lines = capfd.readouterr().err.splitlines()
    assert code in (0, 2)
    assert (output / "summary.json").exists() == (code == 0)
    if code == 2:
        assert lines and all(line.startswith("train.py: ") and ": " in line[10:] for line in lines), lines
        assert not list(output.glob("checkpoints/*"))


@pytest.mark.parametrize("examples", [30, pytest.param(500, marks=pytest.mark.soak)])
def test_any_configuration_runs_or_is_refused(tmp_path_factory, capfd, examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(hparams=mutated())
    def check(hparams):
        runs_or_is_refused(tmp_path_factory, capfd, hparams)

    check()
