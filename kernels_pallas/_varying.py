"""Variance: the part of a type by which shard_map marks values that differ between workers."""

from typing import TypeVar

import jax
from jax import lax

Tree = TypeVar("Tree")


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which a value is typed as varying: none where variance is not tracked."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())


def varying_as(value: jax.Array, x: jax.Array) -> jax.Array:
    """``value``, typed as varying over the axes over which ``x`` varies.

    A loop needs this for its initial carry, because a carry must keep its type.
    """
    axes = varying_axes(x) - varying_axes(value)
    return lax.pcast(value, tuple(axes), to="varying") if axes else value


def alike(tree: Tree) -> Tree:
    """The arrays of a tree, each typed as varying over all axes over which any of them varies."""
    for leaf in jax.tree.leaves(tree):
        tree = jax.tree.map(lambda value, leaf=leaf: varying_as(value, leaf), tree)
    return tree
