"""A command in several processes."""

import argparse

import jax

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
    how, processes, rank = args.distributed, args.processes, args.rank
    by_address = how is not None and ":" in how
    if by_address != (processes is not None) or by_address != (rank is not None):
        raise ValueError(
            "--processes and --rank go with --distributed HOST:PORT, which needs both, and with nothing else"
        )
    if by_address:
        if not 0 <= rank < processes:
            raise ValueError(f"--rank is {rank}; of {processes} processes it is from 0 to {processes - 1}")
        jax.distributed.initialize(how, processes, rank)
    elif how is not None:
        if how not in METHODS:
            raise ValueError(f"--distributed is {how!r}; it is HOST:PORT, or one of {', '.join(METHODS)}")
        jax.distributed.initialize(cluster_detection_method=None if how == "auto" else how)
