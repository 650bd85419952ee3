"""Hosts on one machine, joined by links of a given rate.

A host is a process that holds its own namespaces for network, mounts, host name and processes.
The namespaces have no name outside it, so the kernel removes everything when that process ends:
links, shaping, mounts, and all processes that still run there. The host's process ends with this
one in any case: its input is a pipe from this process, and the kernel kills it when its parent
dies.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Process = subprocess.Popen[str]
INTERFACE = "eth0"
JAX_PORT, TORCH_PORT = 12321, 12322
# The environment variable that names a folder in which hosts leave programs that they compiled.
FOLDER = "JSPARSE_COMPILED"
# glibc takes memory in huge pages and keeps freed memory, because every step takes as much again.
MALLOC = ":".join(f"glibc.malloc.{x}" for x in ("hugetlb=1", "mmap_max=0", "trim_threshold=1099511627776"))
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
# Runs in a host once its namespaces are made; it ends, and the namespaces with it, when its input
# ends.
HOLD = """set -e
mount -t sysfs sysfs /sys 2>/dev/null || true
for scope in all default; do echo 1 2>/dev/null >/proc/sys/net/ipv6/conf/$scope/disable_ipv6 || true; done
{ echo "$JSPARSE_NAME" >/proc/sys/kernel/hostname; } 2>/dev/null || hostname "$JSPARSE_NAME"
hosts=$(mktemp)
echo "$JSPARSE_HOSTS" >"$hosts"
mount --bind "$hosts" /etc/hosts
rm "$hosts"
echo ready
exec cat"""
# tc counts whole bytes a second, and holds what a link may send at once in 32 bits.
LEAST_RATE, MOST_RATE = 8, 1e13
MOST_HOSTS = 250
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
# A link may send the bytes of one millisecond at once, and at least these: Linux hands over
# pieces of 64 KiB.
LEAST_BURST = 80_000


class Counters(NamedTuple):
    """The bytes that a host's interface has counted, headers included."""

    sent: int
    received: int


