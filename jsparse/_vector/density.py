"""The density, and the number of elements k that it keeps."""


def elements_kept(density: float, n: int) -> int:
    """The number of elements kept, k: ``round(density * n)``, at least 1.

    >>> elements_kept(0.01, 14728266), elements_kept(0.01, 3)
    (147283, 1)
    """
    return max(1, round(density * n))


def check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(
            f"density is {density}; it must be a share of the elements, above 0 and at most 1, such as 0.01"
        )


def check_steps(name: str, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"{name} is {steps}; it must be a number of steps, at least 1")
