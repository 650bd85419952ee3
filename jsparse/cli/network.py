"""``jsparse network``: runs a command on several hosts of one machine, joined by links of a given rate.

Each host has a network of its own with one link to a switch, its own name (host0, host1, ...) and address (10.0.0.1,
10.0.0.2, ...); files are this machine's, and nothing leads outside. The command finds its number and how many there
are in the environment: JAX_PROCESS_ID, JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS for jax.distributed, RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT for torch.distributed, JSPARSE_RANK and JSPARSE_SIZE for others. When it fails
on one host, it is ended on the others. Whatever happens, nothing stays behind. Needs Linux and root.
"""

import argparse
import contextlib
import json
import sys
import time
from typing import Any

import rich.console
import rich.table

from ..bench.hosts import Network, run_everywhere


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "network",
        help="run a command on several hosts of one machine, joined by slow links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="jsparse network [--hosts P] [--rate RATE] [--latency TIME] [--json FILE] -- COMMAND ...",
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="P", help="how many (default 4)")
    parser.add_argument("--rate", default="1gbit", help="of each link, either way, as tc has it (default 1gbit)")
    parser.add_argument("--latency", metavar="TIME", help="of each link, such as 500us: where the kernel has netem")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run on each")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError("there is no command: jsparse network --hosts 4 --rate 1gbit -- python train.py")
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
    with open(args.json, "w") if args.json else contextlib.nullcontext() as file:
        if file:
            json.dump(figures, file, indent=2)
    show(figures)
    if any(statuses):
        sys.exit(1)


def show(figures: dict[str, Any]) -> None:
    """Prints the table."""
    table = rich.table.Table(title=f"{figures['seconds']:.2f} s at {figures['rate']}", caption="by their interfaces")
    table.add_column("host")
    table.add_column("ended")
    table.add_column("MB sent", justify="right")
    table.add_column("MB received", justify="right")
    for rank, host in enumerate(figures["hosts"]):
        status = host["status"]
        ended = f"by signal {-status}" if status < 0 else f"with {status}"
        table.add_row(str(rank), ended, f"{host['sent_bytes'] / 1e6:,.3f}", f"{host['received_bytes'] / 1e6:,.3f}")
    rich.console.Console(stderr=True).print(table)
