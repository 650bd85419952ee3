"""How workers talk: the few collectives that the algorithms need, and what each of them sends."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import varying_as, varying_axes

T = TypeVar("T")


class Comm(Protocol):
    """A group of workers, seen from inside one of them. A payload is one array.

    All methods must be called by all workers, in the same order: under a branch, only one that all of them take.
    """

    @property
    def size(self) -> int:
        """P, the number of workers."""
        ...

    @property
    def typed(self) -> bool:
        """Whether types tell what is alike on all workers."""
        ...

    def rank(self) -> jax.Array:
        """This worker's number, from 0: int32 scalar."""
        ...

    def psum(self, x: jax.Array) -> jax.Array:
        """The sum over workers, the same bits everywhere."""
        ...

    def pmax(self, x: jax.Array) -> jax.Array:
        """The largest over workers."""
        ...

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Every worker's ``x``, stacked by rank: shape ``(P, *x.shape)``."""
        ...

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Row ``i`` of ``x``, shape ``(P, ...)``, goes to worker ``i``; row ``j`` of the result came from ``j``."""
        ...

    def psum_scatter(self, x: jax.Array) -> jax.Array:
        """On worker ``i`` row ``i`` of the sum over workers of ``x``, shape ``(P, ...)``."""
        ...

    def ppermute(self, x: jax.Array, perm: Sequence[tuple[int, int]]) -> jax.Array:
        """Sends ``x`` from the first of each pair of ranks to the second; who receives nothing gets zeros."""
        ...

    def switch(self, index: jax.Array, branches: Sequence[Callable[[], T]], *, replicated: bool = False) -> T:
        """Runs one branch, the same on every worker (so that branches may communicate).

        Args:
          index: int32 scalar, alike on all workers.
          branches: functions of no arguments.
          replicated: whether what they return is alike on all workers (and typed so, where types tell).
        """
        ...

    def repeat(self, count: int, body: Callable[[jax.Array, T], T], start: T) -> T:
        """Runs ``body(i, carry)`` ``count`` times; what it carries is alike on all workers."""
        ...

    def varying(self, tree: T) -> T:
        """The same values, typed as differing between workers, where types tell."""
        ...

    def may_differ(self, x: jax.Array) -> bool:
        """False where types tell that ``x`` is alike on all workers."""
        ...


@dataclasses.dataclass(frozen=True)
class AxisComm:
    """The workers along a named axis: of ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``.

    Attributes:
      axis: the axis's name; under ``shard_map`` also a tuple of names, taken as one axis in row-major order.
    """

    axis: str | tuple[str, ...]

    @property
    def size(self) -> int:
        try:
            return lax.axis_size(self.axis)
        except NameError as error:
            raise ValueError(
                f"the axis {self.axis!r} is not bound here: call inside jax.shard_map, jax.pmap or jax.vmap over an "
                "axis of that name. To initialise a state outside, use jsparse.init(tx, params, mesh, axis); for a "
                "whole step, jsparse.train_step"
            ) from error

    @property
    def typed(self) -> bool:
        return bool(self._axes)

    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def psum(self, x: jax.Array) -> jax.Array:
        return lax.psum(self.varying(x), self.axis)

    def pmax(self, x: jax.Array) -> jax.Array:
        return lax.pmax(self.varying(x), self.axis)

    def all_gather(self, x: jax.Array) -> jax.Array:
        to = "invarying" if self.typed else "varying"
        return lax.all_gather(self.varying(x), self.axis, to=to)

    def all_to_all(self, x: jax.Array) -> jax.Array:
        return lax.all_to_all(self.varying(x), self.axis, split_axis=0, concat_axis=0)

    def psum_scatter(self, x: jax.Array) -> jax.Array:
        return lax.psum_scatter(self.varying(x), self.axis)

    def ppermute(self, x: jax.Array, perm: Sequence[tuple[int, int]]) -> jax.Array:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if self._names <= set(manual):
            return lax.ppermute(self.varying(x), self.axis, perm)
        # vmap wants every worker to send and receive: those that have no part in it do so among themselves.
        senders, targets = ({pair[side] for pair in perm} for side in (0, 1))
        idle = [[rank for rank in range(self.size) if rank not in busy] for busy in (senders, targets)]
        moved = lax.ppermute(x, self.axis, [*perm, *zip(*idle, strict=True)])
        return jnp.where(jnp.array([rank in targets for rank in range(self.size)])[self.rank()], moved, 0)

    def switch(self, index: jax.Array, branches: Sequence[Callable[[], T]], *, replicated: bool = False) -> T:
        if not replicated:
            branches = [lambda branch=branch: self.varying(branch()) for branch in branches]
        if self._others:
            # What one branch returns may vary over them where another's does not; all must have one type.
            shapes = [jax.eval_shape(branch) for branch in branches]
            axes = jax.tree.map(lambda *leaves: frozenset().union(*map(varying_axes, leaves)), *shapes)
            branches = [lambda branch=branch: jax.tree.map(_vary, branch(), axes) for branch in branches]
        return lax.switch(index, branches)

    def repeat(self, count: int, body: Callable[[jax.Array, T], T], start: T) -> T:
        def keep_type(i, carry):
            return jax.tree.map(varying_as, body(i, carry), carry)

        if self._others:
            # Likewise what is carried; it may take a few rounds until it varies over all that it ever will.
            after = jax.eval_shape(lambda: keep_type(jnp.int32(0), start))
            wider = jax.tree.map(varying_as, start, after)
            if jax.tree.map(varying_axes, wider) != jax.tree.map(varying_axes, start):
                return self.repeat(count, body, wider)
        return lax.fori_loop(0, count, keep_type, start)

    def varying(self, tree: T) -> T:
        return jax.tree.map(lambda x: _vary(x, self._axes), tree)

    def may_differ(self, x: jax.Array) -> bool:
        return self._axes <= varying_axes(x)

    @property
    def _names(self) -> set[str]:
        return {self.axis} if isinstance(self.axis, str) else set(self.axis)

    @property
    def _axes(self) -> frozenset[str]:
        """The axes over which variance is tracked: ours under ``shard_map(check_vma=True)``, otherwise none."""
        return varying_axes(lax.axis_index(self.axis))

    @property
    def _others(self) -> frozenset[str]:
        """The other axes over which variance is tracked."""
        return frozenset(jax.sharding.get_abstract_mesh().manual_axes) - self._axes if self._axes else self._axes


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The value, typed as varying over these axes too."""
    axes -= varying_axes(x)
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


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


CommLike: TypeAlias = str | tuple[str, ...] | Comm


def as_comm(comm: CommLike) -> Comm:
    """The Comm that an axis name, a tuple of them, or a Comm stands for."""
    if isinstance(comm, tuple):
        if comm and all(isinstance(name, str) for name in comm):
            return AxisComm(comm)
    elif isinstance(comm, str):
        return AxisComm(comm)
    elif hasattr(comm, "all_to_all"):
        return comm
    raise ValueError(f"comm is {comm!r}; pass a mesh axis name, a tuple of them, or a Comm such as jsparse.AxisComm")
