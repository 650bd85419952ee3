"""A server that is some steps late."""

import jax
import numpy as np
import pytest

import jsparse
import oracles
import scenarios
import transports
from algorithms import Row

SIZE = 3
LATE = Row("late", lambda comm, density: jsparse.parameter_server(comm, staleness=2))


@pytest.mark.parametrize("transport", ["vmap", "shard_map", "shard_map unchecked"])
def test_updates_come_late(transport: str):
    state, update = transports.workers(LATE, SIZE, transport)
    gradients = scenarios.take("ordinary", SIZE, 6)
    for step, gradient in enumerate(gradients):
        updates, state = update(transports.tree(gradient), state)
        want = oracles.parameter_server(gradient, staleness=2, before=gradients[:step])
        np.testing.assert_allclose(transports.flat(updates, SIZE), np.tile(want.total / SIZE, (SIZE, 1)), rtol=3e-7)
        assert np.any(want.total) == (step >= 2)


def test_a_non_finite_gradient_is_not_kept():
    state, update = transports.workers(LATE, SIZE)
    gradients = scenarios.take("ordinary", SIZE, 5)
    spoilt = gradients[0].copy()
    spoilt[1, 600] = np.nan
    seen = []
    for gradient in [*gradients[:3], spoilt, *gradients[3:]]:
        before = state
        updates, state = update(transports.tree(gradient), state)
        if gradient is spoilt:
            assert np.isnan(transports.flat(updates, SIZE)).all()
            jax.tree.map(np.testing.assert_array_equal, state.buckets, before.buckets)
            np.testing.assert_array_equal(state.step, before.step)
        else:
            seen.append(np.round(SIZE * transports.flat(updates, SIZE)[0]))
    np.testing.assert_array_equal(seen[2:], [gradient.sum(0) for gradient in gradients[:3]])


def test_what_waits_is_placed_with_its_worker():
    mesh = transports.mesh(SIZE)
    state = jsparse.init(jsparse.parameter_server(transports.AXIS, staleness=2), transports.zeros(), mesh, "workers")
    assert [waiting.shape for waiting in state.buckets[0].reducer.waiting] == [(SIZE * transports.N,)] * 2
