"""Moves a training state to another number of workers."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kernels_pallas import varying_axes

from .._engine.state import ANEW
from .._train.per_worker import per_worker
from .._train.placement import AxisName, check_axis, state_specs
from .move import FIX, Local, between


def reshard(
    tx: optax.GradientTransformation,
    opt_state: Any,
    params: optax.Params,
    mesh: Mesh,
    axis: AxisName,
) -> optax.OptState:
    """Moves a chain's state to another number of workers, so that pending updates are not lost.

    Any number of workers can become any other. The pending mean update, ``sum(residual) / P``,
    stays the same: exactly if it is representable, as for integers, and otherwise to rounding.

    - *Residuals, velocities* (:func:`dgc`) and all other floats that differ between workers, such
      as momentum in :func:`per_worker`: think of the old workers as lying side by side, and of the
      new ones as lying over the same stretch. Each new worker gets the mean of the old ones that
      it covers. If P doubles, each old worker is copied to two. If P halves, two are averaged. If
      P stays, nothing changes. So magnitudes still fit the thresholds, no worker has more to
      deliver than others, and second moments stay positive. (To put the sum of all residuals on
      one worker would be as exact, but would deliver a P-th as much in a step.) Over
      two levels, the residuals of a node are joined from its shards, moved to the new nodes in the
      same way, and cut into shards again.
    - *The agreed step*, and everything else that is no float: each new worker gets those of the
      first old worker that it covers.
    - *Ok-Topk's regions*: their boundaries are interpolated, so that the new regions hold equal
      parts of what the old ones held. If it is not known how to move such a state, it begins anew.
      That is so if the number of workers in a node changes, and for a state of your own whose
      shape depends on P.
    - *An optimizer in* :func:`sharded`: its state is joined and cut again, exactly.
    - *What is alike on all workers*, such as Adam's moments: it is placed on the new mesh.

    Everything is computed on the host, in NumPy, in one pass over the state. In a run of several
    processes, each of them calls this function, and holds the whole state while it runs.

    Args:
      tx: the chain, as for the new mesh. Its axes may have other names; nothing else may differ.
      opt_state: its state: global arrays on any mesh, or NumPy arrays from a checkpoint; also
        dicts and lists with the same names, as orbax restores them without a target.
      params: the parameters. Only their shapes and types matter.
      mesh: the new devices.
      axis: the mesh axis, or axes, along which the workers stand; over two levels
        ``(inter, intra)``.

    Returns:
      The state, placed as :func:`state_specs` says. For ``train_step(..., params="per_worker")``
      pass the chain that ``train_step`` was given, and begin with the mean of the replicas:
      ``step.init(mean)._replace(opt_state=...)``.

    Raises:
      ValueError: the mesh lacks the axis; the state does not belong to this chain and these
        parameters; or parts of the state belong to different numbers of workers.

    Example::

      state = checkpointer.restore(path)  # saved by 8 workers
      opt_state = jsparse.reshard(tx, state["opt_state"], params, mesh, "data")  # for the mesh's

    **Cost**: nothing is sent, except for arrays that are spread over several processes: each
    process gathers these.
    """
    check_axis(mesh, axis)
    names = (axis,) if isinstance(axis, str) else axis
    given = {path: leaf for path, leaf in _paths(opt_state) if jnp.size(leaf)}
    tx, once = _matching(tx, given, params, mesh)
    now = _local(tx, params, mesh, {name: mesh.shape[name] for name in names})
    halved = {name: _local(tx, params, mesh, {name: 2}) for name in names}
    leaves = [_on_host(given, path, leaf) for path, leaf in _paths(now)]
    old = jax.tree.unflatten(jax.tree.structure(now), leaves)
    carried = between(mesh, names, now, old, once, halved).tree(now, old, once)
    specs = state_specs(now, axis)
    begun = _begun(tx, params, mesh, specs, carried)
    carried = jax.tree.map(lambda leaf, new: new if leaf is ANEW else leaf, carried, begun)
    return jax.tree.map(lambda leaf, spec: _placed(leaf, NamedSharding(mesh, spec)), carried, specs)


def _begun(tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh, specs: Any, carried: Any) -> Any:
    """A new run's state where the carried one has the mark, and None elsewhere.

    What is not wanted is not computed.
    """

    def wanted(tree):
        return jax.tree.map(lambda leaf, mark: leaf if mark is ANEW else None, tree, carried)

    def begin():
        return wanted(tx.init(jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), x.dtype), params)))

    return jax.jit(jax.shard_map(begin, mesh=mesh, in_specs=(), out_specs=wanted(specs)))()


def _matching(
    tx: optax.GradientTransformation, given: Mapping[str, Any], params: optax.Params, mesh: Mesh
) -> tuple[optax.GradientTransformation, Any]:
    """The chain that the state belongs to, and its state as it is on a worker without others.

    The chain is ``tx`` by itself, or ``tx`` in ``per_worker``.
    """
    differences = []
    for chain in (tx, per_worker(tx)):
        once = _local(chain, params, mesh, {})
        wanted = dict(_paths(once))
        found = [f"lacks {path!r}" for path, leaf in wanted.items() if math.prod(leaf.shape) and path not in given]
        found += [f"has {path!r}, which that of the chain has not" for path in given if path not in wanted]
        if not found:
            return chain, once
        differences += found
    raise ValueError(f"the state does not belong to this chain: it {differences[0]}; {FIX}")


def _local(tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh, sizes: Mapping[str, int]) -> Any:
    """The state of one worker on axes of these sizes. Other axes have size 1."""
    everywhere, found = PartitionSpec(), []
    shape = AbstractMesh(tuple(sizes.get(name, 1) for name in mesh.axis_names), mesh.axis_names)

    def probe(params):
        found.append(jax.tree.map(lambda x: Local(jnp.shape(x), x.dtype, varying_axes(x)), tx.init(params)))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(probe, mesh=shape, in_specs=everywhere, out_specs=everywhere), params)
    return found[0]


def _paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves, and for each the names of the attributes, keys or places that lead to it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _on_host(given: Mapping[str, Any], path: str, local: Local) -> Any:
    """The whole array, in NumPy. A random key is returned unchanged.

    A checkpoint may lack arrays without elements: these are made here.
    """
    if path not in given:
        return np.zeros(local.shape, local.dtype)
    leaf = given[path]
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])
