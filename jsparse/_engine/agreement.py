"""What workers agree on before and after a step, and what they refuse."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import bitmap, varying_axes

from .._comm.comm import AxisComm, Comm, axes_of
from .._comm.metered import Metered
from .._vector.sparse_vector import Leaf, SparseVector
from .state import SparseAllReduceState

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def agree(levels: Sequence[Metered], step: jax.Array, leaves: Sequence[Leaf]) -> tuple[jax.Array, jax.Array]:
    """One exchange opens the step: the step's number, and whether any gradient is not finite."""
    opening = pmax_over(levels, jnp.stack([not_finite(leaves).astype(jnp.int32), step]))
    return opening[1], opening[0] > 0


def pmax_over(levels: Sequence[Metered], x: jax.Array) -> jax.Array:
    """The largest over the workers of all levels."""
    for level in levels:
        x = level.pmax(x)
    return x


def not_finite(leaves: Sequence[Leaf]) -> jax.Array:
    """Whether any element is infinite or NaN: bool scalar."""
    parts = [leaf.values if isinstance(leaf, SparseVector) else leaf for leaf in leaves]
    parts = [part for part in parts if part.size]
    return lax.platform_dependent(*parts, cpu=_sums_not_finite, default=_any_not_finite)


def _any_not_finite(*parts: jax.Array) -> jax.Array:
    return jnp.any(jnp.array([False, *(jnp.any(~jnp.isfinite(part)) for part in parts)]))


def _sums_not_finite(*parts: jax.Array) -> jax.Array:
    """The same, at the speed at which memory is read.

    XLA:CPU sums an array two to four times as fast as it looks at each element, and a sum with an
    infinite element or NaN is not finite. Finite elements may have an infinite sum, too. Their sum
    is computed again then, of elements so small that it is finite.
    """

    def sums(scale: float, parts: Sequence[jax.Array]) -> jax.Array:
        return _any_not_finite(*(_sum(part, scale) for part in parts))

    first = sums(1.0, parts)
    return lax.cond(first, lambda *parts: sums(2.0**-32, parts), lambda *parts: first, *parts)


def _sum(part: jax.Array, scale: float) -> jax.Array:
    if part.dtype == jnp.float16:  # XLA:CPU is slow at its sums.
        return jnp.where(bitmap.count_mask(~jnp.isfinite(part.reshape(-1))) > 0, jnp.inf, 0)
    dtype = jnp.promote_types(part.dtype, jnp.float32)
    return jnp.sum(part.astype(dtype) * scale)


def varying_over(levels: Sequence[Comm], tree: Any) -> Any:
    """The same values, typed as differing between the workers of all levels."""
    return functools.reduce(lambda tree, comm: comm.varying(tree), levels, tree)


def _named_leaves(tree: Any) -> list[tuple[Any, Any]]:
    """The leaves with their paths. A :class:`SparseVector` is one leaf."""
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, SparseVector))


def check_arrays(tree: Any) -> None:
    """Refuses leaves that are neither arrays nor numbers, such as the functions in a module."""
    for path, leaf in _named_leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is {leaf}, a shape without values: pass arrays; for the shapes of "
                "what this returns, call it in jax.eval_shape"
            )
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is {leaf!r}, which is no array: pass the arrays that are trained, "
                "and keep all else out of the parameters; of an equinox model, params, static = eqx.partition(model, "
                "eqx.is_inexact_array)"
            )


def check_floats(tree: Any) -> None:
    """Refuses leaves that are no arrays of floats."""
    check_arrays(tree)
    for path, leaf in _named_leaves(tree):
        if not hasattr(leaf, "dtype"):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is {leaf!r}, a number of Python's: make it an array, with "
                "jnp.asarray"
            )
        if leaf.dtype not in FLOATS:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} has type {leaf.dtype}; gradients are float16, bfloat16, "
                "float32 or float64: keep what is not trained out of the parameters"
            )


def check_sparse(grads: Any) -> None:
    """Refuses sparse leaves whose buffers are not those of a :class:`SparseVector`."""
    for path, leaf in _named_leaves(grads):
        if not isinstance(leaf, SparseVector):
            continue
        values, indices = leaf.values, leaf.indices
        if indices.dtype != jnp.int32 or values.shape != indices.shape or values.ndim not in (1, 2):
            raise ValueError(
                f"gradient leaf {jax.tree_util.keystr(path)} is a SparseVector of values {values.dtype}{values.shape} "
                f"and indices {indices.dtype}{indices.shape}; the indices are int32, and both have the shape "
                "(capacity,) or (runs, capacity). A transformation before the all-reduce would change the indices, "
                "too: put none there"
            )


