"""How a synchronisation is configured."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._comm.comm import Comm, axes_of
from .._vector.buckets import Bucket, plan
from ..allreduce import AllReduce, Dense
from ..select import Selector
from ..wire import Full, Wire
from .memory import ErrorFeedback
from .momentum import Momentum

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


@dataclasses.dataclass(frozen=True)
class Config:
    """How gradients are synchronised: the arguments of :func:`sparse_allreduce`, ``intra``, and those of ``dgc``.

    Where ``intra`` are the workers of a node, each of them has a shard of the node's sum, and ``comm`` are the workers
    that have the same shard, one on each node.
    """

    comm: Comm
    select: Selector | None
    allreduce: AllReduce
    wire: Wire = Full()
    error_feedback: bool | ErrorFeedback = True
    scope: Literal["global", "leaf"] = "global"
    dense_below: int = 0
    bucket_bytes: int | None = None
    intra: Comm | None = None
    momentum: Momentum | None = None
    clip_norm: float | None = None

    def __post_init__(self):
        axes = [name for comm in self.levels for name in axes_of(comm)]
        if len(set(axes)) < len(axes) or self.comm == self.intra:
            raise ValueError(
                f"the axes are {axes or self.levels}, one of them twice; name each once: over two levels, inter is the "
                "axis along which the nodes stand, and intra the one along which a node's workers do"
            )
        if self.allreduce.sparse and self.select is None:
            raise ValueError(f"{self.allreduce} sums sparse vectors; give it a selector, such as select=TopK(0.01)")
        if self.select is not None and not self.allreduce.sparse:
            raise ValueError(f"{self.allreduce} sums dense vectors and selects nothing; pass select=None")
        if getattr(self.allreduce, "operator", "sum") != "sum":
            raise ValueError(f"{self.allreduce} does not sum; gradients are averaged: leave operator at its default")
        if not isinstance(self.error_feedback, bool | ErrorFeedback):
            raise ValueError(
                f"error_feedback is {self.error_feedback!r}; it is True, False or jsparse.ErrorFeedback(...)"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it is the norm of a gradient, above 0, or None")
        for quantizer in (getattr(self.allreduce, "quantize", None), getattr(self.wire, "values", None)):
            if self.error_feedback and quantizer is not None and quantizer.unbiased:
                raise ValueError(
                    f"{quantizer} with error feedback makes the residual grow without bound: shrink what it decodes "
                    "with contract=True, or, where dense vectors are summed, pass error_feedback=False"
                )
        if self.scope not in ("global", "leaf"):
            raise ValueError(f'scope is {self.scope!r}; choose "global" or "leaf"')
        if self.dense_below < 0:
            raise ValueError(f"dense_below is {self.dense_below}; it is a number of elements, at least 0")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; it is a number of bytes, at least 1, or None")

    @property
    def levels(self) -> tuple[Comm, ...]:
        """The networks that a worker is in."""
        return (self.comm,) if self.intra is None else (self.comm, self.intra)

    @property
    def feedback(self) -> ErrorFeedback | None:
        """How what was not delivered is kept."""
        return ErrorFeedback() if self.error_feedback is True else self.error_feedback or None

    def length(self, n: int) -> int:
        """How many elements of a vector of length ``n`` a worker selects from: all, or a shard."""
        return n if self.intra is None else -(-n // self.intra.size)

    def plan(self, tree: Any) -> list[Bucket]:
        """Which leaves travel together."""
        check_floats(tree)
        return plan(
            jax.tree.leaves(tree), scope=self.scope, dense_below=self.dense_below, bucket_bytes=self.bucket_bytes
        )

    def of(self, bucket: Bucket) -> "Config":
        """How one bucket is synchronised."""
        if not bucket.dense:
            return self
        return dataclasses.replace(self, select=None, allreduce=Dense(), error_feedback=False)


@dataclasses.dataclass(frozen=True)
class Phases:
    """How gradients are synchronised in the phases of a run.

    Attributes:
      stages: how, in each; alike in what concerns the buckets and what is carried for them.
      starts: the first step of each.
    """

    stages: tuple[Config, ...]
    starts: tuple[int, ...]

    @property
    def shared(self) -> Config:
        """A phase that says what is carried: a sparse one, if there is any."""
        return next((stage for stage in self.stages if stage.allreduce.sparse), self.stages[0])

    @property
    def levels(self) -> tuple[Comm, ...]:
        """The networks that a worker is in."""
        return self.shared.levels

    @property
    def momentum(self) -> Momentum | None:
        """Momentum before selection."""
        return self.shared.momentum

    def plan(self, tree: Any) -> list[Bucket]:
        """Which leaves travel together."""
        return self.shared.plan(tree)


def check_floats(tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.dtype not in FLOATS:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} has type {leaf.dtype}; gradients are float16, bfloat16, "
                "float32 or float64: keep what is not trained out of the parameters"
            )
