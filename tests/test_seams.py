"""The engine's seams: a space, a memory and a mean defined here."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse._comm.comm import AxisComm
from jsparse._engine.mean import Quotient, over_contributors
from jsparse._engine.memory import ErrorFeedback, Memory, largest_addend
from jsparse._engine.reducer import Reduced, Selecting, Whole
from jsparse._engine.space import Flat
from jsparse._engine.synchroniser import Composition
from jsparse._presets.powersgd import LowRank
from jsparse._vector.buckets import Bucket
from jsparse._vector.layout import Layout
from jsparse._vector.pending import Pending
from jsparse._vector.sparse_vector import to_dense
from jsparse.allreduce import Dense, OkTopk, Quantized, TopkAllGather
from jsparse.quantize import Block8, Float16
from jsparse.select import SampledThreshold, TopK
from tiers import quick

AXIS, SIZE, DENSITY = "workers", 4, 0.05
SHAPES = {"b": (7,), "v": (16, 8), "w": (8, 24)}
N = sum(int(np.prod(shape)) for shape in SHAPES.values())


def composed(space=Flat(), memory=ErrorFeedback(), allreduce=TopkAllGather(), density=DENSITY, select=TopK, **parts):
    reducer = Selecting(select(density), allreduce)
    return jsparse.SparseAllReduce.of(Composition(AxisComm(AXIS), reducer, memory, space, **parts))


def gradients(steps: int, seed: int = 0) -> list[np.ndarray]:
    """Of shape ``(P, N)``: some elements alike on all workers, some not."""
    rng = np.random.default_rng(seed)
    common = rng.standard_t(2, N)
    return [(common + rng.standard_normal((SIZE, N))).astype(np.float32) for _ in range(steps)]


def tree(flat: np.ndarray) -> dict[str, np.ndarray]:
    ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
    parts = np.split(flat, ends, axis=-1)
    return {
        name: part.reshape(*flat.shape[:-1], *shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


def flat(leaves: dict[str, Any]) -> np.ndarray:
    """The update of each worker, shape ``(P, N)``."""
    return np.concatenate([np.asarray(leaves[name]).reshape(SIZE, -1) for name in SHAPES], axis=1)


def run(tx, given):
    """Yields ``(updates, state)`` of each step, workers first."""
    params = tree(np.zeros(N, np.float32))
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(SIZE))
    step = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for gradient in given:
        updates, state = step(tree(gradient), state)
        yield flat(updates), state


# A space: tiles of matrices, in an orthonormal basis.


def cosines(side: int) -> np.ndarray:
    """The orthonormal discrete cosine transform of ``side`` values, as a matrix."""
    k, i = np.arange(side)[:, None], np.arange(side)[None]
    basis = np.sqrt(2 / side) * np.cos(np.pi * (2 * i + 1) * k / (2 * side))
    basis[0] /= np.sqrt(2)
    return basis.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Tiles(Flat):
    """Cuts matrices into tiles, each in a cosine basis; leaves that do not fit stay."""

    as_leaves: ClassVar[bool] = False

    side: int = 4

    def buckets(self, leaves):
        return Flat().buckets(leaves)

    def enter(self, comms, bucket: Bucket, leaves, keep, limit):
        return [self._turned(leaf, forward=True) for leaf in leaves]

    def leave(self, comms, bucket: Bucket, total):
        dense = total.to_dense() if isinstance(total, jsparse.SparseVector) else total
        layout = dataclasses.replace(bucket.layout, dtypes=(bucket.layout.dtype,) * len(bucket.layout.dtypes))
        return layout.ravel([self._turned(leaf, forward=False) for leaf in layout.unravel(dense)])

    def _turned(self, leaf, *, forward: bool):
        side = self.side
        if leaf.ndim != 2 or leaf.shape[0] % side or leaf.shape[1] % side:
            return leaf
        basis = jnp.asarray(cosines(side))
        rows, columns = leaf.shape[0] // side, leaf.shape[1] // side
        if forward:
            tiles = leaf.reshape(rows, side, columns, side).swapaxes(1, 2)
            return (basis @ tiles @ basis.T).reshape(leaf.shape)
        tiles = basis.T @ leaf.reshape(rows, columns, side, side) @ basis
        return tiles.swapaxes(1, 2).reshape(leaf.shape)


def coordinates(vectors: np.ndarray, side: int) -> np.ndarray:
    """Vectors of shape ``(P, N)`` in the coordinates of the space, in NumPy, tile by tile."""
    basis, out = cosines(side).astype(np.float64), []
    for leaf in tree(np.asarray(vectors, np.float64)).values():
        if leaf.ndim < 3:
            out.append(leaf.reshape(SIZE, -1))
            continue
        tiles = [
            basis @ leaf[:, i : i + side, j : j + side] @ basis.T
            for i in range(0, leaf.shape[1], side)
            for j in range(0, leaf.shape[2], side)
        ]
        out.append(np.stack(tiles, axis=1).reshape(SIZE, -1))
    return np.concatenate(out, axis=1)


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Each row with all but its k largest magnitudes set to 0."""
    kept = np.zeros_like(x)
    for row, into in zip(x, kept, strict=True):
        best = np.argsort(-np.abs(row), kind="stable")[:k]
        into[best] = row[best]
    return kept


