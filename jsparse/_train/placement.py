"""Optimizer states that hold something for each worker: making, placing and reading them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import varying_axes

from .._comm.comm import AxisComm, Comm, CommLike, as_comm
from .._comm.processes import check_equal_values, is_global, numbers, put_everywhere
from .._engine.synchronise import SparseAllReduceState
from .per_worker import PerWorkerState, ShardedState

PER_WORKER = (SparseAllReduceState, PerWorkerState, ShardedState)
AxisName = str | tuple[str, ...]


def init(
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh | None,
    axis: AxisName | Comm,
    *,
    per_worker: bool = False,
) -> optax.OptState:
    """Initialises a chain's state outside ``shard_map``, each worker's part on its own devices.

    Args:
      tx: the chain.
      params: its parameters, for all workers alike at the beginning (where there are several processes, in each the
        same; or global arrays).
      mesh: the devices; None where each process is one worker, with arrays of its own.
      axis: the mesh axis, or axes, along which the workers stand; without a mesh a :class:`Comm` of all of them, such
        as :class:`MpiComm`. All processes must call it then, and what types would tell is not checked.
      per_worker: whether each worker is to have parameters of its own, so that updates may differ. Wrap the whole chain
        in :func:`jsparse.per_worker` then.

    Returns:
      The state as global arrays, placed as :func:`state_specs` says; without a mesh ``tx.init(params)``.

    Raises:
      ValueError: the mesh lacks the axis, or there is no mesh and no Comm; several processes have different parameters;
        or the chain would let replicas drift apart: a state that differs between workers is not in
        :func:`jsparse.per_worker`, or, without ``per_worker``, an update is not alike on all of them.
    """
    if mesh is None:
        return _init_here(tx, params, of_processes(axis), per_worker)
    axis = check_axis(mesh, axis)
    everywhere = PartitionSpec()
    specs: Any = None

    def probe(params):
        nonlocal specs
        state = tx.init(params)
        specs = state_specs(state, axis)
        _check_alike(tx, params, state, specs, axis, per_worker)
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(probe, mesh=mesh, in_specs=everywhere, out_specs=everywhere), params)
    make = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=everywhere, out_specs=specs))
    return make(put_everywhere(params, mesh))


def _init_here(tx: optax.GradientTransformation, params: optax.Params, comm: Comm, per_worker: bool) -> optax.OptState:
    """The state of the one worker that this process is."""
    state = jax.jit(tx.init)(params)  # Jitted, so that no two leaves are one array: it can be donated.
    _check_order(state)
    if not per_worker and not _holds(state, SparseAllReduceState):
        raise ValueError(
            "nothing in the chain communicates, and parameters would drift apart: put an all-reduce into it, such as "
            'jsparse.dense(comm), or give each worker parameters of its own: train_step(..., params="per_worker")'
        )
    check_equal_values(numbers(params), lambda digest: comm.all_gather(jnp.asarray(digest)))
    return state


def _check_alike(
    tx: optax.GradientTransformation,
    params: optax.Params,
    state: optax.OptState,
    specs: Any,
    axis: AxisName,
    per_worker: bool,
) -> None:
    """Traces an update, and refuses it where what should be alike on all workers may differ, by its types."""
    comm = AxisComm(axis)
    grads = comm.varying(jax.tree.map(jnp.zeros_like, params))
    params = comm.varying(params) if per_worker else params
    fix = (
        "Wrap the whole chain in jsparse.per_worker(...)"
        if per_worker
        else "Wrap what remembers gradients before the all-reduce in jsparse.per_worker(...); let an all-reduce cover "
        "every parameter that is trained; and freeze others before it, with optax.masked(optax.set_to_zero(), mask). "
        "Where replicas are to differ, as with jsparse.a2sgd, give each worker parameters of its own: "
        'jsparse.train_step(..., params="per_worker"), or in your own loop jsparse.init(..., per_worker=True)'
    )
    axes = {axis} if isinstance(axis, str) else set(axis)
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, value=jnp.zeros(()))

    def check(path, leaf, spec, what):
        if spec == PartitionSpec() and varying_axes(leaf) & axes:
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} differs between workers: it depends on gradients that no "
                f"all-reduce has made alike. {fix}"
            )

    if not per_worker:
        jax.tree_util.tree_map_with_path(lambda path, leaf: check(path, leaf, PartitionSpec(), "the update "), updates)
    jax.tree_util.tree_map_with_path(lambda path, leaf, spec: check(path, leaf, spec, "the state "), state, specs)


def state_specs(opt_state: optax.OptState, axis: AxisName) -> Any:
    """A PartitionSpec for every leaf of a chain's state: ours and other transformations'.

    Args:
      opt_state: the state, or its shapes.
      axis: the mesh axis, or axes, along which the workers stand.

    Returns:
      The state with ``PartitionSpec(axis)`` in place of every leaf that differs between workers (in a
      :class:`ShardedState`, its own axes), and ``PartitionSpec()`` elsewhere: ``in_specs`` and ``out_specs`` for
      ``jax.shard_map``.

    Raises:
      ValueError: a transformation before the all-reduce has a state that differs between workers and is not wrapped
        in :func:`jsparse.per_worker`; or the all-reduce stands inside ``optax.MultiSteps`` or
        ``optax.apply_if_finite``.
    """
    _check_order(opt_state)

    def spec(state):
        whose = PartitionSpec(axis) if isinstance(state, PER_WORKER) else PartitionSpec()
        if isinstance(state, ShardedState) and state.axis:
            whose = PartitionSpec(state.axis)
        return jax.tree.map(lambda _: whose, state)

    return jax.tree.map(spec, opt_state, is_leaf=lambda state: isinstance(state, PER_WORKER))


def residual(opt_state: Any) -> jax.Array:
    """The residuals: what each worker has accumulated and not yet got delivered.

    Args:
      opt_state: a chain's state with one sparse all-reduce: global arrays, or one worker's part.

    Returns:
      Shape ``(P, n)``: the flat residuals, in the order of ``jax.tree.leaves(params)`` (with ``scope="leaf"`` and
      ``dense_below``, those of the sparse leaves). ``n`` is 0 without error feedback, and over two levels the length
      of a shard. Over several processes it is a global array: ``addressable_shards`` are the rows of this process's
      workers.
    """
    state = find(opt_state)
    workers = state.step.shape[0]
    parts = [bucket.residual.reshape(workers, -1) for bucket in state.buckets if bucket.residual is not None]
    return jnp.concatenate(parts, axis=1) if parts else jnp.zeros((workers, 0))


class Stats(NamedTuple):
    """What the last synchronisation did. Every leaf has one entry a worker, shape ``(P,)``.

    Attributes:
      step: int32: synchronisations so far, those with a non-finite gradient apart.
      selected: int32: elements that qualified on this worker.
      overflowed: int32: those of them that did not fit into its buffers and wait in its residual.
      delivered: int32: elements of this worker that became part of the update.
      updated: int32: elements of the update that are not zero, alike on all workers: over n, the density to which it
        has filled in. An all-gather counts an index once for each worker that sent it.
      thresholds: shape ``(P, buckets)``: the magnitude that elements had to reach on this worker.
      global_thresholds: shape ``(P, buckets)``: and in the sum, where the all-reduce has such a threshold; else 0.
      residual_norm: Euclidean norm of this worker's residual.
      words: uint32: 4-byte words that this worker sent, counted as in :class:`Report`: see there for trees.
      messages: uint32: messages that this worker sent.
    """

    step: jax.Array
    selected: jax.Array
    overflowed: jax.Array
    delivered: jax.Array
    updated: jax.Array
    thresholds: jax.Array
    global_thresholds: jax.Array
    residual_norm: jax.Array
    words: jax.Array
    messages: jax.Array


def stats(opt_state: Any) -> Stats:
    """Reads off a chain's state what its last synchronisation did.

    Over several processes all of them must call it, and each gets the figures of all workers: a few words a worker are
    gathered, in one message.

    Args:
      opt_state: a chain's state with one of our transformations: global arrays, or one worker's part.

    Returns:
      One entry a worker.
    """
    state = find(opt_state)
    sharding = state.step.sharding if is_global(state.step) else None
    if isinstance(sharding, NamedSharding) and any(sharding.spec):
        return _gathering(sharding.mesh, sharding.spec[0])(state)
    return _read(state)


@jax.jit
def _read(state: SparseAllReduceState) -> Stats:
    nothing = jnp.zeros_like(state.report.delivered)
    selections = [bucket.select for bucket in state.buckets if bucket.select]
    reductions = [bucket.reduce for bucket in state.buckets if bucket.select]

    def column(states, name):
        columns = [getattr(s, name, jnp.zeros(nothing.shape)) for s in states]
        return jnp.stack(columns, axis=1) if columns else jnp.zeros((*nothing.shape, 0))

    return Stats(
        step=state.step,
        selected=sum((s.selected for s in selections), nothing),
        thresholds=column(selections, "threshold"),
        global_thresholds=column(reductions, "threshold"),
        residual_norm=jnp.linalg.norm(residual(state), axis=1),
        **state.report._asdict(),
    )


@functools.cache
def _gathering(mesh: Mesh, axis: AxisName) -> Callable[[SparseAllReduceState], Stats]:
    """Reads the figures of all workers, in every process."""
    comm = AxisComm(axis)

    def local(state):
        figures, treedef = jax.tree.flatten(_read(state))
        parts = [lax.bitcast_convert_type(x, jnp.uint8) for x in figures]
        sizes = [part.size for part in parts]
        every = comm.all_gather(jnp.concatenate([part.reshape(size) for part, size in zip(parts, sizes, strict=True)]))
        columns = jnp.split(every, np.cumsum(sizes)[:-1], axis=1)
        return jax.tree.unflatten(
            treedef,
            [
                lax.bitcast_convert_type(column.reshape(comm.size, *part.shape[1:]), x.dtype)
                for column, part, x in zip(columns, parts, figures, strict=True)
            ],
        )

    whole = PartitionSpec()
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(axis), out_specs=whole))


def find(opt_state: Any) -> SparseAllReduceState:
    """The one state of ours in a chain's."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda state: isinstance(state, SparseAllReduceState))
    found = [leaf for leaf in leaves if isinstance(leaf, SparseAllReduceState)]
    if len(found) != 1:
        raise ValueError(
            f"the optimizer state holds {len(found)} states of a jsparse transformation; this reads one: pass a part "
            "that holds one, and put a preset such as jsparse.oktopk(axis, density=0.01) into a chain that has none"
        )
    return found[0]


