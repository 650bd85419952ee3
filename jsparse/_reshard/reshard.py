"""Moves a training state to another number of workers."""

import collections
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._engine.shards import Placement, axes_in, placed
from .._engine.state import ANEW, SparseAllReduceState, check_not_donated, states_in
from .._train.per_worker import laid_out
from .._train.placement import AxisName, check_axis, state_specs
from .._train.state import TrainState
from .form import Form, Site
from .move import FIX, Move, between
from .recut import Shards, recut


def reshard(
    tx: optax.GradientTransformation,
    opt_state: Any,
    params: optax.Params,
    mesh: Mesh,
    axis: AxisName,
    *,
    param_specs: Any = None,
    before: tuple[Mapping[str, int], Any] | None = None,
) -> optax.OptState:
    """Moves a chain's state to other workers and shards, so that pending updates are not lost.

    Any number of workers can become any other, and a :doc:`sharded model <sharded>` may be cut
    into any other shards, or be whole on one side. The pending mean update, ``sum(residual) / P``,
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
    - *Other shards*: what the devices of a worker hold of a leaf's residual or velocity is put
      together and cut anew, to the bit, before the number of workers changes. Steps, skipped ones
      too, are kept. What is not of single elements begins anew: thresholds, regions, factors of
      low rank, the report of the last step. If devices hold the same shards as before, nothing of
      this happens. A leaf that can't be cut any more delivers its residual in the next step.
      Residuals of :func:`demo` are frequencies of a shard's tiles, and can't go to other shards.

    Everything is computed on the host, in NumPy, in one pass over the state. In a run of several
    processes, each of them calls this function, and holds the whole state while it runs.

    Args:
      tx: the chain, as for the new mesh. Its axes may have other names; nothing else may differ.
        For a plain jit it has the preset itself where the loop has :func:`over_mesh`.
      opt_state: its state: global arrays on any mesh, or NumPy arrays from a checkpoint; also
        dicts and lists with the same names, as orbax restores them without a target.
      params: the parameters. Only their shapes and types matter.
      mesh: the new devices.
      axis: the mesh axis, or axes, along which the workers stand; over two levels
        ``(inter, intra)``.
      param_specs: how each worker is to hold the parameters in shards, as for :func:`train_step`.
        None if they are whole on every device.
      before: the mesh that the state was made on, and the specs there: ``(sizes, specs)``, such as
        ``({"replica": 2, "fsdp": 4}, specs)``, with the axes in the order of that mesh and those
        of the workers named as in ``axis``. The specs are None if parameters were whole. It may be
        left out if devices hold the same shards as before, so that only the number of workers
        changes.

    Returns:
      The state, placed as :func:`state_specs` says; with ``param_specs`` as :func:`train_step`
      places it. For ``train_step(..., params="per_worker")`` pass the chain that ``train_step``
      was given, for ``local_steps(eager=True)`` its ``tx``. Both take the mean of the replicas, of
      :func:`sync_params`, as parameters, and begin with it:
      ``step.init(mean)._replace(opt_state=...)``.

    Raises:
      ValueError: the mesh lacks the axis; the state does not belong to this chain and these
        parameters, or was donated; parts of the state belong to different numbers of workers; the
        state is of workers with other numbers of devices than ``before`` says, or of another
        number of workers; a whole TrainState is passed, or the chain holds :func:`over_mesh`, or,
        with ``param_specs``, :func:`sharded`; two arrays of the state have the same path; over two
        levels the axes are in another order; or a shard becomes shorter than ``dense_below``,
        and has a residual; or shards change, and a residual is not of single elements, as that of
        :func:`demo`.

    Example::

      state = checkpointer.restore(path)  # saved by 8 workers
      opt_state = jsparse.reshard(tx, state["opt_state"], params, mesh, "data")  # for the mesh's

    **Cost**: nothing is sent, except for arrays that are spread over several processes: each
    process gathers these.
    """
    check_axis(mesh, axis)
    if isinstance(opt_state, TrainState):
        raise ValueError(
            "this is the state of a training step: pass its opt_state, and its params as the parameters, and put the "
            "result back with state._replace(opt_state=...)"
        )
    check_not_donated(opt_state)
    names = (axis,) if isinstance(axis, str) else axis
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype), params)
    site = Site(mesh.shape, names, None if param_specs is None else Placement.of(mesh, axis, param_specs))
    source = site if before is None else Site.of(before, names)
    named = [(path, leaf) for path, leaf in _paths(opt_state) if jnp.size(leaf)]
    given = dict(named)
    if len(given) < len(named):
        twice = collections.Counter(path for path, _ in named).most_common(1)[0][0]
        raise ValueError(
            f"two arrays of the state are both called {twice!r}: rename the parameters, so that no name contains a "
            "slash and is the path of another"
        )
    tx, had_once = _matching(tx, given, params, source)
    sizes = {name: mesh.shape[name] for name in names}
    had, halved = source.form(tx, params, sizes), {name: source.form(tx, params, {name: 2}).state for name in names}
    leaves = [_on_host(given, path, leaf) for path, leaf in _paths(had.state)]
    old = jax.tree.unflatten(jax.tree.structure(had.state), leaves)
    move = between(sizes, had.state, old, had_once.state, halved)
    if before is not None:
        _check_workers(old, source)
    now, once = had.state, had_once
    if source is not site:
        now, once = site.form(tx, params, sizes).state, site.form(tx, params, {})
        if _differ(source, site, params):
            old = _recut(old, (source, had_once), (site, once), move)
    carried = move.tree(now, old, once.state)
    specs = _specs(now, params, axis, site.placement)
    begun = _begun(tx, params, mesh, axis, site.placement, carried)
    carried = jax.tree.map(lambda leaf, new: new if leaf is ANEW else leaf, carried, begun)
    return jax.tree.map(lambda leaf, spec: _placed(leaf, NamedSharding(mesh, spec)), carried, specs)


