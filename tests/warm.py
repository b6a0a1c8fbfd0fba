"""A warm interpreter: torch, DeepSpeed, Determined and the trial are imported once, and each program is a fork of it.

``Warm.start`` takes what follows ``python3`` on a command line. The fork gets its arguments, environment, working
directory and output files, and runs the program as ``__main__``; several ranks get the variables that
``torchrun`` sets. A fork has gradients only if its parent has one thread and has never computed any.
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import pathlib
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

TESTS = pathlib.Path(__file__).resolve().parent
# Late imports of a training, a report and an export
IMPORTED = """
PIL.BmpImagePlugin PIL.GifImagePlugin PIL.JpegImagePlugin PIL.PngImagePlugin PIL.PpmImagePlugin
boto3 fsspec matplotlib.backends.backend_agg matplotlib.pyplot pathspec rich.console scipy.stats
sklearn.datasets.data sklearn.datasets.descr sklearn.model_selection tensorboard timm
torch._dynamo torch._subclasses.schema_check_mode torch.onnx torch.profiler torch.utils.serialization
torch.utils.tensorboard
deepspeed.module_inject.auto_ep_layer deepspeed.moe.layer deepspeed.ops.triton_ops deepspeed.runtime.pipe.engine
deepspeed.runtime.superoffload deepspeed.runtime.zero.muon.muon_optimizer
train baseline checkpoint search shards model_def line_trial deepspeed_trial.trainer deepspeed_trial.local.progress
classify.models.state_dicts classify.models.timm_nets workbench.publish.onnx_file classify.reports.figures
workbench.reports.html_report classify.reports.overview classify.reports.summary
classify.reports.utilisation classify.tuning.micro_batch
""".split()
MEETING = {
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


class Started:
    """A program that runs in a fork of the warm interpreter.

    Attributes:
        pid: the program's process, or of several ranks their launcher.
    """

    def __init__(self, pid: int, status: int, files: list[Any]) -> None:
        self.pid, self._status, self._files = pid, status, files
        self.returncode: int | None = None

    @property
    def stdout(self) -> str:
        """Everything written so far."""
        return self._read(0)

    @property
    def stderr(self) -> str:
        return self._read(1)

    def _read(self, which: int) -> str:
        return pathlib.Path(self._files[which].name).read_text(errors="replace")

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, seconds: float) -> int:
        """Return the exit code, as ``subprocess`` gives it.

        Raises:
            TimeoutError: if the program still runs.
        """
        code = self._wait(seconds)
        if code is None:
            raise TimeoutError(
                f"{self.stdout}\n{self.stderr}\nprocess {self.pid} runs for more than {seconds} s"
            )
        return code

    def _wait(self, seconds: float) -> int | None:
        import select

        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = int(os.read(self._status, 99))
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the program and all that it started, if it still runs, and close its files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._wait(60)
        for file in self._files:
            file.close()


class Warm:
    """Starts programs in forks of one warm interpreter.

    Attributes:
        seconds: that the interpreter's imports took, a measure of how slow the machine is now.
    """

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        command = [sys.executable, str(TESTS / "warm.py"), str(theirs.fileno())]
        # pyarrow, which scikit-learn imports through pandas, starts a thread of its allocator at its import
        one_thread = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
        environment = {**os.environ, **one_thread}
        # Its imports take about 6 seconds on an idle machine
        self._server = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, cwd=TESTS.parent
        )
        theirs.close()
        self._socket = mine
        begun = time.monotonic()
        _receive(mine, 1)
        self.seconds = time.monotonic() - begun

    def start(
        self, arguments: list[str], *, processes: int = 0, cwd: pathlib.Path, environment: dict[str, str]
    ) -> Started:
        """Start a program, or ``processes`` ranks of it."""
        files = [tempfile.NamedTemporaryFile("w", prefix="warm-") for _ in range(2)]  # noqa: SIM115
        status, theirs = os.pipe()
        request = {
            "arguments": arguments,
            "processes": processes,
            "cwd": str(cwd),
            "environment": environment,
        }
        content = json.dumps(request).encode()
        fds = [files[0].fileno(), files[1].fileno(), theirs]
        self._socket.sendmsg(
            [len(content).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        )
        self._socket.sendall(content)
        os.close(theirs)
        return Started(int.from_bytes(_receive(self._socket, 4), "big"), status, files)

    def close(self) -> None:
        self._socket.close()
        self._server.wait(60)


def _receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        if not (more := connection.recv(size - len(content))):
            raise EOFError
        content += more
    return content


# ---------------------------------------------------------------------------------------- in the warm interpreter


def serve(connection: socket.socket) -> list[str]:
    """Fork for each request; return, in a fork, the program's arguments."""
    running: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = running.pop(ended[0])
                os.write(status, str(os.waitstatus_to_exitcode(ended[1])).encode())
                os.close(status)

    for number in (signal.SIGINT, signal.SIGTERM):  # they are for pytest, whose end ends this process
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, reap)
    connection.sendall(b".")
    while True:
        size, fds, *_ = socket.recv_fds(connection, 4, 3)
        if len(size) < 4:  # pytest has ended
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        request = json.loads(_receive(connection, int.from_bytes(size, "big")))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if pid := os.fork():
            running[pid] = fds[2]
            for fd in fds[:2]:
                os.close(fd)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            connection.sendall(pid.to_bytes(4, "big"))
            continue
        connection.close()
        for status in [*running.values(), fds[2]]:
            os.close(status)
        become(request, fds)
        return request["arguments"]


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Take on a program's files, folder, environment and rank; the launcher of several ranks never returns."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for fd, target in zip([os.open(os.devnull, os.O_RDONLY), *fds[:2]], (0, 1, 2), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["processes"]:
        launch(request["processes"])
    random.seed()
    sys.modules["numpy"].random.seed()