def test_an_orthonormal_space_selects_and_remembers_in_its_own_coordinates():
    k = round(DENSITY * N)
    residual = np.zeros((SIZE, N))
    for gradient, (updates, state) in zip(gradients(8), run(composed(Tiles()), gradients(8)), strict=True):
        acc = residual + coordinates(gradient, 4)
        chosen = largest(acc, k)
        residual = acc - chosen
        np.testing.assert_allclose(state.buckets[0].residual, residual, atol=2e-4)
        np.testing.assert_allclose(coordinates(updates, 4)[0], chosen.mean(0), atol=2e-4)
        np.testing.assert_array_equal(updates, np.tile(updates[:1], (SIZE, 1)))
    assert np.abs(residual).max() > 0.1


@pytest.mark.parametrize("allreduce", quick([TopkAllGather(), OkTopk()], TopkAllGather()), ids=["all-gather", "oktopk"])
def test_nothing_is_lost_in_an_orthonormal_space(allreduce):
    given, applied = np.zeros(N), np.zeros(N)
    for gradient, (updates, state) in zip(
        gradients(6), run(composed(Tiles(), allreduce=allreduce), gradients(6)), strict=True
    ):
        given, applied = given + gradient.sum(0), applied + SIZE * updates[0]
        left = np.asarray(state.buckets[0].residual, np.float64).sum(0)
        np.testing.assert_allclose(coordinates(np.tile(given - applied, (SIZE, 1)), 4)[0], left, atol=1e-3)


def test_an_orthonormal_space_at_density_1_is_dense():
    for gradient, (updates, _) in zip(gradients(3), run(composed(Tiles(), density=1.0), gradients(3)), strict=True):
        np.testing.assert_allclose(updates[0], gradient.mean(0), atol=1e-5)


# A memory: EF21, which sends what a gradient differs from what was sent of those before it.


class Estimate(NamedTuple):
    """h, what the others know of this worker's gradient; and g, the mean of all workers' h."""

    own: jax.Array
    mean: jax.Array

    @property
    def residual(self) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class EF21(Memory):
    """``h += C(gradient - h)``, and the update is the mean of h (Richtárik et al., 2021)."""

    def init(self, n, dtype):
        return Estimate(jnp.zeros(n, dtype), jnp.zeros(n, dtype))

    def accumulate(self, state: Estimate, layout: Layout, parts, keep, size):
        limit = largest_addend(state.own.dtype, size)
        return Pending(-state.own, parts, keep, layout, limit), state

    def retain(self, state: Estimate, done: Reduced, mean: Quotient, keep, size):
        own = state.own + to_dense(done.delivered)
        shared = jnp.where(keep, state.mean + to_dense(mean.total) / mean.divisor, state.mean)
        return Estimate(own, shared), Quotient(shared, 1)


