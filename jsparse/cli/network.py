"""``jsparse network``: runs a command on several hosts of one machine, joined by slow links.

Each host has a network of its own with one link to a switch, its own name (host0, host1, ...) and
its own address (10.0.0.1, 10.0.0.2, ...). The files are those of this machine, and no link leads
outside.

The command finds its rank and the number of hosts in the environment: in JAX_PROCESS_ID,
JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS for jax.distributed; in RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT for torch.distributed; in JSPARSE_RANK and JSPARSE_SIZE for other
programs. When the command fails on one host, it is ended on the others. However it ends, no
process and no network stays behind. Needs Linux and root.
"""

import argparse
import sys
import time
from typing import Any

import rich.console
import rich.table

from .._presets.files import write
from ..bench.command import numbers, output_file
from ..bench.hosts import Network, run_everywhere

HELP = "run a command on several hosts of one machine, joined by slow links"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.usage = "jsparse network [--hosts P] [--rate RATE] [--latency TIME] [--json FILE] -- COMMAND ..."
    parser.add_argument("--hosts", type=int, default=4, metavar="P", help="number of hosts (default 4)")
    parser.add_argument(
        "--rate", default="1gbit", help="of each link, in either direction, such as 100mbit (default 1gbit)"
    )
    parser.add_argument(
        "--latency",
        metavar="TIME",
        help="of each link, one way, such as 500us (default: none added); the kernel needs netem",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to this JSON file")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run on each host")


def run(args: argparse.Namespace) -> None:
    """Runs the command; exits with status 1 if ``args.command`` fails on a host."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError(
            "there is no command; name one, as in jsparse network --hosts 4 --rate 1gbit -- python train.py"
        )
    with Network(args.hosts, args.rate, args.latency) as network:
        start = time.perf_counter()
        statuses = run_everywhere(network, command)
        seconds = time.perf_counter() - start
        counters = [network.counters(rank) for rank in range(args.hosts)]
    figures = {
        "command": command,
        "rate": args.rate,
        "latency": args.latency,
        "seconds": seconds,
        "hosts": [
            {"status": status, "sent_bytes": counted.sent, "received_bytes": counted.received}
            for status, counted in zip(statuses, counters, strict=True)
        ],
    }
    show(figures)
    if args.json:
        write(args.json, figures)
    if any(statuses):
        sys.exit(1)


def show(figures: dict[str, Any]) -> None:
    """Prints the table to the standard error."""
    table = rich.table.Table(
        "host",
        "ended",
        *numbers("MB sent", "MB received"),
        title=f"{figures['seconds']:.2f} s at {figures['rate']}",
        caption="MB: as the hosts' interfaces count them",
    )
    for rank, host in enumerate(figures["hosts"]):
        status = host["status"]
        ended = f"by signal {-status}" if status < 0 else f"with {status}"
        table.add_row(str(rank), ended, f"{host['sent_bytes'] / 1e6:,.3f}", f"{host['received_bytes'] / 1e6:,.3f}")
    rich.console.Console(stderr=True).print(table)
