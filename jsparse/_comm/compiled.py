"""What a compiled program sends, read from its text.

The text is that of XLA's HLO. A form that is not known is refused: what is not found is not sent.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from .collectives import COLLECTIVES, UNKNOWN_ROUNDS, Branches, Collective, Traffic
from .comm import SCOPE
from .cost import Cost, collective_cost

# For each collective of HLO, the name of its function in jax.lax; and for sums of another kind.
NAMES = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "ppermute",
    "collective-broadcast": "pbroadcast",
}
REDUCTIONS = {"maximum": "pmax", "or": "pmax", "minimum": "pmin", "and": "pmin"}
# Those whose groups have numbers of replicas, unless they say otherwise.
BY_REPLICA = {"all-reduce", "all-gather", "reduce-scatter"}
# Attributes that only an instruction with peers has.
PEERS = re.compile(r"\b(?:replica_groups|source_target_pairs|channel_id)=")
# Attributes that name computations.
CALLS = re.compile(
    r"\b(?:to_apply|calls|body|condition|branch_computations|true_computation|false_computation|called_computations"
    r"|select|scatter)=(\{[^}]*\}|%?[\w.\-]+)"
)
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
TYPE = re.compile(r"(pred|(s|u|f|bf|c)(\d+)(\w*))\[([\d,]*)\](?:\{[^}]*\})?")
# In a name, the scope of our collectives, and in transformations such as vmap.
OURS = re.compile(rf"(?:\w+\()*{SCOPE}\)*")
KINDS = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}


def compiled_traffic(compiled: jax.stages.Compiled, mesh: Mesh) -> Traffic:
    """What a device sends in a compiled program.

    Args:
      compiled: the program.
      mesh: the devices it was compiled for, in any order and under any names of axes.

    Raises:
      NotImplementedError: the backend has no text of its programs, or one of a form that is not
        known; or a loop of unknown length communicates.
      ValueError: the mesh has other devices than the program.
    """
    text = compiled.as_text()
    if text is None:
        raise NotImplementedError("this backend has no text of its compiled programs: compile for CPUs or GPUs")
    where = {device: place for place, device in np.ndenumerate(mesh.devices)}
    devices = _devices(compiled)
    if set(devices) != set(where):
        raise ValueError(
            f"the program was compiled for {len(devices)} devices, and the mesh has {len(where)}, not the same: pass "
            "the mesh along which its arguments are sharded"
        )
    places = np.array([where[device] for device in devices]).reshape(len(devices), mesh.devices.ndim)
    program = _Program(text, mesh.axis_names, places)
    return Traffic(tuple(program.walk(program.entry, 1)), mesh.axis_names)


def _devices(compiled: jax.stages.Compiled) -> list[Any]:
    """The devices of a program, in the order in which it counts them."""
    found: list[tuple[Sharding, tuple[int, ...]]] = []

    def note(info: Any, sharding: Sharding | None) -> None:
        if sharding is not None:  # Of an argument that the program does not use.
            found.append((sharding, info.shape))

    jax.tree.map(note, compiled.args_info, compiled.input_shardings)
    if not found:
        jax.tree.map(note, compiled.out_info, compiled.output_shardings)
    if not found:
        raise ValueError("the program has neither arguments nor results, which would tell its devices: give it some")
    sharding, shape = found[0]
    return list(sharding.devices_indices_map(shape))


class _Instruction(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
      type: of its result, in the words of HLO.
      opcode: its kind.
      rest: what follows: operands and attributes, with empty strings in place of all strings.
      line: the whole line.
    """

    type: str
    opcode: str
    rest: str
    line: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        depth, end = 1, 0
        while depth:
            depth += {"(": 1, ")": -1}.get(self.rest[end], 0)
            end += 1
        # Types may stand before names, and hold commas.
        plain = re.sub(r"/\*.*?\*/|\[[^]]*\]|\{[^}]*\}", "", self.rest[: end - 1])
        return [operand.split()[-1].removeprefix("%") for operand in plain.split(",") if operand.strip()]

    @property
    def calls(self) -> list[str]:
        """The names of the computations it refers to."""
        return [name for found in CALLS.findall(self.rest) for name in re.findall(r"[\w.\-]+", found)]

    @property
    def op_name(self) -> str:
        """What it comes from; empty if the compiler does not tell."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.line)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    def attribute(self, name: str, form: str = r"\w+") -> str | None:
        found = re.search(rf"\b{name}=({form})(?=, |$)", self.rest)
        return found[1] if found else None


class _Program:
    """The computations of a compiled program, each a dictionary of instructions by name.

    Attributes:
      entry: the name of the computation with which the program begins.
    """

    def __init__(self, text: str, axes: tuple[str, ...], places: np.ndarray):
        """Reads the text.

        Args:
          text: the program.
          axes: the names of the mesh's axes.
          places: each device's place in the mesh, shape ``(devices, axes)``.
        """
        self._axes, self._places = axes, places
        self._computations: dict[str, dict[str, _Instruction]] = {}
        entries, computation = [], None
        for line in text.splitlines():
            opens = COMPUTATION.match(line)
            if opens and not line.startswith("HloModule "):
                computation = self._computations[opens[2]] = {}
                entries += [opens[2]] if opens[1] else []
            elif line.startswith("}"):
                computation = None
            elif computation is not None and line:
                name, instruction = _instruction(line)
                computation[name] = instruction
        if len(entries) != 1:
            raise NotImplementedError(f"the compiled text has {len(entries)} programs, and one is known how to read")
        self.entry = entries[0]
        header = text[: text.index("\n")]
        counts = [re.search(rf"\b{key}=(\d+)", header) for key in ("replica_count", "num_partitions")]
        shape = [int(count[1]) if count else 1 for count in counts]
        if math.prod(shape) != len(places):
            raise NotImplementedError(f"the compiled text is for {shape} replicas and partitions, not for all devices")
        # What the text counts as a device: a partition of a replica.
        self._devices = np.arange(len(places)).reshape(shape)

    def walk(self, computation: str, times: int) -> Iterator[Collective | Branches]:
        """What a computation sends that runs so many times."""
        for instruction in self._computations[computation].values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in NAMES:
                yield self._collective(kind, instruction, self._computations[computation], times)
            elif kind.removesuffix("-done") not in NAMES:
                self._check_silent(instruction)
                yield from self._inside(kind, instruction, times)

    def _check_silent(self, instruction: _Instruction) -> None:
        """Refuses an instruction that may communicate in a way that is not known."""
        host = instruction.attribute("is_host_transfer") == "true"
        if (PEERS.search(instruction.rest) and not host) or 'custom_call_target="mpi_' in instruction.line:
            raise _refusal("sends is not known", instruction)
        unknown = re.sub(r"\bcontrol-predecessors=\{[^}]*\}", "", CALLS.sub("", instruction.rest))
        if "=%" in unknown or "={%" in unknown:
            raise _refusal("calls is not known", instruction)

    def _inside(self, kind: str, instruction: _Instruction, times: int) -> Iterator[Collective | Branches]:
        """What the computations send that an instruction of this kind calls."""
        match kind:
            case "while":
                count = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.line)
                rounds = int(count[1]) if count else 0
                runs = {"condition": rounds + 1, "body": rounds}
                names = {role: str(instruction.attribute(role, r"%?[\w.\-]+")).removeprefix("%") for role in runs}
                parts = [part for role in runs for part in self.walk(names[role], times * runs[role])]
                if parts and not count:
                    raise NotImplementedError(UNKNOWN_ROUNDS)
                yield from parts
            case "conditional":
                # Of two branches by a predicate, the text names the true one first.
                names = instruction.calls[::-1] if "true_computation=" in instruction.rest else instruction.calls
                branches = Branches(tuple(Traffic(tuple(self.walk(name, times)), self._axes) for name in names))
                if any(branch.parts for branch in branches.branches):
                    yield branches
            case "call" | "fusion" | "async":
                for name in instruction.calls:
                    yield from self.walk(name, times)
            case "async-update" | "async-done":
                pass  # They name what has been started.
            case _:
                for name in instruction.calls:
                    if next(self.walk(name, times), None):
                        raise _refusal("calls communicates, and how often is not known", instruction)

    def _collective(
        self, kind: str, instruction: _Instruction, computation: dict[str, _Instruction], times: int
    ) -> Collective:
        if "slice_sizes=" in instruction.rest:
            raise _refusal("sends is not known", instruction)
        operands = instruction.operands
        # The others give offsets and lengths, and where what arrives is put.
        sent = operands[:1] if kind == "ragged-all-to-all" else operands
        types, sizes = zip(*(_type(computation[operand].type) for operand in sent), strict=True)
        groups = self._groups(kind, instruction)
        distances = [np.ptp(self._places[group], axis=0) for group in groups]
        axes = tuple(axis for i, axis in enumerate(self._axes) if any(distance[i] for distance in distances))
        name = NAMES[kind]
        if kind == "all-reduce":
            name = self._reduction(instruction)
        cost = collective_cost(name, sum(sizes), max(map(len, groups))) if axes else Cost()
        # Later versions of XLA mark what they add.
        added, op_name = 'is_spmd_generated="true"' in instruction.line, instruction.op_name
        return Collective(
            name, _payload(types), axes, times, cost * times, op_name, not added and _is_ours(op_name, name)
        )

    def _reduction(self, instruction: _Instruction) -> str:
        """The name of an all-reduce in jax.lax; a sum, where it has none there."""
        (reducer,) = instruction.calls
        names = [REDUCTIONS.get(each.opcode) for each in self._computations[reducer].values()]
        return next(filter(None, names), NAMES["all-reduce"])

    def _groups(self, kind: str, instruction: _Instruction) -> list[np.ndarray]:
        """The groups of devices that exchange data, by their numbers in the program."""
        replicas, partitions = self._devices.shape
        by_channel = "channel_id=" in instruction.rest
        if instruction.attribute("use_global_device_ids") == "true":
            groups = _groups(kind, instruction, replicas * partitions)
            return [self._devices.reshape(-1)[group] for group in groups]
        if by_channel and kind not in BY_REPLICA:
            groups = _groups(kind, instruction, partitions)
            return [row[group] for group in groups for row in self._devices]
        groups = _groups(kind, instruction, replicas)
        if by_channel:
            return [self._devices[group].reshape(-1) for group in groups]
        return [column[group] for group in groups for column in self._devices.T]


def _instruction(line: str) -> tuple[str, _Instruction]:
    """The name of an instruction, and the instruction."""
    found = INSTRUCTION.match(STRING.sub('""', line))
    if not found:
        raise NotImplementedError(f"this line of the compiled text is not known: {line.strip()}")
    name, kind, opcode, rest = found.groups()
    return name, _Instruction(kind, opcode, rest, line)


def _refusal(what: str, instruction: _Instruction) -> NotImplementedError:
    return NotImplementedError(
        f"what this instruction of the compiled program {what}: {instruction.line.strip()[:400]}"
    )


def _type(text: str) -> tuple[str, int]:
    """The type and shape of an array, and its bytes. An element has a whole byte at least."""
    found = TYPE.fullmatch(text)
    if not found:
        raise NotImplementedError(f"a collective's operand has the type {text}, which is not known")
    whole, kind, bits, form, shape = found.groups()
    name = "bool" if whole == "pred" else f"{KINDS[kind]}{bits}{'_' * bool(form)}{form}"
    elements = math.prod(int(length) for length in shape.split(",") if length)
    return f"{name}[{shape}]", elements * max(1, int(bits or 8) // 8)


def _payload(types: Sequence[str]) -> str:
    """The operands of a collective, equal ones together."""
    counts = {one: types.count(one) for one in types}
    return " + ".join(f"{count} x {one}" if count > 1 else one for one, count in counts.items())


def _is_ours(op_name: str, name: str) -> bool:
    """Whether jsparse sends a collective. Of those that the compiler has merged, it must send all.

    XLA names what it adds after an operation beside it. That may be one of ours, but of another
    kind.

    Args:
      op_name: what it comes from.
      name: its name in ``jax.lax``.
    """
    merged = re.fullmatch(r"(|.*?/)\((.*)\)", op_name)
    if merged:
        return all(_is_ours(merged[1] + part, name) for part in _split(merged[2]))
    *scopes, primitive = op_name.split("/")
    return any(OURS.fullmatch(scope) for scope in scopes) and COLLECTIVES.get(primitive) == name


def _split(names: str) -> Iterator[str]:
    """The parts of merged names, which may be merged names themselves."""
    depth, part = 0, ""
    for letter in names:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ":" and not depth:
            yield part
            part = ""
        else:
            part += letter
    yield part


def _groups(kind: str, instruction: _Instruction, count: int) -> list[np.ndarray]:
    """The groups that an instruction names.

    Args:
      kind: the collective.
      instruction: the collective itself.
      count: how many devices, replicas or partitions there are.
    """
    listed = r"\{(?:\{[\d,]*\},?)*\}"
    iota, mesh = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?", r"mesh\[[^]]*\](?:, device_ids=\(.*?\)+)? \{[^}]*\}"
    permutes = kind == "collective-permute"
    name, form = ("source_target_pairs", listed) if permutes else ("replica_groups", f"{listed}|{iota}|{mesh}")
    text = instruction.attribute(name, form)
    if text is None:
        raise _refusal("sends goes to devices that are not known", instruction)
    if text.startswith("mesh"):
        return _groups_of_mesh(text)
    if text.startswith("["):
        shape, order = text.split("<=")
        return list(_iota(order).reshape(_numbers(shape)))
    groups = [np.array(_numbers(group), int) for group in re.findall(r"\{([\d,]+)\}", text)]
    return groups if groups or permutes else [np.arange(count)]


def _groups_of_mesh(text: str) -> list[np.ndarray]:
    """The groups along axes of a mesh that the text itself describes, or along parts of them.

    If an axis of 16 devices is laid out as ``[2,4,2]``, then ``'a':(2)4`` is its second part: what
    stands before it has 2 coordinates, and it has 4.
    """
    found = re.fullmatch(r"mesh\[(.*)\](?:, device_ids=\((.*)\))? \{(.*)\}", text)
    assert found
    sizes = {name: int(size) for name, size in re.findall(r"'?([^'=,]+)'?=(\d+)", found[1])}
    shape = tuple(sizes.values())
    order = found[2]
    if order is None:
        devices = np.arange(math.prod(shape))
    else:
        devices = _iota(order) if order.startswith("[") else np.array(_numbers(order))
    # Devices of a group have the same coordinates, but for those along which it goes.
    places = np.indices(shape).reshape(len(shape), -1)
    for name, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", found[3]):
        axis, whole = list(sizes).index(name), sizes[name]
        inner = whole // (int(before) * int(size)) if size else 1
        places[axis] -= places[axis] // inner % int(size or whole) * inner
    _, group = np.unique(places, axis=1, return_inverse=True)
    return [devices[group.reshape(-1) == number] for number in range(group.max() + 1)]


def _iota(text: str) -> np.ndarray:
    """All numbers in the order of ``[4,2]T(1,0)``: laid out in this shape, then transposed."""
    shape, _, order = text.partition("T")
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return numbers.transpose(_numbers(order) or None).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
