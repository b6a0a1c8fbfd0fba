"""Runs train.py's main once for each row of a table, in one process or under one launcher."""

import contextlib
import io
import json
import os
import pathlib
import signal
import sys
import traceback

import train

if step := int(os.environ.get("SIGTERM_AT", 0)):
    from model_def import CIFARTrial

    train_batch = CIFARTrial.train_batch

    def signalled(self, iterator, epoch, batch):
        if batch + 1 == step and self.context.distributed.rank == self.context.distributed.size - 1:
            os.kill(os.getpid(), signal.Signals[os.environ.get("SIGNAL", "SIGTERM")])
        return train_batch(self, iterator, epoch, batch)

    setattr(CIFARTrial, "train_batch", signalled)  # noqa: B010

table = pathlib.Path(sys.argv[1])
for name, arguments in json.loads(table.read_text()).items():
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = train.main(arguments)
        except Exception:  # what would be a traceback and exit code 1
            traceback.print_exc()
            code = 1
    if int(os.environ.get("RANK", 0)) == 0:
        result = {"code": code, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()}
        table.with_name(f"{name}.done.json").write_text(json.dumps(result))
