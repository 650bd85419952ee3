"""Drawing, where matplotlib is there."""

from typing import Any


def pyplot() -> Any:
    """``matplotlib.pyplot``, for files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
