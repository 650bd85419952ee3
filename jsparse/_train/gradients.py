"""Each worker's own gradient of its share of a batch, in one part or several."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._comm.comm import Comm, CommLike, as_comm
from .._engine.shards import place_as_params
from .._vector.arguments import check_count


def local_value_and_grad(
    loss_fn: Callable[..., Any], axis: CommLike, *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """``jax.value_and_grad`` of each worker's own loss, which gives each worker's own gradient.

    Under ``jax.shard_map(check_vma=True)``, ``jax.value_and_grad`` sums the gradient of replicated
    parameters over the workers. This function does not. Elsewhere the two are the same.

    Args:
      loss_fn: the worker's loss, without any psum or pmean over workers in it.
      axis: the mesh axis, or axes, along which the workers stand.
      argnums: which argument, or arguments, to differentiate.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.

    Returns:
      A function with the arguments of ``loss_fn`` that returns ``(value, gradient)``.
    """
    comm = as_comm(axis)
    value_and_grad = jax.value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)

    def local(*args, **kwargs):
        args = list(args)
        for i in (argnums,) if isinstance(argnums, int) else argnums:
            args[i] = comm.varying(args[i])
        value, grads = value_and_grad(*args, **kwargs)
        return value, comm.varying(grads)

    return local


@dataclasses.dataclass(frozen=True)
class Loss:
    """A user's loss function, and how to call it.

    Attributes:
      fn: the function.
      has_aux: whether it returns metrics beside the loss.
      has_model_state: whether it takes and returns a model state.
      with_key: whether it takes a random key.
      with_extra: whether it takes inputs that are not cut up.
    """

    fn: Callable[..., Any]
    has_aux: bool
    has_model_state: bool
    with_key: bool
    with_extra: bool

    def __call__(self, params: Any, batch: Any, model_state: Any, key: Any, extra: Any) -> tuple[Any, tuple[Any, Any]]:
        """Returns ``(loss, (model_state, aux))``. What the function does not return is None.

        Raises:
          ValueError: the function returns something else than it should.
        """
        kwargs = {"model_state": model_state} if self.has_model_state else {}
        if self.with_key:
            kwargs["key"] = key
        if self.with_extra:
            kwargs["extra"] = extra
        out = self.fn(params, batch, **kwargs)
        if not self.has_model_state:
            loss, aux = _pair(out, "(loss, aux)") if self.has_aux else (out, None)
            return loss, (None, _numbers(aux))
        if not self.has_aux:
            loss, kept = _pair(out, "(loss, model_state)")
            return loss, (_alike(model_state, kept), None)
        form = "(loss, (model_state, aux))"
        loss, rest = _pair(out, form)
        kept, aux = _pair(rest, form)
        return loss, (_alike(model_state, kept), _numbers(aux))


def _pair(out: Any, form: str) -> Any:
    """The two things that a function returned. Anything else is refused."""
    if isinstance(out, tuple | list) and len(out) == 2:
        return out
    what = f"{type(out).__name__} of {len(out)}" if isinstance(out, tuple | list) else type(out).__name__
    raise ValueError(
        f"loss_fn returned a {what} where {form} is expected: return that, or make the step with another has_aux or "
        "model_state"
    )


def _numbers(aux: Any) -> Any:
    """The metrics. They are refused if they have no mean."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else type(leaf)
        if dtype not in (bool, int, float, complex) and not jnp.issubdtype(dtype, jnp.number):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} of aux is {leaf!r}, which has no mean: return numbers alone as aux"
            )
    return aux


def _alike(before: Any, after: Any) -> Any:
    """The new model state. It is refused if it has not the structure and the shapes of the old."""
    olds, news = jax.tree.structure(before), jax.tree.structure(after)
    if olds != news:
        raise ValueError(f"loss_fn was given a model state {olds}, and returned {news}: return the same structure")
    after = jax.tree.map(jnp.asarray, after)
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if old.shape != new.shape:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} of the model state has shape {old.shape}, and loss_fn returned it "
                f"with shape {new.shape}: return the same shapes"
            )
    return after


@dataclasses.dataclass(frozen=True)
class Gradients:
    """A worker's gradient of its share of a batch, computed in equal parts one after the other.

    Attributes:
      loss: the loss.
      comm: the workers.
      micro_batches: the number of parts.
    """

    loss: Loss
    comm: Comm
    micro_batches: int

    def __post_init__(self):
        check_count("micro_batches", self.micro_batches, "the number of parts of a batch")

    def __call__(self, params: Any, kept: Any, batch: Any, key: Any, extra: Any) -> tuple[Any, Any, Any]:
        """Returns ``(model state, (loss, aux), gradient)``.

        The loss, the metrics and the gradient are means over the parts. The model state passes
        from part to part.
        """
        if self.micro_batches == 1:
            return self._of_part(params, kept, batch, key, extra, 0)
        # Part i has examples i, i + m, and so on: each device of a sharded batch has some of them.
        parts = jax.tree.map(lambda x: x.reshape(-1, self.micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(carry, numbered):
            kept, total = carry
            kept, report, grads = self._of_part(params, kept, numbered[1], key, extra, numbered[0])
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype) / self.micro_batches, total, grads)
            return (self.comm.varying(kept), place_as_params(total)), report

        wide = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.result_type(p, jnp.float32)), params)
        start = self.comm.varying((kept, place_as_params(wide)))
        (kept, total), reports = lax.scan(add, start, (jnp.arange(self.micro_batches), parts))
        report = jax.tree.map(lambda x: jnp.mean(x, axis=0), reports)
        return kept, report, jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)

    def _of_part(self, params: Any, kept: Any, part: Any, key: Any, extra: Any, number: Any) -> tuple[Any, Any, Any]:
        if self.loss.with_key:
            key = jax.random.fold_in(jax.random.fold_in(key, self.comm.rank()), number)
        value_and_grad = local_value_and_grad(self.loss, self.comm, has_aux=True)
        (value, (kept, aux)), grads = value_and_grad(params, part, kept, key, extra)
        return kept, (value, aux), grads
