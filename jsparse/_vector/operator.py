"""The operators with which vectors are reduced."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Operator = Literal["sum", "max", "min"]

COMBINE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
SCATTER = {"sum": "add", "max": "max", "min": "min"}
NEUTRAL = {"sum": 0.0, "max": -float("inf"), "min": float("inf")}


def neutral(operator: Operator, n: int, dtype: DTypeLike) -> jax.Array:
    """A vector of the operator's neutral element: what an index has that no vector holds."""
    return jnp.full(n, NEUTRAL[operator], dtype)


def check_operator(operator: str) -> None:
    if operator not in COMBINE:
        raise ValueError(f"operator is {operator!r}; choose one of {', '.join(map(repr, COMBINE))}")
