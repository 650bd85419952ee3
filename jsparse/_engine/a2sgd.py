"""A2SGD: workers keep their own gradients, and average only two means of them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import varying_as

from .._comm.comm import Comm
from .._comm.metered import Metered, add_words
from .._vector.arguments import check_fields
from .._vector.layout import Layout
from .._vector.sparse_vector import flatten, to_dense
from .agreement import check, varying_over
from .outcome import begin
from .space import Flat
from .state import SparseAllReduceState
from .synchroniser import Synchroniser

# Steps, and parts of a step: how often a vector is folded, as a strip of paper, before its figures
# are summed. XLA:CPU adds so many parts many elements at a time; it adds the elements of a row, or
# of more parts, one at a time.
STEPS, PARTS = 16, 16
# Long parts have a multiple of so many elements: for an odd number XLA:CPU takes up to three times
# as long.
ALIGN = 64
# The length of what is folded at once: its indices are int32.
LONGEST = 2**30


@dataclasses.dataclass(frozen=True)
class TwoMeans(Synchroniser):
    """The synchroniser of :func:`jsparse.a2sgd`. Its updates differ between workers.

    Attributes:
      levels: one network, of all workers.
      per_leaf: whether every leaf has two means of its own.
      space: where the leaves stand: a worker's devices may hold them in shards.
    """

    alike = False

    levels: tuple[Comm]
    per_leaf: bool = False
    space: Flat = Flat()

    def __post_init__(self):
        check_fields(self)

    @property
    def model(self) -> tuple[Comm, ...]:  # type: ignore[override]
        return self.space.model

    def over(self, *comms: Comm) -> "TwoMeans":
        return dataclasses.replace(self, levels=comms)

    def on_shards(self, model: tuple[Comm, ...], whole: tuple[int, ...]) -> "TwoMeans":
        return dataclasses.replace(self, space=self.space.on_shards(model, whole))

    def init(self, params: Any) -> SparseAllReduceState:
        return begin(self.levels, self.space, flatten(params)[0], (), ())

    def update(self, grads: Any, state: SparseAllReduceState) -> tuple[Any, SparseAllReduceState]:
        """Algorithm 1, lines 3 to 7."""
        levels = comm, *_ = [Metered(comm) for comm in self.levels]
        check(self, grads, state)
        leaves, treedef = flatten(grads)
        leaves = list(map(to_dense, leaves))
        layout, bad = Layout.of(leaves), jnp.array(False)
        # Leaves that share two means. Leaves without elements have none.
        ids = [i for i, leaf in enumerate(leaves) if leaf.size]
        groups = [[i] for i in ids] if self.per_leaf else [ids]
        if ids:
            own = jnp.stack([self._means({i: leaves[i] for i in ids}, layout.dtype) for ids in groups])
            shared = comm.psum(own.reshape(-1)).reshape(-1, 2) / comm.size
            bad = ~jnp.all(jnp.isfinite(shared))
            for ids, mine, (plus, minus) in zip(groups, own, shared - own, strict=True):
                for i in ids:
                    leaves[i] = jnp.where(bad, jnp.nan, _corrected(leaves[i], mine, plus, minus))
        everything = jnp.where(bad, 0, jnp.int32(min(layout.n, jnp.iinfo(jnp.int32).max)))[None]
        words = functools.reduce(add_words, [level.words for level in levels])
        messages = functools.reduce(jnp.add, [level.messages for level in levels])
        report = state.report._replace(
            delivered=everything,
            updated=everything,
            words=words[None],
            messages=messages[None],
            skipped=state.report.skipped + jnp.where(bad, 1, 0),
        )
        after = state._replace(step=state.step + jnp.where(bad, 0, 1), report=report)
        return jax.tree.unflatten(treedef, leaves), varying_over((*levels, *self.model), after)

    def _means(self, leaves: Mapping[int, jax.Array], dtype: DTypeLike) -> jax.Array:
        """The mean of elements that are at least 0, and that of the other magnitudes (line 3).

        The result has shape ``(2,)``. The mean of no elements is 0. If an element is not finite, a
        mean is not.

        Args:
          leaves: some of the leaves, by their numbers.
          dtype: the type of the result.
        """
        rows, sizes = [], []
        for i, leaf in leaves.items():
            flat = leaf.reshape(-1).astype(dtype)
            for start in range(0, flat.shape[0], LONGEST):
                figures = _reduced(flat[start : start + LONGEST])
                rows.append([*(self.space.once(i, x) for x in figures[:3]), *figures[3:]])
            sizes.append(self.space.once(i, float(leaf.size)))
        plus, minus, count, largest, smallest = (jnp.concatenate(column) for column in zip(*rows, strict=True))
        of_plus, n = jnp.sum(count), sum(sizes)
        figures = jnp.stack([jnp.sum(plus), jnp.sum(minus), of_plus, n - of_plus])
        most = jnp.maximum(jnp.stack([jnp.max(largest), -jnp.min(smallest)]), 0)
        for comm in self.model:
            figures, most = comm.psum(figures), comm.pmax(most)
        sums, counts = figures[:2], figures[2:]
        # No mean is above the largest of its elements, in spite of rounding. So if elements are
        # equal, each of them reaches the mean.
        return jnp.where(jnp.isfinite(sums), jnp.minimum(sums / jnp.maximum(counts, 1), most), jnp.nan)


def _figures(values: jax.Array) -> list[jax.Array]:
    """Values that are at least 0, the other magnitudes, 1 for each of the former; all twice."""
    positive = values >= 0
    halves = [jnp.where(positive, values, 0), jnp.where(positive, 0, -values)]
    return [*halves, positive.astype(values.dtype), values, values]


def _combined(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums of the first three figures, the largest of the fourth, the smallest of the fifth."""
    return [a[0] + b[0], a[1] + b[1], a[2] + b[2], jnp.maximum(a[3], b[3]), jnp.minimum(a[4], b[4])]


