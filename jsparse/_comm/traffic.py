"""What a function can send, read from its traced program."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend import core

from .cost import Cost, collective_cost
from .mpi import mpi_collective

# For each collective primitive of JAX, the name of its function in jax.lax.
COLLECTIVES = {
    "psum": "psum",
    "psum_invariant": "psum",
    "pmax": "pmax",
    "pmin": "pmin",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "ppermute",
    "reduce_scatter": "psum_scatter",
}
# Primitives that have an axis parameter and send nothing.
SILENT = {"axis_index", "pvary", "pcast", "pbroadcast"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      name: its name in ``jax.lax``.
      payload: type and shape of a worker's operand, such as ``int32[8,100]``.
      axes: the axes over which it runs; for an :class:`MpiComm`, the name of the communicator.
      times: how often the program runs it.
      cost: what a worker sends in it, in all runs together.
    """

    name: str
    payload: str
    axes: tuple[str, ...]
    times: int
    cost: Cost


@dataclasses.dataclass(frozen=True)
class Branches:
    """Parts of a program of which one runs.

    The branch that sends the most bytes may not be the one that sends the most messages. So bytes
    and messages are bounded each by itself.
    """

    branches: tuple["Traffic", ...]

    @property
    def cost(self) -> Cost:
        """The most bytes of any branch, and the most messages of any branch."""
        costs = [branch.cost for branch in self.branches]
        return Cost(max(cost.bytes for cost in costs), max(cost.messages for cost in costs))

    @property
    def least(self) -> Cost:
        """The fewest bytes of any branch, and the fewest messages of any branch."""
        costs = [branch.least for branch in self.branches]
        return Cost(min(cost.bytes for cost in costs), min(cost.messages for cost in costs))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one worker sends in a program.

    Attributes:
      parts: the program's collectives, and the branches that hold others, in the order of the
        program.
    """

    parts: tuple[Collective | Branches, ...]

    @property
    def cost(self) -> Cost:
        """The most bytes and the most messages that a worker sends."""
        return sum((part.cost for part in self.parts), Cost())

    @property
    def least(self) -> Cost:
        """The fewest bytes and the fewest messages that a worker sends."""
        return sum((part.least if isinstance(part, Branches) else part.cost for part in self.parts), Cost())

    @property
    def bytes(self) -> int:
        """The most bytes that a worker sends."""
        return self.cost.bytes

    @property
    def messages(self) -> int:
        """The most messages that a worker sends."""
        return self.cost.messages

    def __str__(self) -> str:
        return "\n".join([f"{'bytes':>12} {'messages':>8}  collective", *self._lines("")])

    def _lines(self, indent: str) -> Iterator[str]:
        for part in self.parts:
            figures = f"{part.cost.bytes:12} {part.cost.messages:8}  {indent}"
            if isinstance(part, Branches):
                yield f"{figures}one of"
                for number, branch in enumerate(part.branches):
                    yield f"{branch.bytes:12} {branch.messages:8}  {indent}  branch {number}"
                    yield from branch._lines(indent + "    ")
            else:
                times = f" x {part.times}" if part.times > 1 else ""
                yield f"{figures}{part.name} {part.payload} over {', '.join(part.axes)}{times}"


def traffic(fn: Callable[..., Any], *args: Any, axis_sizes: Mapping[str, int] | None = None) -> Traffic:
    """Determines what one call of a function can send, without running it.

    It counts the collectives that the traced program names. It does not count what the compiler
    adds to a program over sharded arrays, such as the gradient's sum in a plain ``jit`` over a
    sharded batch.

    Args:
      fn: any function that JAX can trace, jitted or not: a training step, or an ``update`` inside
        one.
      *args: its arguments, or their shapes and types (``jax.ShapeDtypeStruct``).
      axis_sizes: the sizes of the axes that ``fn`` expects to be bound. Leave out axes that ``fn``
        binds itself by ``jax.shard_map`` or ``jax.pmap``.

    Returns:
      Bytes and messages, in all and by collective and branch. Print it for a table.

    Raises:
      NotImplementedError: a loop whose length is not known beforehand communicates, or a
        collective is not known.

    >>> t = traffic(lambda x: jax.lax.psum(x, "data"), jnp.ones(1000), axis_sizes={"data": 4})
    >>> t.bytes, t.messages
    (6000, 4)
    """
    sizes = dict(axis_sizes or {})
    trace = getattr(fn, "trace", None)
    closed = trace(*args).jaxpr if trace and not sizes else jax.make_jaxpr(fn, axis_env=list(sizes.items()))(*args)
    return Traffic(tuple(_walk(closed, sizes, 1)))


def _walk(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, sizes: Mapping[str, int], times: int
) -> Iterator[Collective | Branches]:
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        communicates = _collective(name, params, sizes)
        if communicates:
            collective, axes, size = communicates
            # The second operand of mpi4jax's sendrecv gives the shape of what arrives: it is not
            # sent.
            for operand in eqn.invars[:1] if name in ("sendrecv_mpi", "ragged_all_to_all") else eqn.invars:
                aval: Any = operand.aval
                cost = collective_cost(collective, math.prod(aval.shape) * aval.dtype.itemsize, size)
                payload = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
                yield Collective(collective, payload, axes, times, cost * times)
        elif name not in SILENT and any(axis in sizes for axis in _axes(params)):
            raise NotImplementedError(
                f"the cost of {name!r} is not known; add it to COLLECTIVES in jsparse/_comm/traffic.py"
            )
        elif name == "cond":
            branches = tuple(Traffic(tuple(_walk(branch, sizes, times))) for branch in params["branches"])
            if any(branch.parts for branch in branches):
                yield Branches(branches)
        else:
            inner = {**sizes, **params["mesh"].shape} if name == "shard_map" else sizes
            rounds = times * params["length"] if name == "scan" else times
            found = [part for sub in core.jaxprs_in_params(params) for part in _walk(sub, inner, rounds)]
            if name == "while" and found:
                raise NotImplementedError(
                    "a while loop communicates, and its number of rounds is not known before it runs: "
                    "use lax.scan, or lax.fori_loop with a static number of rounds"
                )
            yield from found


def _collective(
    primitive: str, params: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[str, tuple[str, ...], int] | None:
    """A primitive's collective, the axes over which it runs, and the number of their workers."""
    if primitive not in COLLECTIVES:
        return mpi_collective(primitive, params)
    axes, groups = _axes(params), params.get("axis_index_groups")
    return COLLECTIVES[primitive], axes, len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)


def _axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The named axes over which a primitive runs; empty for most primitives."""
    axes = params.get("axes", params.get("axis_name"))
    return tuple(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str))
