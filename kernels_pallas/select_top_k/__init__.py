"""Exact top-k by magnitude."""

import functools
from typing import NamedTuple

import jax

from .. import _check
from ..kth_magnitude import choose_primitives
from ..kth_magnitude.xla import PLAIN, Marked, lower_bound, superset_capacity
from . import xla

# Up to this length a vector is selected from as fast without a bound that its caller found.
SHORT = 262_144


def select_top_k(
    x: jax.Array, k: int, *, marked: Marked | None = None, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Selects the ``k`` elements of largest magnitude, in ascending order of index.

    For most inputs it reads ``x`` once. Among elements equal to the k-th magnitude it takes those
    with the lowest indices. Zeros and NaN are never selected. So fewer than ``k`` elements are
    selected if ``x`` has fewer than ``k`` others.

    Args:
      x: float32 or float64, shape ``(n,)``, ``n < 2**31``.
      k: static, at least 1.
      marked: the threshold of :func:`top_k_bound` and the bitmap of the elements of ``x`` that
        reach it, for a caller that found them while it computed ``x``. This saves a pass over
        ``x``. The result is the same.
      implementation: ``"xla"``, ``"triton"`` or ``"interpret"``; with None the operation chooses
        (see :func:`kernels_pallas.using`).

    Returns:
      ``(values, indices, count)``: shapes ``(k,)``, ``(k,)`` and ``()``. Indices are int32,
      ascending, padded with ``n``. Values have the type of ``x`` and are padded with 0.
      ``count``, int32, is the number of selected elements.

    Raises:
      ValueError: ``x`` is not one vector of float32 or float64, or it is too long; ``k`` is not
        positive; or there is no implementation of this name.

    >>> values, indices, count = select_top_k(jnp.array([3.0, -1.0, 0.5, -4.0]), 2)
    >>> values, indices, int(count)
    (Array([ 3., -4.], dtype=float32), Array([0, 3], dtype=int32), 2)
    """
    x = _check.vector(x)
    _check.positive("k", k)
    return choose_primitives(implementation, functools.partial(xla.select_top_k, k=k, marked=marked), x)


class TopKSample(NamedTuple):
    """What :func:`top_k_bound` needs, and what reaches it.

    Attributes:
      size: how many elements it needs.
      room: how many elements of the vector reach it at most, if the estimate holds.
    """

    size: int
    room: int


def top_k_sample(n: int, k: int) -> TopKSample | None:
    """The sample for :func:`top_k_bound`, or None if a bound would be of no use.

    It is of no use where ``n`` is small, or ``k`` near ``n``.
    """
    size = PLAIN.sample_size(n)
    room = None if n <= SHORT or k >= n else superset_capacity(n, k, size)
    return None if room is None else TopKSample(size, room)


def top_k_bound(sampled: jax.Array, n: int, k: int, *, implementation: str | None = None) -> jax.Array:
    """A threshold that the k largest of ``n`` elements reach, and few others: a scalar.

    It is an estimate. :func:`select_top_k` checks it, and does without it if it does not hold.

    Args:
      sampled: the elements at :func:`sample_places`, as many as :func:`top_k_sample` says.
      n, k: the length of the whole vector, and how many elements will be selected.
      implementation: as of :func:`select_top_k`.
    """
    return choose_primitives(implementation, functools.partial(lower_bound, n=n, k=k), sampled)
