"""Gradients that test algorithms: sequences of vectors of shape ``(P, N)``, integers in floats."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from transports import N

Scenario = Callable[[int, np.random.Generator], Iterator[np.ndarray]]


def ordinary(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Many magnitudes; a third of the elements is zero; larger towards the end."""
    while True:
        scale = np.linspace(1, 20, N).astype(int)
        yield rng.integers(-50, 51, (size, N)) * (rng.random((size, N)) < 0.7) * scale


def zeros(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    while True:
        yield np.zeros((size, N))


def constant(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """All magnitudes are equal: ties decide every selection, and every buffer overflows."""
    while True:
        yield np.ones((size, N))


def few_values(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Few values: there are ties everywhere, and sums cancel."""
    while True:
        yield rng.integers(-2, 3, (size, N))


def layered(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """One stretch is a thousand times larger than the rest."""
    while True:
        gradient = rng.integers(-9, 10, (size, N))
        gradient[:, 300:340] *= 1000
        yield gradient


def disjoint(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """No two workers have an index in common."""
    while True:
        yield rng.integers(1, 99, (size, N)) * (np.arange(N) % size == np.arange(size)[:, None])


def disjoint_constant(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """No two workers have an index in common, and all magnitudes are equal.

    So P k elements tie for k places.
    """
    while True:
        yield (np.arange(N) % size == np.arange(size)[:, None]) * np.ones((size, N))


def alike(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """All workers have the same gradient."""
    while True:
        yield np.repeat(rng.integers(-99, 100, (1, N)), size, axis=0)


def one_region(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """All large elements lie in the first region in one step, and in the last in the next."""
    where = 0
    while True:
        gradient = rng.integers(-1, 2, (size, N))
        gradient[:, where : where + 80] = rng.integers(100, 999, (size, 80))
        yield gradient
        where = N - 80 - where


def uneven(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The first worker has almost nothing, and the last has values a hundred times larger."""
    while True:
        gradient = rng.integers(-9, 10, (size, N))
        gradient[-1] *= 100
        gradient[0] *= np.arange(N) < 3
        yield gradient


ALL: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        ordinary,
        zeros,
        constant,
        few_values,
        layered,
        disjoint,
        disjoint_constant,
        alike,
        one_region,
        uneven,
    )
}


def cancelling(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Workers cancel in pairs in the largest quarter of the elements, and agree on the others.

    It is the same in each step.
    """
    signs = rng.choice([-1, 1], N)
    in_pairs = np.where(np.arange(size) < size // 2 * 2, 2 * (-1) ** np.arange(size), 0)
    gradient = np.where(np.arange(N) % 4 == 0, in_pairs[:, None], 1) * signs
    while True:
        yield gradient


def disagreeing(size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Workers differ by more than they have in common. It is the same in each step."""
    apart = rng.integers(-3, 4, (size, N))
    apart[-1] -= apart.sum(0)
    gradient = apart + rng.choice([-1, 1], N)
    while True:
        yield gradient


# Gradients that stay the same from step to step.
STANDING: dict[str, Scenario] = {
    scenario.__name__: scenario for scenario in (constant, disjoint_constant, cancelling, disagreeing)
}


def stream(name: str, size: int, steps: int, seed: int = 0) -> Iterator[np.ndarray]:
    for gradient in itertools.islice((ALL | STANDING)[name](size, np.random.default_rng(seed)), steps):
        yield gradient.astype(np.float32)


def take(name: str, size: int, steps: int, seed: int = 0) -> list[np.ndarray]:
    return list(stream(name, size, steps, seed))


def mixed(size: int, scale: int = 1) -> list[np.ndarray]:
    """Some of each: integers, a gradient that is not finite, and numbers with rounded sums."""
    whole = [scale * gradient for gradient in take("ordinary", size, 3) + take("one_region", size, 2)]
    spoilt = whole[0].copy()
    spoilt[size // 2, 700] = np.nan
    rng = np.random.default_rng(1)
    return [*whole, spoilt, *(rng.standard_t(2, (size, N)).astype(np.float32) for _ in range(3))]
