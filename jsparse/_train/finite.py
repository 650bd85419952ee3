"""Whether trees are finite, and a choice between two."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import core


def finite(tree: Any) -> jax.Array:
    """Whether all floats are finite. Leaf by leaf, as to flatten one in shards would gather it."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in floats], jnp.array(True))


def spoilt(before: Any, after: Any) -> jax.Array:
    """Whether an array that was finite is not any more. Some are infinite from the beginning."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return functools.reduce(jnp.logical_or, [finite(a) & ~finite(b) for a, b in pairs], jnp.array(False))


def check_finite(params: Any) -> None:
    """Refuses parameters that are not finite. In a trace nothing is known of them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        known = finite(jnp.asarray(leaf))
        if not isinstance(known, core.Tracer) and not known:
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} is not finite, so what workers move of it has no mean: keep "
                "what is infinite, such as a mask, in the model state or in the loss"
            )


def chosen(which: jax.Array, one: Any, other: Any) -> Any:
    """One tree, or the other."""
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), one, other)
