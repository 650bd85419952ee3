"""Selection in every leaf for itself."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._vector.layout import Layout
from .._vector.pending import Pending
from .._vector.sparse_vector import Leaf, SparseVector
from ._base import Selector


class PerLeafState(NamedTuple):
    """The state of :class:`PerLeaf`.

    Attributes:
      threshold: shape ``(1,)``: the lowest threshold of a leaf of which elements qualified, or 0.
      selected: int32, shape ``(1,)``: how many elements qualified in all leaves together.
      leaves: the states of the leaves, one after another: for each array of a state one that has
        the elements of all.
    """

    threshold: jax.Array
    selected: jax.Array
    leaves: Any


@dataclasses.dataclass(frozen=True)
class PerLeaf(Selector):
    """Selects in every leaf of the gradient for itself, and sends all that as one message.

    What is selected is what ``scope="leaf"`` selects. But there each leaf has its own message, and
    its own all-reduce. Here all leaves are one vector, with one all-reduce and few messages. The
    selector is compiled for each leaf, but :class:`TopK` on a CPU, which searches all leaves at
    once. An all-reduce that selects again, such as ``OkTopk`` or ``GTopk``, does so among all
    leaves. One float64 leaf makes all of them float64, in which others are then selected, too.

    Leaves are the arrays of the gradient; sparse ones become dense. Where a worker's vector is not
    made of these, as between the nodes of :func:`jsparse.hitopk`, it counts as one leaf.

    Attributes:
      select: the selector. A random one draws the same numbers in leaves of one length.
      density: that of ``select``. The number of elements of each leaf is rounded, and at least 1.

    >>> tx = jsparse.topk_allgather("workers", select=PerLeaf(jsparse.select.TopK(0.25)))
    >>> grads = {"a": jnp.array([[1.0, 2.0, 3.0, 4.0]]), "b": jnp.array([[0.1, 0.3, 0.2, 0.4]])}
    >>> first = lambda grads: tx.update(grads, tx.init(grads))[0]
    >>> jax.vmap(first, axis_name="workers")(grads)["b"]  # one worker
    Array([[0. , 0. , 0. , 0.4]], dtype=float32)
    """

    select: Selector

    def __post_init__(self):
        if not isinstance(self.select, Selector):
            raise ValueError(f"select is {self.select!r}; it is the selector for each leaf, such as TopK(0.01)")

    @property
    def density(self) -> float:  # type: ignore[override]
        return self.select.density

    def init(self, n: int, dtype: DTypeLike) -> PerLeafState:
        return self._init([n], dtype)

    def init_for(self, layout: Layout) -> PerLeafState:
        return self._init(layout.lengths, layout.dtype)

    def _init(self, lengths: Sequence[int], dtype: DTypeLike) -> PerLeafState:
        states = [self.select.init(n, dtype) for n in lengths]
        return PerLeafState(jnp.zeros(1, dtype), jnp.zeros(1, jnp.int32), _together(states))

    def __call__(
        self, acc: jax.Array, state: PerLeafState, step: jax.Array, rank: jax.Array
    ) -> tuple[SparseVector, PerLeafState]:
        layout = Layout.of([acc])
        _, x, state = self.accumulate_and_select(Pending(None, [acc], jnp.array(True), layout), state, step, rank)
        return x, state

    def accumulate_and_select(
        self, pending: Pending, state: PerLeafState, step: jax.Array, rank: jax.Array
    ) -> tuple[Leaf, SparseVector, PerLeafState]:
        dtype, lengths = pending.layout.dtype, pending.layout.lengths
        like = [jax.eval_shape(lambda n=n: self.select.init(n, dtype)) for n in lengths]
        acc, x, states = self.select.select_per_leaf(pending, _apart(state.leaves, like), step, rank)
        thresholds = jnp.concatenate([state.threshold for state in states])
        selected = jnp.concatenate([state.selected for state in states])
        lowest = jnp.min(jnp.where(selected > 0, thresholds, jnp.inf))
        count = jnp.sum(selected, dtype=jnp.int32)
        return acc, x, PerLeafState(jnp.where(count > 0, lowest, 0)[None], count[None], _together(states))


def _together(states: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *states)


def _apart(together: Any, like: Sequence[Any]) -> list[Any]:
    """The states of which :func:`_together` made one, in the shapes of these."""
    arrays, shape = jax.tree.flatten(together)
    sizes = [[array.size for array in jax.tree.leaves(state)] for state in like]
    parts = [
        jnp.split(array, list(itertools.accumulate(of_leaves))[:-1])
        for array, of_leaves in zip(arrays, zip(*sizes, strict=True), strict=True)
    ]
    return [jax.tree.unflatten(shape, of_leaf) for of_leaf in zip(*parts, strict=True)]
