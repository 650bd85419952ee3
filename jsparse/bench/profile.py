"""``jsparse bench profile``: where the computing of a synchronisation goes, function by function.

It is the computing of one host of ``jsparse bench network``, without the other hosts: what it
sends comes back to it at once. JAX's profiler times the operations of some steps, and each counts
for the function of jsparse whose line it comes from. XLA fuses operations of several functions;
these count for the one that the fused result comes from. Operations that XLA adds, and which have
no line, are named by what they do, such as ``(copy)``. Times of several cores are added up: begin
the command with ``taskset -c 0`` for those of one core. The profiler itself makes steps longer.
"""

import argparse
import collections
import pathlib
import re
import statistics
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.table

from .._vector.density import check_density
from .alone import Alone
from .command import add_output_options, numbers, output, subplots
from .forms import FORMS, Form
from .gradients import GRADIENTS, in_leaves, worker_gradients
from .network_worker import synchroniser
from .options import LONGEST, check_memory, whole
from .timing import WARM_UP, timed

HELP = "see where the computing of a synchronisation goes, function by function"
PROJECT = pathlib.Path(__file__).parents[2]
PACKAGES = {PROJECT / "jsparse", PROJECT / "kernels_pallas"}
# Operations whose time is that of the operations inside.
CONTAINERS = {"while", "conditional", "call"}
# How many functions the table and the plot show.
SHOWN = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [form.name for form in FORMS]
    parser.add_argument("form", choices=names, metavar="FORM", help="as in jsparse bench network, such as oktopk")
    parser.add_argument(
        "--size",
        type=whole(1, LONGEST),
        default=14_728_266,
        metavar="N",
        help="n, the gradient's length (default 14728266)",
    )
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument(
        "--hosts", type=whole(2), default=4, metavar="P", help="whose messages are received (default 4)"
    )
    parser.add_argument("--repeats", type=whole(1), default=9, help="steps (default 9)")
    add_output_options(parser, plot="the times")


def run(args: argparse.Namespace) -> None:
    check_density(args.density)
    # The gradients of several steps, and a residual.
    check_memory(4 * (GRADIENTS + 1) * args.size, f"--size is {args.size:,}")
    form = next(form for form in FORMS if form.name == args.form)
    if (form.levels or form.pairs) and args.hosts % 2:
        raise ValueError(f"--hosts is {args.hosts}; {form.name} has pairs of hosts, so take an even number")
    figures = measure(form, args.size, args.density, args.hosts, args.repeats)
    output(args, figures, show, draw)


