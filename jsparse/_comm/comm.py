"""How workers communicate: the few collectives that the algorithms need."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import varying_as, varying_axes

from . import gloo
from .permute import permute

T = TypeVar("T")
# The compiler keeps this name of a collective: by it one finds ours among all of a program.
SCOPE = "jsparse"


class Comm(Protocol):
    """A group of workers, seen from inside one of them. A payload is one array.

    All workers must call all methods, in the same order. Inside a branch, a method may be called
    only if all workers take that branch.

    A class that inherits from this one defines ``size``, ``rank`` and the collectives. The other
    methods suit workers of which types tell nothing.
    """

    @property
    def size(self) -> int:
        """P, the number of workers."""
        ...

    @property
    def typed(self) -> bool:
        """Whether the types of arrays tell what is alike on all workers."""
        return False

    def rank(self) -> jax.Array:
        """This worker's number, from 0: int32 scalar."""
        ...

    def psum(self, x: jax.Array) -> jax.Array:
        """The sum over workers, with the same bits on all of them."""
        ...

    def pmax(self, x: jax.Array) -> jax.Array:
        """The maximum over workers."""
        ...

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Every worker's ``x``, stacked by rank: shape ``(P, *x.shape)``."""
        ...

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Exchanges rows: row ``i`` of ``x``, shape ``(P, ...)``, goes to worker ``i``.

        Row ``j`` of the result comes from worker ``j``.
        """
        ...

    def ragged_all_to_all(self, x: jax.Array, lengths: jax.Array, arriving: jax.Array, output: jax.Array) -> jax.Array:
        """Exchanges the beginnings of rows, each as long as its contents.

        Args:
          x: shape ``(P, length, ...)``: row ``i`` has what goes to worker ``i``.
          lengths: int32, shape ``(P,)``: how many entries of each row are sent.
          arriving: int32, shape ``(P,)``: how many arrive from each worker.
          output: of the shape of ``x``: what the result holds beside what arrives.

        Returns:
          ``output``, where row ``j`` begins with what arrives from worker ``j``.
        """
        ...

    def psum_scatter(self, x: jax.Array) -> jax.Array:
        """Sums ``x``, shape ``(P, ...)``, over workers. Worker ``i`` gets row ``i`` of the sum."""
        ...

    def ppermute(self, x: jax.Array, perm: Sequence[tuple[int, int]]) -> jax.Array:
        """Sends ``x`` from the first of each pair of ranks to the second.

        A worker that receives nothing gets zeros.
        """
        ...

    def switch(self, index: jax.Array, branches: Sequence[Callable[[], T]], *, replicated: bool = False) -> T:
        """Runs one branch, the same on every worker, so that branches may communicate.

        Args:
          index: int32 scalar, alike on all workers.
          branches: functions of no arguments.
          replicated: whether the results of the branches are alike on all workers, and typed so if
            types tell.
        """
        return lax.switch(index, branches)

    def repeat(self, count: int, body: Callable[[jax.Array, T], T], start: T) -> T:
        """Runs ``body(i, carry)`` ``count`` times. The carry is alike on all workers."""
        return lax.fori_loop(0, count, body, start)

    def varying(self, tree: T) -> T:
        """The same values, typed as differing between workers if types tell."""
        return tree

    def may_differ(self, x: jax.Array) -> bool:
        """False if types tell that ``x`` is alike on all workers."""
        return True


@dataclasses.dataclass(frozen=True)
class AxisComm:
    """The workers along a named axis of ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``.

    Attributes:
      axis: the name of the axis. Under ``shard_map`` it may be a tuple of names, which count as
        one axis in row-major order.
      alike: further axes of the mesh along which gradients are alike, as those that another
        transformation has averaged there. Only ``shard_map(check_vma=False)`` needs to be told.
    """

    axis: str | tuple[str, ...]
    alike: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self._asked(lax.axis_size)

    @property
    def typed(self) -> bool:
        return bool(self._axes)

    def rank(self) -> jax.Array:
        return self._asked(lax.axis_index)

    @jax.named_scope(SCOPE)
    def psum(self, x: jax.Array) -> jax.Array:
        return lax.psum(self.varying(x), self.axis)

    @jax.named_scope(SCOPE)
    def pmax(self, x: jax.Array) -> jax.Array:
        return lax.pmax(self.varying(x), self.axis)

    @jax.named_scope(SCOPE)
    def all_gather(self, x: jax.Array) -> jax.Array:
        to = "invarying" if self.typed else "varying"
        if self._over_gloo:
            return gloo.all_gather(self.varying(x), self.axis, to)
        return lax.all_gather(self.varying(x), self.axis, to=to)

    @jax.named_scope(SCOPE)
    def all_to_all(self, x: jax.Array) -> jax.Array:
        if self._over_gloo:
            return gloo.all_to_all(self.varying(x), self.axis)
        return lax.all_to_all(self.varying(x), self.axis, split_axis=0, concat_axis=0)

    @jax.named_scope(SCOPE)
    def ragged_all_to_all(self, x: jax.Array, lengths: jax.Array, arriving: jax.Array, output: jax.Array) -> jax.Array:
        size, length = x.shape[:2]
        rows = length * lax.iota(jnp.int32, size)
        mine = jnp.full(size, length * self.rank())
        entries, kept = (self.varying(each.reshape(size * length, *x.shape[2:])) for each in (x, output))
        offsets = self.varying((rows, lengths, mine, arriving))
        return lax.ragged_all_to_all(entries, kept, *offsets, axis_name=self.axis).reshape(x.shape)

    @jax.named_scope(SCOPE)
    def psum_scatter(self, x: jax.Array) -> jax.Array:
        if self._over_gloo:
            return gloo.psum_scatter(self.varying(x), self.axis)
        return lax.psum_scatter(self.varying(x), self.axis)

    @jax.named_scope(SCOPE)
    def ppermute(self, x: jax.Array, perm: Sequence[tuple[int, int]]) -> jax.Array:
        if self._over_gloo:
            return gloo.ppermute(self.varying(x), self.axis, perm)
        if self._in_shard_map:
            return permute(self.varying(x), self.axis, perm)
        # vmap wants every worker to send and to receive: workers outside all pairs do so among
        # themselves.
        senders, targets = ({pair[side] for pair in perm} for side in (0, 1))
        idle = [[rank for rank in range(self.size) if rank not in busy] for busy in (senders, targets)]
        moved = lax.ppermute(x, self.axis, [*perm, *zip(*idle, strict=True)])
        return jnp.where(jnp.array([rank in targets for rank in range(self.size)])[self.rank()], moved, 0)

    def switch(self, index: jax.Array, branches: Sequence[Callable[[], T]], *, replicated: bool = False) -> T:
        if not replicated:
            branches = [lambda branch=branch: self.varying(branch()) for branch in branches]
        if self._others:
            # The result of one branch may vary over other axes while that of another does not. All
            # branches must have one type.
            shapes = [jax.eval_shape(branch) for branch in branches]
            axes = jax.tree.map(lambda *leaves: frozenset().union(*map(varying_axes, leaves)), *shapes)
            branches = [lambda branch=branch: jax.tree.map(_vary, branch(), axes) for branch in branches]
        return lax.switch(index, branches)

    def repeat(self, count: int, body: Callable[[jax.Array, T], T], start: T) -> T:
        def keep_type(i, carry):
            return jax.tree.map(varying_as, body(i, carry), carry)

        if self._others:
            # The carry, too, may begin to vary over other axes. It may take several passes until
            # its type is final.
            after = jax.eval_shape(lambda: keep_type(jnp.int32(0), start))
            wider = jax.tree.map(varying_as, start, after)
            if jax.tree.map(varying_axes, wider) != jax.tree.map(varying_axes, start):
                return self.repeat(count, body, wider)
        return lax.fori_loop(0, count, keep_type, start)

    def varying(self, tree: T) -> T:
        return jax.tree.map(lambda x: _vary(x, self._axes), tree)

    def may_differ(self, x: jax.Array) -> bool:
        return self._axes <= varying_axes(x)

    def _asked(self, about: Callable[[Any], T]) -> T:
        """What JAX says about the axis. It is refused where it is not bound."""
        try:
            return about(self.axis)
        except NameError as error:
            bound = jax.sharding.get_abstract_mesh().manual_axes
            if bound:
                raise ValueError(
                    f"the axis {self.axis!r} is not bound here, where the axes are {bound}: give the transformation "
                    "the axis of the loop or step that it is in"
                ) from error
            raise ValueError(
                f"the axis {self.axis!r} is not bound here: call inside jax.shard_map, jax.pmap or jax.vmap over an "
                "axis of that name. To initialise a state outside, use jsparse.init(tx, params, mesh, axis); for a "
                "whole step, jsparse.train_step"
            ) from error

    @property
    def _in_shard_map(self) -> bool:
        return set(axes_of(self)) <= set(jax.sharding.get_abstract_mesh().manual_axes)

    @property
    def _over_gloo(self) -> bool:
        return self._in_shard_map and gloo.in_use()

    @property
    def _axes(self) -> frozenset[str]:
        """This Comm's axes if their variance is tracked, as ``check_vma=True`` does, else none."""
        return varying_axes(self.rank())

    @property
    def _others(self) -> frozenset[str]:
        """The other axes whose variance is tracked."""
        return frozenset(jax.sharding.get_abstract_mesh().manual_axes) - self._axes if self._axes else self._axes


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The value, typed as varying over these axes as well."""
    axes -= varying_axes(x)
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def axes_of(comm: Comm) -> tuple[str, ...]:
    """The names of the axes along which the workers stand. A Comm of another kind has none."""
    axis = comm.axis if isinstance(comm, AxisComm) else ()
    return (axis,) if isinstance(axis, str) else axis


CommLike: TypeAlias = str | tuple[str, ...] | Comm


def as_comm(comm: CommLike) -> Comm:
    """The Comm that an axis name, a tuple of axis names, or a Comm stands for."""
    if isinstance(comm, tuple):
        if comm and all(isinstance(name, str) for name in comm) and len(set(comm)) == len(comm):
            return AxisComm(comm)
    elif isinstance(comm, str):
        return AxisComm(comm)
    elif hasattr(comm, "all_to_all"):
        return comm
    raise ValueError(
        f"comm is {comm!r}; pass a mesh axis name, a tuple of them, each once, or a Comm such as jsparse.AxisComm"
    )
