"""Whole synchronisations with each implementation of the kernels: the same to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jsparse
import kernels_pallas
import scenarios
import transports
from algorithms import ROWS
from gpus import abstract, lowered
from jsparse import select

SIZE, STEPS = 4, 3
# Each kernel, as selectors and all-reduces use them.
NAMES = ["oktopk", "hitopk", "gaussiank"]
OTHERS = ["oktopk-sampled", "oktopk-reused", "oktopk-mstopk", "gtopk", "topk_allgather-dgc", "oktopk-bf16"]
DENSITY = 0.02


def assert_equal(got, expected) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        assert other.dtype == leaf.dtype
        # NumPy does not know bfloat16's NaN.
        other, leaf = (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in (other, leaf))
        np.testing.assert_array_equal(other, leaf, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_whole_step_is_the_same_with_each_implementation(name: str):
    row = next(row for row in ROWS if row.name == name)
    expected = run(*transports.workers(row, SIZE))
    with kernels_pallas.using("interpret"):
        got = run(*transports.workers.__wrapped__(row, SIZE))
    assert_equal(got, expected)


def run(state, update):
    """Updates and states of some steps."""
    seen = []
    for gradient in scenarios.take("ordinary", SIZE, STEPS):
        updates, state = update(transports.tree(gradient.astype(np.float32)), state)
        seen.append((updates, state))
    return seen


N = 9001  # Some whole blocks, and a ragged rest.


def flat_step(selector, mesh, check_vma: bool):
    """Ok-Topk over one flat gradient, which is accumulated and selected from in one pass."""
    tx = jsparse.oktopk("data", density=DENSITY, select=selector)
    along = PartitionSpec("data")
    begin = jax.shard_map(lambda: tx.init(jnp.zeros(N)), mesh=mesh, in_specs=(), out_specs=along, check_vma=check_vma)
    step = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(along, along), out_specs=(PartitionSpec(), along), check_vma=check_vma
    )
    return jax.jit(begin), jax.jit(step)


def flat_steps(selector, dtype, implementation: str, check_vma: bool):
    """Means and states of some steps, with a NaN in the second."""
    rng, seen = np.random.default_rng(0), []
    with kernels_pallas.using(implementation):
        begin, step = flat_step(selector, Mesh(np.array(jax.devices()[:SIZE]), ("data",)), check_vma)
        state = begin()
        for number in range(STEPS):
            gradient = rng.standard_normal(SIZE * N).astype(dtype)
            if number == 1:
                gradient[N + 5] = np.nan
            mean, state = step(gradient, state)
            seen.append((mean, state))
    return seen


@pytest.mark.parametrize(
    ("selector", "dtype"),
    [(select.SampledThreshold(DENSITY), jnp.float32), (select.FixedThreshold(1.5, DENSITY), jnp.bfloat16)],
    ids=["sampled", "fixed"],
)
def test_one_pass_over_a_flat_gradient(selector, dtype):
    """Where variance is tracked Pallas's interpreter can't run; the plain forms are the same there."""
    kernel = flat_steps(selector, dtype, "interpret", False)
    for check_vma in (True, False):
        assert_equal(kernel, flat_steps(selector, dtype, "xla", check_vma))
    mean, state = kernel[1]
    assert np.isnan(mean).any()
    assert np.isfinite(state.buckets[0].residual).all()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("selector", [select.SampledThreshold(DENSITY), select.TopK(DENSITY)], ids=["sampled", "exact"])
def test_a_whole_step_as_a_gpu_gets_it(selector, check_vma: bool):
    """The kernels are in it, and a gradient that is not flat goes through them, too."""
    with kernels_pallas.using("triton"):
        begin, step = flat_step(selector, abstract((SIZE,), ("data",)), check_vma)
        state = jax.eval_shape(begin)
        text = lowered(step, jax.ShapeDtypeStruct((SIZE * N,), jnp.float32), state)
    # Staging, ranking and placing.
    assert text.count("xla.gpu.triton") >= 3