def of_processes(axis: CommLike) -> Comm:
    """The Comm of processes with arrays of their own."""
    comm = as_comm(axis)
    if isinstance(comm, AxisComm):
        raise ValueError(f"axis is {comm.axis!r}, and mesh is None: pass a mesh, or a Comm such as jsparse.MpiComm()")
    return comm


def check_axis(mesh: Mesh, axis: AxisName | Comm) -> AxisName:
    """The axis, which the mesh has."""
    if not isinstance(axis, str | tuple):
        raise ValueError(
            f"axis is {axis!r}; with a mesh, name its axis, or a tuple of them; a Comm goes with mesh=None"
        )
    missing = [name for name in ((axis,) if isinstance(axis, str) else axis) if name not in mesh.axis_names]
    if missing:
        raise ValueError(f"the mesh has axes {mesh.axis_names}, and not {missing[0]!r}: name one that it has")
    return axis


def _check_order(state: Any, per_worker: bool = False) -> None:
    """Refuses a chain that would be placed, or run, wrongly; all inside ``per_worker`` is placed rightly."""
    per_worker |= isinstance(state, PerWorkerState)
    if not _holds(state, SparseAllReduceState):
        return
    if isinstance(state, optax.MultiStepsState):
        raise ValueError(
            "optax.MultiSteps around the all-reduce sends in every micro-step what one message could carry, and "
            "accumulates each worker's own gradients as if they were alike: use "
            "jsparse.train_step(..., micro_batches=m), or accumulate before tx.update"
        )
    if isinstance(state, optax.ApplyIfFiniteState):
        raise ValueError(
            "optax.apply_if_finite around the all-reduce would skip it on some workers and hang the others: put it "
            "around what follows; after a non-finite gradient on any worker the update is NaN on all"
        )
    children = _children(state)
    if type(state) is tuple and not per_worker:
        ours = max(i for i, child in enumerate(children) if _holds(child, SparseAllReduceState))
        for i, child in enumerate(children[:ours]):
            if not _holds(child, SparseAllReduceState) and _remembers(child):
                raise ValueError(
                    f"member {i} of the chain, with state {type(child).__name__}, stands before the all-reduce and "
                    "remembers gradients, which differ between workers there: wrap it in jsparse.per_worker(...)"
                )
    for child in children:
        if child is not state:
            _check_order(child, per_worker)


def _remembers(state: Any) -> bool:
    """Whether a state depends on gradients: whether it holds floats or flags, injected hyperparameters apart."""
    if isinstance(state, (PerWorkerState, ShardedState)):
        return False
    if hasattr(state, "hyperparams") and hasattr(state, "inner_state"):
        return _remembers(state.inner_state)
    children = _children(state)
    if children and children[0] is state:
        return jnp.issubdtype(state.dtype, jnp.inexact) or state.dtype == bool
    return any(_remembers(child) for child in children)


def _holds(state: Any, kind: type) -> bool:
    return any(isinstance(node, kind) for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind)))


def _children(state: Any) -> list[Any]:
    """What a node of a pytree holds, one level down; of a leaf, the leaf."""
    return jax.tree.leaves(state, is_leaf=lambda node: node is not state)
