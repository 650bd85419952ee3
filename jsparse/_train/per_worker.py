"""Transformations whose state differs between workers."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax


class PerWorkerState(NamedTuple):
    """State of :func:`per_worker`: the inner state, every leaf's leading axis concatenating over workers.

    Attributes:
      inner: the wrapped transformation's state, scalars as vectors of length 1.
    """

    inner: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedState:
    """State of :func:`sharded`: the inner state of a worker's parts, leading axes concatenating over its workers.

    Attributes:
      inner: the wrapped transformation's state, scalars as vectors of length 1.
      axis: the mesh axes among which it is cut; along others it is alike.
    """

    inner: Any
    axis: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def per_worker(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Gives the state of a transformation that stands *before* the all-reduce its worker axis.

    Before the all-reduce each worker sees its own gradient, so that momentum, say, differs from worker to worker.
    Wrapped, it is placed and saved as such; :func:`jsparse.state_specs` refuses a chain that needs this and lacks it.

    Where workers have parameters of their own, everything differs: wrap the whole chain
    (``train_step(..., params="per_worker")`` does it for you).

    Args:
      tx: the transformation.

    Returns:
      The same transformation with its state laid out per worker. Initialise it by :func:`jsparse.init`: a state made
      inside ``shard_map(check_vma=True)`` is typed as alike on all workers until its first update.

    Example (momentum correction)::

      tx = optax.chain(
          jsparse.per_worker(optax.trace(0.9)), jsparse.oktopk("data", density=0.01), optax.scale(-0.1)
      )
    """
    tx = optax.with_extra_args_support(tx)

    def init_fn(params):
        return PerWorkerState(jax.tree.map(lambda leaf: leaf.reshape(leaf.shape or (1,)), tx.init(params)))

    def update_fn(updates, state, params=None, **extra_args):
        shapes = jax.eval_shape(tx.init, updates)
        inner = jax.tree.map(lambda leaf, shape: leaf.reshape(shape.shape), state.inner, shapes)
        updates, inner = tx.update(updates, inner, params, **extra_args)
        return updates, PerWorkerState(jax.tree.map(lambda leaf: leaf.reshape(leaf.shape or (1,)), inner))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
