"""LARS and LAMB, layer-wise learning rates whose norms the workers share out."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .._comm.comm import Comm, CommLike, as_comm
from .parts import check_replicated, map_in_parts


class Piece(NamedTuple):
    """A stretch of a raveled leaf.

    Attributes:
      leaf: the leaf's number.
      begin: the stretch's first index.
      end: the index after its last one.
    """

    leaf: int
    begin: int
    end: int


def scale_by_trust_ratio(
    comm: CommLike, *, min_norm: ArrayLike = 0.0, trust_coefficient: ArrayLike = 1.0, eps: ArrayLike = 0.0
) -> optax.GradientTransformation:
    """``optax.scale_by_trust_ratio`` whose norms are shared out among the workers.

    Each leaf's update is multiplied by ``trust_coefficient * |params| / (|update| + eps)``, or by
    1 where a norm is zero. A leaf longer than a P-th of all elements is cut, and the pieces are
    shared out, so that every worker reads about a P-th of the elements in a P-th of the
    reductions. Put it *after* the all-reduce in a chain, where parameters and updates are the
    same on all workers. Squares are summed in float32 or a wider type; optax sums them in the
    leaf's type.

    Args:
      comm: a mesh axis name, a tuple of them, or a :class:`Comm`.
      min_norm: the least value of a norm; smaller norms count as this.
      trust_coefficient: a multiplier of the ratio.
      eps: added to the update's norm.

    Returns:
      A gradient transformation without state. Its ``update`` needs ``params``.

    Raises:
      ValueError: from ``update``: ``params`` are missing, the axis is not bound, or the updates'
        types say that they differ between workers.

    **Cost**: ``2 (P-1)`` words for every piece of the worker that has most pieces, in one
    all-gather: about ``2 (P-1) (leaves/P + 1)`` words in ``log P`` messages.

    References:
      Shi et al., MLSys 2021, section 4.2, equation 11. There LARS has weight decay in the
      denominator; here, as in optax, it is part of the update.
    """
    comm = as_comm(comm)

    def update_fn(updates, state, params=None):
        if params is None:
            raise ValueError("trust ratios need the parameters: call update(updates, state, params)")
        leaves, treedef = jax.tree.flatten(updates)
        weights = treedef.flatten_up_to(params)
        check_replicated(comm, updates, "update")
        check_replicated(comm, params, "parameter")

        def scaled(update, weight, squares):
            norms = jnp.sqrt(squares[1]).astype(weight.dtype), jnp.sqrt(squares[0]).astype(update.dtype)
            param_norm, update_norm = (jnp.where(norm <= min_norm, min_norm, norm) for norm in norms)
            ratio = trust_coefficient * param_norm / (update_norm + eps)
            either = (param_norm == 0) | (update_norm == 0)
            return update * jnp.where(either, jnp.ones((), weight.dtype), ratio)

        squares = sums_of_squares(comm, list(zip(leaves, weights, strict=True)))
        return jax.tree.unflatten(treedef, map(scaled, leaves, weights, squares)), state

    return optax.GradientTransformation(optax.init_empty_state, update_fn)


def lars(
    comm: CommLike,
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = True,
    trust_coefficient: ArrayLike = 0.001,
    eps: ArrayLike = 0.0,
    trust_ratio_mask: Any = True,
    momentum: ArrayLike = 0.9,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """``optax.lars`` whose norms are shared out among the workers.

    Put it after the all-reduce in a chain.

    Args:
      comm: a mesh axis name, a tuple of them, or a :class:`Comm`.
      learning_rate: a number or a schedule.
      weight_decay: strength of the decay, which is added to the gradient.
      weight_decay_mask: which leaves decay: a pytree of bools, or a function of the parameters
        that returns one.
      trust_coefficient: a multiplier of the trust ratio.
      eps: added to the trust ratio's denominator.
      trust_ratio_mask: which leaves are scaled by the trust ratio, like ``weight_decay_mask``.
      momentum: the decay of the momentum.
      nesterov: whether the momentum is Nesterov's.

    Returns:
      A gradient transformation, equal to optax's up to rounding. Its state is the same on all
      workers.

    **Cost**: that of :func:`scale_by_trust_ratio`.

    Example::

      optimizer = jsparse.lars("data", 1.0, weight_decay=1e-4)
      tx = optax.chain(jsparse.oktopk("data", density=0.01), optimizer)

    References:
      You et al., Large Batch Training of Convolutional Networks, 2017; Shi et al., MLSys 2021,
      section 4.2, "PTO for LARS".
    """
    ratio = scale_by_trust_ratio(comm, trust_coefficient=trust_coefficient, eps=eps)
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=weight_decay_mask),
        optax.masked(ratio, mask=trust_ratio_mask),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(decay=momentum, nesterov=nesterov),
    )


def lamb(
    comm: CommLike,
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    eps_root: ArrayLike = 0.0,
    weight_decay: Any = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """``optax.lamb`` whose norms are shared out among the workers.

    Put it after the all-reduce in a chain.

    Args:
      comm: a mesh axis name, a tuple of them, or a :class:`Comm`.
      learning_rate: a number or a schedule.
      b1, b2: the decay of the first and of the second moment.
      eps, eps_root: added outside and inside the square root of the second moment.
      weight_decay: strength of the decay, which is added to Adam's update.
      mask: which leaves decay: a pytree of bools, or a function of the parameters that returns
        one.

    Returns:
      A gradient transformation, equal to optax's up to rounding. Its state is the same on all
      workers.

    **Cost**: that of :func:`scale_by_trust_ratio`.

    References:
      You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020;
      Shi et al., MLSys 2021, section 4.2.
    """
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root),
        optax.add_decayed_weights(weight_decay, mask=mask),
        scale_by_trust_ratio(comm),
        optax.scale_by_learning_rate(learning_rate),
    )


def sums_of_squares(comm: Comm, pairs: Sequence[tuple[jax.Array, jax.Array]]) -> list[tuple[jax.Array, jax.Array]]:
    """The sums of squares of leaves, shared out among the workers.

    Args:
      comm: the workers.
      pairs: updates with their parameters, each pair of the same size.

    Returns:
      Two sums for each pair: of the update's squares, and of the parameter's.
    """
    whole = [pair[0].size for pair in pairs]
    pieces = cut(whole, comm.size)

    def squares(piece):
        def total(leaf):
            part = leaf.reshape(-1)[piece.begin : piece.end].astype(jnp.result_type(leaf.dtype, jnp.float32))
            return jnp.sum(jnp.square(part))

        return tuple(map(total, pairs[piece.leaf]))

    # Every reduction has a fixed cost. It is taken to be that of a quarter of the mean leaf's
    # elements.
    start = sum(whole) / (4 * max(len(whole), 1))
    found = map_in_parts(squares, comm, pieces, weigh=lambda piece: piece.end - piece.begin + start)
    sums: list[Any] = [(0.0, 0.0)] * len(whole)
    for piece, addends in zip(pieces, found, strict=True):
        sums[piece.leaf] = jax.tree.map(operator.add, sums[piece.leaf], addends)
    return sums


def cut(sizes: Sequence[int], workers: int) -> list[Piece]:
    """Cuts leaves into pieces of at most a ``workers``-th of all elements.

    Args:
      sizes: the leaves' numbers of elements.
      workers: P.

    >>> cut([6, 2], 2)
    [Piece(leaf=0, begin=0, end=4), Piece(leaf=0, begin=4, end=6), Piece(leaf=1, begin=0, end=2)]
    """
    limit = max(1, -(-sum(sizes) // workers))
    return [
        Piece(leaf, begin, min(begin + limit, size))
        for leaf, size in enumerate(sizes)
        for begin in range(0, size, limit)
    ]
