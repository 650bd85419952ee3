"""What is sent: the cost of each collective, and a Comm that keeps account of it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .comm import Comm

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """What one worker sends: bytes and messages. Compared by bytes first.

    >>> Cost(8, 1) + Cost(4, 2)
    Cost(bytes=12, messages=3)
    """

    bytes: int = 0
    messages: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.messages + other.messages)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.bytes * times, self.messages * times)


def collective_cost(name: str, payload: int, size: int) -> Cost:
    """What a worker sends in one collective: bandwidth-optimal in bytes, in the papers' number of messages.

    Args:
      name: as in ``jax.lax``.
      payload: bytes of the worker's operand.
      size: P.

    Raises:
      NotImplementedError: the collective is not in the table.
    """
    rounds = (size - 1).bit_length()
    match name:
        case "psum" | "pmax" | "pmin":
            return Cost(-(-2 * payload * (size - 1) // size), 2 * rounds)
        case "all_gather":
            return Cost(payload * (size - 1), rounds)
        case "all_to_all":
            return Cost(-(-payload * (size - 1) // size), size - 1)
        case "psum_scatter":
            return Cost(-(-payload * (size - 1) // size), rounds)
        case "ppermute":
            return Cost(payload, 1)
    raise NotImplementedError(f"the cost of {name!r} is not known; add it to collective_cost")


def in_turn(*parts: Cost | tuple[Cost, Cost]) -> tuple[Cost, Cost]:
    """What is sent at least and at most by parts that all run, each a cost or a least and a most.

    >>> in_turn(Cost(8, 1), (Cost(0, 0), Cost(4, 2)))
    (Cost(bytes=8, messages=1), Cost(bytes=12, messages=3))
    """
    ranges = [(part, part) if isinstance(part, Cost) else part for part in parts]
    return sum((least for least, _ in ranges), Cost()), sum((most for _, most in ranges), Cost())


def one_of(*branches: Cost | tuple[Cost, Cost]) -> tuple[Cost, Cost]:
    """What is sent at least and at most by branches of which one runs.

    >>> one_of(Cost(8, 1), (Cost(0, 0), Cost(4, 2)))
    (Cost(bytes=0, messages=0), Cost(bytes=8, messages=1))
    """
    ranges = [in_turn(branch) for branch in branches]
    return min(least for least, _ in ranges), max(most for _, most in ranges)


class Metered:
    """A Comm that counts what is sent through it while one synchronisation is traced, and keeps its buckets apart.

    XLA merges collectives of one kind that do not depend on each other, and what is merged waits for the last
    gradient. So a bucket's first message follows the first of the bucket before, its second the second, and so on.

    Attributes:
      words: uint32 scalar: 4-byte words sent so far. It stands still from 16 GiB on.
      messages: uint32 scalar: messages sent so far.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        self.size = comm.size
        self.typed = comm.typed
        self.rank = comm.rank
        self.varying = comm.varying
        self.may_differ = comm.may_differ
        self.words = self.messages = jnp.uint32(0)
        self._received: list[jax.Array] = []
        self._to_follow: list[jax.Array] = []

    def next_bucket(self) -> None:
        """What is sent from here on belongs to another bucket."""
        self._received, self._to_follow = [], self._received

    def psum(self, x: jax.Array) -> jax.Array:
        return self._send("psum", x)

    def pmax(self, x: jax.Array) -> jax.Array:
        return self._send("pmax", x)

    def all_gather(self, x: jax.Array) -> jax.Array:
        return self._send("all_gather", x)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        return self._send("all_to_all", x)

    def psum_scatter(self, x: jax.Array) -> jax.Array:
        return self._send("psum_scatter", x)

    def ppermute(self, x: jax.Array, perm: Sequence[tuple[int, int]]) -> jax.Array:
        return self._send("ppermute", x, perm)

    def switch(self, index: jax.Array, branches: Sequence[Callable[[], T]], *, replicated: bool = False) -> T:
        def metered(branch):
            def run():
                with self._apart():
                    out = branch()
                    return out if replicated else self.varying(out), self.words, self.messages

            return run

        out, words, messages = self._comm.switch(index, [metered(b) for b in branches], replicated=True)
        self._count(words, messages)
        return out

    def repeat(self, count: int, body: Callable[[jax.Array, T], T], start: T) -> T:
        def metered(i, carry):
            inner, words, messages = carry
            with self._apart():
                out = body(i, inner)
                self._count(words, messages)
                return out, self.words, self.messages

        none = jnp.uint32(0)
        out, words, messages = self._comm.repeat(count, metered, (start, none, none))
        self._count(words, messages)
        return out

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """In a branch or loop: counts from zero and follows nothing, so that it does not wait for what was sent."""
        outside = self.words, self.messages, self._received, self._to_follow
        self.words = self.messages = jnp.uint32(0)
        self._received, self._to_follow = [], []
        yield
        self.words, self.messages, self._received, self._to_follow = outside

    def _send(self, name: str, x: jax.Array, *args: Any) -> jax.Array:
        cost = collective_cost(name, x.size * x.dtype.itemsize, self.size)
        self._count(jnp.uint32(min(-(-cost.bytes // 4), 2**32 - 1)), jnp.uint32(cost.messages))
        if self._to_follow:
            x, _ = lax.optimization_barrier((x, self._to_follow.pop(0)))
        self._received.append(getattr(self._comm, name)(x, *args))
        return self._received[-1]

    def _count(self, words: jax.Array, messages: jax.Array) -> None:
        self.words = add_words(self.words, words)
        self.messages = self.messages + messages


def add_words(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two uint32, at most the largest."""
    return jnp.where(a + b < b, jnp.uint32(2**32 - 1), a + b)
