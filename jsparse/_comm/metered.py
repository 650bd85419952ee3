"""A Comm that counts what is sent through it."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .comm import Comm
from .cost import collective_cost

T = TypeVar("T")


class Metered:
    """A Comm that counts what is sent in one traced synchronisation, and keeps buckets apart.

    XLA merges collectives of one kind that do not depend on each other, and a merged collective
    waits for the last gradient. To prevent this, the first message of a bucket depends on the
    first one of the bucket before, the second on the second, and so on.

    Attributes:
      words: uint32 scalar: 4-byte words sent so far. It stays at its maximum from 16 GiB on.
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
        """Begins another bucket: what is sent from here on belongs to it."""
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
            with self._apart():
                out = branch()
                return out if replicated else self.varying(out), self.words, self.messages

        ways = [functools.partial(metered, branch) for branch in branches]
        out, words, messages = self._comm.switch(index, ways, replicated=True)
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
        """Makes a branch or loop count from zero, and makes its messages wait for none before."""
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
    """The sum of two uint32. If it overflows, the largest uint32."""
    return jnp.where(a + b < b, jnp.uint32(2**32 - 1), a + b)