def counters(process: int | str = "self") -> Counters:
    """What the interface of a process's host has counted so far.

    The numbers are those of ``/sys/class/net/*/statistics`` on that host. They can be read from
    outside it, too.
    """
    lines = pathlib.Path(f"/proc/{process}/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return Counters(sent=int(fields[8]), received=int(fields[0]))


def bits_per_second(rate: str) -> float:
    """The bits per second of a rate in the notation of ``tc``.

    >>> bits_per_second("2.5gbit")
    2500000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if not match:
        raise ValueError(f"the rate is {rate!r}; write it like 100mbit or 2.5gbit")
    bits = float(match[1]) * UNITS[match[2]]
    if not LEAST_RATE <= bits <= MOST_RATE:
        raise ValueError(f"the rate is {rate!r}; give one from 8bit to 10000gbit, written like 100mbit or 2.5gbit")
    return bits


def share_of(cores: Sequence[int], rank: int, hosts: int) -> Sequence[int]:
    """The cores of one host: its own part of all cores, or a core that it shares with other hosts.

    >>> share_of([0, 1, 2, 3, 4], 0, 2), share_of([0, 1], 2, 4)
    ([0, 2, 4], [0])
    """
    return list(cores[rank % len(cores) :: hosts])


class Network:
    """A context manager for hosts that each have a link to one switch.

    Each host has its own network with one interface, its own process numbers, its own name, and
    its own list of hosts. So libraries that bind to the address of their host's name find the
    right one. The files are those of this machine, and the hosts share out its cores. No link
    leads outside.

    Args:
      hosts: how many, from 1 to 250.
      rate: of each link, in either direction, such as ``"1gbit"``.
      latency: of each link, one way, such as ``"500us"``; None to add no latency.

    Raises:
      ValueError: an argument is out of range, this is not Linux or not root, a tool is missing, or
        the kernel lacks a feature.
    """

    def __init__(self, hosts: int, rate: str, latency: str | None = None):
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"there are to be {hosts} hosts; choose 1 to {MOST_HOSTS}")
        bits_per_second(rate)
        if latency is not None and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", latency):
            raise ValueError(f"the latency is {latency!r}; write it like 500us or 2ms")
        check_able()
        self.hosts, self._rate, self._latency = hosts, rate, latency
        self._holders: list[Process] = []
        self._started: list[Process] = []
        self._compiled = tempfile.TemporaryDirectory(prefix="jsparse-")

    def __enter__(self) -> "Network":
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes on the hosts, and removes the hosts."""
        for process in self._started:
            _kill(process)
        for holder in self._holders:
            holder.kill()
        for process in (*self._holders, *self._started):
            # Popen's own exit closes the pipes, and waits.
            with contextlib.suppress(OSError), process:
                pass
        self._holders, self._started = [], []
        self._compiled.cleanup()

    def address(self, rank: int) -> str:
        """A host's IP address."""
        return f"10.0.0.{rank + 1}"

    def name(self, rank: int) -> str:
        """A host's name."""
        return f"host{rank}"

    def environment(self, rank: int) -> dict[str, str]:
        """The environment variables that tell a program its rank, the size, and host 0's address.

        They are those of JAX and of PyTorch, and :data:`FOLDER`. Where ``GLIBC_TUNABLES`` is not
        set, :data:`MALLOC` is added.
        """
        first = self.address(0)
        return {
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", MALLOC),
            "JSPARSE_RANK": str(rank),
            "JSPARSE_SIZE": str(self.hosts),
            FOLDER: self._compiled.name,
            "JAX_COORDINATOR_ADDRESS": f"{first}:{JAX_PORT}",
            "JAX_NUM_PROCESSES": str(self.hosts),
            "JAX_PROCESS_ID": str(rank),
            "MASTER_ADDR": first,
            "MASTER_PORT": str(TORCH_PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.hosts),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def start(self, rank: int, command: Sequence[str], **options: Any) -> Process:
        """Starts a command on a host, in the current directory; takes ``Popen``'s options.

        It runs as a batch job, unless this process is scheduled in a way of its own: with hosts
        that share cores, short messages then do not wait for the scheduler.
        """
        environment = {**os.environ, **self.environment(rank), **options.pop("env", {})}
        # To enter the mount namespace is to leave the current directory, so the shell returns to
        # it.
        change = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]
        cores, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
        # The new process inherits the cores that this one may use, and how it is scheduled.
        try:
            os.sched_setaffinity(0, share_of(sorted(cores), rank, self.hosts))
            if policy == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            process = subprocess.Popen(
                [*self._entering(rank), *change, *command],
                env=environment,
                text=True,
                start_new_session=True,
                **options,
            )
        finally:
            os.sched_setaffinity(0, cores)
            if policy == os.SCHED_OTHER:
                os.sched_setscheduler(0, policy, os.sched_param(0))
        self._started.append(process)
        return process

    def run(self, command: Sequence[str], hear: Callable[[int, Process, str], None], **options: Any) -> list[int]:
        """Runs a command on every host until all have ended; when one fails, kills the others.

        Args:
          command: the command.
          hear: is called with a host's rank, its process, and each line that this writes. If it
            raises an exception, the process counts as failed, and the exception is raised again.
          **options: as :meth:`start` takes them.

        Returns:
          The exit status on each host, as :attr:`subprocess.Popen.returncode` gives it.
        """
        failures: list[Exception] = []

        def listen(rank: int, process: Any) -> None:
            try:
                for line in process.stdout:
                    hear(rank, process, line)
            except Exception as error:
                failures.append(error)
                process.kill()

        processes = [self.start(rank, command, stdout=subprocess.PIPE, **options) for rank in range(self.hosts)]
        threads = [threading.Thread(target=listen, args=given, daemon=True) for given in enumerate(processes)]
        for thread in threads:
            thread.start()
        while None in [process.poll() for process in processes]:
            if any(process.returncode for process in processes):
                time.sleep(1)
                for process in processes:
                    _kill(process)
            time.sleep(0.02)
        # A process that still runs in the background keeps a pipe open.
        patience = time.monotonic() + 5
        for thread in threads:
            thread.join(max(patience - time.monotonic(), 0))
        if failures:
            raise failures[0]
        return [process.returncode for process in processes]

    def counters(self, rank: int) -> Counters:
        """What a host's interface has counted so far."""
        return counters(self._holders[rank].pid)

    def set_rate(self, rate: str) -> None:
        """Changes the rate of all links."""
        for rank in range(self.hosts):
            self._shape(self._holders[rank], INTERFACE, rate, self._latency)
            self._shape(self._holders[-1], f"port{rank}", rate)
        self._rate = rate

    def _make(self) -> None:
        names = "\n".join(f"{self.address(rank)} {self.name(rank)}" for rank in range(self.hosts))
        for name in [*map(self.name, range(self.hosts)), "switch"]:
            self._holders.append(_hold(name, f"127.0.0.1 localhost\n{names}"))
        for holder in self._holders:
            assert holder.stdout
            if holder.stdout.readline() != "ready\n":
                assert holder.stderr
                raise ValueError(f"this process may not make namespaces: {holder.stderr.read().strip() or 'it ended'}")
        switch = self._holders[-1]
        lines = ["link add name switch type bridge mcast_snooping 0", "link set switch up"]
        for rank, holder in enumerate(self._holders[:-1]):
            lines.append(f"link add name port{rank} type veth peer name {INTERFACE} netns {holder.pid}")
            lines.append(f"link set port{rank} master switch up")
        _configure(switch, "ip", lines)
        for rank, holder in enumerate(self._holders[:-1]):
            here = [
                f"address add {self.address(rank)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                "link set lo up",
            ]
            _configure(holder, "ip", here)
            # CUBIC is Linux's default for congestion control, but this machine may have another;
            # few kernels lack it.
            route = f"dev {INTERFACE} proto kernel scope link src {self.address(rank)}"
            with contextlib.suppress(ValueError):
                _configure(holder, "ip", [f"route change 10.0.0.0/24 {route} congctl cubic"])
        self.set_rate(self._rate)

    def _shape(self, holder: Process, interface: str, rate: str, latency: str | None = None) -> None:
        burst = max(LEAST_BURST, round(bits_per_second(rate) / 8 / 1000))
        place = "root handle 1:"
        if latency is not None:
            try:
                delay = f"qdisc replace dev {interface} {place} netem delay {latency} limit 1000000"
                _configure(holder, "tc", [delay])
            except ValueError as error:
                raise ValueError(
                    f"this kernel cannot delay packets, because it lacks sch_netem; leave the latency out ({error})"
                ) from None
            place = "parent 1:1 handle 10:"
        shape = f"tbf rate {rate} burst {burst} latency 200ms"
        _configure(holder, "tc", [f"qdisc replace dev {interface} {place} {shape}"])

    def _entering(self, rank: int) -> list[str]:
        pid = self._holders[rank].pid
        return ["nsenter", f"--target={pid}", "--net", "--mount", "--uts", f"--pid=/proc/{pid}/ns/pid_for_children"]


def check_able() -> None:
    """Checks that this machine can make hosts.

    Raises:
      ValueError: this is not Linux, a tool is missing, or the process is not root.
    """
    missing = [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool, path=_path()) is None]
    if not sys.platform.startswith("linux") or missing:
        raise ValueError(f"hosts on one machine need Linux, and these tools: {', '.join(missing or TOOLS)}")
    if os.geteuid() != 0:
        raise ValueError(
            "hosts on one machine need root, to make their namespaces: run this under sudo, or, where the system "
            "lets users make namespaces, under unshare --user --map-root-user"
        )


