"""Measures forms so that nothing is lost: figures are written as they come, and runs go on."""

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from .._presets.files import write
from .command import output
from .job import Job
from .reports import Reports, WorkerFailedError

# What was measured of one form at one rate; the keys "name" and "rate" say of which.
Result = dict[str, Any]
SomeJob = TypeVar("SomeJob", bound=Job)


def measure_forms(
    args: argparse.Namespace,
    job: SomeJob,
    key: str,
    *,
    measure: Callable[[SomeJob, Callable[[Reports], None]], Reports],
    combine: Callable[[Reports], list[Result]],
    describe: Callable[[SomeJob, list[Result]], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    draw: Callable[[dict[str, Any], pathlib.Path], None],
) -> None:
    """Measures the forms of a job, and prints, writes and draws the figures.

    The file of ``--json`` has those of each form as soon as there are any. With ``--resume`` only
    the forms that it lacks are measured. Where a worker fails, what was measured before is shown.

    Args:
      args: the options of :func:`.add_job_options` and :func:`.add_output_options`.
      job: what to measure.
      key: the results' key in the figures.
      measure: runs a job and returns the reports of each host. It also gives them to a function,
        whenever there are more.
      combine: makes results of the hosts' reports.
      describe: makes the figures, of the job and all results.
      show, draw: as :func:`.output` takes them.

    Raises:
      WorkerFailedError: a worker failed.
      ValueError: ``--resume`` has no file, or that of another job.
    """
    before, measured = resumed(args, describe(job, []), key) if args.resume else ([], set())
    missing = [name for name in job.forms if name not in measured]
    before = [result for result in before if result["name"] not in missing]

    def figures(reports: Reports) -> dict[str, Any]:
        return describe(job, [*before, *combine(reports)])

    def keep(reports: Reports) -> None:
        if isinstance(args.json, pathlib.Path):
            with contextlib.suppress(OSError):  # The disk may be full only now.
                write(args.json, figures(reports))

    try:
        reports = measure(dataclasses.replace(job, forms=missing), keep) if missing else []
    except WorkerFailedError as error:
        if before or any(error.reports):
            output(args, figures(error.reports), show, draw)
        raise
    output(args, figures(reports), show, draw)


def resumed(args: argparse.Namespace, described: dict[str, Any], key: str) -> tuple[list[Result], set[str]]:
    """The results in ``--json``'s file.

    Args:
      args: the options.
      described: the figures without results.
      key: the results' key.

    Returns:
      The results; and the names of the forms that were measured at every rate.

    Raises:
      ValueError: there is no file to write to, or it is of another job or no such file.
    """
    if not isinstance(args.json, pathlib.Path):
        raise ValueError("--resume reads what there is from the file of --json: name one")
    if not args.json.exists():
        return [], set()
    try:
        figures = json.loads(args.json.read_text())
        names = [result["name"] for result in figures[key]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"--resume goes on where {args.json} ends, but that has no figures of this command: name another file, or "
            "leave --resume out"
        ) from error
    for name, value in described.items():
        if name not in ("forms", key) and figures.get(name) != value:
            raise ValueError(
                f"--resume goes on where {args.json} ends, but {name} is {figures.get(name)} there and {value} here: "
                "give the same options, or name another file"
            )
    counts = collections.Counter(names)
    return figures[key], {name for name, count in counts.items() if count == len(described["rates"])}
