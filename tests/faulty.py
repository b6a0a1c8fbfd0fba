"""Train with a fault: the rank ``RANK_AT_FAULT`` gets the signal ``FAULT``, or hangs, in step ``STEP`` or after it."""

import dataclasses
import importlib
import os
import pathlib
import signal
import sys
import time
from typing import Any

import torch
from line_trial import LineTrial

import deepspeed_trial.checkpoints.files
from deepspeed_trial import loaders
from deepspeed_trial.heartbeat import Heartbeats
from model_def import CIFARTrial
from net import Net

PROGRAM = pathlib.PurePath(os.environ.get("PROGRAM", "train.py")).stem
FAULT, SECONDS = os.environ["FAULT"], float(os.environ.get("SLEEP", 1000))
IS_AT_FAULT = os.environ.get("RANK", "0") == os.environ["RANK_AT_FAULT"]
STEP = int(os.environ.get("STEP", 6)) - 1  # counted from 0
TRIAL: Any = {"train": CIFARTrial, "line": LineTrial}[PROGRAM]


def before_step(trial, iterator, epoch, step):
    if step == STEP and not calls["fault"]:
        calls["fault"] += 1  # once, whatever the number of its micro-batches
        if FAULT == "data":
            time.sleep(SECONDS)
        elif FAULT == "barrier":
            torch.distributed.barrier()
        elif FAULT.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[FAULT])
    return train_batch(trial, iterator, epoch, step)


def skip_a_layer(net, inputs):
    calls["forward"] += 1
    if net.training and calls["forward"] > STEP:
        net.fc1.forward = lambda features: features[:, : net.fc1.out_features]
        net.fc1._forward_pre_hooks.clear()
    return forward(net, inputs)


def have_fewer_batches(trial, context, steps):
    return dataclasses.replace(build(trial, context, steps), epoch=STEP)


def stop_before_the_first_beat(exchange):
    time.sleep(2)  # until the other rank has read the message of the first heartbeats
    os.kill(os.getpid(), signal.SIGSTOP)


calls = {"forward": 0, "fault": 0}
train_batch, forward, build = TRIAL.train_batch, Net.forward, loaders.build
if IS_AT_FAULT:
    TRIAL.train_batch = before_step
    if FAULT == "branch":
        Net.forward = skip_a_layer  # type: ignore[method-assign]
    if FAULT == "unequal":
        loaders.build = have_fewer_batches
    if FAULT == "unheard":
        Heartbeats._talk = stop_before_the_first_beat  # type: ignore[method-assign]
    if FAULT == "save":
        deepspeed_trial.checkpoints.files.write_metadata = lambda *_: time.sleep(SECONDS)
sys.exit(importlib.import_module(PROGRAM).main(sys.argv[1:]))
