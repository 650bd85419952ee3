"""Whole synchronisations give the same bits with each implementation of the kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
import kernels_pallas
import scenarios
import transports
from algorithms import ROWS, Row, case
from gpus import abstract, devices, lowered, needs_plugin
from jsparse import select
from tiers import quick

SIZE, STEPS = 4, 3
# These rows use each kernel, as selectors and all-reduces do. They have as many workers as in
# other tests of these rows.
NAMES = ["oktopk", "hitopk", "gaussiank"]
OTHERS = ["oktopk-sampled", "oktopk-reused", "oktopk-mstopk", "gtopk", "topk_allgather-dgc", "oktopk-bf16"]
OTHERS += [
    "topk_allgather-block",
    "topk_allgather-bucketed",
    "topk_allgather-per_leaf",
    "ssar_recursive_doubling-stochastic",
]
DENSITY = 0.02


def assert_equal(got, expected, rounding: float = 0) -> None:
    """Compares trees bit for bit; thresholds up to the relative error ``rounding``."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        assert other.dtype == leaf.dtype
        # NumPy does not recognise NaN in bfloat16.
        other, leaf = (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in (other, leaf))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(other, leaf, rounding if "threshold" in name else 0, err_msg=name)


@pytest.mark.parametrize(
    "row, size",
    [
        case(row, 8 if row.gpus else 3, slow=row.name not in NAMES, full=row.name == "oktopk")
        for row in ROWS
        if row.name in NAMES + OTHERS
    ],
)
def test_a_whole_step_is_the_same_with_each_implementation(row: Row, size: int):
    expected = run(*transports.workers(row, size), size)
    with kernels_pallas.using("interpret"):
        got = run(*transports.workers.__wrapped__(row, size), size)
    # The threshold of Gaussian-k comes from sums of floats.
    assert_equal(got, expected, rounding=1e-6 if row.name == "gaussiank" else 0)


def run(state, update, size: int):
    """The updates and states of some steps."""
    seen = []
    for gradient in scenarios.take("ordinary", size, STEPS):
        updates, state = update(transports.tree(gradient.astype(np.float32)), state)
        seen.append((updates, state))
    return seen


N = 9001  # Some whole blocks and a ragged end.


def flat_step(selector, mesh, check_vma: bool):
    """Ok-Topk over one flat gradient, accumulated and selected from in one pass if possible."""
    tx = jsparse.oktopk("data", density=DENSITY, select=selector)
    along = PartitionSpec("data")
    begin = jax.shard_map(lambda: tx.init(jnp.zeros(N)), mesh=mesh, in_specs=(), out_specs=along, check_vma=check_vma)
    step = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(along, along), out_specs=(PartitionSpec(), along), check_vma=check_vma
    )
    return jax.jit(begin), jax.jit(step)


def flat_steps(selector, dtype, implementation: str, check_vma: bool):
    """The means and states of some steps; the gradient of the second step has a NaN."""
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
@pytest.mark.full
def test_one_pass_over_a_flat_gradient(selector, dtype):
    """The kernel runs without tracking of variance, because Pallas's interpreter cannot track it.

    The plain form is run both with it and without it.
    """
    kernel = flat_steps(selector, dtype, "interpret", False)
    for check_vma in (True, False):
        assert_equal(kernel, flat_steps(selector, dtype, "xla", check_vma))
    mean, state = kernel[1]
    assert np.isnan(mean).any()
    assert np.isfinite(state.buckets[0].residual).all()


@pytest.mark.parametrize("check_vma", quick([True, False], False))
@pytest.mark.parametrize(
    "selector",
    quick([select.SampledThreshold(DENSITY), select.TopK(DENSITY)], select.TopK(DENSITY)),
    ids=["sampled", "exact"],
)
def test_a_whole_step_as_a_gpu_gets_it(selector, check_vma: bool):
    """The lowered step has the kernels of compaction, with either selector."""
    with kernels_pallas.using("triton"):
        begin, step = flat_step(selector, abstract((SIZE,), ("data",)), check_vma)
        state = jax.eval_shape(begin)
        text = lowered(step, jax.ShapeDtypeStruct((SIZE * N,), jnp.float32), state)
    # The kernels that stage, rank and place.
    assert text.count("xla.gpu.triton") >= 3


@needs_plugin
@pytest.mark.xdist_group("cuda")
@pytest.mark.full
def test_nothing_long_is_copied_in_a_whole_step():
    """A step compiled for four H200s overwrites the residual.

    Its temporary memory is less than a quarter of the residual.
    """
    n, mesh, along = 14_728_266, Mesh(np.array(devices("1x4x1")), ("data",)), PartitionSpec("data")
    tx = jsparse.oktopk("data", density=0.01, select=select.SampledThreshold(0.01))
    with kernels_pallas.using("triton"), jax.set_mesh(mesh):
        begin = jax.shard_map(lambda: tx.init(jnp.zeros(n)), mesh=mesh, in_specs=(), out_specs=along, check_vma=False)
        state, gradient = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, along)),
            (jax.eval_shape(begin), jax.ShapeDtypeStruct((SIZE * n,), jnp.float32)),
        )
        step = jax.shard_map(
            lambda grads, state: jsparse.sync(tx, grads, state)[::-1],
            mesh=mesh,
            in_specs=(along, along),
            out_specs=(along, PartitionSpec()),
            check_vma=False,
        )
        program = jax.jit(step, donate_argnums=1).lower(gradient, state).compile({"xla_gpu_autotune_level": 0})
    text, memory = program.as_text(), program.memory_analysis()
    assert "__gpu$xla.gpu.triton" in text
    assert not re.findall(rf"= f32\[{n}\]\S* copy(?:-start)?\(", text)
    assert memory.alias_size_in_bytes >= 4 * n
    assert memory.temp_size_in_bytes < 4 * n / 4
