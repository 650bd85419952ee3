"""Compares ``add_sparse`` with numpy bit for bit, both the kernel and the plain form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import kernels_pallas
from kernels_pallas.shapes import GRADIENTS, SMALL

IMPLEMENTATIONS = ("xla", "interpret")


def draw(n: int, k: int, lists: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws a dense vector, and lists of ``k`` values and indices, some of them padding."""
    rng = np.random.default_rng(seed)
    indices = np.full((lists, k), n, np.int32)
    for row in indices:
        used = rng.integers(0, min(n, k) + 1)
        row[:used] = np.sort(rng.choice(n, used, replace=False))
    values = rng.standard_normal((lists, k)).astype(np.float32)
    return rng.standard_normal(n).astype(np.float32), values, indices


def expected(dense: np.ndarray, values: np.ndarray, indices: np.ndarray, scale: float = 1) -> np.ndarray:
    dense, scaled = dense.copy(), (np.float32(scale) * values).astype(dense.dtype)
    for run, places in zip(scaled, indices, strict=True):
        here = places < len(dense)
        dense[places[here]] += run[here]
    return dense


@functools.partial(jax.jit, static_argnames="implementation", donate_argnums=0)
def add(dense, values, indices, scale=1.0, *, implementation):
    return kernels_pallas.add_sparse(dense, values, indices, scale, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("n, k", [*((n, max(n // 3, 1)) for n in SMALL), (100, 0), (100, 512)])
def test_lists_are_added_in_order(n: int, k: int, implementation: str):
    dtype, lists = GRADIENTS[n % 2], 2
    dense, values, indices = draw(n, k, lists)
    dense = dense.astype(dtype)
    got = add(jnp.asarray(dense), values, indices, -0.5, implementation=implementation)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), expected(dense, values, indices, -0.5))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_order_of_the_lists_is_the_order_of_the_sum(implementation: str):
    """1 + 1e8 - 1e8 is 0 from left to right, and 1 from right to left."""
    for order, result in (((1e8, -1e8, 1.0), 1.0), ((1.0, 1e8, -1e8), 0.0)):
        lists = np.array(order, np.float32)[:, None], np.zeros((3, 1), np.int32)
        assert add(jnp.zeros(1), *lists, implementation=implementation) == result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_list_and_any_scale(implementation: str):
    dense, values, indices = draw(3000, 500, 1)
    got = add(jnp.asarray(dense), values[0], indices[0], -0.37, implementation=implementation)
    # The compiler may or may not round the product before it adds.
    np.testing.assert_allclose(got, expected(dense, values, indices, -0.37), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("check", [True, False])
def test_under_shard_map_and_vmap(implementation: str, check: bool):
    parts = [draw(500, 60, 3, seed) for seed in range(4)]
    wanted = np.stack([expected(*part) for part in parts])
    dense, values, indices = (np.stack(part) for part in zip(*parts, strict=True))
    run = functools.partial(kernels_pallas.add_sparse, implementation=implementation)
    np.testing.assert_array_equal(jax.jit(jax.vmap(run))(dense, values, indices), wanted)

    spec = PartitionSpec("workers")
    mesh = Mesh(np.array(jax.devices()[:4]), ("workers",))
    worker = jax.shard_map(
        lambda *args: run(*(arg[0] for arg in args))[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check
    )
    np.testing.assert_array_equal(jax.jit(worker)(dense, values, indices), wanted)


def test_the_dense_vector_is_overwritten():
    """The plain form makes no other array of its length.

    The interpreter copies the vector. For the kernel, test_kernels_cuda.py asks a GPU's compiler.
    """
    dense, values, indices = draw(100_000, 100, 2)
    compiled = add.lower(jnp.asarray(dense), values, indices, implementation="xla").compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == dense.nbytes
    assert memory.temp_size_in_bytes < dense.nbytes / 4


def test_float64_is_added_in_float64():
    with jax.enable_x64(True):
        got = kernels_pallas.add_sparse(
            jnp.ones(2, jnp.float64),
            jnp.full(1, 2.0**-40, jnp.float64),
            jnp.zeros(1, jnp.int32),
            implementation="triton",
        )
        np.testing.assert_array_equal(got, [1 + 2.0**-40, 1])


@pytest.mark.parametrize(
    "dense, values, indices, message",
    [
        (jnp.ones((2, 2)), jnp.ones(1), jnp.zeros(1, jnp.int32), r"\(2, 2\).* one vector"),
        (jnp.ones(2, jnp.float16), jnp.ones(1), jnp.zeros(1, jnp.int32), "float16; give"),
        (jnp.ones(2), jnp.ones(1), jnp.zeros(2, jnp.int32), r"\(1,\) and indices \(2,\)"),
        (jnp.ones(2), jnp.ones(()), jnp.zeros((), jnp.int32), "give one list"),
        (jnp.ones(2), jnp.ones(1), jnp.zeros(1), "indices float32"),
        (jnp.ones(2), jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32), "values have type int32"),
    ],
)
def test_bad_input_is_refused(dense, values, indices, message: str):
    with pytest.raises(ValueError, match=message):
        kernels_pallas.add_sparse(dense, values, indices)