def check_local(levels: Sequence[Comm], grads: Any) -> None:
    """Refuses gradients whose types tell that they are already summed over the workers."""
    for path, leaf in _named_leaves(grads):
        values = leaf.values if isinstance(leaf, SparseVector) else leaf
        if not all(comm.may_differ(values) for comm in levels):
            raise ValueError(
                f"gradient leaf {jax.tree_util.keystr(path)} is the same on all workers: under "
                "jax.shard_map(check_vma=True) the gradient with respect to replicated parameters is already summed. "
                "Compute it with jsparse.local_value_and_grad(loss_fn, axis), which leaves it local, and neither psum "
                "nor pmean it. Where the all-reduce is over two axes, pass both wherever an axis is asked for"
            )


def check_places(levels: Sequence[Comm], model: Sequence[Comm], grads: Any) -> None:
    """Refuses gradients that may differ along further axes of a mesh, as shards of a model do.

    Each device would select from its own. Where types tell, gradients may differ along such an
    axis, all of them: then so do updates.

    Args:
      levels: the networks of the synchronisation.
      model: the networks inside a worker.
      grads: the gradients.
    """
    named = {name for comm in (*levels, *model) for name in axes_of(comm)}
    mesh = jax.sharding.get_abstract_mesh()
    alike = {name for comm in levels if isinstance(comm, AxisComm) for name in comm.alike}
    others = {name for name in mesh.manual_axes if mesh.shape[name] > 1} - named - alike
    if not others or not named & set(mesh.manual_axes):
        return
    fix = (
        "for a sharded model use jsparse.train_step(..., param_specs=specs), or jsparse.over_mesh in a plain jax.jit, "
        "which synchronise each device's shards for themselves"
    )
    if not levels[0].typed:
        raise ValueError(
            f"the mesh has the axes {sorted(others)} beside those of the workers, and check_vma=False: if gradients "
            f"differ along them, so would updates, in silence. Pass check_vma=True; {fix}; if gradients are alike "
            f"along them, say so in place of the axis: jsparse.AxisComm(axis, alike={tuple(sorted(others))})"
        )
    first: Any = None
    for path, leaf in _named_leaves(grads):
        along = varying_axes(leaf.values if isinstance(leaf, SparseVector) else leaf) & others
        first = first or (path, along)
        if along != first[1]:
            told = [f"{jax.tree_util.keystr(p)} along {sorted(axes) or 'none'}" for p, axes in (first, (path, along))]
            raise ValueError(
                f"gradient leaves differ along unlike axes of the mesh, {' and '.join(told)}, and one vector of both "
                f"would differ along all: {fix}"
            )


def check(synchroniser: Any, grads: Any, state: Any) -> None:
    """Refuses gradients that are already summed, and a state that is not for them.

    Args:
      synchroniser: what is to average the gradients.
      grads: the gradients.
      state: what is given as the state of the synchronisation.
    """
    check_floats(grads)
    check_sparse(grads)
    check_local(synchroniser.levels, grads)
    if isinstance(state, SparseAllReduceState) and jax.tree.leaves(state.buckets):
        check_places(synchroniser.levels, synchroniser.model, grads)
    fix = (
        "initialise the state by the same transformation, with parameters of the gradients' shapes and types, for as "
        "many workers as there are here; jsparse.reshard carries a state over to another number of workers"
    )
    if not isinstance(state, SparseAllReduceState):
        raise ValueError(f"the state is of type {type(state).__name__}, and that of another transformation: {fix}")
    if state.step.shape != (1,):
        raise ValueError(
            f"the state has a step of shape {state.step.shape}, and each worker's part has one step: {fix}"
        )
    had, have = (
        [(jax.tree_util.keystr(path), x.shape, x.dtype.name) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (state.buckets, jax.eval_shape(synchroniser.init, grads).buckets)
    )
    if had != have:
        ours = next((leaf for leaf in have if leaf not in had), None)
        theirs = next((leaf for leaf in had if leaf not in have), None)
        raise ValueError(f"the state's buckets have {theirs}, the gradients make {ours}: {fix}")
