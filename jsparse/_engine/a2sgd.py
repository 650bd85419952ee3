"""A2SGD: workers keep their own gradients, and average two means of them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas import varying_as

from .._comm.comm import Comm
from .._comm.metered import Cost, Metered, collective_cost
from .._vector.layout import Layout
from .config import check_floats
from .synchronise import Report, SparseAllReduceState, check_local, varying_over

# Elements summed one after the other: what bounds the rounding error, and keeps masks out of memory.
ROW = 256


@dataclasses.dataclass(frozen=True)
class MeansConfig:
    """Which means are averaged: the arguments of :func:`a2sgd`."""

    comm: Comm
    per_leaf: bool = False

    def groups(self, tree: Any) -> list[list[int]]:
        """The leaves that have their two means in common; those without elements have none."""
        ids = [i for i, leaf in enumerate(jax.tree.leaves(tree)) if leaf.size]
        return [[i] for i in ids] if self.per_leaf or not ids else [ids]

    def sends(self, params: Any, size: int) -> Cost:
        """What a worker sends in a step."""
        check_floats(params)
        means, width = 2 * len(self.groups(params)), Layout.of(jax.tree.leaves(params)).dtype.itemsize
        return collective_cost("psum", means * width, size) if means else Cost()


class A2SGD(optax.GradientTransformationExtraArgs):
    """The gradient transformation of :func:`a2sgd`, which can be asked how it averages."""

    @staticmethod
    def of(config: MeansConfig) -> "A2SGD":
        """The transformation of a configuration."""
        init: Any = functools.partial(_init, config)
        update: Any = functools.partial(_update, config)
        return A2SGD(init, update)

    @property
    def config(self) -> MeansConfig:
        """Its configuration."""
        return self.init.args[0]  # type: ignore[attr-defined]


def _init(config: MeansConfig, params: optax.Params) -> SparseAllReduceState:
    comm = Metered(config.comm)
    check_floats(params)
    none, zero = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.uint32)
    return varying_over([comm], SparseAllReduceState(none, (), Report(none, none, none, zero, zero)))


def _update(
    config: MeansConfig,
    updates: optax.Updates,
    state: SparseAllReduceState,
    params: optax.Params | None = None,
    **extra_args,
) -> tuple[optax.Updates, SparseAllReduceState]:
    """Algorithm 1, lines 3 to 7."""
    del params, extra_args
    check_floats(updates)
    comm = Metered(config.comm)
    check_local([comm], updates)
    leaves, treedef = jax.tree.flatten(updates)
    layout, groups, bad = Layout.of(leaves), config.groups(updates), jnp.array(False)
    if groups:
        own = jnp.stack([_means([leaves[i] for i in ids], layout.dtype) for ids in groups])
        shared = comm.psum(own.reshape(-1)).reshape(-1, 2) / comm.size
        bad = ~jnp.all(jnp.isfinite(shared))
        for ids, mine, (plus, minus) in zip(groups, own, shared - own, strict=True):
            for i in ids:
                leaves[i] = jnp.where(bad, jnp.nan, _corrected(leaves[i], mine, plus, minus))
    everything = jnp.where(bad, 0, min(layout.n, jnp.iinfo(jnp.int32).max))
    report = Report(jnp.int32(0), everything, everything, comm.words, comm.messages)
    report = jax.tree.map(lambda new, old: new.astype(old.dtype)[None], report, state.report)
    after = SparseAllReduceState(state.step + jnp.where(bad, 0, 1), (), report)
    return jax.tree.unflatten(treedef, leaves), varying_over([comm], after)


def _means(leaves: Sequence[jax.Array], dtype: DTypeLike) -> jax.Array:
    """The mean of what is at least 0, and of the magnitudes of the rest (line 3); 0 of none: shape ``(2,)``.

    They are not finite where an element is not.
    """
    rows = []
    for leaf in leaves:
        flat = leaf.reshape(-1).astype(dtype)
        whole = flat.shape[0] // ROW * ROW
        rows += [_reduced(part) for part in (flat[:whole].reshape(-1, ROW), flat[whole:][None]) if part.size]
    plus, minus, count, largest, smallest = (jnp.concatenate(column) for column in zip(*rows, strict=True))
    n = sum(leaf.size for leaf in leaves)
    sums = jnp.stack([jnp.sum(plus), jnp.sum(minus)])
    counts = jnp.stack([jnp.sum(count), float(n) - jnp.sum(count)])
    # No mean is above what it is of, whatever the rounding: of equal elements each reaches it.
    most = jnp.maximum(jnp.stack([jnp.max(largest), -jnp.min(smallest)]), 0)
    return jnp.where(jnp.isfinite(sums), jnp.minimum(sums / jnp.maximum(counts, 1), most), jnp.nan)


def _reduced(rows: jax.Array) -> list[jax.Array]:
    """Of each row the sum of what is at least 0, that of the other magnitudes, the former's count, largest, smallest.

    In one pass, which XLA:CPU would not make of five reductions.
    """
    positive = rows >= 0
    start = [varying_as(jnp.array(x, rows.dtype), rows) for x in (0, 0, 0, -jnp.inf, jnp.inf)]
    return lax.reduce(
        [jnp.where(positive, rows, 0), jnp.where(positive, 0, -rows), positive.astype(rows.dtype), rows, rows],
        start,
        lambda a, b: [a[0] + b[0], a[1] + b[1], a[2] + b[2], jnp.maximum(a[3], b[3]), jnp.minimum(a[4], b[4])],
        (1,),
    )


def _corrected(leaf: jax.Array, means: jax.Array, plus: jax.Array, minus: jax.Array) -> jax.Array:
    """The gradient with its means exchanged for the shared ones, which are greater by ``plus`` and ``minus``.

    Lines 4, 6 and 7 in one, as in the paper's equation for Δμ: what moves is what reaches its own mean. A zero, which
    reaches a mean of 0 where nothing is positive, stays.
    """
    x = leaf.astype(means.dtype)
    x = x + jnp.where((x > 0) & (x >= means[0]), plus, 0) - jnp.where((x < 0) & (-x >= means[1]), minus, 0)
    return x.astype(leaf.dtype)
