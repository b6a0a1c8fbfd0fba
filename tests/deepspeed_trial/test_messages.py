"""Messages between ranks: values arrive as they were, and no bytes from outside run code."""

import collections
import os
import pathlib
import pickle

import msgpack
import numpy as np
import pytest
import torch

from deepspeed_trial.messages import pack, unpack


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**63),
        float("inf"),
        "ü",
        b"\0\xff",
        pathlib.Path("a/b"),
        [1, (2, [3, ()])],
        {"a": {1: (2,), (3, "b"): None}},
        {1, 2},
        np.float32(1.5),
        np.arange(6, dtype="<i2").reshape(2, 3),
        np.zeros((0, 3)),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        torch.tensor(True),
        torch.empty(0, 2),
    ],
    ids=str,
)
def test_a_value_arrives_as_it_was(value):
    arrived = unpack(pack(value))
    assert type(arrived) is type(value)
    if isinstance(value, torch.Tensor):
        assert arrived.dtype == value.dtype and torch.equal(arrived, value)
    elif isinstance(value, np.ndarray):
        assert arrived.dtype == value.dtype and np.array_equal(arrived, value) and arrived.flags.writeable
    else:
        assert arrived == value


def test_kinds_of_dictionaries_arrive_as_dictionaries():
    for value in collections.OrderedDict(b=1, a=2), collections.Counter("aab"):
        assert unpack(pack(value)) == value and list(unpack(pack(value))) == list(value)


@pytest.mark.parametrize("value", [ValueError("a"), np.array([object()]), 1j])
def test_a_value_of_another_kind_is_refused_where_it_is_sent(value):
    with pytest.raises(TypeError, match="cannot be sent to other ranks; send numbers, text, paths, lists"):
        pack({"a": [value]})


def test_bytes_from_outside_run_no_code(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    evil = pickle.dumps(Runs())
    for content in [
        evil,
        msgpack.packb(msgpack.ExtType(3, pack(["|O", [1], evil]))),
        msgpack.packb(msgpack.ExtType(4, pack(["load", [1], evil]))),
        msgpack.packb(msgpack.ExtType(3, pack(["<f8", [2**40], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(9, evil)),
        b"\xdd\xff\xff\xff\xff",
    ]:
        with pytest.raises(ValueError):
            unpack(content)
    assert not (tmp_path / "ran").exists()