def test_ef21_with_a_top_k():
    """Against its two lines in numpy."""
    k, own = round(DENSITY * N), np.zeros((SIZE, N))
    for gradient, (updates, state) in zip(gradients(10), run(composed(memory=EF21()), gradients(10)), strict=True):
        own = own + largest(gradient - own, k)
        np.testing.assert_allclose(state.buckets[0].memory.own, own, atol=1e-4)
        np.testing.assert_allclose(updates[0], own.mean(0), atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("select", [TopK, SampledThreshold])
def test_ef21_over_an_all_reduce_that_does_not_deliver_all(select):
    """g stays the mean of all h, and comes near the mean gradient where that does not change.

    Not nearer than that: EF21 adds nothing up, so an element whose differences cancel in the sum
    stays.
    """
    (gradient,) = gradients(1)
    tx = composed(memory=EF21(), allreduce=OkTopk(), select=select)
    for updates, state in run(tx, [gradient] * 60):
        memory = jax.tree.map(np.asarray, state.buckets[0].memory)
        np.testing.assert_allclose(memory.mean[0], memory.own.mean(0), atol=1e-4)
        np.testing.assert_array_equal(updates, memory.mean)
    assert np.linalg.norm(updates[0] - gradient.mean(0)) < 0.05 * np.linalg.norm(gradient.mean(0))


@pytest.mark.parametrize(
    "reducer",
    quick(
        [
            Selecting(TopK(DENSITY), TopkAllGather()),
            Whole(Dense()),
            Whole(Quantized(Block8(64), split=True)),
            Whole(Quantized(Float16())),
            LowRank(2, min_rate=1.0),
        ],
        Whole(Quantized(Block8(64), split=True)),
    ),
    ids=lambda reducer: type(getattr(reducer, "allreduce", reducer)).__name__,
)
def test_a_memory_of_ones_own_survives_a_non_finite_gradient(reducer):
    """Nothing is delivered in such a step."""
    tx = jsparse.SparseAllReduce.of(Composition(AxisComm(AXIS), reducer, EF21()))
    good, bad, again = gradients(3)
    bad[2, 11] = np.inf
    steps = list(run(tx, [good, bad, again]))
    assert np.isnan(steps[1][0]).all()
    jax.tree.map(np.testing.assert_array_equal, steps[0][1].buckets, steps[1][1].buckets)
    clean = list(run(tx, [good, again]))
    np.testing.assert_array_equal(steps[2][0], clean[1][0])


# A mean: over those who contributed.


def test_a_mean_over_contributors():
    """Each element is divided by the number of workers that sent it.

    The residuals lose all that was sent, as with any mean.
    """
    k = round(DENSITY * N)
    tx = composed(mean=over_contributors)
    for gradient, (updates, _) in zip(gradients(1), run(tx, gradients(1)), strict=True):
        chosen = largest(gradient.astype(np.float64), k)
        counts = np.maximum(np.count_nonzero(chosen, axis=0), 1)
        np.testing.assert_allclose(updates[0], chosen.sum(0) / counts, atol=1e-6)
        assert (counts > 1).any()
        assert not np.allclose(updates[0], chosen.mean(0))


def test_a_mean_over_contributors_needs_a_gathered_sum():
    with pytest.raises(ValueError, match="counts who sent an element"):
        next(run(composed(mean=over_contributors, allreduce=OkTopk()), gradients(1)))


@pytest.mark.full
def test_leaves_that_go_densely_have_a_mean_over_workers():
    """All workers contribute to them, and the others' elements have a mean over those who do."""
    tx = jsparse.demo(AXIS, k=2, chunk=2, dense_below=3)
    given = {"small": jnp.array([[1.0, 2.0], [3.0, 6.0]]), "large": jnp.arange(16.0).reshape(2, 8)}
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), given)
    state = jax.vmap(lambda _: tx.init(zeros), axis_name=AXIS)(jnp.arange(2))
    updates, _ = jax.jit(jax.vmap(tx.update, axis_name=AXIS))(given, state)
    np.testing.assert_allclose(updates["small"], [[2.0, 4.0]] * 2)
    assert np.abs(updates["large"]).max() > 0
