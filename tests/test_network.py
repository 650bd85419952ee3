"""``jsparse network``: the hosts' environment, links and counters, and how they are removed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jsparse import cli
from jsparse.bench import hosts
from jsparse.bench.compiler import Compiler
from jsparse.bench.hosts import MALLOC, Network, bits_per_second, run_everywhere, share_of

ROOT = pathlib.Path(__file__).parent.parent


def able() -> bool:
    try:
        with Network(1, "1gbit"):
            return True
    except ValueError:
        return False


needs_network = pytest.mark.skipif(not able(), reason="needs Linux, root, iproute2 and util-linux")

# On host 1 this program sends a number of bytes to host 0.
SEND = """
import os, socket, sys, time
amount, first = int(sys.argv[1]), os.environ["MASTER_ADDR"]
if os.environ["RANK"] == "0":
    with socket.create_server((first, 5000)) as server, server.accept()[0] as link:
        start, left = time.perf_counter(), amount
        while left:
            left -= len(link.recv(min(left, 2**20)))
        print("seconds", time.perf_counter() - start)
elif os.environ["RANK"] == "1":
    while True:
        try:
            link = socket.create_connection((first, 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    link.sendall(bytes(amount))
    print("control", link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""


def running(marker: str) -> list[int]:
    """The processes on this machine, on all hosts, whose command line contains the marker."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "cmdline").read_text() and int(process.name) != os.getpid():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def namespaces() -> set[str]:
    """The network namespaces of all processes."""
    links = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            links.add(os.readlink(process / "ns/net"))
        except OSError:
            continue
    return links


def until(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@needs_network
def test_a_command_finds_its_place(capsys, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    policy = os.sched_getscheduler(0)
    with Network(3, "1gbit") as network:
        show = "hostname; hostname -i; pwd; echo $JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS"
        assert run_everywhere(
            network,
            [
                "sh",
                "-c",
                f"{show}; ls /sys/class/net | grep -v lo; nproc; echo $GLIBC_TUNABLES; chrt -p $$ | grep -c BATCH",
            ],
        ) == [0, 0, 0]
    assert os.sched_getscheduler(0) == policy
    lines = capsys.readouterr().out.splitlines()
    for rank in range(3):
        assert [line.split(" ", 1)[1] for line in lines if line.startswith(f"[{rank}]")] == [
            f"host{rank}",
            f"10.0.0.{rank + 1}",
            os.getcwd(),
            f"{rank} of 3 at 10.0.0.1:12321",
            "eth0",
            str(len(share_of(sorted(os.sched_getaffinity(0)), rank, 3))),
            MALLOC,
            "1",
        ]
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # A variable that is set stays, even if it is empty.
    assert network.environment(0)["GLIBC_TUNABLES"] == ""


@needs_network
def test_links_have_their_rate_and_are_counted(capsys):
    amount = 1_500_000
    with Network(3, "1gbit") as network:
        for rate, seconds in (("100mbit", 0.12), ("20mbit", 0.6)):
            network.set_rate(rate)
            before = [network.counters(rank) for rank in range(3)]
            assert run_everywhere(network, [sys.executable, "-c", SEND, str(amount)]) == [0, 0, 0]
            after = [network.counters(rank) for rank in range(3)]
            sent = [b.sent - a.sent for a, b in zip(before, after, strict=True)]
            received = [b.received - a.received for a, b in zip(before, after, strict=True)]
            assert amount < sent[1] < 1.02 * amount
            assert received[0] == sent[1]
            assert sent[2] < 1000
            assert sent[0] < 0.05 * amount
            # The bursts at both ends make it faster, a busy machine slower.
            said = dict(line.split()[1:] for line in capsys.readouterr().out.splitlines())
            assert 0.8 * seconds < float(said["seconds"]) < 3 * seconds
            if "cubic" in pathlib.Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text():
                assert said["control"] == "cubic"


@needs_network
def test_when_one_host_fails_the_others_end():
    start = time.monotonic()
    with Network(3, "1gbit") as network:
        statuses = run_everywhere(network, ["sh", "-c", "test $RANK != 1 || exit 7; sleep 60"])
        killed = run_everywhere(network, ["sh", "-c", "test $RANK != 2 || kill -9 $$; sleep 60"])
    assert statuses == [-9, 7, -9]
    assert killed == [-9, -9, -9]
    assert time.monotonic() - start < 20


@needs_network
def test_an_exception_leaves_nothing():
    before, marker = namespaces(), f"jsparse-{os.getpid()}-exception"
    with pytest.raises(RuntimeError, match="wrong"), Network(2, "1gbit") as network:  # noqa: PT012
        for rank in range(2):
            # This is a daemon, outside the process group of the command and without its parent.
            network.start(rank, ["setsid", "--fork", "sh", "-c", "sleep 60 & sleep 60", marker])
        assert until(lambda: len(running(marker)) == 2)
        assert len(namespaces() - before) >= 3
        holders = {os.readlink(f"/proc/{holder.pid}/ns/net") for holder in network._holders}
        raise RuntimeError("wrong")
    assert until(lambda: not running(marker))
    assert until(lambda: not holders & namespaces())


@needs_network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_to_the_tool_leaves_nothing(number: int, tmp_path):
    marker = f"jsparse-{os.getpid()}-signal-{number}"
    command = ["sh", "-c", f"readlink /proc/self/ns/net >{tmp_path}/$RANK; setsid sleep 60 & sleep 60", marker]
    # Where the tests run as a shell's background job, they and their children ignore SIGINT.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"import sys; sys.path.insert(0, {str(ROOT)!r}); from jsparse import cli; cli.main()"
    tool = subprocess.Popen(
        [sys.executable, "-c", code, "network", "--hosts", "2", "--", *command],
        stderr=subprocess.DEVNULL,
    )
    try:
        # The processes with the marker are nsenter, which waits, and the shell.
        assert until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), 30)
        assert until(lambda: all((tmp_path / str(rank)).read_text() for rank in range(2)))
        assert running(marker)
    finally:
        tool.send_signal(number)
        try:
            assert tool.wait(10) != 0
        finally:
            tool.kill()
            tool.wait()
    networks = {(tmp_path / str(rank)).read_text().strip() for rank in range(2)}
    assert until(lambda: not running(marker))
    assert until(lambda: not networks & namespaces())


@needs_network
def test_the_command(tmp_path, capsys):
    figures = tmp_path / "x.json"
    command = [sys.executable, "-c", SEND, "100000"]
    cli.main(["network", "--hosts", "2", "--rate", "100mbit", "--json", str(figures), "--", *command])
    out = capsys.readouterr()
    assert "[0] seconds" in out.out
    assert "MB sent" in out.err
    results = json.loads(figures.read_text())
    assert results["command"] == command
    assert [host["status"] for host in results["hosts"]] == [0, 0]
    assert results["hosts"][1]["sent_bytes"] > 100_000
    with pytest.raises(SystemExit) as ended:
        cli.main(["network", "--hosts", "1", "--", "false"])
    assert ended.value.code == 1


@needs_network
def test_what_the_system_refuses(monkeypatch):
    monkeypatch.setattr(hosts, "LEAST_BURST", 2**32)
    with pytest.raises(ValueError, match=r"tbf|refused"), Network(1, "1gbit"):
        pass
    monkeypatch.setattr(hosts, "HOLD", "echo no >&2; exit 1")
    with pytest.raises(ValueError, match="may not make namespaces: no"), Network(1, "1gbit"):
        pass


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool, path: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(ValueError, match=r"these tools: tc \(iproute2\)$"):
        Network(2, "1gbit")
    monkeypatch.setattr(hosts.shutil, "which", lambda tool, path: f"/sbin/{tool}")
    with pytest.raises(ValueError, match="need root"):
        Network(2, "1gbit")
    monkeypatch.setattr(hosts.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="need Linux"):
        Network(2, "1gbit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no command"),
        (["--rate", "fast", "--", "true"], "the rate is 'fast'; write it like"),
        (["--rate", "0gbit", "--", "true"], "the rate is '0gbit'; give one from 8bit to 10000gbit"),
        (["--rate", "1bit", "--", "true"], "the rate is '1bit'; give one from 8bit"),
        (["--rate", "40000gbit", "--", "true"], "the rate is '40000gbit'; give one from 8bit"),
        (["--latency", "5", "--", "true"], "the latency is '5'"),
        (["--hosts", "0", "--", "true"], "there are to be 0 hosts"),
        (["--hosts", "251", "--", "true"], "there are to be 251 hosts"),
    ],
)
def test_wrong_options(arguments, message: str, capsys):
    with pytest.raises(SystemExit):
        cli.main(["network", *arguments])
    assert message in capsys.readouterr().err


def test_cores_are_shared_out():
    for count, size in ((2, 4), (5, 2), (8, 3), (1, 3), (3, 3)):
        shares = [share_of(list(range(count)), rank, size) for rank in range(size)]
        assert all(shares)
        assert {core for share in shares for core in share} == set(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        if size <= count:
            assert sum(map(len, shares)) == count


def test_rates():
    assert bits_per_second("2.5gbit") == 2.5e9
    assert bits_per_second("100mbit") == 1e8
    assert bits_per_second("10Kbit") == 1e4
    assert bits_per_second("8bit") == 8


@pytest.fixture
def cache(tmp_path):
    """The folder in which JAX keeps what it compiles during the test."""

    def use(options):
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    given = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in given}
    use(given)
    yield tmp_path / "cache"
    use(before)


def test_each_program_is_compiled_on_one_host(tmp_path, monkeypatch, cache):
    """And a second command, which asks in another order, is given the right ones. None is in JAX's
    cache: what is read from there cannot be given to another host.
    """
    monkeypatch.setenv(hosts.FOLDER, str(tmp_path))
    mesh = jax.sharding.Mesh(jax.devices(), "hosts")
    x = jax.device_put(jnp.full(8, 5.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("hosts")))

    def cached(x):
        return x + 3

    jax.jit(cached).lower(x).compile()
    assert len(list(cache.glob("jit_cached*"))) == 1
    programs = [jax.jit(fn).lower(x) for fn in (lambda x: x + 1, lambda x: 2 * x, lambda x: x - 1)]
    compile_here, compiled_on = Compiler._compile, []

    def compile_counted(self, *given):
        compiled_on.append(self._rank)
        return compile_here(self, *given)

    monkeypatch.setattr(Compiler, "_compile", compile_counted)
    for order in ((0, 1, 2), (2, 0, 1)):
        asked = [programs[i] for i in order]
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(Compiler.compile, (Compiler(rank, 2) for rank in range(2)), [asked] * 2)
            values = [[float(run(x)[0]) for run in of] for of in compiled]
        assert values == [[(6, 10, 4)[i] for i in order]] * 2
        assert sorted(compiled_on) == [0, 0, 1]
    assert not list(cache.glob("jit__lambda*"))
