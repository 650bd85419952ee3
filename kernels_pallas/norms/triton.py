"""Norms on a GPU, in one read, by the kernel of ``magnitude_statistics``."""

import jax
import jax.numpy as jnp

from ..magnitude_statistics import triton, xla


def norms(x: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    if not x.shape[0]:
        return jnp.zeros((), x.dtype), jnp.zeros((), x.dtype)
    largest, _, magnitudes, _ = xla.whole(triton.read(x, jnp.zeros(0), describe=True, interpret=interpret)[0])
    return largest, magnitudes / jnp.where(largest > 0, largest * xla.inverse(xla.unit(largest)), 1)
