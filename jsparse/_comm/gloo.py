"""Collectives over gloo, which carries messages between processes on CPUs.

Where two workers send to each other, XLA calls gloo's send before its receive. gloo tells the
other side that a receive waits on the connection on which the message goes, behind that message.
So of two long messages the one goes after the other, unless both workers begin at once. gloo's
all-reduce goes in pieces, and tells of each receive before it sends. So here pairs of workers
exchange long messages by an all-reduce, and all else is made of such exchanges and of messages
that go round in a ring. None of them sends more bytes than XLA's own collective.

All functions are for the inside of ``jax.shard_map``.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from kernels_pallas import varying_as

Axis = str | tuple[str, ...]
# From how many bytes on a message is long. A shorter one takes less time by an all-gather.
LONG = 2**17


def in_use() -> bool:
    """Whether messages between workers go over gloo: on CPUs of several processes."""
    several = jax.process_count() > 1 and jax.default_backend() == "cpu"
    return several and jax.config.jax_cpu_collectives_implementation == "gloo"  # type: ignore[attr-defined]


def permute(x: jax.Array, axis: Axis, to: Mapping[int, int]) -> jax.Array:
    """Sends ``x`` from each worker to another.

    Args:
      x: the message.
      axis: where the workers stand.
      to: for each sender its receiver.

    Returns:
      What arrives; zeros where nothing does.
    """
    paired = len(to) == lax.axis_size(axis) and all(a != b and to.get(b) == a for a, b in to.items())
    return exchange(x, axis, to) if paired else lax.ppermute(x, axis, list(to.items()))


def exchange(x: jax.Array, axis: Axis, partners: Mapping[int, int]) -> jax.Array:
    """Exchanges ``x`` between partners.

    A long message is exchanged by a sum: each gets the sum of both messages, as integers, and
    subtracts its own. Integers wrap round, so the result has the bits of the partner's message. In
    an all-reduce of two workers each sends as many bytes as it has.

    Args:
      x: the message.
      axis: where the workers stand.
      partners: for each worker its partner.
    """
    pairs = tuple((rank, partner) for rank, partner in partners.items() if rank < partner)
    if _bytes(x) < LONG:
        both = lax.all_gather(x, axis, axis_index_groups=pairs)
        return jnp.where(_own([partner < rank for rank, partner in sorted(partners.items())], axis), both[0], both[1])
    if x.dtype == bool:
        return exchange(x.astype(jnp.uint8), axis, partners).astype(bool)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    # jax.lax.psum refuses groups where types tell what is alike on all workers. The primitive's
    # result is typed as if it were; it is not.
    axes = axis if isinstance(axis, tuple) else (axis,)
    both = varying_as(primitives.psum_p.bind(bits, axes=axes, axis_index_groups=pairs), x)
    return lax.bitcast_convert_type(both - bits, x.dtype)


def all_to_all(x: jax.Array, axis: Axis) -> jax.Array:
    """Exchanges rows, as :meth:`jsparse.Comm.all_to_all` does: long ones round by round."""
    size = lax.axis_size(axis)
    if _bytes(x) < LONG * size:
        return lax.all_to_all(x, axis, split_axis=0, concat_axis=0)
    arrived = x
    for to in rounds(size):
        source = {receiver: sender for sender, receiver in to.items()}
        row = lax.dynamic_index_in_dim(x, _own([to[rank] for rank in range(size)], axis), keepdims=False)
        place = _own([source[rank] for rank in range(size)], axis)
        arrived = lax.dynamic_update_index_in_dim(arrived, permute(row, axis, to), place, 0)
    return arrived


def psum_scatter(x: jax.Array, axis: Axis) -> jax.Array:
    """Sums rows, as :meth:`jsparse.Comm.psum_scatter` does: partial sums go round in a ring.

    gloo's own, which halves and doubles, takes twice the link's time for long rows, and for short
    ones several milliseconds.
    """
    size, rank = lax.axis_size(axis), lax.axis_index(axis)
    following = {sender: (sender + 1) % size for sender in range(size)}

    def row(distance: int) -> jax.Array:
        return lax.dynamic_index_in_dim(x, (rank - distance) % size, keepdims=False)

    total = row(1)
    for distance in range(2, size + 1):
        total = permute(total, axis, following) + row(distance)
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
        # One worker has a place of its own; the others' places in a circle add up to the number.
        to = {rank: (number - rank) % others for rank in range(others)}
        alone = next(rank for rank, partner in to.items() if rank == partner)
        yield {**to, alone: others, others: alone}


def _bytes(x: jax.Array) -> int:
    return x.size * x.dtype.itemsize


def _own(each: list[int] | list[bool], axis: Axis) -> jax.Array:
    """This worker's entry of a list with an entry for each."""
    return jnp.array(each)[lax.axis_index(axis)]
