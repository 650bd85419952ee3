"""Measures α and β of a network: times messages of several lengths, and fits a line to them."""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._comm.comm import AxisComm
from .._comm.cost import Cost, collective_cost
from ..bench.timing import timed

# The mesh axes of the network's two levels.
BETWEEN, INSIDE = "nodes", "gpus"
# A measurement takes about this many seconds, and at most so many runs.
BUDGET, MOST = 0.05, 1000


class Sample(NamedTuple):
    """The measured time of one collective at one length.

    Attributes:
      what: the collective; ``"ppermute"`` is a ping-pong between two workers.
      payload: words of a worker's operand.
      messages: how many messages a worker sends, one after the other.
      words: how many words pass over a link.
      seconds: the time that it took.
    """

    what: str
    payload: int
    messages: float
    words: float
    seconds: float


class Fit(NamedTuple):
    """The line ``seconds = alpha * messages + beta * words``.

    Attributes:
      alpha: seconds a message.
      beta: seconds a word of 4 bytes.
      error: mean absolute error of the samples' logarithms: 0.1 is about 10 %.
    """

    alpha: float
    beta: float
    error: float


def fit(samples: Sequence[Sample]) -> Fit:
    """Fits the line. Neither α nor β is below 0.

    Of the lines through two samples, and those through one sample where α or β is 0, it is the one
    with the least mean absolute error of the logarithms. So a prediction of twice the time is as
    wrong as one of half the time, and a few samples that took far longer than the others hardly
    move the line.

    Args:
      samples: what was measured.

    Raises:
      ValueError: there are no samples.

    >>> times = [(1, 10), (1, 1000), (4, 500)]
    >>> fit([Sample("psum", w, m, w, 0.5 * m + 0.25 * w) for m, w in times])
    Fit(alpha=0.5, beta=0.25, error=0.0)
    """
    if not samples:
        raise ValueError("there are no times to fit a line to: measure at least one message")
    messages, words, taken = np.array([(s.messages, s.words, s.seconds) for s in samples]).T
    first, second = np.triu_indices(len(samples), 1)
    zero = np.zeros_like(taken)
    with np.errstate(divide="ignore", invalid="ignore"):
        determinant = messages[first] * words[second] - messages[second] * words[first]
        alpha = (taken[first] * words[second] - taken[second] * words[first]) / determinant
        beta = (messages[first] * taken[second] - messages[second] * taken[first]) / determinant
        alphas, betas = [alpha, taken / messages, zero], [beta, zero, taken / words]
    lines = np.stack([np.concatenate(alphas), np.concatenate(betas)], axis=1)
    lines = lines[np.all((lines >= 0) & np.isfinite(lines), axis=1)]
    predicted = np.maximum(lines @ np.stack([messages, words]), 1e-300)
    errors = np.mean(np.abs(np.log(predicted / taken)), axis=1)
    best = int(np.argmin(errors))
    figures = [float(f"{figure:.6g}") for figure in lines[best]]
    return Fit(figures[0], figures[1], float(f"{errors[best]:.3g}") if errors[best] > 1e-9 else 0.0)


def agreed(taken: float) -> float:
    """The longest time of any process; the same number on all, so that all decide alike."""
    if jax.process_count() == 1:
        return taken
    return float(np.max(multihost_utils.process_allgather(np.float32(taken))))


def seconds_of(run: Callable[[int], Any], repeats: int, budget: float = BUDGET) -> float:
    """The median time of one run.

    Args:
      run: does as many runs as its argument says, and returns arrays. Its first call, which
        compiles, does not count.
      repeats: how many measurements to take the median of.
      budget: seconds that one measurement, of several runs, should take.
    """

    def taken(count):
        return timed(run, count)[0] / 1e3 / count

    taken(1)
    count = int(min(max(budget / max(agreed(taken(1)), 1e-9), 1), MOST))
    return agreed(statistics.median(taken(count) for _ in range(repeats)))


def measure(mesh: Mesh, axis: str, payloads: Sequence[int], repeats: int, sharing: int = 1) -> Iterator[Sample]:
    """Times messages and collectives along an axis of the mesh, on all its rows at once.

    Args:
      mesh: the workers.
      axis: the axis, of more than one worker.
      payloads: lengths of a worker's operand, in words.
      repeats: measurements of each collective at each length.
      sharing: how many workers share a link.

    Yields:
      The samples.
    """
    comm, size, parted = AxisComm(axis), mesh.shape[axis], PartitionSpec(mesh.axis_names)

    # Each returns a vector of the operand's length, so that it can be repeated.
    bodies = {
        "ppermute": lambda x: comm.ppermute(comm.ppermute(x, [(0, 1)]), [(1, 0)]),  # There and back.
        "psum": lambda x: comm.psum(x) / size,
        "all_gather": lambda x: comm.all_gather(x)[(comm.rank() + 1) % size],
        "all_to_all": lambda x: comm.all_to_all(x.reshape(size, -1)).reshape(-1),
    }

    def local(body, x, count):
        return lax.fori_loop(0, count, lambda i, x: body(x), x)

    for name, body in bodies.items():
        along = functools.partial(local, body)
        looped = jax.jit(
            jax.shard_map(along, mesh=mesh, in_specs=(parted, PartitionSpec()), out_specs=parted, check_vma=False)
        )
        for payload in sorted({-(-payload // size) * size for payload in payloads}):
            x = ones(mesh, payload)
            taken = seconds_of(lambda count, x=x, looped=looped: looped(x, jnp.int32(count)), repeats)
            sent = collective_cost(name, 4 * payload, size)
            sent = Cost(2 * sent.bytes, 2) if name == "ppermute" else sent
            yield Sample(name, payload, sent.messages, sharing * sent.bytes / 4, taken)


def ones(mesh: Mesh, n: int) -> jax.Array:
    """A vector of length n on each worker."""
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.jit(lambda: jnp.ones(mesh.size * n), out_shardings=place)()
