"""Which form of an operation runs: the one place where that is decided.

An operation has a plain JAX form, which runs on every backend and is its oracle, and kernels for GPUs of NVIDIA.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
from jax import lax

IMPLEMENTATIONS = ("xla", "triton", "mosaic", "interpret")

# Not a context variable of Python's: what is traced under one choice must not be found in JAX's caches under another.
_override = jax.make_user_context(None)


@contextlib.contextmanager
def using(implementation: str | None) -> Iterator[None]:
    """A context in which the operations run in one form, unless a call names another; for tests and benchmarks.

    It acts where an operation is traced, and a function compiled under one choice is traced again under another.
    Operations that have no such form choose as they do outside.

    Args:
      implementation: ``"xla"``, the plain form; ``"triton"`` or ``"mosaic"``, a kernel; ``"interpret"``, the Triton
        kernel in Pallas's interpreter, on any backend, slowly; ``None``, each operation's own choice.

    Raises:
      ValueError: there is no such implementation.

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
    """Runs one of an operation's forms.

    Left to itself it takes the plain form in a process whose JAX sees no GPU, which then traces nothing else; otherwise
    it leaves the choice to where the program is lowered, so that the same process may also use its CPU.

    Args:
      implementation: a name in ``forms``, or ``"interpret"`` where there is a ``"triton"``, or None: what
        :func:`using` says, else a choice.
      forms: functions of ``args`` with equal results: ``"xla"``, and any of ``"triton"`` and ``"mosaic"``. The Triton
        form also takes ``interpret=``.
      *args: arrays, or trees of them; what is static is bound in ``forms``.
      on_cuda: which of ``forms`` is chosen on a GPU.

    Returns:
      What the form returns. Arguments of float64 always get the plain form: no kernel takes them.

    Raises:
      ValueError: the operation has no such implementation.
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
    """Whether this process has a GPU of NVIDIA. Starts JAX's backends, as the first array would."""
    return "cuda" in jax.extend.backend.backends()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
