"""Collectives as over gloo, on the devices of one process: the same bits as XLA's own."""

import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jsparse
from jsparse._comm import gloo
from tiers import quick

DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32, jnp.int4, jnp.bool_, jnp.complex64)


def both(call: Callable, x: jax.Array, mesh: Mesh, axis, check_vma: bool) -> list[np.ndarray]:
    """What a function of a Comm returns on all workers, by XLA's own collectives and by ours."""
    comm, along = jsparse.AxisComm(axis), PartitionSpec(mesh.axis_names)
    found = []
    for over_gloo in (False, True):
        with mock.patch.multiple(gloo, in_use=lambda over=over_gloo: over, LONG=16, LONG_GATHERED=16):

            def local(x):
                return comm.varying(call(comm, x[0]))[None]

            mapped = jax.shard_map(local, mesh=mesh, in_specs=along, out_specs=along, check_vma=check_vma)
            found.append(np.asarray(jax.jit(mapped)(x)))
    return found


def workers(size: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    """What each worker has: random values, of a type that holds them or their lowest bits."""
    values = 100 * jax.random.normal(jax.random.key(size), (size, *shape))
    if dtype == jnp.bool_:
        return values > 0
    return values.astype(jnp.int8).astype(dtype) if dtype == jnp.int4 else values.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [2, 37, 0])
