"""The choice of the form in which an operation runs. It is made only here.

Every operation has a plain JAX form. It runs on every backend, and the tests compare the other
forms with it. Most operations also have kernels for NVIDIA GPUs.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
from jax import lax

IMPLEMENTATIONS = ("xla", "triton", "mosaic", "interpret")

# A JAX user context, not a Python context variable: a function that was traced under one choice
# must not be found in JAX's caches under another.
_override = jax.make_user_context(None)


@contextlib.contextmanager
def using(implementation: str | None) -> Iterator[None]:
    """A context manager that sets the form in which operations run, for tests and benchmarks.

    A call that names an implementation itself overrides the context. The context acts when an
    operation is traced. A function that was compiled under one choice is traced again under
    another. An operation without the chosen form chooses for itself, as it does outside the
    context.

    Args:
      implementation: ``"xla"`` is the plain JAX form. ``"triton"`` and ``"mosaic"`` are kernels.
        ``"interpret"`` is the Triton kernel in Pallas's interpreter: it runs on any backend,
        slowly, and in ``shard_map`` with ``check_vma=False``. With ``None`` each operation chooses
        for itself.

    Raises:
      ValueError: there is no implementation of this name.

    >>> import kernels_pallas
    >>> with using("xla"):
    ...     kernels_pallas.kth_magnitude(jnp.array([3.0, -1.0, 0.5, -4.0]), 2)
    Array(3., dtype=float32)
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}; it must be one of {_listed(IMPLEMENTATIONS)}, or None")
    with _override(implementation):
        yield


def choose(
    implementation: str | None, forms: Mapping[str, Callable[..., Any]], *args: Any, on_cuda: str = "triton"
) -> Any:
    """Runs one of the forms of an operation.

    Without a name, the choice depends on the process. If JAX sees no NVIDIA GPU in it, the plain
    JAX form runs, and no other form is traced. Otherwise the choice is made when the program is
    lowered, so that the same process can also use its CPU.

    Args:
      implementation: a name in ``forms``; or ``"interpret"``, if ``forms`` has ``"triton"``; or
        None. With None the choice of :func:`using` holds, if there is one and the operation has
        that form.
      forms: functions of ``args`` with equal results: ``"xla"``, and optionally ``"triton"`` and
        ``"mosaic"``. The Triton form also takes ``interpret=``.
      *args: arrays, or trees of arrays. Static arguments must already be bound in ``forms``.
      on_cuda: the name in ``forms`` that is chosen on a GPU.

    Returns:
      The result of the form. If an argument is float64, the plain form runs, whatever is named,
      because no kernel takes float64.

    Raises:
      ValueError: the operation has no implementation of this name.
    """
    possible = (*forms, *(["interpret"] if "triton" in forms else []))
    if implementation is not None and implementation not in possible:
        raise ValueError(
            f"implementation={implementation!r}; for this operation it must be one of {_listed(possible)}, or None"
        )
    if implementation is None and _override.value in possible:
        implementation = _override.value
    if any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(args)):
        implementation = "xla"
    if implementation is None and (on_cuda == "xla" or not sees_cuda()):
        implementation = "xla"
    if implementation is None:
        return lax.platform_dependent(*args, cuda=forms[on_cuda], default=forms["xla"])
    if implementation == "interpret":
        return forms["triton"](*args, interpret=True)
    return forms[implementation](*args)


def sees_cuda() -> bool:
    """Whether JAX sees an NVIDIA GPU in this process. The call starts JAX's backends."""
    return "cuda" in jax.extend.backend.backends()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
