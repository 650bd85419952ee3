"""Exchanges between pairs of workers."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from .._comm.comm import Comm
from .._vector.sparse_vector import SparseVector
from ..wire import Full, Messages

T = TypeVar("T")
Message = TypeVar("Message", SparseVector, jax.Array)
Pairs = Sequence[tuple[int, int]]


def butterfly(size: int) -> tuple[Pairs, Sequence[Pairs], Pairs]:
    """The pairs of workers that exchange, so that all hear from all, directly or not.

    Returns:
      ``(into, rounds, out)``. The workers beyond a power of two send to others first (``into``),
      and those send back to them at the end (``out``). In between, in each of ``rounds``, the
      others exchange in pairs. The two partners of a round have heard from equally many workers,
      and from no worker in common.

    >>> butterfly(5)
    ([(4, 0)], [[(0, 1), (1, 0), (2, 3), (3, 2)], [(0, 2), (1, 3), (2, 0), (3, 1)]], [(0, 4)])
    """
    rounds = size.bit_length() - 1
    power = 1 << rounds
    into = [(power + guest, guest) for guest in range(size - power)]
    exchanges = [[(rank, rank ^ 1 << t) for rank in range(power)] for t in range(rounds)]
    return into, exchanges, [(host, guest) for guest, host in into]


def receives(comm: Comm, pairs: Pairs) -> jax.Array:
    """Whether this worker is the second of a pair: bool scalar."""
    return among(comm, (target for _, target in pairs))


def deliver(comm: Comm, x: SparseVector, pairs: Pairs, wire: Messages) -> tuple[SparseVector, SparseVector]:
    """Sends ``x`` from the first worker of each pair to the second.

    Returns:
      ``x`` as others read it; and what arrived here, which is empty if this worker is not the
      second of a pair.
    """
    message = wire.encode(x)
    arrived = wire.decode(comm.ppermute(message, pairs), x.capacity, x.n, x.values.dtype)
    return wire.as_read(x, message), arrived if len(pairs) == comm.size else arrived.where(receives(comm, pairs))


def among(comm: Comm, ranks: Iterable[int]) -> jax.Array:
    """Whether this worker's rank is one of these: bool scalar."""
    chosen = set(ranks)
    return jnp.array([rank in chosen for rank in range(comm.size)])[comm.rank()]


def either(first: jax.Array, a: T, b: T) -> T:
    """``a`` where ``first``, else ``b``."""
    return jax.tree.map(lambda x, y: jnp.where(first, x, y), a, b)


def type_as_alike(comm: Comm, x: Message, wire: Messages) -> Message:
    """Types ``x``, a run or a dense vector that has equal values on all workers, as alike on them.

    JAX can't type the result of a ``ppermute`` as alike on all workers. Where types tell
    (``check_vma=True``), each worker contributes a different part of ``x`` to an all-gather, which
    sends ``(P-1)/P`` of the length of ``x``. Otherwise ``x`` is returned as it is.
    """
    if not comm.typed:
        return x
    if isinstance(x, SparseVector):
        exact = wire if wire.lossless else Full().at(wire.step)
        return exact.decode(type_as_alike(comm, exact.encode(x), exact), x.capacity, x.n, x.values.dtype)
    parts = jnp.pad(x, (0, -x.shape[0] % comm.size)).reshape(comm.size, -1)
    return comm.all_gather(parts[comm.rank()]).reshape(-1)[: x.shape[0]]
