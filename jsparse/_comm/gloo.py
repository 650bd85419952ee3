"""Collectives over gloo, which carries messages between processes on CPUs.

Where two workers send to each other, XLA calls gloo's send before its receive. gloo tells the
other side that a receive waits on the connection on which the message goes, behind that message.
So of two long messages the one goes after the other, unless both workers begin at once. gloo's
all-reduce goes in pieces, and tells of each receive before it sends. So where all workers meet in
pairs, they exchange long messages by an all-reduce here. All-to-alls are made of such exchanges,
and so are all-gathers of two workers. Reduce-scatters are made of messages that go round in a
ring. None sends more bytes than XLA's own.

All functions are for the inside of ``jax.shard_map``. Workers are numbered along the axis, which
may be a tuple of axes in any order.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from kernels_pallas import varying_as

from .permute import Axis, permute

# From how many bytes on a message is long, and one of an all-gather. Shorter ones take less time
# by XLA's own collectives.
LONG, LONG_GATHERED = 2**17, 2**22


def in_use() -> bool:
    """Whether messages between workers go over gloo: on CPUs of several processes."""
    several = jax.process_count() > 1 and jax.default_backend() == "cpu"
    return several and jax.config.jax_cpu_collectives_implementation == "gloo"  # type: ignore[attr-defined]


def ppermute(x: jax.Array, axis: Axis, perm: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends ``x`` as :meth:`jsparse.Comm.ppermute` does; partners exchange if all workers have
    one.
    """
    to = dict(perm)
    paired = len(perm) == len(to) == lax.axis_size(axis) and all(a != b and to.get(b) == a for a, b in perm)
    return _exchange(x, axis, to) if paired else permute(x, axis, perm)


