"""Finds out from a function's trace whether it treats each element by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

# Primitives of which an element of the result depends on the same element of each argument alone.
# The others may mix elements, even if they keep the shape.
POINTWISE = {
    *("abs", "ceil", "clamp", "conj", "convert_element_type", "floor", "imag", "max", "min", "neg", "real", "round"),
    *("add", "add_any", "div", "integer_pow", "mul", "pow", "rem", "sign", "square", "sqrt", "rsqrt", "cbrt", "sub"),
    *("exp", "exp2", "expm1", "log", "log1p", "logistic", "erf", "erf_inv", "erfc", "lgamma", "digamma"),
    *("bessel_i0e", "bessel_i1e", "igamma", "igammac", "polygamma", "regularized_incomplete_beta", "zeta"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("eq", "ne", "ge", "gt", "le", "lt", "eq_to", "le_to", "lt_to", "is_finite", "select_n", "complex"),
    *("and", "or", "not", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
    *("bitcast_convert_type", "clz", "nextafter", "population_count", "reduce_precision"),
    *("copy", "copy_p", "name", "optimization_barrier", "pvary", "sharding_constraint", "stop_gradient"),
}
# Primitives that change a shape but do not mix elements.
RESHAPING = {"reshape", "broadcast_in_dim", "squeeze", "expand_dims"}


def mixing_primitive(fn: Callable[..., Any], *args: Any) -> str | None:
    """The first primitive in a function that may mix the elements of its array arguments.

    A primitive that draws random numbers counts, too. Scalars among the arguments may be mixed
    with everything.

    Args:
      fn: the function.
      *args: its arguments, or their shapes and types.

    Returns:
      The primitive's name; None where there is none.

    >>> double, normalise = lambda x: x * 2, lambda x: x / jnp.sum(x)
    >>> mixing_primitive(double, jnp.ones(3)), mixing_primitive(normalise, jnp.ones(3))
    (None, 'reduce_sum')
    """
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return _walk(jaxpr, [bool(var.aval.shape) for var in jaxpr.invars])[0]


def _walk(jaxpr: core.Jaxpr, arrays: Sequence[bool]) -> tuple[str | None, list[bool]]:
    """The first mixing primitive of a jaxpr, and which of its results depend on arrays.

    Args:
      jaxpr: the program.
      arrays: which of its arguments are arrays, or depend on arrays.
    """
    depends = {var for var, array in zip(jaxpr.invars, arrays, strict=True) if array}

    def of(atom):
        return not isinstance(atom, core.Literal) and atom in depends

    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, [of(atom) for atom in eqn.invars]
        if name.startswith(("random_bits", "threefry")):
            return name, []
        outs = [any(given)] * len(eqn.outvars)
        subs = [getattr(sub, "jaxpr", sub) for sub in core.jaxprs_in_params(eqn.params)]
        for sub in subs:
            # In a loop any value may reach any other by the carry. A cond's branches get all its
            # arguments but the predicate.
            inner = [any(given)] * len(sub.invars) if name in ("scan", "while") else given[-len(sub.invars) :]
            found, used = _walk(sub, inner if sub.invars else [])
            if found:
                return found, []
            outs = used if len(subs) == 1 and len(used) == len(outs) else outs
        if any(given) and not subs and _mixes(eqn, name, given):
            return name, []
        depends |= {var for var, out in zip(eqn.outvars, outs, strict=True) if out}
    return None, [of(atom) for atom in jaxpr.outvars]


def _mixes(eqn: core.JaxprEqn, name: str, given: Sequence[bool]) -> bool:
    """Whether an equation mixes elements; ``given`` says which arguments depend on arrays."""
    before = {atom.aval.shape for atom, array in zip(eqn.invars, given, strict=True) if array}  # type: ignore[attr-defined]
    after = {var.aval.shape for var in eqn.outvars}  # type: ignore[attr-defined]
    if name in RESHAPING:
        sizes = {tuple(length for length in shape if length != 1) for shape in before | after}
        return len(sizes) > 1
    return name not in POINTWISE or len(before | after) > 1