def _differ(old: Site, new: Site, params: Any) -> bool:
    """Whether devices hold other parts of the parameters than before."""
    leaves = [(path, leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    return old.shards != new.shards or any(old.windows(*leaf) != new.windows(*leaf) for leaf in leaves)


def _recut(state: Any, old: tuple[Site, Form], new: tuple[Site, Form], move: Move) -> Any:
    """A state of the same workers in other shards."""
    nodes, gpus = (move.old_nodes, move.old // move.old_nodes) if move.cut else (move.old, 1)

    def shards(site: Site, form: Form) -> Iterator[Shards]:
        states = states_in(form.state)
        if len(form.begun) < len(states):
            raise ValueError(
                "a transformation around the all-reduce makes new arrays of its state, so that it can't be told to "
                "which parameters these belong: return the state as it is from init"
            )
        for begun, once in zip(form.begun, states, strict=True):
            yield Shards.of(site, begun, once)

    pairs = zip(shards(*old), shards(*new), strict=True)

    def own(part):
        return recut(part, *next(pairs), move.old, nodes, gpus) if isinstance(part, SparseAllReduceState) else part

    return jax.tree.map(own, state, is_leaf=lambda part: isinstance(part, SparseAllReduceState))


def _specs(now: Any, params: Any, axis: AxisName, placement: Placement | None) -> Any:
    """How the state lies on the mesh."""
    specs = state_specs(now, axis)
    if placement is None:
        return specs

    def joined(of_workers, within):
        first = [axes_in(spec[0]) if len(spec) else () for spec in (of_workers, within)]
        return PartitionSpec((*first[0], *first[1]), *within[1:]) if len(of_workers) else within

    return jax.tree.map(joined, specs, placement.specs_like_params(now, params))


def _begun(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    axis: AxisName,
    placement: Placement | None,
    carried: Any,
) -> Any:
    """A new run's state where the carried one has the mark, and None elsewhere.

    What is not wanted is not computed.
    """

    def wanted(tree):
        return jax.tree.map(lambda leaf, mark: leaf if mark is ANEW else None, tree, carried)

    def begin():
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        if placement is None:
            return wanted(tx.init(zeros))
        with placed(placement):
            return wanted(placement.like_params(tx.init(placement.place_tree(zeros)), params))

    manual = set(mesh.axis_names if placement is None else placement.workers)
    specs = wanted(state_specs(carried, axis))
    return jax.jit(jax.shard_map(begin, mesh=mesh, in_specs=(), out_specs=specs, axis_names=manual))()


def _matching(
    tx: optax.GradientTransformation, given: Mapping[str, Any], params: Any, source: Site
) -> tuple[optax.GradientTransformation, Form]:
    """The chain that the state belongs to, and its form on a worker without others.

    The chain is ``tx`` by itself, or ``tx`` in ``per_worker``.
    """
    differences = []
    for chain in (tx, laid_out(tx)):
        once = source.form(chain, params, {})
        _check_shards(given, once.state, source)
        wanted = dict(_paths(once.state))
        found = [f"lacks {path!r}" for path, leaf in wanted.items() if math.prod(leaf.shape) and path not in given]
        found += [f"has {path!r}, which that of the chain has not" for path in given if path not in wanted]
        if not found:
            return chain, once
        differences += found
    raise ValueError(f"the state does not belong to this chain: it {differences[0]}; {FIX}")


def _check_shards(given: Mapping[str, Any], once: Any, source: Site) -> None:
    """Refuses a state of workers with another number of devices."""
    states = jax.tree_util.tree_leaves_with_path(once, is_leaf=lambda node: isinstance(node, SparseAllReduceState))
    for path, own in states:
        name = "/".join(filter(None, (jax.tree_util.keystr(path, simple=True, separator="/"), "shards")))
        if not isinstance(own, SparseAllReduceState) or name not in given:
            continue
        recorded = int(_on_host(given, name, own.shards).reshape(-1)[0])
        if recorded != source.shards:
            raise ValueError(
                f"in the state each worker has {recorded} devices, and here {source.shards}: pass before=(sizes, "
                "specs): the sizes of the axes of the mesh that the state was made on, such as {'replica': 2, 'fsdp': "
                "4}, and how the parameters were cut there; None if they were whole"
            )


def _check_workers(old: Any, source: Site) -> None:
    """Refuses a state of another number of workers than ``before`` says."""
    for own in states_in(old):
        if own.step.shape[0] != source.size * source.shards:
            raise ValueError(
                f"before says that there were {source.size} workers, and the state is of "
                f"{own.step.shape[0] // source.shards}: give the sizes of the axes of the mesh that it was made on"
            )


def _paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves, and for each the names of the attributes, keys or places that lead to it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _on_host(given: Mapping[str, Any], path: str, local: Any) -> Any:
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