def launch(processes: int) -> None:
    """Fork the ranks as ``torchrun`` starts them; end with the exit code of the first that failed.

    Returns in each rank.
    """
    from torch.distributed import TCPStore

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        sizes = {
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
        }
        ranks = {}
        for rank in range(processes):
            numbers = {
                **sizes,
                "RANK": rank,
                "LOCAL_RANK": rank,
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "warm",
            }
            if not (pid := os.fork()):
                os.environ.update(MEETING, **{key: str(value) for key, value in numbers.items()})
                return
            ranks[pid] = rank
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def pass_on(number: int, _: object) -> None:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = 0
    while ranks:
        pid, status = os.wait()
        del ranks[pid]
        if status and not code:
            code = os.waitstatus_to_exitcode(status) % 256
            threading.Thread(target=end_others, args=(pass_on,), daemon=True).start()
    del store
    os._exit(code)


def end_others(pass_on: Callable[[int, Any], None]) -> None:
    """End the remaining ranks after one has failed; most end without help."""
    for number, seconds in ((signal.SIGTERM, os.environ.get("GRACE", "5")), (signal.SIGKILL, "30")):
        time.sleep(float(seconds))
        pass_on(number, None)


def run(arguments: list[str]) -> None:
    """Run a program as ``python3 ARGUMENTS`` does."""
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(pathlib.Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def prepare() -> None:
    """Import everything, with one thread and nothing for the garbage collector to look through in every fork."""
    gc.disable()
    sys.path[:0] = [str(TESTS.parent), str(TESTS / "deepspeed_trial")]
    import deepspeed_trial  # noqa: F401 - before DeepSpeed

    for module in IMPORTED:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    spare_what_no_test_sees()
    threads = [
        line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if "Threads:" in line
    ]
    assert threads == ["Threads:\t1"], threads
    gc.enable()
    gc.freeze()


def spare_what_no_test_sees() -> None:
    """Leave out TensorBoard's figures, unless ``FIGURES`` is set, and writes that outlast a loss of power."""
    from classify.reports.tensorboard import TensorBoardLog

    draw = TensorBoardLog._draw
    setattr(TensorBoardLog, "_draw", lambda log: draw(log) if "FIGURES" in os.environ else None)  # noqa: B010
    setattr(os, "fsync", lambda file: None)  # noqa: B010


def run_and_exit(arguments: list[str]) -> NoReturn:
    """Run a program and exit as Python does, except that the kernel frees the memory: Python takes 0.6 s for it."""
    code: Any = 0
    try:
        run(arguments)
    except SystemExit as exit:
        code = exit.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(code % 256)


if __name__ == "__main__":
    prepare()
    run_and_exit(serve(socket.socket(fileno=int(sys.argv[1]))))