def run_everywhere(network: Network, command: Sequence[str]) -> list[int]:
    """Runs a command on every host, and prints what each writes, each line after the host's rank.

    When the command fails on one host, it is ended on the others, which might wait for that host
    for ever.

    Returns:
      The exit statuses, in the notation of ``subprocess``: negative for a signal.
    """
    lock = threading.Lock()

    def show(rank: int, process: Process, line: str) -> None:
        with lock:
            print(f"[{rank}] {line.rstrip()}", flush=True)

    return network.run(command, show, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)


def _hold(name: str, hosts: str) -> Process:
    """Starts the process that holds a host's namespaces.

    Args:
      name: the host's name.
      hosts: the lines of its ``/etc/hosts``.
    """
    namespaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": _path(), "JSPARSE_NAME": name, "JSPARSE_HOSTS": hosts},
        text=True,
        start_new_session=True,
    )


def _configure(holder: Process, tool: str, lines: Sequence[str]) -> None:
    """Runs lines of ``ip`` or ``tc`` in the network that a process holds."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{holder.pid}/ns/net", tool, "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        env={"PATH": _path()},
    )
    if done.returncode:
        raise ValueError(f"{tool} refused: {done.stderr.strip().splitlines()[0]}")


def _kill(process: Process) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _path() -> str:
    """The PATH with the directories of administrators' tools, which a plain user's often lacks."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
