"""The type that shard_map gives to what differs between workers."""

import jax
from jax import lax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which a value is typed as varying; none where variance is not tracked."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())


def varying_as(value: jax.Array, x: jax.Array) -> jax.Array:
    """The value, typed as varying over the axes over which ``x`` varies: a loop's carry must keep its type."""
    axes = varying_axes(x) - varying_axes(value)
    return lax.pcast(value, tuple(axes), to="varying") if axes else value
