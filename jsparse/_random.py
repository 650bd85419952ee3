"""Random numbers that workers agree on, or agree to differ in."""

import jax
from jax.typing import ArrayLike


def key_of(seed: int, *numbers: ArrayLike) -> jax.Array:
    """A random key of a seed and any integers, such as a step and a rank; alike wherever they are.

    It takes no state: what is drawn in a step is drawn again when the step is repeated.
    """
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
