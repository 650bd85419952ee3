"""Timing on a device that works asynchronously.

To queue a program takes the host 30 to 90 microseconds, longer than a short operation takes the
device. So several calls of an operation are compiled into one program, as an operation is part of
a training step. Programs are queued one after the other, and the timer waits for the last one.
Several sets of inputs are used in turn. Together they are at least twice as large as the cache of
the device, so the inputs of a call are in memory and not in the cache.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

# The bytes of the largest cache that the inputs must exceed: no less than the L2 cache of an H200.
CACHE = 60 * 10**6
MOST_SETS = 64
# The number of calls in a program. With more of them, programs would take long to compile.
IN_A_ROW = 4
MOST_PROGRAMS = 1000


def sets_of(size: int) -> int:
    """The number of sets of inputs, of ``size`` bytes each, that exceed the cache twice.

    It is a multiple of ``IN_A_ROW``, and at most ``MOST_SETS``.
    """
    enough = math.ceil(2 * CACHE / max(size, 1))
    return min(max(math.ceil(enough / IN_A_ROW), 1) * IN_A_ROW, MOST_SETS)


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
    calls = min(max(math.ceil(seconds / group(3)), 1), MOST_PROGRAMS)
    return [group(calls) for _ in range(groups)]


def in_a_row(make: Callable[..., Any], donate: tuple[int, ...]) -> Callable[..., list[Any]]:
    """A function that applies ``make`` to several sets of inputs, one after the other.

    Args:
      make: a function of one set of inputs.
      donate: the places of the inputs that it overwrites.

    Returns:
      A function of two lists: for each set the inputs at these places, and the other inputs. It
      returns what ``make`` returns for each set.
    """

    def run(donated: Sequence[Sequence[jax.Array]], kept: Sequence[Sequence[jax.Array]]) -> list[Any]:
        outputs: list[Any] = []
        for given in zip(donated, kept, strict=True):
            # Without the barrier XLA could make one kernel of the kernels of several calls.
            (own, others), outputs[-1:] = lax.optimization_barrier((given, outputs[-1:]))
            inputs = list(others)
            for place, array in zip(donate, own, strict=True):
                inputs.insert(place, array)
            outputs.append(make(*inputs))
        return outputs

    return run


def split(sets: Sequence[list[jax.Array]], donate: tuple[int, ...]) -> tuple[list[list[jax.Array]], ...]:
    """The arguments of what :func:`in_a_row` returns, for these sets of inputs."""
    donated = [[given[place] for place in donate] for given in sets]
    return donated, [[array for place, array in enumerate(given) if place not in donate] for given in sets]


def jax_calls(run: Any, sets: list[list[jax.Array]], donate: tuple[int, ...]) -> Callable[[int], Any]:
    """A function that runs a program of :func:`in_a_row` with ``IN_A_ROW`` sets of inputs in turn.

    The last outputs of a call replace the inputs that were donated to it.
    """
    groups = [sets[begin : begin + IN_A_ROW] for begin in range(0, len(sets), IN_A_ROW)]

    def call(number: int) -> Any:
        group = groups[number % len(groups)]
        outputs = run(*split(group, donate))
        for inputs, output in zip(group, outputs, strict=True):
            last = output[len(output) - len(donate) :] if donate else ()
            for place, array in zip(donate, last, strict=True):
                inputs[place] = array
        return outputs

    return call