def _exchange(x: jax.Array, axis: Axis, partners: Mapping[int, int]) -> jax.Array:
    """Exchanges ``x`` between partners: for each worker, ``partners`` has one."""
    pairs = tuple((rank, partner) for rank, partner in partners.items() if rank < partner)
    integer = _unsigned(x.dtype)
    if integer is not None and _bytes(x) >= LONG:
        return _exchange_by_sum(x, axis, pairs, integer)
    both = lax.all_gather(x, axis, axis_index_groups=pairs)
    return jnp.where(_own({rank: partners[rank] < rank for rank in partners}, axis), both[0], both[1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _exchange_by_sum(x: jax.Array, axis: Axis, pairs: tuple[tuple[int, int], ...], integer: np.dtype) -> jax.Array:
    """Exchanges ``x`` in pairs: each gets the sum of both messages, and subtracts its own.

    The sum is one of integers, which wraps round. So the result has the bits of the partner's
    message. In an all-reduce of two workers each sends as many bytes as it has.
    """
    bits = lax.bitcast_convert_type(x, integer)
    # jax.lax.psum refuses groups where types tell what is alike on all workers. The result of its
    # primitive is typed as alike on all workers, which it is not; so it is typed anew.
    axes = axis if isinstance(axis, tuple) else (axis,)
    both = varying_as(primitives.psum_p.bind(bits, axes=axes, axis_index_groups=pairs), x)
    return lax.bitcast_convert_type(both - bits, x.dtype)


@_exchange_by_sum.defjvp
def _exchange_jvp(axis, pairs, integer, primals, tangents):
    """Bits have no derivative, but an exchange has: the tangents are exchanged."""
    (tangent,) = tangents
    if jnp.issubdtype(tangent.dtype, jnp.inexact):
        tangent = permute(tangent, axis, [*pairs, *((b, a) for a, b in pairs)])
    return _exchange_by_sum(*primals, axis, pairs, integer), tangent


def all_gather(x: jax.Array, axis: Axis, to: Literal["varying", "invarying"]) -> jax.Array:
    """Stacks every worker's ``x`` as :meth:`jsparse.Comm.all_gather` does: two workers exchange
    long ones.

    ``to`` says how the result is typed, as it does for ``jax.lax.all_gather``.
    """
    integer = _unsigned(x.dtype)
    if lax.axis_size(axis) != 2 or integer is None or _bytes(x) < LONG_GATHERED:
        return lax.all_gather(x, axis, to=to)
    return _all_gather_of_two(x, axis, to, integer)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _all_gather_of_two(x: jax.Array, axis: Axis, to: Literal["varying", "invarying"], integer: np.dtype) -> jax.Array:
    """Stacks what two workers exchange."""
    own = lax.bitcast_convert_type(x, integer)
    other, first = _exchange(own, axis, {0: 1, 1: 0}), lax.axis_index(axis) == 0
    rows = jnp.stack([jnp.where(first, own, other), jnp.where(first, other, own)])
    if to == "invarying":
        # A sum over groups of one worker sends nothing, and types the rows as alike on all.
        axes = axis if isinstance(axis, tuple) else (axis,)
        rows = primitives.psum_p.bind(rows, axes=axes, axis_index_groups=((0,), (1,)))
    return lax.bitcast_convert_type(rows, x.dtype)


@_all_gather_of_two.defjvp
def _all_gather_jvp(axis, to, integer, primals, tangents):
    """Bits have no derivative, but a gather has: the tangents are gathered."""
    return _all_gather_of_two(*primals, axis, to, integer), lax.all_gather(tangents[0], axis, to=to)


def all_to_all(x: jax.Array, axis: Axis) -> jax.Array:
    """Exchanges rows as :meth:`jsparse.Comm.all_to_all` does: long ones one after the other."""
    size = lax.axis_size(axis)
    if _bytes(x) < LONG * size or x.shape[0] != size:  # JAX refuses another number of rows.
        return lax.all_to_all(x, axis, split_axis=0, concat_axis=0)
    arrived = x
    for to in rounds(size):
        row = lax.dynamic_index_in_dim(x, _own(to, axis), keepdims=False)
        source = _own({receiver: sender for sender, receiver in to.items()}, axis)
        arrived = lax.dynamic_update_index_in_dim(arrived, ppermute(row, axis, list(to.items())), source, 0)
    return arrived


def psum_scatter(x: jax.Array, axis: Axis) -> jax.Array:
    """Sums rows as :meth:`jsparse.Comm.psum_scatter` does: partial sums go round in a ring.

    gloo's own, which halves and doubles, takes twice the link's time for long rows, and for short
    ones several milliseconds.
    """
    size, rank = lax.axis_size(axis), lax.axis_index(axis)
    if x.shape[0] != size:
        return lax.psum_scatter(x, axis)  # JAX refuses another number of rows.
    ring = [(sender, (sender + 1) % size) for sender in range(size)]

    def row(distance: int) -> jax.Array:
        return lax.dynamic_index_in_dim(x, (rank - distance) % size, keepdims=False)

    total = row(1)
    for distance in range(2, size + 1):
        total = ppermute(total, axis, ring) + row(distance)
    return total


def rounds(size: int) -> Iterator[dict[int, int]]:
    """The rounds in which each worker sends a message to every other: for each its receiver.

    An even number of workers meet in pairs in each round, as players in a tournament do. Of an odd
    number, each sends to the worker some places further.

    >>> list(rounds(4))
    [{0: 3, 1: 2, 2: 1, 3: 0}, {0: 1, 1: 0, 2: 3, 3: 2}, {0: 2, 1: 3, 2: 0, 3: 1}]
    >>> list(rounds(3))
    [{0: 1, 1: 2, 2: 0}, {0: 2, 1: 0, 2: 1}]
    """
    if size % 2:
        yield from ({rank: (rank + distance) % size for rank in range(size)} for distance in range(1, size))
        return
    others = size - 1
    for number in range(others):
        # Partners' numbers add up to the round's, modulo the others. Who would meet itself meets
        # the last worker.
        to = {rank: (number - rank) % others for rank in range(others)}
        alone = next(rank for rank, partner in to.items() if rank == partner)
        yield {**to, alone: others, others: alone}


def _bytes(x: jax.Array) -> int:
    return x.size * x.dtype.itemsize


def _unsigned(dtype: np.dtype) -> np.dtype | None:
    """The type of unsigned integers with as many bits; None if there is none in JAX."""
    real, whole = (jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))
    bits = jnp.finfo(dtype).bits if real else jnp.iinfo(dtype).bits if whole else 0
    return np.dtype(f"uint{bits}") if bits >= 8 else None


def _own(each: Mapping[int, int], axis: Axis) -> jax.Array:
    """What a mapping has for this worker."""
    return jnp.array([each[rank] for rank in range(len(each))])[lax.axis_index(axis)]