def measure(form: Form, n: int, density: float, hosts: int, repeats: int) -> dict[str, Any]:
    """Profiles the computing of one host.

    Args:
      form: what synchronises.
      n: the gradient's length.
      density: k / n.
      hosts: how many hosts a message would go to and come from.
      repeats: how many steps are timed, first without the profiler and then with it.

    Returns:
      The options, the ``"median_ms"`` of a step without the profiler, and the median milliseconds
      of each function, as ``"functions"``.
    """
    comms = (Alone(2), Alone(hosts // 2)) if form.levels else (Alone(hosts),)
    tx = form.make(*comms, density=density)
    given = [in_leaves(grad) if form.leaves else grad for grad in worker_gradients(n, 0)]
    grads = [jax.tree.map(jnp.asarray, grad) for grad in given]
    state = jax.tree.map(jnp.copy, tx.init(grads[0]))  # No buffer twice: they are donated.
    program = jax.jit(synchroniser(tx, form.dense_update), donate_argnums=1).lower(grads[0], state).compile()
    times = []
    for number in range(WARM_UP + repeats):
        ms, (state, _) = timed(program, grads[number % len(grads)], state)
        times.append(ms)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for number in range(repeats):
                state, _ = jax.block_until_ready(program(grads[number % len(grads)], state))
        (trace,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        steps = operations(jax.profiler.ProfileData.from_file(str(trace)), repeats)
    if not steps:
        raise ValueError("JAX's profiler saw no operations: has this process an environment that turns it off?")
    sources = Sources(program.as_text() or "")
    took: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * len(steps))
    for number, step in enumerate(steps):
        for name, ms in step.items():
            if sources.opcodes.get(name) not in CONTAINERS:
                took[sources.function(name)][number] += ms
    functions = {name: statistics.median(ms) for name, ms in took.items()}
    return {
        "form": form.name,
        "size": n,
        "density": density,
        "hosts": hosts,
        "jax": jax.__version__,
        "median_ms": statistics.median(times[WARM_UP:]),
        "functions": dict(sorted(functions.items(), key=lambda item: -item[1])),
    }


def operations(profile: Any, repeats: int) -> list[dict[str, float]]:
    """For each step of a ``jax.profiler.ProfileData``, the milliseconds of each operation.

    On a GPU operations do not say of which step they are. The result is then one step: the mean of
    ``repeats`` steps.
    """
    steps: dict[Any, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                told = dict(event.stats)
                if "hlo_op" in told:
                    steps[told.get("run_id")][str(told["hlo_op"])] += event.duration_ns / 1e6
    if None in steps:
        return [{name: ms / repeats for name, ms in steps[None].items()}]
    return list(steps.values())


class Sources:
    """From which function of jsparse each operation of a compiled program comes.

    Args:
      text: the program, as XLA prints it.

    Attributes:
      opcodes: what each operation is, such as ``"fusion"``.
    """

    def __init__(self, text: str):
        names = ("FileNames", "FunctionNames")
        files, functions = ([entry.strip('"') for entry in _table(text, name)] for name in names)
        places = [_numbers(entry) for entry in _table(text, "FileLocations")]
        self._frames = [_numbers(entry) for entry in _table(text, "StackFrames")]
        self._named = [_function(files[place[0] - 1], functions[place[1] - 1]) for place in places]
        self.opcodes: dict[str, str] = {}
        self._frame: dict[str, int] = {}
        self._inside: dict[str, str] = {}
        self._roots: dict[str, str] = {}
        computation = ""
        for line in text.splitlines():
            if head := re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line):
                computation = head[1]
            elif operation := re.match(r"\s+(ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(", line):
                root, name, opcode = operation.groups()
                self.opcodes[name] = opcode
                if root:
                    self._roots[computation] = name
                if frame := re.search(r"stack_frame_id=(\d+)", line):
                    self._frame[name] = int(frame[1])
                if inside := re.search(r"(?:calls|to_apply)=%?([\w.-]+)", line):
                    self._inside[name] = inside[1]

    def function(self, name: str) -> str:
        """The file and the function. Without one, what the operation is, such as ``"(copy)"``."""
        frame = self._frame.get(name, 0)
        while frame:
            place, parent = self._frames[frame - 1]
            if self._named[place - 1]:
                return self._named[place - 1]
            frame = parent - 1
        root = self._roots.get(self._inside.get(name, ""))
        return self.function(root) if root else f"({self.opcodes.get(name, name)})"


def _table(text: str, name: str) -> list[str]:
    """A table before the program: lines of a number, from 1 on, and an entry."""
    found = re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
    return [line.partition(" ")[2] for line in found[1].splitlines()] if found else []


def _numbers(entry: str) -> tuple[int, ...]:
    """The first two numbers of an entry such as ``{file_name_id=1 function_name_id=2 line=3}``."""
    return tuple(map(int, re.findall(r"=(\d+)", entry)[:2]))


def _function(file: str, function: str) -> str:
    """The file and the function, or nothing if it is not of this project."""
    path = pathlib.Path(file)
    if not PACKAGES & set(path.parents):
        return ""
    return f"{path.relative_to(PROJECT)}: {function.replace('.<locals>', '')}"


def show(figures: dict[str, Any]) -> None:
    """Prints the table."""
    functions = list(figures["functions"].items())
    table = rich.table.Table(
        "function",
        *numbers("ms", "%"),
        title=f"{figures['form']}, n = {figures['size']:,}, density {figures['density']:g}, {figures['hosts']} hosts: "
        f"{figures['median_ms']:.1f} ms a step without the profiler",
        caption="of one host, without the others; times of several cores are added up",
    )
    total = sum(figures["functions"].values())
    rest = sum(ms for _, ms in functions[SHOWN:])
    for name, ms in [*functions[:SHOWN], ("all others", rest), ("together", total)]:
        table.add_row(name, f"{ms:.2f}", f"{100 * ms / total:.0f}")
    rich.console.Console(width=140).print(table)


def draw(figures: dict[str, Any], path: pathlib.Path) -> None:
    """Draws a bar for each function."""
    functions = list(figures["functions"].items())[:SHOWN]
    figure, axes = subplots(size=(11, 6))
    bars = axes.barh([name for name, _ in functions], [ms for _, ms in functions])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="ms a step", title=f"{figures['form']}, n = {figures['size']:,}")
    figure.savefig(path, dpi=120)
