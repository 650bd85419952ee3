"""Puts faults into a copy of the code, one at a time, and shows those that the short tests miss.

``make mutants`` draws 60 lines of the rooms below, and changes an operator, a number or a
condition in each. ``ARGS="300 --seed 7 --room _engine"`` draws 300 others, from one room, or as
many as it has. A fault that is missed is harmless, or wants a test.
"""

import argparse
import ast
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import MutationSpec, TestOutcome

from algorithms import QUICK, ROWS, parts

# The judges of a room: files of tests, and rows of the invariants for files that belong to no row.
# Those of a row's parts are judged by their rows.
ROOMS = {
    "select": ("selectors", "topk_allgather-3 or oktopk-3"),
    "allreduce": ("allreduce gather threshold", "oktopk-3 or gtopk-3 or ssar or dsar"),
    "wire": ("wire", "topk_allgather-compact-3 or topk_allgather-3"),
    "_engine": ("transform sync state phases a2sgd two_levels dgc", "topk_allgather-3 or dgc-3 or quantized-3"),
}
LIMIT = 300  # Seconds for a mutant's tests. Without an end it counts as found.

# Of many replacements the one that is hardest to see.
BINARY = "Add_Sub Sub_Add Mul_FloorDiv Div_Mul FloorDiv_Mul Mod_FloorDiv RShift_LShift LShift_RShift BitAnd_BitOr"
COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_Gt LtE_GtE Gt_Lt GtE_LtE Is_IsNot IsNot_Is"
OPERATORS = [
    *(f"core/ReplaceBinaryOperator_{name}" for name in [*BINARY.split(), "BitOr_BitAnd"]),
    *(f"core/ReplaceComparisonOperator_{name}" for name in COMPARISON.split()),
    *(f"core/ReplaceUnaryOperator_Delete_{name}" for name in ("USub", "Invert", "Not")),
    *(f"core/{name}" for name in ("AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse")),
    *(f"core/{name}" for name in ("ReplaceFalseWithTrue", "NumberReplacer", "ZeroIterationForLoop")),
]


def silent(path: pathlib.Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a file has types, decorators and errors: begins and ends, as lines and columns."""
    nodes: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(path.read_text())):
        nodes += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        nodes += [node] if isinstance(node, ast.Raise) else getattr(node, "decorator_list", [])
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes if n is not None]


def mutants(path: pathlib.Path) -> Iterator[MutationSpec]:
    tree, spans = get_ast_from_path(path), silent(path)
    for name in OPERATORS:
        operator = plugins.get_operator(name)()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, (begin, end) in enumerate(places):
            if not any(first <= begin < last for first, last in spans):
                yield MutationSpec(path, name, occurrence, begin, end)


def judge(room: str, path: pathlib.Path | None = None) -> str:
    """The command that tests a file, or a room."""
    files, rows = ROOMS[room]
    names = files.split()
    if path:
        module = ".".join(path.with_suffix("").parts)
        own = [row for row in ROWS if row.name in QUICK and any(part.__module__ == module for part in parts(row))]
        rows = " or ".join(f"{row.name}-{row.usual_size}" for row in own[:2]) or rows
        names.sort(key=lambda name: name != path.stem)
    tests = " ".join(f"tests/test_{name}.py" for name in [*names, "bad_input", "invariants"])
    return f'{sys.executable} -m pytest -n 0 -x -q --tb=line {tests} -k "not test_invariants or {rows}"'


def copy(to: str) -> None:
    """Copies the checkout, with what is not committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True
    )
    for name in filter(os.path.isfile, listed.stdout.splitlines()):
        target = pathlib.Path(to, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=60, help="how many mutants (60)")
    parser.add_argument("--seed", type=int, default=0, help="chooses them (0)")
    parser.add_argument("--room", choices=ROOMS, action="append", help="a folder of jsparse/; all four by default")
    args = parser.parse_args()
    rooms = args.room or list(ROOMS)
    with tempfile.TemporaryDirectory() as place:
        copy(place)
        os.chdir(place)
        # Most of the programs are the same for each mutant.
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": f"{place}/cache", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        lines = defaultdict(list)
        for room in rooms:
            for path in sorted(pathlib.Path("jsparse", room).glob("*.py")):
                for mutant in mutants(path):
                    lines[room, path, mutant.start_pos[0]].append(mutant)
        draw, missed = random.Random(args.seed), []
        drawn = draw.sample(sorted(lines), min(args.count, len(lines)))
        for room, path, line in drawn:
            result = mutate_and_test([draw.choice(lines[room, path, line])], judge(room, path), LIMIT)
            found = result.test_outcome == TestOutcome.KILLED
            missed += [] if found else [room]
            print(
                f"found {path}:{line}" if found else f"MISSED {path}:{line}\n{result.diff or result.output}", flush=True
            )
        print(f"{len(missed)} of {len(drawn)} mutants missed, drawn from {len(lines)} lines")
        # Tests that always fail find everything. A mutant that they missed shows that they pass.
        for room in sorted({room for room, *_ in drawn} - set(missed)):
            outcome, output = run_tests(judge(room), LIMIT)
            if outcome != TestOutcome.SURVIVED:
                sys.exit(f"the tests of {room} fail without a mutant:\n{output}")


if __name__ == "__main__":
    main()
