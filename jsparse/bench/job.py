"""What the processes of ``jsparse bench network`` agree on: the job, its gradients, and how they report."""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .hosts import INTERFACE

GRADIENTS = 3
REPORT = "report "
# Stretches of a gradient, as if of different layers.
LAYERS = 50
# Seconds that the steps of one form may take, once three have been taken.
PATIENCE = 12.0
LEAST = 3


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
      hosts, size, density: P, n, k / n.
      rates: of the links, one after the other.
      repeats: steps that are timed, of each form.
      forms: names, None for all of them.
    """

    hosts: int
    size: int
    density: float
    rates: tuple[str, ...]
    repeats: int
    forms: tuple[str, ...] | None = None

    def wants(self, name: str) -> bool:
        return self.forms is None or name in self.forms

    def written(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def read(text: str) -> "Job":
        read = json.loads(text)
        forms = None if read["forms"] is None else tuple(read["forms"])
        return Job(**read | {"rates": tuple(read["rates"]), "forms": forms})


def gradients(n: int, rank: int, count: int = GRADIENTS) -> list[np.ndarray]:
    """Some gradients of a worker, which it goes through in turn: float32, shape ``(n,)``.

    Each element is normal, of a scale that it has on all workers and in all steps: log-normal, times one for its layer,
    log-normal too. So magnitudes are heavy-tailed, workers agree somewhat on what is large, regions differ in how much
    they hold, and what is not sent adds up as it does in training.
    """
    shared = np.random.default_rng(0)
    scale = shared.standard_normal(n, np.float32)
    layers = shared.standard_normal(LAYERS).astype(np.float32)
    for number, part in enumerate(np.array_split(scale, LAYERS)):
        part += layers[number]
    np.exp(0.5 * scale, out=scale)
    own = np.random.default_rng(1 + rank)
    return [scale * own.standard_normal(n, np.float32) for _ in range(count)]


def sent_bytes() -> int:
    """What this host's interface has sent."""
    return int(pathlib.Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def received_bytes() -> int:
    """What this host's interface has received."""
    return int(pathlib.Path(f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").read_text())


def tell(**what: Any) -> None:
    """Reports to the process that started this one: a line of JSON, among what libraries print."""
    print(f"{REPORT}{json.dumps(what)}", flush=True)


def ask_for_rate(rate: str) -> None:
    """Has the links changed, as the first worker alone does: waits until they are."""
    if os.environ["JSPARSE_RANK"] == "0":
        tell(ask=rate)
        sys.stdin.readline()


def time_steps(
    step: Callable[[], Any], agree: Callable[[float], float], repeats: int, before: Callable[[], Any] = lambda: None
) -> list[float]:
    """Times steps that all workers begin together: in milliseconds.

    Args:
      step: runs one, and returns when it is done.
      agree: the largest of what the workers say, once all have; so that all take equally many.
      repeats: how many; fewer, where they take long.
      before: what is done before each, and not timed.
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
    """Counts bytes a step, without those of the agreeing between steps."""

    agree: Callable[[float], float]
    each: tuple[float, float] = (0.0, 0.0)

    def calibrate(self) -> None:
        _, sent, received = self.count(lambda: [self.agree(0.0) for _ in range(20)][:0])
        self.each = sent / 20, received / 20

    def count(self, steps: Callable[[], list[float]]) -> tuple[list[float], float, float]:
        """Runs steps: their times, and what was sent and received in all."""
        self.agree(0.0)
        sent, received = sent_bytes(), received_bytes()
        times = steps()
        # What was sent has left the queue once what was sent after it has been answered.
        self.agree(0.0)
        return times, sent_bytes() - sent, received_bytes() - received

    def measure(self, step: Callable[[], Any], repeats: int, **options: Any) -> dict[str, Any]:
        """Times and counts steps."""
        times, sent, received = self.count(lambda: time_steps(step, self.agree, repeats, **options))
        # One before each, one at the end of each, and the last.
        others = len(times) + 2
        return {
            "ms": times,
            "sent_bytes": (sent - others * self.each[0]) / len(times),
            "received_bytes": (received - others * self.each[1]) / len(times),
        }
