"""Several processes of one script on this machine, joined by ``jax.distributed``.

A test starts them by :func:`start` or :func:`run`. The script begins with ``processes.join()``.
The processes are killed when the ``with`` block ends, in any case. Linux kills them if this
process dies.
"""

import contextlib
import ctypes
import gc
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import jax

TESTS = pathlib.Path(__file__).parent
# In seconds. A living process sends a heartbeat long before this, even on a busy machine.
HEARTBEAT, SHUTDOWN = 10, 20
PR_SET_PDEATHSIG = 1
# Thresholds of the garbage collector. Tracing makes millions of objects, and nearly all of them
# are freed without the collector, which would take a twelfth of the time.
GARBAGE = 100_000, 50, 100


class Process:
    """One of the processes.

    Attributes:
      rank: its rank.
      popen: the process, the first of its group.
      output: the file to which it writes stdout and stderr.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: dict[str, str], output: pathlib.Path):
        self.rank, self.output = rank, output
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process and to all processes that it has started."""
        kill_group(self.popen.pid, number)

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.output.read_text(errors="replace")


@contextlib.contextmanager
def start(script: str, processes: int, *arguments: str | os.PathLike[str], devices: int = 1) -> Iterator[list[Process]]:
    """Starts a script of this directory in several processes, and kills them at the end.

    Each process has ``devices`` CPU devices.
    """
    environment = os.environ | {
        "JSPARSE_COORDINATOR": f"127.0.0.1:{free_port()}",
        "JSPARSE_PROCESSES": str(processes),
        "JSPARSE_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
    }
    directory = pathlib.Path(tempfile.mkdtemp())
    command = [sys.executable, str(TESTS / script), *map(str, arguments)]
    started: list[Process] = []
    try:
        for rank in range(processes):
            one = environment | {"JSPARSE_RANK": str(rank)}
            started.append(Process(rank, command, one, directory / str(rank)))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.popen.wait()
        shutil.rmtree(directory)


def wait(started: Sequence[Process], seconds: float) -> list[int]:
    """Waits until all processes have ended, and returns their exit statuses.

    Raises:
      TimeoutError: some have not ended in time.
    """
    until(lambda: all(process.popen.poll() is not None for process in started), started, seconds, "end")
    return [process.popen.wait() for process in started]


def until(true: Callable[[], bool], started: Sequence[Process], seconds: float, what: str = "get there") -> None:
    """Waits until a condition is true.

    Both errors contain what the processes have written.

    Raises:
      RuntimeError: all processes have ended, and the condition is not true.
      TimeoutError: the condition is not true in time.
    """
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"{seconds} s were not enough to {what}\n{written(started)}")
        if all(process.popen.poll() is not None for process in started) and not true():
            raise RuntimeError(f"all ended before they could {what}\n{written(started)}")
        time.sleep(0.02)


def run(
    script: str, processes: int, *arguments: str | os.PathLike[str], devices: int = 1, seconds: float = 480
) -> list[str]:
    """Runs a script to its end in all processes, and returns what each has written.

    Raises:
      RuntimeError: a process failed.
      TimeoutError: the processes did not end in time.
    """
    with start(script, processes, *arguments, devices=devices) as started:
        if any(wait(started, seconds)):
            raise RuntimeError(written(started))
        return [process.text for process in started]


def written(started: Sequence[Process]) -> str:
    return "\n".join(f"--- process {p.rank}, exit status {p.popen.poll()}\n{p.text[-3000:]}" for p in started)


def kill_group(leader: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that began a session, and to all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def mpirun() -> str | None:
    """MPI's launcher: that of this environment, or of the machine."""
    beside = pathlib.Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def join() -> int:
    """In the script: joins the other processes, and returns this process's rank."""
    gc.set_threshold(*GARBAGE)
    with contextlib.suppress(OSError, AttributeError):  # Linux only.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = int(os.environ["JSPARSE_RANK"])
    jax.config.update("jax_num_cpu_devices", int(os.environ["JSPARSE_DEVICES"]))
    jax.distributed.initialize(
        os.environ["JSPARSE_COORDINATOR"],
        int(os.environ["JSPARSE_PROCESSES"]),
        rank,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=SHUTDOWN,
    )
    return rank