def test_partners_exchange_bits(dtype, length: int):
    """Infinities, NaNs and negative zeros too."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("workers",))
    x = workers(4, length, dtype=dtype)
    if jnp.issubdtype(dtype, jnp.floating) and length:
        x = x.at[:, :2].set(jnp.array([[jnp.inf, jnp.nan], [-0.0, 1], [jnp.nan, -jnp.inf], [0, -0.0]], dtype))
    pairs = [(0, 2), (2, 0), (1, 3), (3, 1)]
    for check_vma in (True, False):
        theirs, ours = both(lambda comm, x: comm.ppermute(x, pairs), x, mesh, "workers", check_vma)
        assert ours.dtype == theirs.dtype == dtype
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("size", quick([1, 2, 3, 4, 5, 6, 8], 1, 3, 4))
def test_rows_are_exchanged(size: int):
    mesh = Mesh(np.array(jax.devices()[:size]), ("workers",))
    for shape in ((1,), (20, 2)):  # Short rows and long ones.
        x = workers(size, size, *shape)
        theirs, ours = both(lambda comm, x: comm.all_to_all(x), x, mesh, "workers", size != 4)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("size", quick([1, 2, 3], 3))
def test_all_have_every_row(size: int):
    """All types, and infinities, NaNs and negative zeros too."""
    mesh = Mesh(np.array(jax.devices()[:size]), ("workers",))
    for dtype in DTYPES:
        for shape in ((1,), (20, 2)):
            x = workers(size, *shape, dtype=dtype)
            if jnp.issubdtype(dtype, jnp.floating) and size > 1:
                x = x.at[:2, :1].set(jnp.array([[jnp.nan], [-0.0]], dtype).reshape(2, 1, *[1] * (x.ndim - 2)))
            for check_vma in (True, False):
                theirs, ours = both(lambda comm, x: comm.all_gather(x), x, mesh, "workers", check_vma)
                assert ours.dtype == theirs.dtype == dtype
                assert ours.tobytes() == theirs.tobytes()


def test_what_two_workers_gather_is_typed_as_alike():
    mesh, along = Mesh(np.array(jax.devices()[:2]), ("workers",)), PartitionSpec("workers")
    comm = jsparse.AxisComm("workers")
    with mock.patch.multiple(gloo, in_use=lambda: True, LONG=16, LONG_GATHERED=16):
        gather = jax.shard_map(lambda x: comm.all_gather(x[0]), mesh=mesh, in_specs=along, out_specs=PartitionSpec())
        x = workers(2, 40)
        np.testing.assert_array_equal(jax.jit(gather)(x), x)
        assert "all_gather" not in {one.name for one in jsparse.traffic(gather, x).collectives}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_rows_are_summed(size: int):
    mesh = Mesh(np.array(jax.devices()[:size]), ("workers",))
    x = workers(size, size, 7, 5, dtype=jnp.int32)
    theirs, ours = both(lambda comm, x: comm.psum_scatter(x), x, mesh, "workers", True)
    np.testing.assert_array_equal(ours, theirs)
    theirs, ours = both(lambda comm, x: comm.psum_scatter(x), x / 7, mesh, "workers", False)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", quick([(2, 4), (3, 2), (2, 3)], (3, 2)))
@pytest.mark.parametrize("axis", ["nodes", "gpus", ("nodes", "gpus"), ("gpus", "nodes")])
def test_workers_are_part_of_a_mesh(axis, shape: tuple[int, int]):
    """Along one of two axes, and along both in either order."""
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("nodes", "gpus"))
    size = mesh.size if isinstance(axis, tuple) else mesh.shape[axis]
    x = workers(mesh.size, size, 40, dtype=jnp.int32)
    for name in ("all_to_all", "psum_scatter", "all_gather"):

        def call(comm, x, name=name):
            return getattr(comm, name)(x)

        theirs, ours = both(call, x, mesh, axis, True)
        np.testing.assert_array_equal(ours, theirs)
    # Who sends is seen in what arrives.
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    for arrived in both(
        lambda comm, x: comm.ppermute(comm.rank(), ring) - (comm.rank() - 1) % size, x, mesh, axis, True
    ):
        np.testing.assert_array_equal(arrived, 0)


@pytest.mark.parametrize("name", ["ppermute", "all_to_all", "psum_scatter", "all_gather"])
@pytest.mark.parametrize("size", quick([2, 3, 4], 3))
def test_derivatives(name: str, size: int):
    """Those of XLA's own collectives, forward and in reverse."""
    mesh = Mesh(np.array(jax.devices()[:size]), ("workers",))
    other = [(rank, (rank + size // 2) % size) for rank in range(size)]
    x, weights = workers(size, size, 8) / 100, workers(size, size, 8)

    def call(comm, x):
        y = comm.ppermute(x, other) if name == "ppermute" else getattr(comm, name)(x)
        own = weights[comm.rank()].reshape(-1)[: y.size].reshape(y.shape[-2:])
        return jnp.sum(jnp.sin(y) * jnp.broadcast_to(own, y.shape))

    for derivative in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]):

        def of(comm, x, derivative=derivative):
            return derivative(lambda x: call(comm, x))(x)

        theirs, ours = both(of, x, mesh, "workers", False)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert np.abs(theirs).max() > 0.1


def test_what_jax_refuses_is_refused():
    mesh, along = Mesh(np.array(jax.devices()[:2]), ("workers",)), PartitionSpec("workers")
    comm = jsparse.AxisComm("workers")
    for call, message in (
        (lambda x: comm.ppermute(x, [(0, 1), (0, 0)]), "unique|duplicate"),
        (comm.all_to_all, "3"),
        (comm.psum_scatter, "3"),
    ):
        with (
            mock.patch.multiple(gloo, in_use=lambda: True, LONG=16, LONG_GATHERED=16),
            pytest.raises(ValueError, match=message),
        ):
            jax.jit(jax.shard_map(call, mesh=mesh, in_specs=along, out_specs=along)).lower(jnp.ones((6, 40)))


@pytest.mark.parametrize("name", ["all_to_all", "psum_scatter", "all_gather"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_more_bytes_are_sent(name: str, size: int):
    mesh, along = Mesh(np.array(jax.devices()[:size]), ("workers",)), PartitionSpec("workers")
    comm, sent = jsparse.AxisComm("workers"), []
    for over_gloo in (False, True):
        with mock.patch.multiple(gloo, in_use=lambda over=over_gloo: over, LONG=16, LONG_GATHERED=16):
            local = functools.partial(jax.shard_map, mesh=mesh, in_specs=along, out_specs=along)
            program = local(lambda x: getattr(comm, name)(x[0, 0] if name == "all_gather" else x[0])[None])
            sent.append(jsparse.traffic(program, workers(size, size, 40)).bytes)
    assert sent[0] == sent[1] == 4 * 40 * (size - 1)


def test_all_workers_meet_once_in_even_rounds():
    for size in range(1, 18):
        rounds = list(gloo.rounds(size))
        assert all(sorted(to) == sorted(to.values()) == list(range(size)) for to in rounds)
        met = sorted(pair for to in rounds for pair in to.items())
        assert met == [(a, b) for a in range(size) for b in range(size) if a != b]
        if size % 2 == 0:
            assert all(to[to[rank]] == rank for to in rounds for rank in range(size))


def test_a_long_exchange_is_a_sum():
    mesh, along = Mesh(np.array(jax.devices()[:2]), ("workers",)), PartitionSpec("workers")
    comm = jsparse.AxisComm("workers")
    with mock.patch.object(gloo, "in_use", return_value=True):
        swap = jax.shard_map(lambda x: comm.ppermute(x, [(0, 1), (1, 0)]), mesh=mesh, in_specs=along, out_specs=along)
        names = [next(jsparse.traffic(swap, workers(2 * length)).collectives).name for length in (8, gloo.LONG // 4)]
    assert names == ["all_gather", "psum"]
