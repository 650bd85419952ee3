"""Times calls, and steps that all hosts take together; counts the bytes that interfaces carry."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .hosts import counters

# The first steps of each program are not counted.
WARM_UP = 3
# Once LEAST steps are done, no further step starts after this many seconds.
PATIENCE = 12.0
LEAST = 3


def timed(run: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Calls a function; returns the milliseconds until its arrays are there, and its result."""
    start = time.perf_counter()
    result = jax.block_until_ready(run(*arguments))
    return 1e3 * (time.perf_counter() - start), result


def spread(ms: Sequence[float]) -> dict[str, float]:
    """The median, the least and the most of several times."""
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms)}


def time_steps(
    step: Callable[[], Any], agree: Callable[[float], float], repeats: int, before: Callable[[], Any] = lambda: None
) -> list[float]:
    """Times steps that all workers begin together.

    Args:
      step: runs one step, and returns when it is done.
      agree: waits for all workers, and returns the largest of the numbers that they pass. Because
        of it all workers take the same number of steps.
      repeats: how many steps to take; slow steps are repeated less often (``PATIENCE``).
      before: runs before each step, and is not timed.

    Returns:
      The time of each step, in milliseconds.
    """
    times: list[float] = []
    before()
    spent = agree(0.0)
    while len(times) < repeats and (len(times) < LEAST or spent < PATIENCE):
        times.append(timed(step)[0])
        before()
        spent = agree(spent + times[-1] / 1e3)
    return times


class Meter:
    """Times steps and counts their bytes, without the bytes of the agreements between them.

    Args:
      agree: as in :func:`time_steps`.
    """

    def __init__(self, agree: Callable[[float], float]):
        self._agree = agree
        # The bytes that one agreement sends and receives: the mean of 20.
        _, sent, received = self._count(lambda: [agree(0.0) for _ in range(20)])
        self._sent, self._received = sent / 20, received / 20

    def _count(self, steps: Callable[[], list[float]]) -> tuple[list[float], float, float]:
        """Runs steps; returns their times, and the bytes sent and received in all."""
        self._agree(0.0)
        before = counters()
        times = steps()
        # After one more agreement the steps' bytes have left the queue: they were sent before it.
        self._agree(0.0)
        after = counters()
        return times, after.sent - before.sent, after.received - before.received

    def measure(
        self, step: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None
    ) -> dict[str, Any]:
        """Times a step repeatedly, after ``WARM_UP`` steps that are not timed.

        Args:
          step, repeats, before: as in :func:`time_steps`.

        Returns:
          ``"ms"``: each step's time; ``"sent_bytes"``, ``"received_bytes"``: means over the steps.
        """
        for _ in range(WARM_UP):
            before()
            step()
        times, sent, received = self._count(lambda: time_steps(step, self._agree, repeats, before))
        # One agreement before the first step, one after each step, and the last one of `_count`.
        others = len(times) + 2
        return {
            "ms": times,
            "sent_bytes": (sent - others * self._sent) / len(times),
            "received_bytes": (received - others * self._received) / len(times),
        }
