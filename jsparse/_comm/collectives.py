"""What a program sends: its collectives, those of its branches, and what they cost together."""

import dataclasses
from collections.abc import Iterable, Iterator

from .cost import Cost

# For each collective primitive of JAX, the name of its function in jax.lax.
COLLECTIVES = {
    "psum": "psum",
    "psum_invariant": "psum",
    "pmax": "pmax",
    "pmin": "pmin",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "pbroadcast",
    "reduce_scatter": "psum_scatter",
}
UNKNOWN_ROUNDS = (
    "a while loop communicates, and its number of rounds is not known before it runs: "
    "use lax.scan, or lax.fori_loop with a static number of rounds"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      name: its name in ``jax.lax``.
      payload: type and shape of a worker's operand, such as ``int32[8,100]``. A collective that
        the compiler has merged has several.
      axes: the axes over which it runs; for an :class:`MpiComm`, the name of the communicator. In
        a compiled program, the axes along which the devices that exchange data differ.
      times: how often the program runs it.
      cost: what a worker sends in it, in all runs together.
      op_name: in a compiled program, the operation it comes from, such as
        ``jit(step)/jvp()/dot_general``; empty if the compiler does not tell. None in a traced
        program.
      ours: in a compiled program, whether jsparse sends it. Otherwise XLA has added it, or the
        model's own code names it. None in a traced program.
    """

    name: str
    payload: str
    axes: tuple[str, ...]
    times: int
    cost: Cost
    op_name: str | None = None
    ours: bool | None = None

    def __str__(self) -> str:
        times = f" x {self.times}" if self.times > 1 else ""
        by_xla = f", by XLA for {self.op_name}" if self.op_name else ", by XLA (unnamed)"
        whose = "" if self.ours is None else ", by jsparse" if self.ours else by_xla
        return f"{self.name} {self.payload} over {', '.join(self.axes) or 'no axis'}{times}{whose}"


@dataclasses.dataclass(frozen=True)
class Branches:
    """Parts of a program of which one runs.

    The branch that sends the most bytes may not be the one that sends the most messages. So bytes
    and messages are bounded each by itself.
    """

    branches: tuple["Traffic", ...]

    @property
    def cost(self) -> Cost:
        """The most bytes of any branch, and the most messages of any branch."""
        costs = [branch.cost for branch in self.branches]
        return Cost(max(cost.bytes for cost in costs), max(cost.messages for cost in costs))

    @property
    def least(self) -> Cost:
        """The fewest bytes of any branch, and the fewest messages of any branch."""
        costs = [branch.least for branch in self.branches]
        return Cost(min(cost.bytes for cost in costs), min(cost.messages for cost in costs))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one worker sends in a program.

    Attributes:
      parts: the program's collectives, and the branches that hold others, in the order of the
        program.
      axes: the axes over which the program can communicate.
    """

    parts: tuple[Collective | Branches, ...]
    axes: tuple[str, ...]

    @property
    def cost(self) -> Cost:
        """The most bytes and the most messages that a worker sends."""
        return sum((part.cost for part in self.parts), Cost())

    @property
    def least(self) -> Cost:
        """The fewest bytes and the fewest messages that a worker sends."""
        return sum((part.least if isinstance(part, Branches) else part.cost for part in self.parts), Cost())

    @property
    def bytes(self) -> int:
        """The most bytes that a worker sends."""
        return self.cost.bytes

    @property
    def messages(self) -> int:
        """The most messages that a worker sends."""
        return self.cost.messages

    @property
    def collectives(self) -> Iterator[Collective]:
        """All collectives, those in branches too."""
        for part in self.parts:
            if isinstance(part, Collective):
                yield part
            else:
                for branch in part.branches:
                    yield from branch.collectives

    def over(self, axis: str | tuple[str, ...]) -> "Traffic":
        """What crosses an axis: the collectives that run over it, alone or among others.

        Args:
          axis: the axis; or several, any of which a collective may cross.

        Raises:
          ValueError: the program has no such axis.
        """
        names = (axis,) if isinstance(axis, str) else axis
        for name in names:
            if name not in self.axes:
                raise ValueError(
                    f"there is no axis {name!r} in this program; its axes are {', '.join(self.axes) or 'none'}"
                )
        return Traffic(tuple(_over(self.parts, set(names))), self.axes)

    def __str__(self) -> str:
        return "\n".join([f"{'bytes':>12} {'messages':>8}  collective", *self._lines("")])

    def _lines(self, indent: str) -> Iterator[str]:
        for part in self.parts:
            figures = f"{part.cost.bytes:12} {part.cost.messages:8}  {indent}"
            if isinstance(part, Branches):
                yield f"{figures}one of"
                for number, branch in enumerate(part.branches):
                    yield f"{branch.bytes:12} {branch.messages:8}  {indent}  branch {number}"
                    yield from branch._lines(indent + "    ")
            else:
                yield f"{figures}{part}"


def _over(parts: Iterable[Collective | Branches], axes: set[str]) -> Iterator[Collective | Branches]:
    """The parts that cross any of the axes."""
    for part in parts:
        if isinstance(part, Collective):
            if axes & set(part.axes):
                yield part
        else:
            branches = Branches(tuple(Traffic(tuple(_over(way.parts, axes)), way.axes) for way in part.branches))
            if any(way.parts for way in branches.branches):
                yield branches
