"""The state of a training step, and the average of parameters that differ between workers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from .._comm.comm import AxisComm, Comm, CommLike, as_comm
from .._vector.layout import Layout
from .placement import AxisName, check_axis
from .workers import number_of_workers, workers_of


class TrainState(NamedTuple):
    """The state of a training step.

    Attributes:
      params: the parameters, alike on all workers; or, if each worker has its own, with a leading
        axis of P.
      opt_state: the chain's state.
      model_state: what the model keeps beside parameters, such as batch statistics; None if it
        keeps nothing.
    """

    params: Any
    opt_state: Any
    model_state: Any = None


def sync_params(params: Any, comm: CommLike, *, mesh: Mesh | None = None) -> Any:
    """Averages parameters that differ between workers, in one message.

    Use it at the end of a training in which workers have parameters of their own, or now and then
    during it. Floats and complex numbers are averaged. In other leaves (integers, booleans, random
    keys) each element becomes the largest of any worker. Parameters that agree already stay as
    they are, to rounding, if their sum is finite. It also averages anything else that is kept per
    worker, such as a ``model_state``.

    Args:
      params: inside ``shard_map``, ``pmap`` or ``vmap``, this worker's parameters. With ``mesh``,
        the global arrays, each with a leading axis of P, or the :class:`TrainState` of
        ``train_step(..., params="per_worker")``, whose parameters are averaged. Without a mesh,
        among processes, this worker's parameters or its TrainState.
      comm: the mesh axis, or axes, along which the workers stand; without ``mesh`` also a Comm.
      mesh: the devices, for a call from outside ``shard_map``; it is jitted.

    Returns:
      The mean, alike on all workers. With ``mesh`` it is replicated over the mesh and has no
      leading axis: ordinary parameters. To go on training, use the step's own
      :meth:`TrainStep.sync_params`.

    Raises:
      ValueError: the axis is not bound and there is no ``mesh``; or the ``mesh`` lacks the axis;
        or, with ``mesh``, a leaf has no leading axis of P, or the TrainState's parameters are
        alike on all workers.

    **Cost**: ``2n (P-1)/P`` words and ``2 log P`` messages a worker.

    References:
      Bhattacharya et al., CLUSTER 2021 (A2SGD), Algorithm 1, line 10.

    >>> worker = {"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])}
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> sync_params(worker, "data", mesh=mesh)
    {'w': Array([2., 4.], dtype=float32)}
    """
    if isinstance(params, TrainState):
        params = params.params
        if mesh is not None and any(_on_all(leaf) for leaf in jax.tree.leaves(params)):
            raise ValueError(
                "this state's parameters are alike on all workers, so there is nothing to average: sync_params is for "
                'train_step(..., params="per_worker")'
            )
        if mesh is None and not isinstance(as_comm(comm), AxisComm):
            return averaging(None, as_comm(comm))(params)
    if mesh is None:
        return mean(as_comm(comm), params)
    workers = number_of_workers(mesh, check_axis(mesh, comm))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.shape(leaf)[:1] != (workers,):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; parameters of {workers} workers have "
                f'a leading axis of {workers}, as train_step(..., params="per_worker") keeps them'
            )
    return averaging(mesh, comm)(params)


def _on_all(leaf: Any) -> bool:
    """Whether several devices have all of an array."""
    return isinstance(leaf, jax.Array) and leaf.is_fully_replicated and len(leaf.sharding.device_set) > 1


@functools.cache
def averaging(mesh: Mesh | None, axis: AxisName | Comm) -> Callable[[Any], Any]:
    """A jitted function that averages what workers have, and returns the mean once."""
    workers = workers_of(mesh, axis)
    return workers.on_each(functools.partial(mean, workers.comm), stacked=False)


def mean(comm: Comm, tree: Any) -> Any:
    """The mean over workers of all floats, in one message; for other types, the largest."""
    size = comm.size
    floats = [part for leaf in jax.tree.leaves(tree) for part in _floats(leaf)]
    layout = Layout.of(floats)
    means = iter(layout.unravel(comm.psum(layout.ravel(floats)) / size) if floats else [])

    def shared(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return lax.complex(next(means), next(means))
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return next(means)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = comm.pmax(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return comm.pmax(leaf)

    return jax.tree.map(shared, tree)


def _floats(leaf: jax.Array) -> list[jax.Array]:
    """A leaf of floats; the real and imaginary parts of a complex one; nothing of others."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return [leaf.real, leaf.imag]
    return [leaf] if jnp.issubdtype(leaf.dtype, jnp.floating) else []
