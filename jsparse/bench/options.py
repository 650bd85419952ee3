"""Argparse types of options that are numbers, and a check of sizes: they refuse what cannot be."""

import argparse
import contextlib
import math
import os
from collections.abc import Callable
from typing import TypeVar

# The most elements of a vector, whose indices are int32.
LONGEST = 2**31 - 1
Number = TypeVar("Number", int, float)


def whole(least: int, most: int | None = None, *, of: int = 1) -> Callable[[str], int]:
    """Reads whole numbers from ``least`` to ``most`` that are multiples of ``of``.

    They may be written like 25e6.
    """

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            return int(text)  # A float would round a long one.
        number = float(text)
        if not number.is_integer():
            raise ValueError
        return int(number)

    def allowed(number: int) -> bool:
        return least <= number <= (number if most is None else most) and number % of == 0

    kind = "whole number" if of == 1 else f"multiple of {of}"
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    return _checked(read, allowed, f"{kind}, {bounds}")


def real(least: float = -math.inf, *, above: float = -math.inf, infinite: bool = False) -> Callable[[str], float]:
    """Reads numbers that are at least ``least`` and more than ``above``.

    NaN is refused, and so is infinity without ``infinite``.
    """
    kind = "number" if infinite else "finite number"
    bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"above {above:g}"] * (above > -math.inf)

    def allowed(number: float) -> bool:
        return number >= least and number > above and (infinite or number < math.inf)

    return _checked(float, allowed, ", ".join([kind, *bounds]))


def _checked(read: Callable[[str], Number], allowed: Callable[[Number], bool], what: str) -> Callable[[str], Number]:
    def checked(text: str) -> Number:
        with contextlib.suppress(ValueError):
            number = read(text)
            if allowed(number):
                return number
        raise argparse.ArgumentTypeError(f"it is {text}; give a {what}")

    return checked


def check_memory(size: int, options: str) -> None:
    """Refuses sizes that this machine has no memory for.

    Args:
      size: the least number of bytes that the command needs.
      options: the options that ask for them, with their values.

    Raises:
      ValueError: the machine has less memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ValueError(
            f"{options}: that takes {size / 1e9:,.0f} GB of memory at least, and this machine has {memory / 1e9:,.0f}: "
            "give less"
        )
