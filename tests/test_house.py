"""The house: what imports what, what is documented, and that what the documents show runs."""

import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
import kernels_pallas

ROOT = pathlib.Path(__file__).parent.parent
# Bottom to top: a module imports from its own line, but for its own room's, and from those above it here.
LAYERS = [
    {"kernels_pallas"},
    {
        "jsparse._density",
        "jsparse._operator",
        "jsparse._models",
        "jsparse._processes",
        "jsparse._random",
        "jsparse._redistribute",
    },
    {"jsparse._sparse_vector"},
    {"jsparse._flatten", "jsparse._buckets"},
    {"jsparse._comm", "jsparse._mpi"},
    {"jsparse._ledger"},
    {"jsparse._traffic"},
    {"jsparse.quantize"},
    {"jsparse.wire"},
    {"jsparse.select"},
    {"jsparse.allreduce"},
    {"jsparse._error_feedback", "jsparse._two_levels", "jsparse._parts", "jsparse._elementwise"},
    {"jsparse._momentum"},
    {"jsparse._config"},
    {"jsparse._synchronise"},
    {"jsparse._transform", "jsparse._a2sgd", "jsparse._per_worker", "jsparse._state", "jsparse._sync"},
    {"jsparse._presets", "jsparse._dense_presets", "jsparse._phases"},
    {"jsparse._trust_ratio", "jsparse._sharded", "jsparse._move", "jsparse._files"},
    {"jsparse._reshard"},
    {"jsparse._train_state"},
    {"jsparse._train_ground"},
    {"jsparse._train_step"},
    {"jsparse.cost"},
    {"jsparse.cli", "jsparse.__main__"},
]
COLLECTIVES = {"psum", "pmax", "pmin", "pmean", "all_gather", "all_to_all", "ppermute", "psum_scatter", "axis_index"}


def modules():
    for package in (kernels_pallas, jsparse):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            yield found.name


MODULES = list(modules())


def source(module: str) -> pathlib.Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def layer(module: str) -> int:
    return next(i for i, rooms in enumerate(LAYERS) if any(f"{module}.".startswith(f"{room}.") for room in rooms))


def imports(module: str):
    """The modules of ours that a module imports."""
    package = module if source(module).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in ("jsparse", "kernels_pallas"))
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            whole = ".".join(filter(None, [base, node.module or ""]))
            if whole.split(".")[0] in ("jsparse", "kernels_pallas"):
                names = [f"{whole}.{alias.name}" for alias in node.names]
                yield from (name if name in MODULES else whole for name in names)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str):
    if module == "jsparse":
        return
    for other in imports(module):
        assert layer(other) <= layer(module), f"{module} imports {other}, which stands above it"


@pytest.mark.parametrize("module", [module for module in MODULES if module != "jsparse._comm"])
def test_only_comm_names_a_collective(module: str):
    # To a kernel an axis's index is its place in the grid.
    named = COLLECTIVES - {"axis_index"} if module.startswith("kernels_pallas.") else COLLECTIVES
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Attribute) and node.attr in named:
            assert ast.unparse(node.value) not in ("lax", "jax.lax"), f"{module}: {ast.unparse(node)}"


def public():
    for package in (
        jsparse,
        jsparse.select,
        jsparse.allreduce,
        jsparse.quantize,
        jsparse.wire,
        jsparse.cost,
        kernels_pallas,
    ):
        for name in package.__all__:
            yield pytest.param(package, name, id=f"{package.__name__}.{name}")


@pytest.mark.parametrize(("package", "name"), list(public()))
def test_public_names_are_documented(package, name: str):
    thing = getattr(package, name)
    doc = inspect.getdoc(thing)
    assert doc
    assert not doc.startswith(f"{name}("), "the docstring that NamedTuple and dataclass make by themselves"
    if inspect.isfunction(thing):
        for parameter in inspect.signature(thing).parameters:
            assert parameter in doc, f"{name} says nothing of {parameter}"
        assert inspect.signature(thing).return_annotation is not inspect.Signature.empty
    reference = (ROOT / "docs/api.md").read_text()
    members = re.search(rf"automodule:: {package.__name__}\n   :members:([^\n]*)\n", reference)
    assert (
        re.search(rf"auto(function|class):: {name}\n", reference)
        or (
            (members and (not members[1] or name in members[1]))
            or name in ("bitmap", "choose", "varying_as", "varying_axes")
        )
        or inspect.ismodule(thing)
    ), f"{name} is not in docs/api.md"


@pytest.mark.parametrize("module", [module for module in MODULES if module != "jsparse.__main__"])
def test_doctests(module: str):
    globs = {"jax": jax, "jnp": jnp, "jsparse": jsparse, "optax": optax}
    tests = doctest.DocTestFinder().find(importlib.import_module(module), extraglobs=globs)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert not runner.failures


def test_some_doctests_are_found():
    finder = doctest.DocTestFinder()
    examples = sum(len(t.examples) for module in MODULES for t in finder.find(importlib.import_module(module)))
    assert examples >= 15


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")))
def test_code_in_the_docs_runs(page: str):
    namespace = {"jsparse": jsparse}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S):
        exec(compile(block.replace('jax.config.update("jax_num_cpu_devices", 8)', ""), page, "exec"), namespace)


def loop():
    """What the README's loop finds when it begins."""
    rng = np.random.default_rng(0)
    true = rng.standard_normal((20, 1)).astype(np.float32)
    x = rng.standard_normal((30, 64, 20)).astype(np.float32)
    return {
        "jax": jax,
        "np": np,
        "optax": optax,
        "Mesh": Mesh,
        "NamedSharding": NamedSharding,
        "P": PartitionSpec,
        "jsparse": jsparse,
        "params": {"w": jnp.zeros((20, 1))},
        "loss_fn": lambda params, batch: jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2),
        "batches": [(part, part @ true) for part in x],
    }


def run_loop(code: str) -> list[float]:
    """Runs it, ten times as fast, and returns the losses."""
    code = re.sub(r"adam\(1e-3\)", "adam(1e-1)", code) + "    losses.append(float(loss))\n"
    namespace = loop() | {"losses": []}
    exec(compile(code, "README.md", "exec"), namespace)
    return namespace["losses"]


def test_the_lines_that_change():
    """The README's diff: the loop before it, and after it, with and without check_vma."""
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[1].splitlines(keepends=True)
    before = "".join(line[1:] or "\n" for line in diff if line[0] != "+")
    after = "".join(line[1:] or "\n" for line in diff if line[0] != "-")
    dense = run_loop(before)
    assert dense[-1] < 0.2 * dense[0]
    for code in (after, after.replace("check_vma=False", "check_vma=True")):
        sparse = run_loop(code)
        assert sparse[0] == pytest.approx(dense[0])
        assert sparse != dense
    # And at density 1 the same lines train as before.
    np.testing.assert_allclose(run_loop(after.replace("density=0.01", "density=1.0")), dense, rtol=1e-3, atol=1e-5)


def test_the_rest_of_the_readme(capsys):
    namespace = loop() | {"mesh": Mesh(np.array(jax.devices()), ("data",))}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S):
        exec(compile(block, "README.md", "exec"), namespace)
    assert "all_to_all" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))])
def test_links_lead_somewhere(page: str):
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target
