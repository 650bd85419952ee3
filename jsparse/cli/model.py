"""Loads the model of ``jsparse tune --model``, and refuses one whose step can't be measured."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

RETURNS = "it is MODULE:FUNCTION, a function without arguments that returns (loss_fn, params, batch)"


def load_model(model: str) -> tuple[Callable[..., Any], Any, Any]:
    """Calls a model's function.

    Args:
      model: the function, as ``MODULE:FUNCTION``.

    Returns:
      ``loss_fn``, ``params`` and ``batch``.

    Raises:
      ValueError: there is no such function, or it returns something else.
    """
    module, _, name = model.partition(":")
    if not module or not name:
        raise ValueError(f"--model is {model!r}; {RETURNS}")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"--model is {model!r} ({error}); {RETURNS}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, (tuple, list)) or len(made) != 3 or not callable(made[0]):
        raise ValueError(f"--model is {model!r}, which returns {_kinds(made)}; {RETURNS}")
    loss_fn, params, batch = made
    try:
        leaves, loss = jax.eval_shape(lambda *of: (jax.tree.leaves(of[0]), loss_fn(*of)), params, batch)
    except (TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"--model is {model!r}, and its loss_fn(params, batch) fails: {first}; return one that takes these arrays"
        ) from error
    if not leaves or not all(map(_is_float, leaves)):
        kinds = ", ".join(sorted({str(leaf.dtype) for leaf in leaves})) or "no arrays"
        raise ValueError(f"--model is {model!r}, whose params are {kinds}; return arrays of floats as params")
    if not isinstance(loss, jax.ShapeDtypeStruct) or loss.shape or not _is_float(loss):
        raise ValueError(f"--model is {model!r}, whose loss_fn returns {loss}; return one float, such as a mean")
    return loss_fn, params, batch


def _is_float(array: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _kinds(made: Any) -> str:
    """The types of what a function returned."""
    if isinstance(made, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__
