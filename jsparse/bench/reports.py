"""Runs a worker on every host and collects what the workers report.

A worker reports lines of JSON on its standard output, by :func:`tell`; :func:`run_workers` reads
them in the process that started it. A report with the key ``"ask"`` is a request for another link
rate; the answer is an empty line on the worker's standard input.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .hosts import Network, wait_for_all

# It marks the reports among the lines that libraries print.
REPORT = "report "


def tell(**what: Any) -> None:
    """Reports from a worker to the process that started it."""
    print(f"{REPORT}{json.dumps(what)}", flush=True)


def ask_for_rate(rate: str) -> None:
    """Has the rate of all links changed, and waits until it is; only worker 0 asks."""
    if os.environ["JSPARSE_RANK"] == "0":
        tell(ask=rate)
        sys.stdin.readline()


def run_workers(
    network: Network, module: str, job: Any, heard: Callable[[dict[str, Any]], None]
) -> list[list[dict[str, Any]]]:
    """Runs a module on every host.

    Args:
      network: the hosts.
      module: its name, such as ``"jsparse.bench.network_worker"``.
      job: its argument, by ``job.written()``.
      heard: is called with each report of host 0 as it arrives.

    Returns:
      The reports of each host.

    Raises:
      ValueError: a worker failed; the message ends with the last lines that the workers wrote.
    """
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            network.start(
                rank,
                [sys.executable, "-m", module, job.written()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            for rank in range(network.hosts)
        ]
        reports: list[list[dict[str, Any]]] = [[] for _ in processes]

        failures: list[Exception] = []

        def listen(rank: int, process: Any) -> None:
            try:
                for line in process.stdout:
                    if line.startswith(REPORT):
                        hear(rank, process, json.loads(line.removeprefix(REPORT)))
            except Exception as error:
                failures.append(error)
                process.kill()

        def hear(rank: int, process: Any, report: dict[str, Any]) -> None:
            if "ask" in report:
                network.set_rate(report["ask"])
                process.stdin.write("\n")
                process.stdin.flush()
                return
            reports[rank].append(report)
            if rank == 0:
                heard(report)

        listeners = [
            threading.Thread(target=listen, args=(rank, process), daemon=True) for rank, process in enumerate(processes)
        ]
        for listener in listeners:
            listener.start()
        wait_for_all(processes)
        for listener in listeners:
            listener.join(timeout=5)
        if failures:
            raise failures[0]
        if any(process.returncode for process in processes):
            errors.seek(0)
            lines = errors.read().splitlines()
            raise ValueError("a worker failed:\n" + "\n".join(lines[-30:]))
    return reports


def slowest(told: Sequence[dict[str, Any]], what: str) -> list[float]:
    """The times of each step on the host that took longest.

    Args:
      told: a report of each host.
      what: the key under which each has its times.
    """
    return [max(times) for times in zip(*(report[what] for report in told), strict=True)]
