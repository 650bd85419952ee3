"""A command, or an example, in several processes."""

import argparse
from typing import Any

import jax

# Seconds after which a machine that has gone silent ends the run. (One that closes its connections does so at once.)
HEARTBEAT_TIMEOUT = 30
METHODS = ("auto", "slurm", "mpi4py", "ompi", "k8s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed",
        metavar="HOW",
        help="join others that were started alike: HOST:PORT of process 0, with --processes and --rank; or how to find "
        f"all that out: {', '.join(METHODS)}",
    )
    group.add_argument("--processes", type=int, metavar="P", help="how many there are")
    group.add_argument("--rank", type=int, help="which one this is, from 0")


def join(args: argparse.Namespace) -> None:
    """Joins the other processes, before anything else is asked of JAX.

    Raises:
      ValueError: the arguments do not fit together.
    """
    how, given = args.distributed, (args.processes, args.rank)
    if how is None:
        if given != (None, None):
            raise ValueError("--processes and --rank say nothing without --distributed HOST:PORT")
        return
    if (":" in how) != (None not in given):
        raise ValueError("--distributed HOST:PORT takes --processes and --rank, and no other form of it does")
    if ":" not in how and how not in METHODS:
        raise ValueError(f"--distributed {how} is neither HOST:PORT nor one of {', '.join(METHODS)}")
    if ":" in how and not 0 <= args.rank < args.processes:
        raise ValueError(f"--rank is {args.rank}: with {args.processes} processes it is from 0 to {args.processes - 1}")
    method = None if how == "auto" else how
    where: dict[str, Any] = (
        {"coordinator_address": how, "num_processes": args.processes, "process_id": args.rank}
        if ":" in how
        else {"cluster_detection_method": method}
    )
    jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)
