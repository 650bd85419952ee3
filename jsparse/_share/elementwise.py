"""Whether a program treats each element by itself, read off its trace."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from .._comm.traffic import COLLECTIVES

# They keep a shape, and mix elements all the same; or draw what should differ from place to place.
MIXING = {
    *COLLECTIVES,
    "cholesky",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dot_general",
    "dynamic_update_slice",
    "fft",
    "gather",
    "pure_callback",
    "rev",
    "scatter",
    "scatter-add",
    "scatter_add",
    "sort",
    "transpose",
    "triangular_solve",
}
# They change a shape, and leave every element where it is.
RESHAPING = {"reshape", "broadcast_in_dim", "squeeze", "expand_dims"}


def mixing_primitive(fn: Callable[..., Any], *args: Any) -> str | None:
    """The first primitive in a function that mixes the elements of arrays it is given; None where there is none.

    Scalars among the arguments may be mixed with everything.

    >>> mixing_primitive(lambda x: x * 2, jnp.ones(3)), mixing_primitive(lambda x: x / jnp.sum(x), jnp.ones(3))
    (None, 'reduce_sum')
    """
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return _walk(jaxpr, [bool(var.aval.shape) for var in jaxpr.invars])[0]


def _walk(jaxpr: core.Jaxpr, arrays: Sequence[bool]) -> tuple[str | None, list[bool]]:
    """And which results depend on arrays."""
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
            # Loops carry what they are given; a cond's branches are given all but the predicate.
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
    before = {atom.aval.shape for atom, array in zip(eqn.invars, given, strict=True) if array}  # type: ignore[attr-defined]
    after = {var.aval.shape for var in eqn.outvars}  # type: ignore[attr-defined]
    if name in RESHAPING:
        sizes = {tuple(length for length in shape if length != 1) for shape in before | after}
        return len(sizes) > 1
    return name in MIXING or len(before | after) > 1
