"""Checks of hyperparameters: whether they are numbers at all."""

import dataclasses
import numbers
import typing
from types import NoneType
from typing import Any

# For each type of a field, the values that it takes, and these in words.
KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    NoneType: (NoneType, "None"),
}


def check_fields(part: Any) -> None:
    """Refuses fields of a dataclass that should hold numbers or truth values, and do not.

    Without this check ``True`` would pass for 1, 2.5 for a length, and a text would fail somewhere
    with an error that does not name the field.

    Raises:
      ValueError: a field holds something else than its type says.
    """
    for field in dataclasses.fields(part):
        kinds = typing.get_args(field.type) or (field.type,)
        if all(kind in KINDS for kind in kinds):
            check_kind(field.name, getattr(part, field.name), *kinds)


def check_count(name: str, value: Any, what: str) -> None:
    """Refuses what is no whole number from 1 on."""
    check_kind(name, value, int)
    if value < 1:
        raise ValueError(f"{name} is {value}; it is {what}, so it must be at least 1")


def check_kind(name: str, value: Any, *kinds: Any) -> None:
    """Refuses a value that is of none of these types, which are keys of ``KINDS``."""
    # A bool is a whole number to Python.
    taken = bool in kinds if isinstance(value, bool) else isinstance(value, tuple(KINDS[kind][0] for kind in kinds))
    if not taken:
        raise ValueError(f"{name} is {value!r}; it must be {' or '.join(KINDS[kind][1] for kind in kinds)}")
