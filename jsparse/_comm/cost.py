"""The cost of each collective: all counts of bytes and messages use this one table."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one worker sends: bytes and messages.

    >>> Cost(8, 1) + Cost(4, 2)
    Cost(bytes=12, messages=3)
    """

    bytes: int = 0
    messages: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.messages + other.messages)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.bytes * times, self.messages * times)


def collective_cost(name: str, payload: int, size: int) -> Cost:
    """What a worker sends in one collective.

    The bytes are those of a bandwidth-optimal algorithm. The number of messages is that of the
    papers.

    Args:
      name: the collective's name in ``jax.lax``.
      payload: bytes of the worker's operand. For a ragged exchange, that is the most it can send.
      size: P.

    Raises:
      NotImplementedError: the collective is not in the table.
    """
    rounds = (size - 1).bit_length()
    match name:
        case "psum" | "pmax" | "pmin":
            return Cost(-(-2 * payload * (size - 1) // size), 2 * rounds)
        case "all_gather":
            return Cost(payload * (size - 1), rounds)
        case "all_to_all" | "ragged_all_to_all":
            return Cost(-(-payload * (size - 1) // size), size - 1)
        case "psum_scatter":
            return Cost(-(-payload * (size - 1) // size), rounds)
        case "pbroadcast":
            return Cost(payload * min(size - 1, 1), rounds)
        case "ppermute":
            return Cost(payload, 1)
    raise NotImplementedError(f"the cost of {name!r} is not known; add it to collective_cost")