def _reduced(values: jax.Array) -> list[jax.Array]:
    """Five figures of values, each for 256 of them, in one pass over the values.

    XLA:CPU would not make one pass of five reductions. The figures are the sum of elements that
    are at least 0, the sum of the other magnitudes, the number of the former, the largest element
    and the smallest element.

    Args:
      values: shape ``(m,)``.

    Returns:
      Vectors of one length: m / 256, and the elements that are left when the others are folded.
      These are at most 255, or a sixteenth of m.
    """
    length = values.shape[0] // (STEPS * PARTS)
    length -= length % ALIGN if length > 16 * ALIGN else 0
    start = [varying_as(jnp.array(x, values.dtype), values) for x in (0, 0, 0, -jnp.inf, jnp.inf)]

    def fold(i: jax.Array, figures: list[jax.Array]) -> list[jax.Array]:
        parts = lax.dynamic_slice(values, (i * PARTS * length,), (PARTS * length,)).reshape(PARTS, length)
        return _combined(figures, lax.reduce(_figures(parts), start, _combined, (0,)))

    figures = lax.fori_loop(0, STEPS, fold, [jnp.broadcast_to(x, (length,)) for x in start])
    return [jnp.concatenate(pair) for pair in zip(figures, _figures(values[STEPS * PARTS * length :]), strict=True)]


def _corrected(leaf: jax.Array, means: jax.Array, plus: jax.Array, minus: jax.Array) -> jax.Array:
    """The gradient with its means replaced by the shared means.

    The shared means are greater by ``plus`` and ``minus``. This is lines 4, 6 and 7 in one, as in
    the paper's equation for Δμ: elements that reach their own mean change. A zero stays zero,
    although it reaches the mean of 0 if no element is positive.
    """
    x = leaf.astype(means.dtype)
    x = x + jnp.where((x > 0) & (x >= means[0]), plus, 0) - jnp.where((x < 0) & (-x >= means[1]), minus, 0)
    return x.astype(leaf.dtype)
