"""Runs train.py with what makes rank ``RANK_AT_FAULT`` hang, as ``FAULT`` says, in the sixth step, after it, or at once."""

import os
import signal
import sys
import time

import torch

import harness.checkpoints.files
import train
from harness.hangs.exchange import Exchange
from harness.loop import Loop
from model_def import CIFARTrial
from net import Net

FAULT, SECONDS = os.environ["FAULT"], float(os.environ.get("SLEEP", 1000))
IS_AT_FAULT = os.environ["RANK"] == os.environ["RANK_AT_FAULT"]
STEP = 5  # counted from 0


def before_step(trial, iterator, epoch, step):
    if step == STEP and FAULT == "data":
        time.sleep(SECONDS)
    if step == STEP and FAULT in ("SIGSTOP", "SIGKILL"):
        os.kill(os.getpid(), signal.Signals[FAULT])
    if step == STEP and FAULT == "barrier":
        torch.distributed.barrier()
    return train_batch(trial, iterator, epoch, step)


def skip_a_layer(net, inputs):
    calls["forward"] += 1
    if net.training and calls["forward"] > STEP:
        net.fc1.forward = lambda features: features[:, : net.fc1.out_features]
        net.fc1._forward_pre_hooks.clear()
    return forward(net, inputs)


def have_fewer_batches(loop):
    set_data_loaders(loop)
    loop.context._epoch_len = STEP


def stop_before_the_first_beat(exchange):
    os.kill(os.getpid(), signal.SIGSTOP)


calls = {"forward": 0}
train_batch, forward, set_data_loaders = CIFARTrial.train_batch, Net.forward, Loop._set_data_loaders
if IS_AT_FAULT:
    CIFARTrial.train_batch = before_step  # type: ignore[method-assign]
    if FAULT == "branch":
        Net.forward = skip_a_layer  # type: ignore[method-assign]
    if FAULT == "unequal":
        Loop._set_data_loaders = have_fewer_batches  # type: ignore[method-assign]
    if FAULT == "unheard":
        Exchange._talk = stop_before_the_first_beat  # type: ignore[method-assign]
    if FAULT == "save":
        harness.checkpoints.files.write_metadata = lambda *_: time.sleep(SECONDS)
sys.exit(train.main(sys.argv[1:]))
