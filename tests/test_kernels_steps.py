"""Whole synchronisations with each implementation of the kernels: the same to the bit."""

import functools

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
from jsparse import select

SIZE, STEPS = 4, 3
# Each kernel, as selectors and all-reduces use them.
NAMES = ["oktopk", "oktopk-sampled", "oktopk-reused", "oktopk-mstopk", "gaussiank", "gtopk", "hitopk"]
DENSITY = 0.02


def assert_equal(got, expected) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        np.testing.assert_array_equal(other, leaf, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_step_is_the_same_with_each_implementation(name: str):
    row = next(row for row in ROWS if row.name == name)
    results = {}
    for implementation in ("xla", "interpret"):
        with kernels_pallas.using(implementation):
            state, update = transports.workers.__wrapped__(row, SIZE)
            steps = results[implementation] = []
            for gradient in scenarios.take("ordinary", SIZE, STEPS):
                updates, state = update(transports.tree(gradient.astype(np.float32)), state)
                steps.append((updates, state))
    assert_equal(results["interpret"], results["xla"])


N = 9001  # Some whole blocks, and a ragged rest.


@functools.cache
def flat_steps(selector, dtype, check_vma: bool, implementation: str):
    """Ok-Topk over one flat gradient, which is accumulated and selected from in one pass: a NaN in the second step."""
    tx = jsparse.oktopk("data", density=DENSITY, select=selector)
    mesh, along = Mesh(np.array(jax.devices()[:SIZE]), ("data",)), PartitionSpec("data")
    specs = {"in_specs": (along, along), "out_specs": (PartitionSpec(), along), "check_vma": check_vma}
    rng = np.random.default_rng(0)
    seen = []
    with kernels_pallas.using(implementation):
        begin = jax.shard_map(
            lambda: tx.init(jnp.zeros(N)), mesh=mesh, in_specs=(), out_specs=along, check_vma=check_vma
        )
        state, update = jax.jit(begin)(), jax.jit(jax.shard_map(tx.update, mesh=mesh, **specs))
        for number in range(STEPS + 1):
            gradient = rng.standard_normal(SIZE * N).astype(dtype)
            if number == 1:
                gradient[N + 5] = np.nan
            mean, state = update(gradient, state)
            seen.append((mean, state))
        lowered = str(jax.make_jaxpr(update)(gradient, state))
    return seen, "pallas_call" in lowered


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "selector", [select.SampledThreshold(DENSITY), select.FixedThreshold(1.5, DENSITY)], ids=["sampled", "fixed"]
)
def test_one_pass_over_a_flat_gradient(selector, dtype, check_vma: bool):
    plain, kernel = flat_steps(selector, dtype, check_vma, "xla"), flat_steps(selector, dtype, check_vma, "interpret")
    assert (plain[1], kernel[1]) == (False, True)
    assert_equal(kernel[0], plain[0])
    mean, state = kernel[0][1]
    assert np.isnan(mean).any()
    assert np.isfinite(state.buckets[0].residual).all()
