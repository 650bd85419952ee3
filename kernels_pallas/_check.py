"""Checks of arguments that the operations share."""

import numbers

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def vector(x: ArrayLike, *, narrow: bool = False) -> jax.Array:
    x = jnp.asarray(x)
    types = (jnp.float32, jnp.float64, *((jnp.bfloat16, jnp.float16) if narrow else ()))
    if x.ndim != 1 or x.dtype not in types:
        raise ValueError(
            f"x has shape {x.shape} and type {x.dtype}; it must be one vector of float32 or float64: "
            "ravel x, and cast it if its type is another"
        )
    if x.shape[0] >= 2**31:
        raise ValueError(f"x has {x.shape[0]} elements; indices are int32, so split x into parts of length below 2**31")
    return x


def positive(name: str, value: int) -> None:
    if not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")


def thresholds(values: ArrayLike) -> jax.Array:
    values = jnp.asarray(values)
    if values.ndim != 1:
        raise ValueError(f"thresholds have shape {values.shape}; give one vector of them, shape (m,)")
    return values


def quota(values: ArrayLike, n: int, block: int) -> jax.Array:
    values = jnp.asarray(values, jnp.int32)
    if values.shape != (-(-n // block),):
        raise ValueError(
            f"quota has shape {values.shape}; it must have one number for each block of {block} elements: "
            f"shape ({-(-n // block)},)"
        )
    return values
