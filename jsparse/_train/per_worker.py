"""Transformations whose state differs between workers."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec

from .._engine.state import states_in
from .finite import chosen, finite


class PerWorkerState(NamedTuple):
    """State of :func:`per_worker`: the inner state, in which each leaf has a part for each worker.

    The parts are concatenated along the leading axis.

    Attributes:
      inner: the wrapped transformation's state, scalars as vectors of length 1.
    """

    inner: Any

    def specs(self, axis: Any) -> Any:
        """The state with a PartitionSpec in place of every leaf."""
        return jax.tree.map(lambda _: PartitionSpec(axis), self)

    def moved(self, old: "PerWorkerState", once: Any, move: Any) -> "PerWorkerState":
        """The state for another number of workers.

        A part that has a ``moved`` of its own moves by that. Every other array moves as one of
        which each worker has its own.
        """
        return PerWorkerState(move.tree(self.inner, old.inner, once.inner, of_each=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedState:
    """State of :func:`sharded`: the inner state, in which each leaf is cut among its workers.

    Their parts are concatenated along the leading axis.

    Attributes:
      inner: the wrapped transformation's state, scalars as vectors of length 1.
      axis: the mesh axes among which it is cut. Along other axes it is alike.
    """

    inner: Any
    axis: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def specs(self, axis: Any) -> Any:
        """The state with a PartitionSpec for every leaf: along its own axes if it has any."""
        return jax.tree.map(lambda _: PartitionSpec(self.axis or axis), self)

    def moved(self, old: "ShardedState", once: "ShardedState", move: Any) -> "ShardedState":
        """The state for another number of workers: joined and cut again, exactly."""
        inner = jax.tree.map(lambda *leaves: move.recut(self.axis, *leaves), self.inner, old.inner, once.inner)
        return ShardedState(inner, self.axis)


def per_worker(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Gives each worker its own state of a transformation that is *before* the all-reduce.

    Before the all-reduce each worker sees its own gradient. So its momentum, for example, differs
    from that of other workers. A wrapped transformation has a state that is placed and saved per
    worker. :func:`jsparse.state_specs` refuses a chain that needs this and lacks it.

    If its updates are not finite on a worker, that worker's state stays as it was, so that no NaN
    stays in it. They pass on, and the all-reduce makes the update NaN on all workers.

    If workers have parameters of their own, everything differs: wrap the whole chain
    (``train_step(..., params="per_worker")`` does it for you).

    Args:
      tx: the transformation.

    Returns:
      The same transformation with its state laid out per worker. Initialise it by
      :func:`jsparse.init`: a state made inside ``shard_map(check_vma=True)`` is typed as alike on
      all workers until its first update.

    Raises:
      ValueError: from ``update``: the state is for other parameters, or another number of workers.

    Example (momentum correction)::

      tx = optax.chain(
          jsparse.per_worker(optax.trace(0.9)),
          jsparse.oktopk("data", density=0.01),
          optax.scale(-0.1),
      )
    """
    tx, by_parts = optax.with_extra_args_support(tx), laid_out(tx)

    def update_fn(updates, state, params=None, **extra_args):
        updates, after = by_parts.update(updates, state, params, **extra_args)
        # An all-reduce inside undoes such a step by itself, on all workers, and counts it.
        return updates, after if states_in(state) else chosen(finite(updates), after, state)

    return optax.GradientTransformationExtraArgs(by_parts.init, update_fn)


def laid_out(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same transformation with its state laid out per worker, and otherwise unchanged."""
    tx = optax.with_extra_args_support(tx)

    def init_fn(params):
        return PerWorkerState(as_parts(tx.init(params)))

    def update_fn(updates, state, params=None, **extra_args):
        shapes = jax.eval_shape(tx.init, updates)
        _check_parts(state.inner, shapes)
        updates, inner = tx.update(updates, from_parts(state.inner, shapes), params, **extra_args)
        return updates, PerWorkerState(as_parts(inner))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def as_parts(tree: Any) -> Any:
    """A worker's arrays as its parts of a :class:`PerWorkerState`: scalars get an axis."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape or (1,)), tree)


def from_parts(parts: Any, like: Any) -> Any:
    """The arrays of which :func:`as_parts` made these, in the shapes of others."""
    return jax.tree.map(lambda leaf, shape: leaf.reshape(shape.shape), parts, like)


def _check_parts(state: Any, shapes: Any) -> None:
    """Refuses a state whose parts are not those of one worker."""
    had = [leaf.shape for leaf in jax.tree.leaves(state)]
    have = [leaf.shape or (1,) for leaf in jax.tree.leaves(shapes)]
    if had != have:
        raise ValueError(
            f"a worker's part of the state of per_worker has shapes {had}, its parameters make {have}: the state is "
            "for other parameters, or for another number of workers: jsparse.reshard carries it over to as many as "
            "there are here"
        )
