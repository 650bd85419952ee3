"""Runs a worker on every host and collects what the workers report.

A worker reports lines of JSON on its standard output, by :func:`tell`; :func:`run_workers` reads
them in the process that started it. A report with the key ``"ask"`` is a request for another link
rate; the answer is an empty line on the worker's standard input. One with ``"progress"`` only
moves the progress bar.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from .command import progress_bar
from .hosts import Network
from .job import Job

# It marks the reports among the lines that libraries print.
REPORT = "report "
# The reports of each host.
Reports = list[list[dict[str, Any]]]


def tell(**what: Any) -> None:
    """Reports from a worker to the process that started it."""
    print(f"{REPORT}{json.dumps(what)}", flush=True)


def tell_progress(name: str, done: float) -> None:
    """Reports from worker 0 what part of a measurement is done, for the progress bar."""
    if os.environ["JSPARSE_RANK"] == "0":
        tell(name=name, progress=done)


def ask_for_rate(rate: str) -> None:
    """Has the rate of all links changed, and waits until it is; only worker 0 asks."""
    if os.environ["JSPARSE_RANK"] == "0":
        tell(ask=rate)
        sys.stdin.readline()


def work(main: Callable[[str], None]) -> None:
    """Runs a worker's program with the job's text. If it fails, the process ends at once.

    JAX would first wait for the other workers to end, too, for minutes: they wait for this one.
    """
    try:
        main(sys.argv[1])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def complete(reports: Reports) -> Reports:
    """As many reports of each host as all hosts have told."""
    return [told[: min(map(len, reports))] for told in reports]


class WorkerFailedError(ValueError):
    """A worker failed; the message ends with the last lines that the workers wrote.

    Attributes:
      reports: those of each host until then, as many of each.
    """

    def __init__(self, message: str, reports: Reports):
        super().__init__(message)
        self.reports = complete(reports)


def run_workers(runs: Sequence[tuple[str, Job]], keep: Callable[[Reports], None] = lambda reports: None) -> Reports:
    """Runs modules on hosts, one after the other, behind a progress bar.

    Args:
      runs: the modules' names, such as ``"jsparse.bench.network_worker"``, and what each is to do.
        As JSON that is the module's argument. All jobs have the same hosts and rates.
      keep: takes the reports of each host so far, as many of each, whenever all hosts have told
        of something.

    Returns:
      The reports of each host.

    Raises:
      WorkerFailedError: a worker failed.
    """
    _, job = runs[0]
    reports: Reports = [[] for _ in range(job.hosts)]
    lock = threading.Lock()
    with (
        Network(job.hosts, job.rates[0]) as network,
        progress_bar() as progress,
        tempfile.TemporaryFile("w+") as errors,
    ):
        task = progress.add_task("starting", total=sum(len(part.forms) * len(part.rates) for _, part in runs))

        def hear(rank: int, process: Any, line: str) -> None:
            if not line.startswith(REPORT):
                return
            report = json.loads(line.removeprefix(REPORT))
            if "ask" in report:
                network.set_rate(report["ask"])
                process.stdin.write("\n")
                process.stdin.flush()
                return
            bar = functools.partial(progress.update, task, description=report["name"])
            if "progress" in report:
                bar(completed=len(reports[rank]) + report["progress"])
                return
            with lock:  # Each host has a thread that hears it.
                reports[rank].append(report)
                bar(completed=len(reports[rank]))
                if len(reports[rank]) == min(map(len, reports)):
                    keep(complete(reports))

        for module, part in runs:
            command = [sys.executable, "-m", module, part.written()]
            ended = network.run(command, hear, stdin=subprocess.PIPE, stderr=errors)
            if any(ended):
                errors.seek(0)
                lines = errors.read().splitlines()[-30:]
                raise WorkerFailedError("a worker failed:\n" + "\n".join(lines), reports)
            network.set_rate(job.rates[0])
    return reports


def slowest(told: Sequence[dict[str, Any]], what: str) -> list[float]:
    """The times of each step on the host that took longest.

    Args:
      told: a report of each host.
      what: the key under which each has its times.
    """
    return [max(times) for times in zip(*(report[what] for report in told), strict=True)]
