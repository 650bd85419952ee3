"""What a function can send, read from its traced program or from its compiled one."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from .._vector.arguments import check_count
from .collectives import COLLECTIVES, UNKNOWN_ROUNDS, Branches, Collective, Traffic
from .compiled import compiled_traffic
from .cost import collective_cost
from .mpi import mpi_collective

# Primitives that have an axis parameter and send nothing.
SILENT = {"axis_index", "pvary", "pcast"}


def traffic(
    fn: Callable[..., Any] | jax.stages.Compiled,
    *args: Any,
    axis_sizes: Mapping[str, int] | None = None,
    mesh: Mesh | None = None,
) -> Traffic:
    """Determines what one call of a function can send, without running it.

    Of a function it counts the collectives that the traced program names. It does not count what
    the compiler adds to a program over sharded arrays, such as the gradient's sum in a plain
    ``jit`` over a sharded batch.

    Of a compiled program it counts all collectives, and tells for each whether jsparse sends it.
    There XLA has merged some of them, which makes fewer messages of the same bytes, and dropped
    those over an axis of size 1. On CPU it sums narrow floats in float32. What a custom call sends
    by itself, such as a kernel, is not counted.

    Args:
      fn: any function that JAX can trace, jitted or not: a training step, or an ``update`` inside
        one. Or a compiled program: ``step.lower(...).compile()``.
      *args: a function's arguments, or their shapes and types (``jax.ShapeDtypeStruct``); none for
        a compiled program.
      axis_sizes: the sizes of the axes that ``fn`` expects to be bound. Leave out axes that ``fn``
        binds itself by ``jax.shard_map`` or ``jax.pmap``.
      mesh: for a compiled program, the devices it was compiled for, with the axes in whose terms
        to report.

    Returns:
      Bytes and messages, in all and by collective and branch. Print it for a table; ask it what
      crosses an axis with :meth:`Traffic.over`.

    Raises:
      NotImplementedError: a loop whose length is not known beforehand communicates, a collective
        is not known, or the compiled text has a form that is not known.
      ValueError: a compiled program comes without ``mesh``, with arguments, or with a mesh of
        other devices; or a function comes with ``mesh``.

    >>> t = traffic(lambda x: jax.lax.psum(x, "data"), jnp.ones(1000), axis_sizes={"data": 4})
    >>> t.bytes, t.messages
    (6000, 4)

    >>> mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    >>> along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    >>> batch = jax.ShapeDtypeStruct((4, 1000), jnp.float32, sharding=along)
    >>> compiled = jax.jit(lambda x: x.sum(0)).lower(batch).compile()
    >>> print(traffic(compiled, mesh=mesh).over("data"))
           bytes messages  collective
            6000        4  psum float32[1000] over data, by XLA for jit(<lambda>)/reduce_sum
    """
    if isinstance(fn, jax.stages.Compiled):
        if mesh is None or args or axis_sizes:
            raise ValueError(
                "a compiled program has its arguments, and needs the mesh of its devices: jsparse.traffic(compiled, "
                "mesh=mesh)"
            )
        return compiled_traffic(fn, mesh)
    if mesh is not None:
        raise ValueError(
            "mesh is for a compiled program: pass step.lower(...).compile(), or leave mesh out for what the traced "
            "program names"
        )
    sizes = dict(axis_sizes or {})
    for name, size in sizes.items():
        check_count(f"the size of axis {name!r}", size, "a number of workers")
    trace = getattr(fn, "trace", None)
    closed = trace(*args).jaxpr if trace and not sizes else jax.make_jaxpr(fn, axis_env=list(sizes.items()))(*args)
    axes = dict.fromkeys(sizes)
    parts = tuple(_walk(closed, sizes, 1, axes))
    return Traffic(parts, tuple(axes))


def _walk(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, sizes: Mapping[str, int], times: int, axes: dict[str, None]
) -> Iterator[Collective | Branches]:
    """The parts of a program.

    Args:
      jaxpr: the program.
      sizes: the sizes of the axes that are bound.
      times: how often it runs.
      axes: gets the axes that the program binds, and MPI's communicators.
    """
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        communicates = _collective(name, params, sizes)
        if communicates:
            collective, over, size = communicates
            axes.update(dict.fromkeys(over))
            # The second operand of mpi4jax's sendrecv gives the shape of what arrives: it is not
            # sent.
            for operand in eqn.invars[:1] if name in ("sendrecv_mpi", "ragged_all_to_all") else eqn.invars:
                aval: Any = operand.aval
                cost = collective_cost(collective, math.prod(aval.shape) * aval.dtype.itemsize, size)
                payload = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
                yield Collective(collective, payload, over, times, cost * times)
        elif name not in SILENT and any(axis in sizes for axis in _axes(params)):
            raise NotImplementedError(
                f"the cost of {name!r} is not known; add it to COLLECTIVES in jsparse/_comm/collectives.py"
            )
        elif name == "cond":
            ways = [tuple(_walk(branch, sizes, times, axes)) for branch in params["branches"]]
            branches = tuple(Traffic(way, tuple(axes)) for way in ways)
            if any(branch.parts for branch in branches):
                yield Branches(branches)
        else:
            inner = {**sizes, **params["mesh"].shape} if name == "shard_map" else sizes
            axes.update(dict.fromkeys(inner))
            rounds = times * params["length"] if name == "scan" else times
            found = [part for sub in core.jaxprs_in_params(params) for part in _walk(sub, inner, rounds, axes)]
            if name == "while" and found:
                raise NotImplementedError(UNKNOWN_ROUNDS)
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
