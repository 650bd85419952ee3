"""Timing on a device that works behind the caller's back.

Calls are queued one after the other and waited for at the end: what is measured is the work, where it takes longer than
the queueing of it. Inputs come in several sets, in turn, which together exceed the device's cache twice over, so that
each call finds its own in memory alone.
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax

# Bytes of the largest cache that inputs must exceed: an H200's L2.
CACHE = 50 * 2**20
MOST_SETS = 64
MOST_CALLS = 1000


def sets_of(size: int) -> int:
    """How many sets of inputs of that many bytes exceed the cache twice."""
    return min(max(math.ceil(2 * CACHE / max(size, 1)), 2), MOST_SETS)


def time_calls(call: Callable[[int], Any], wait: Callable[[Any], Any], groups: int, seconds: float) -> list[float]:
    """Seconds a call, for each of some groups of calls.

    Args:
      call: queues the call of a number, counted up, and returns what can be waited for.
      wait: waits for it, and so for all before it.
      groups: how many are timed.
      seconds: what a group should take.
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
    """Calls of a compiled function, whose last outputs take the place of the inputs that it was given to overwrite."""

    def call(number: int) -> Any:
        inputs = sets[number % len(sets)]
        outputs = run(*inputs)
        for place, output in zip(donate, outputs[len(outputs) - len(donate) :] if donate else (), strict=True):
            inputs[place] = output
        return outputs

    return call
