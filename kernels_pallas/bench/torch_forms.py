"""The operations in PyTorch, if it is installed and sees the GPU."""

from collections.abc import Callable
from typing import Any

import jax

from .operations import Operation


def cuda_torch() -> Any:
    """PyTorch, or None if it is not installed or sees no GPU."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def torch_calls(
    torch: Any, operation: Operation, k: int, sets: list[list[jax.Array]]
) -> tuple[Callable[[int], Any], Callable[[Any], None]]:
    """``(call, wait)`` for :func:`.timing.time_calls`.

    The calls use copies of the inputs, because PyTorch may overwrite them.
    """
    run = operation.torch
    assert run
    tensors = [[torch.from_dlpack(array).clone() for array in inputs] for inputs in sets]
    return lambda number: run(torch, k, *tensors[number % len(tensors)]), lambda _: torch.cuda.synchronize()
