"""Times steps that all hosts take together, and counts the bytes that their interfaces carry."""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

from .hosts import INTERFACE

# Once LEAST steps are done, no further step starts after this many seconds.
PATIENCE = 12.0
LEAST = 3


def sent_bytes() -> int:
    """Bytes that this host's interface has sent so far."""
    return int(pathlib.Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def received_bytes() -> int:
    """Bytes that this host's interface has received so far."""
    return int(pathlib.Path(f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").read_text())


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
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
        before()
        spent = agree(spent + times[-1] / 1e3)
    return times


@dataclasses.dataclass
class Meter:
    """Times steps and counts their bytes, without the bytes of the agreements between them.

    Attributes:
      agree: as in :func:`time_steps`.
      each: bytes that one agreement sends and receives; :meth:`calibrate` measures them.
    """

    agree: Callable[[float], float]
    each: tuple[float, float] = (0.0, 0.0)

    def calibrate(self) -> None:
        """Measures the bytes of one agreement, as the mean of 20."""
        _, sent, received = self.count(lambda: [self.agree(0.0) for _ in range(20)][:0])
        self.each = sent / 20, received / 20

    def count(self, steps: Callable[[], list[float]]) -> tuple[list[float], float, float]:
        """Runs steps; returns their times, and the bytes sent and received in all."""
        self.agree(0.0)
        sent, received = sent_bytes(), received_bytes()
        times = steps()
        # After one more agreement the steps' bytes have left the queue: they were sent before it.
        self.agree(0.0)
        return times, sent_bytes() - sent, received_bytes() - received

    def measure(self, step: Callable[[], Any], repeats: int, **options: Any) -> dict[str, Any]:
        """Times a step repeatedly.

        Args:
          step, repeats, **options: as in :func:`time_steps`.

        Returns:
          ``"ms"``: each step's time; ``"sent_bytes"``, ``"received_bytes"``: means over the steps.
        """
        times, sent, received = self.count(lambda: time_steps(step, self.agree, repeats, **options))
        # One agreement before the first step, one after each step, and the last one of `count`.
        others = len(times) + 2
        return {
            "ms": times,
            "sent_bytes": (sent - others * self.each[0]) / len(times),
            "received_bytes": (received - others * self.each[1]) / len(times),
        }
