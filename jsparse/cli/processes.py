"""Options by which a command or an example runs in several processes."""

import argparse
import os
from typing import Any

import jax

from ..bench.options import whole

# The run ends when a machine is silent for so many seconds. (It ends at once when one closes its
# connections.)
HEARTBEAT_TIMEOUT = 30
METHODS = ("auto", "slurm", "mpi4py", "ompi", "k8s", "env")
# What ``env`` reads, in the order of HOST:PORT, the number of processes and the rank.
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--distributed``, ``--processes`` and ``--rank``."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed",
        metavar="HOW",
        help="run in several processes, each started with this option: HOST:PORT of process 0, with --processes and "
        f"--rank; or the way to find all three: {', '.join(METHODS)} (env: in the variables {', '.join(VARIABLES)}, as "
        "jsparse network sets them)",
    )
    group.add_argument("--processes", type=whole(1), metavar="P", help="number of processes")
    group.add_argument("--rank", type=whole(0), help="number of this process, from 0")


def join(args: argparse.Namespace) -> None:
    """Joins the other processes; call it before JAX is used.

    Args:
      args: the options of :func:`add_arguments`. Without ``--distributed`` nothing is done.

    Raises:
      ValueError: the options contradict each other.
    """
    how, given = args.distributed, (args.processes, args.rank)
    if how is None:
        if given != (None, None):
            raise ValueError(
                "--processes and --rank mean nothing without --distributed HOST:PORT: add it, or leave them out"
            )
        return
    if (":" in how) != (None not in given):
        raise ValueError(
            f"--distributed is {how}, --processes {args.processes} and --rank {args.rank}; "
            "--distributed HOST:PORT takes --processes and --rank, and no other form of --distributed does"
        )
    if ":" not in how and how not in METHODS:
        raise ValueError(f"--distributed is {how}; it is neither HOST:PORT nor one of {', '.join(METHODS)}")
    host, _, port = how.rpartition(":")
    if ":" in how and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"--distributed is {how}; in HOST:PORT the port is a number from 1 to 65535: add one")
    address, size, rank = how, args.processes, args.rank
    if how == "env":
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(f"--distributed is env, and {', '.join(missing)} not set: run this by jsparse network")
        address, size, rank = (os.environ[name] for name in VARIABLES)
        size, rank = int(size), int(rank)
    if ":" in address and not 0 <= rank < size:
        raise ValueError(f"--rank is {rank}: with {size} processes it is from 0 to {size - 1}")
    where: dict[str, Any] = (
        {"coordinator_address": address, "num_processes": size, "process_id": rank}
        if ":" in address
        else {"cluster_detection_method": None if how == "auto" else how}
    )
    jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)
