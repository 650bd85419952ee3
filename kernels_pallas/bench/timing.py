"""Timing on a device that works asynchronously.

Calls are queued one after the other, and the timer waits for the last one. So it measures the
work of the device, if that takes longer than the queueing. Several sets of inputs are used in
turn. Together they are at least twice as large as the cache of the device, so the inputs of a
call are in memory and not in the cache.
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax

# The bytes of the largest cache that the inputs must exceed: the L2 cache of an H200.
CACHE = 50 * 2**20
MOST_SETS = 64
MOST_CALLS = 1000


def sets_of(size: int) -> int:
    """The number of sets of inputs, of ``size`` bytes each, that exceed the cache twice.

    It is at least 2, and at most ``MOST_SETS``.
    """
    return min(max(math.ceil(2 * CACHE / max(size, 1)), 2), MOST_SETS)


def time_calls(call: Callable[[int], Any], wait: Callable[[Any], Any], groups: int, seconds: float) -> list[float]:
    """Times groups of calls. Returns the seconds of one call, for each group.

    Args:
      call: queues a call, and returns a result to wait for. It gets the number of the call.
      wait: waits for a result, and so for all calls before it.
      groups: the number of groups that are timed.
      seconds: the time that a group should take.
    """
    number = itertools.count()

    def group(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            last = call(next(number))
        wait(last)
        return (time.perf_counter() - begin) / calls

    group(2)
    calls = min(max(math.ceil(seconds / group(3)), 1), MOST_CALLS)
    return [group(calls) for _ in range(groups)]


def jax_calls(run: Any, sets: list[list[jax.Array]], donate: tuple[int, ...]) -> Callable[[int], Any]:
    """A function that calls a compiled function with the sets of inputs in turn.

    The last outputs of a call replace the inputs that were donated to it.
    """

    def call(number: int) -> Any:
        inputs = sets[number % len(sets)]
        outputs = run(*inputs)
        for place, output in zip(donate, outputs[len(outputs) - len(donate) :] if donate else (), strict=True):
            inputs[place] = output
        return outputs

    return call
