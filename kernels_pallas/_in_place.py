"""What makes XLA:CPU update a part of an array in place."""

import jax
import jax.numpy as jnp


def zero_of(true: jax.Array) -> jax.Array:
    """A zero that XLA does not know to be constant: int32 scalar.

    XLA:CPU updates a slice in place only if it reads the slice at the same index, and only if that
    index is not a constant. With constant indices it goes over the whole vector for every leaf,
    which takes a thousand times as long for all leaves.

    Args:
      true: any boolean scalar that XLA has to compute.
    """
    return jnp.minimum(true.astype(jnp.int32), 0)
