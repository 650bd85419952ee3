"""Fragments: parts of the parameters that are synchronised one after the other."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._vector.arguments import check_count

# Tells, from the parameters, each leaf's fragment, or one for each index of its leading axis.
FragmentOf = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Fragments:
    """How parameters are divided into fragments.

    Attributes:
      count: the number of fragments, if leaves are dealt in their order.
      fragment_of: what tells the fragment of each leaf, otherwise.
    """

    count: int = 1
    fragment_of: FragmentOf | None = None

    @classmethod
    def of(cls, fragments: int | FragmentOf) -> "Fragments":
        """The fragments that an argument says."""
        if callable(fragments):
            return cls(fragment_of=fragments)
        check_count("fragments", fragments, "a number of parts")
        return cls(count=fragments)

    def split(self, tree: Any) -> list[Any]:
        """The fragments of a tree of the parameters' form: trees in which the rest is None."""
        count = 1 + max(int(numbers.max(initial=0)) for numbers in jax.tree.leaves(self._numbers(tree)))
        parts = [self.take(tree, f) for f in range(count)]
        for f, part in enumerate(parts):
            if not jax.tree.leaves(part):
                raise ValueError(f"fragment {f} has no parameters: number fragments from 0, without gaps")
        return parts

    def take(self, tree: Any, f: int) -> Any:
        """One fragment of a tree, in which the rest is None."""
        return jax.tree.map(lambda x, numbers: _taken(x, numbers, f), tree, self._numbers(tree))

    def put(self, tree: Any, f: int, part: Any) -> Any:
        """The tree with one fragment replaced."""
        return jax.tree.map(
            lambda x, numbers, new: _put(x, numbers, new, f),
            tree,
            self._numbers(tree),
            part,
            is_leaf=lambda x: x is None,
        )

    def _numbers(self, tree: Any) -> Any:
        """For each leaf the number of its fragment, shape ``()``, or one for each row."""
        if self.fragment_of is None:
            leaves, form = jax.tree.flatten(tree)
            return jax.tree.unflatten(form, list(map(np.asarray, self._dealt([leaf.size for leaf in leaves]))))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        with jax.ensure_compile_time_eval():
            told = self.fragment_of(shapes)
        try:
            jax.tree.structure(tree).flatten_up_to(told)
        except ValueError as error:
            raise ValueError(
                f"fragments returns a tree of another form than the parameters have ({error}): return a number, or one "
                "for each index of the leading axis, in place of each leaf"
            ) from None

        def checked(path, x, told):
            numbers = np.asarray(told)
            if not np.issubdtype(numbers.dtype, np.integer) or numbers.min(initial=0) < 0:
                raise ValueError(f"fragments({jax.tree_util.keystr(path)}) is {told!r}: return numbers from 0")
            if numbers.ndim and (numbers.ndim > 1 or numbers.shape != x.shape[:1]):
                raise ValueError(
                    f"fragments gives leaf {jax.tree_util.keystr(path)} of shape {x.shape} numbers of shape "
                    f"{numbers.shape}: return one number, or one for each index of its leading axis"
                )
            return numbers

        return jax.tree_util.tree_map_with_path(checked, tree, told)

    def _dealt(self, sizes: list[int]) -> np.ndarray:
        """The number of each leaf's fragment: each begins where the parameters are best divided,
        and has a leaf at least.
        """
        if self.count > len(sizes):
            raise ValueError(
                f"fragments is {self.count}, and there are {len(sizes)} leaves: choose at most so many, or pass a "
                "function that numbers the rows of leaves that stack layers"
            )
        ends = np.cumsum([0, *sizes])
        begins = [0]
        for f in range(1, self.count):
            best = int(np.argmin(np.abs(ends - f * ends[-1] / self.count)))
            begins.append(min(max(best, begins[-1] + 1), len(sizes) - self.count + f))
        return np.searchsorted(begins, np.arange(len(sizes)), side="right") - 1


def _taken(x: Any, numbers: np.ndarray, f: int) -> Any:
    if numbers.ndim == 0:
        return x if numbers == f else None
    rows = np.flatnonzero(numbers == f)
    return jnp.take(x, rows, axis=0) if len(rows) else None


def _put(x: Any, numbers: np.ndarray, new: Any, f: int) -> Any:
    if new is None:
        return x
    return new if numbers.ndim == 0 else x.at[np.flatnonzero(numbers == f)].set(new)
