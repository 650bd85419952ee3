"""The operations that are compared, one row for each.

A row has the forms of the operation, functions of JAX and PyTorch that do the same, and the bytes
that the operation needs. Tests lower and compile the same rows for GPUs, so a new operation needs
only a new row here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels_pallas

# The magnitude of a gradient's large elements, and the threshold that selects them. The residual
# is used again and again, but each call selects these same elements.
SPIKE = 10.0
LEVEL = 5.0
THRESHOLDS = 16
LISTS = 8

Make = Callable[[int, int], Callable[..., Any]]


class Operation(NamedTuple):
    """A row of the comparison.

    Attributes:
      name: the name of the operation.
      inputs: the names of the inputs, as in :func:`draw`.
      ours: from ``n``, ``k`` and an implementation, makes a function of the inputs.
      moved: from ``n`` and ``k``, computes the bytes that must be read and written, every input
        and output once.
      forms: the implementations of the operation.
      donate: the places of the inputs that the last outputs overwrite, one for one.
      beside: other functions that do the same, by name. Each makes, from ``n`` and ``k``, a
        function of the inputs, with the same donation.
      torch: does the same in PyTorch, in place, as a function of ``(torch, k, *tensors)``.
      exact: whether all forms give the same bits. If not, sums of floats are the same up to
        rounding.
      tuned: from ``n``, ``k``, whether to interpret, and options by name, makes the Triton form.
      options: the options of ``tuned``, and the values to try.
    """

    name: str
    inputs: tuple[str, ...]
    ours: Callable[..., Callable[..., Any]]
    moved: Callable[[int, int], float]
    forms: tuple[str, ...] = ("xla", "triton")
    donate: tuple[int, ...] = ()
    beside: Mapping[str, Make] = {}
    torch: Callable[..., Any] | None = None
    exact: bool = True
    tuned: Callable[..., Callable[..., Any]] | None = None
    options: Mapping[str, Sequence[Any]] = {}


def draw(names: Sequence[str], n: int, k: int, seed: int, clustered: bool = False) -> list[jax.Array]:
    """Draws new inputs, by name.

    Args:
      names: the names of the inputs.
      n: the length of a vector.
      k: the number of large elements.
      seed: the seed; other seeds give other inputs.
      clustered: whether the large elements of a gradient are in a sixteenth of the vector, as
        when the gradient of one layer is far larger than the rest.
    """
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)

    def places(count: int, among: int) -> np.ndarray:
        return np.sort(rng.choice(among, min(count, among), replace=False, shuffle=False)).astype(np.int32)

    def gradient(dtype) -> jax.Array:
        chosen = places(k, max(n // 16, k) if clustered else n)
        sign = rng.choice(np.array([-SPIKE, SPIKE], np.float32), len(chosen))
        return (1e-3 * jax.random.normal(key, (n,))).at[chosen].set(sign).astype(dtype)

    def lists(count: int, each: int) -> jax.Array:
        return jnp.asarray(np.stack([places(each, n) for _ in range(count)]))

    def normal() -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, 1), (n,))

    makes = {
        "x": normal,
        "threshold": lambda: kernels_pallas.kth_magnitude(normal(), k, implementation="xla"),
        "thresholds": lambda: jnp.geomspace(0.5, 5.0, THRESHOLDS, dtype=jnp.float32),
        "gradient": lambda: gradient(jnp.float32),
        "narrow gradient": lambda: gradient(jnp.bfloat16),
        "residual": lambda: jax.random.uniform(jax.random.fold_in(key, 2), (n,), minval=-1, maxval=1),
        "words": lambda: jnp.asarray(rng.integers(0, 2**32, 2, np.uint32)),
        "level": lambda: jnp.float32(LEVEL),
        "values": lambda: jnp.asarray(rng.standard_normal(k, np.float32)),
        "indices": lambda: lists(1, k)[0],
        "lists' values": lambda: jnp.asarray(rng.standard_normal((LISTS, k // LISTS), np.float32)),
        "lists' indices": lambda: lists(LISTS, k // LISTS),
    }
    return [makes[name]() for name in names]


def public(function: Callable[..., Any], kept: str | None = None) -> Callable[..., Callable[..., Any]]:
    """The ``ours`` of a row, for a public function whose parameter ``kept`` takes ``k``."""

    def ours(n: int, k: int, implementation: str) -> Callable[..., Any]:
        static = {kept: k} if kept else {}
        return lambda *args: function(*args, **static, implementation=implementation)

    return ours


def accumulate(n: int, k: int, implementation: str) -> Callable[..., Any]:
    return lambda gradient, residual, level: kernels_pallas.accumulate_and_select(
        gradient, residual, level, k, implementation=implementation
    )


def accumulate_tuned(n: int, k: int, interpret: bool = False, **options: Any) -> Callable[..., Any]:
    from ..accumulate_and_select import triton

    def run(gradient, residual, level):
        always = jnp.int32(0), jnp.array(True)
        static = {"capacity": k, "limit": math.inf, "clear": True, "interpret": interpret}
        return triton.accumulate_and_select(gradient, residual, level, *always, **static, **options)

    return run


def select_tuned(n: int, k: int, interpret: bool = False, **options: Any) -> Callable[..., Any]:
    from ..select_above import triton

    return lambda x, threshold: triton.select_above(
        x, threshold, jnp.int32(0), capacity=k, interpret=interpret, **options
    )


def statistics_tuned(n: int, k: int, interpret: bool = False, **options: Any) -> Callable[..., Any]:
    from ..magnitude_statistics import triton

    return lambda x, thresholds: triton.magnitude_statistics(x, thresholds, None, interpret=interpret, **options)


def add_tuned(n: int, k: int, interpret: bool = False, **options: Any) -> Callable[..., Any]:
    from ..add_sparse import triton

    return lambda x, values, indices: (
        triton.add_sparse(x, values[None], indices[None], interpret=interpret, **options),
    )


def two_passes(make: Callable[..., Any]) -> Make:
    """The Triton form without slots, which reads every block twice."""
    return lambda n, k: make(n, k, slots=0)


def accumulate_by(top_k: Callable[..., Any]) -> Make:
    """Accumulates, and selects by a top-k of the magnitudes."""

    def make(n, k):
        def run(gradient, residual, level):
            acc = residual + gradient.astype(residual.dtype)
            indices = jnp.sort(top_k(jnp.abs(acc), k)[1])
            values = acc[indices]
            return values, indices, acc.at[indices].add(-values, indices_are_sorted=True, unique_indices=True)

        return run

    return make


def accumulate_by_nonzero(n: int, k: int) -> Callable[..., Any]:
    def run(gradient, residual, level):
        acc = residual + gradient.astype(residual.dtype)
        indices = jnp.nonzero(jnp.abs(acc) >= level, size=k, fill_value=n)[0]
        values = acc.at[indices].get(mode="fill", fill_value=0)
        return values, indices, acc.at[indices].add(-values, mode="drop")

    return run


def accumulate_in_torch(torch, k, gradient, residual, level):
    residual.add_(gradient)
    indices = torch.topk(residual.abs(), k, sorted=False).indices
    values = residual[indices]
    residual[indices] = 0
    return values, indices


def largest_by(top_k: Callable[..., Any]) -> Make:
    def make(n, k):
        def run(x):
            indices = top_k(jnp.abs(x), k)[1]
            return x[indices], indices

        return run

    return make


def kth_by(top_k: Callable[..., Any]) -> Make:
    return lambda n, k: lambda x: top_k(jnp.abs(x), k)[0][-1]


def nonzero(n: int, k: int) -> Callable[..., Any]:
    def run(x, threshold):
        indices = jnp.nonzero(jnp.abs(x) >= threshold, size=k, fill_value=n)[0]
        return x.at[indices].get(mode="fill", fill_value=0), indices

    return run


def statistics(n: int, k: int) -> Callable[..., Any]:
    """The statistics as one would write them in jax.numpy."""

    def run(x, thresholds):
        magnitude = jnp.abs(x)
        counts = jnp.sum(magnitude[:, None] >= thresholds, axis=0, dtype=jnp.int32)
        return jnp.max(magnitude), jnp.mean(x), jnp.mean(magnitude), jnp.mean(x * x), counts

    return run


def counts(n: int, k: int) -> Callable[..., Any]:
    return lambda x, thresholds: jnp.sum(jnp.abs(x)[:, None] >= thresholds, axis=0, dtype=jnp.int32)


def add_dense(n: int, k: int) -> Callable[..., Any]:
    """Adds a list by way of a dense temporary vector."""

    def run(x, values, indices):
        return (x + jnp.zeros(n, x.dtype).at[indices].add(values, indices_are_sorted=True, unique_indices=True),)

    return run


def add_at_once(n: int, k: int) -> Callable[..., Any]:
    """Adds all lists in one scatter, in no fixed order: the bits can differ from call to call."""
    return lambda x, values, indices: (x.at[indices.reshape(-1)].add(values.reshape(-1)),)


def add_sparse(n: int, k: int, implementation: str) -> Callable[..., Any]:
    return lambda *args: (kernels_pallas.add_sparse(*args, implementation=implementation),)


def in_blocks(block: int, select: Callable[..., Any], **options: Any) -> Callable[..., Callable[..., Any]]:
    """The ``ours`` of a row that selects k of n elements, the same share of each block."""

    def ours(n: int, k: int, implementation: str) -> Callable[..., Any]:
        quota = np.diff(np.minimum(np.arange(-(-n // block) + 1) * block, n) * k // max(n, 1)).astype(np.int32)
        static = {"block": block, "most": int(quota.max(initial=1)), "capacity": max(k, 1), **options}
        return lambda x, *args: select(x, quota, *args, **static, implementation=implementation)

    return ours


def in_blocks_tuned(block: int) -> Callable[..., Callable[..., Any]]:
    def make(n: int, k: int, interpret: bool = False, **options: Any) -> Callable[..., Any]:
        from ..select_block_top_k import triton

        def select(x, quota, implementation, **static):
            return triton.select_block_top_k(x, quota, **static, interpret=interpret, **options)

        return in_blocks(block, select)(n, k, "triton")

    return make


def copy(n: int, k: int, implementation: str) -> Callable[..., Any]:
    """The copy whose rate the others are compared with.

    It is an addition, because XLA would leave out a copy that changes nothing.
    """
    return lambda x: x + 1


BLOCKS = {"block": (1024, 2048, 4096, 8192)}
SLOTS = {"slots": (0, 32, 64, 128, 256)}
TOP_K = {"lax.top_k": lax.top_k, "lax.approx_max_k": lax.approx_max_k}


def operations() -> list[Operation]:
    """The rows of the comparison."""
    accumulating = {
        **{name: accumulate_by(top_k) for name, top_k in TOP_K.items()},
        "jnp.nonzero": accumulate_by_nonzero,
        "triton, two passes": two_passes(accumulate_tuned),
    }
    accumulate_and_select = Operation(
        "accumulate_and_select",
        ("gradient", "residual", "level"),
        accumulate,
        lambda n, k: 12 * n + 8 * k,
        donate=(1,),
        beside=accumulating,
        torch=accumulate_in_torch,
        tuned=accumulate_tuned,
        options=BLOCKS | SLOTS,
    )
    return [
        Operation("copy", ("x",), copy, lambda n, k: 8 * n, forms=("xla",)),
        accumulate_and_select,
        accumulate_and_select._replace(
            name="accumulate_and_select, bfloat16",
            inputs=("narrow gradient", "residual", "level"),
            moved=lambda n, k: 10 * n + 8 * k,
        ),
        Operation(
            "select_above",
            ("x", "threshold"),
            public(kernels_pallas.select_above, "capacity"),
            lambda n, k: 4 * n + 8 * k,
            beside={"jnp.nonzero": nonzero, "triton, two passes": two_passes(select_tuned)},
            tuned=select_tuned,
            options=BLOCKS | SLOTS,
        ),
        Operation(
            "count_above",
            ("x", "threshold"),
            lambda n, k, implementation: kernels_pallas.count_above,
            lambda n, k: 4 * n,
            forms=("xla",),
            beside={"jnp.sum": lambda n, k: lambda x, threshold: jnp.sum(jnp.abs(x) >= threshold, dtype=jnp.int32)},
        ),
        Operation(
            "magnitude_statistics",
            ("x", "thresholds"),
            public(kernels_pallas.magnitude_statistics),
            lambda n, k: 4 * n,
            forms=("xla", "triton", "mosaic"),
            beside={"jnp": statistics},
            exact=False,
            tuned=statistics_tuned,
            options=BLOCKS,
        ),
        Operation(
            "count_above_many",
            ("x", "thresholds"),
            public(kernels_pallas.count_above_many),
            lambda n, k: 4 * n,
            beside={"jnp.sum": counts},
        ),
        Operation("norms", ("x",), public(kernels_pallas.norms), lambda n, k: 4 * n, exact=False),
        Operation(
            "kth_magnitude",
            ("x",),
            public(kernels_pallas.kth_magnitude, "k"),
            lambda n, k: 4 * n,
            beside={name: kth_by(top_k) for name, top_k in TOP_K.items()},
            torch=lambda torch, k, x: torch.topk(x.abs(), k, sorted=False).values.min(),
        ),
        Operation(
            "select_top_k",
            ("x",),
            public(kernels_pallas.select_top_k, "k"),
            lambda n, k: 4 * n + 8 * k,
            beside={name: largest_by(top_k) for name, top_k in TOP_K.items()},
            torch=lambda torch, k, x: torch.topk(x.abs(), k, sorted=False),
        ),
        Operation(
            "select_ms_top_k",
            ("x",),
            public(kernels_pallas.select_ms_top_k, "k"),
            lambda n, k: 4 * n + 8 * k,
            beside={name: largest_by(top_k) for name, top_k in TOP_K.items()},
        ),
        *(
            Operation(
                f"select_block_top_k, {block} a block",
                ("x",),
                in_blocks(block, kernels_pallas.select_block_top_k),
                lambda n, k: 4 * n + 8 * k,
                tuned=in_blocks_tuned(block),
                options={"program": (512, 1024, 2048, 4096)},
            )
            for block in (4096, 512, 60)
        ),
        Operation(
            "select_stochastic",
            ("x", "words"),
            in_blocks(512, kernels_pallas.select_stochastic, exact=True),
            lambda n, k: 4 * n + 8 * k,
        ),
        Operation(
            "add_sparse",
            ("x", "values", "indices"),
            add_sparse,
            lambda n, k: 16 * k,
            donate=(0,),
            beside={"dense temporary": add_dense},
            tuned=add_tuned,
            options={"block": (128, 256, 512, 1024), "warps": (2, 4, 8)},
        ),
        Operation(
            f"add_sparse, {LISTS} lists",
            ("x", "lists' values", "lists' indices"),
            add_sparse,
            lambda n, k: 16 * (k // LISTS) * LISTS,
            donate=(0,),
            beside={"one scatter": add_at_once},
        ),
    ]
