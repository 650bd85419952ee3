"""The house: what imports what, what is documented, and that what the documents show runs."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jsparse
import kernels_pallas
from algorithms import ROWS
from jsparse._presets import files

ROOT = pathlib.Path(__file__).parent.parent
# Bottom to top: a module imports from its own folder, and from the folders above it in this list.
LAYERS = (
    "kernels_pallas",
    "jsparse.data",
    "jsparse._vector",
    "jsparse._comm",
    "jsparse.quantize",
    "jsparse.wire",
    "jsparse.select",
    "jsparse.allreduce",
    "jsparse._engine",
    "jsparse._presets",
    "jsparse._train",
    "jsparse._reshard",
    "jsparse._share",
    "jsparse.cost",
    "jsparse.bench",
    "jsparse.cli",
)
# jsparse itself imports from everywhere; the command line begins in __main__.
ABOVE = {"jsparse": len(LAYERS), "jsparse.__main__": len(LAYERS)}
PUBLIC = (
    jsparse,
    jsparse.select,
    jsparse.allreduce,
    jsparse.quantize,
    jsparse.wire,
    jsparse.cost,
    jsparse.data,
    kernels_pallas,
)
COLLECTIVES = {
    *("psum", "pmax", "pmin", "pmean", "psum_scatter", "ppermute", "pshuffle", "pswapaxes", "pbroadcast"),
    *("all_gather", "all_gather_invariant", "all_to_all", "ragged_all_to_all", "axis_index"),
}


def modules():
    for package in (kernels_pallas, jsparse):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            yield found.name


MODULES = list(modules())


def source(module: str) -> pathlib.Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def within(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"{folder}.")


def layer(module: str) -> int:
    if module in ABOVE:
        return ABOVE[module]
    return next(i for i, folder in enumerate(LAYERS) if within(module, folder))


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
    for other in imports(module):
        assert layer(other) <= layer(module), f"{module} imports {other}, which stands above it"


def importers(folder: str) -> set[str]:
    """The modules outside a folder that import from it."""
    return {
        module
        for module in MODULES
        if not within(module, folder) and any(within(other, folder) for other in imports(module))
    }


def test_only_the_command_line_imports_benchmarks():
    found = importers("jsparse.bench")
    assert found
    assert all(within(module, "jsparse.cli") for module in found)


def test_no_selector_imports_an_allreduce():
    found = importers("jsparse.allreduce")
    assert found
    assert not any(within(module, "jsparse.select") for module in found)


@pytest.mark.parametrize(
    "module", sorted({*MODULES} - {f"jsparse._comm.{name}" for name in ("comm", "gloo", "permute")})
)
def test_only_comm_names_a_collective(module: str):
    # To a kernel an axis's index is its place in the grid.
    named = COLLECTIVES - {"axis_index"} if within(module, "kernels_pallas") else COLLECTIVES
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Attribute) and node.attr in named:
            assert ast.unparse(node.value) not in ("lax", "jax.lax"), f"{module}: {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and node.module == "jax.lax":
            assert not named & {alias.name for alias in node.names}, f"{module}: {ast.unparse(node)}"


def test_comm_names_collectives():
    """So that the test above has something to find."""
    text = source("jsparse._comm.comm").read_text()
    named = {name for name in COLLECTIVES if re.search(rf"\blax\.{name}\b", text)}
    assert named >= {"psum", "all_gather", "ppermute", "axis_index"}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_public_packages_leak_no_names(package):
    """A name without an underscore is in the package's ``__all__``, or is one of its modules."""
    assert sorted(package.__all__) == list(dict.fromkeys(sorted(package.__all__)))
    assert set(package.__all__) <= set(dir(package))
    files = {found.name for found in pkgutil.iter_modules(package.__path__)}
    leaks = {name for name in dir(package) if not name.startswith("_")} - set(package.__all__)
    own = {name for name in leaks & files if sys.modules.get(f"{package.__name__}.{name}") is getattr(package, name)}
    assert leaks == own


def public():
    for package in PUBLIC:
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
            or name in ("bitmap", "choose", "varying_as", "varying_axes", "zero_of")
        )
        or inspect.ismodule(thing)
    ), f"{name} is not in docs/api.md"


@pytest.mark.parametrize("module", [module for module in MODULES if module != "jsparse.__main__"])
def test_modules_import(module: str):
    assert importlib.import_module(module).__name__ == module


@pytest.mark.parametrize("module", [module for module in MODULES if ">>> " in source(module).read_text()])
def test_doctests(module: str):
    globs = {"jax": jax, "jnp": jnp, "jsparse": jsparse, "optax": optax}
    tests = doctest.DocTestFinder().find(importlib.import_module(module), extraglobs=globs)
    assert sum(len(test.examples) for test in tests)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert not runner.failures


def blocks(page: str) -> list[str]:
    """The Python code on a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


def links(page: str) -> list[str]:
    """The files to which a page leads."""
    return re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))


# Pages whose code trains for some seconds.
LONG = (
    "docs/quickstart.md",
    "docs/clusters.md",
    "docs/algorithms.md",
    "docs/non_finite.md",
    "docs/metrics.md",
    "docs/sharded.md",
    "docs/local_steps.md",
    "docs/reshard.md",
)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] * (page in LONG)) for page in PAGES if blocks(page)]
)
def test_code_in_the_docs_runs(page: str):
    namespace: dict[str, object] = {}
    for block in blocks(page):
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


@pytest.mark.full
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
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert "all_to_all" in capsys.readouterr().out


@pytest.mark.parametrize("page", list(filter(links, ["README.md", "CONTRIBUTING.md", *PAGES])))
def test_links_lead_somewhere(page: str):
    for target in links(page):
        assert ((ROOT / page).parent / target).exists(), target


def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["README.md", "docs/algorithms.md"])
def test_tables_say_what_the_rows_say(page: str):
    """``make tables`` writes them."""
    assert tables().written(page) == (ROOT / page).read_text()


def test_every_preset_has_a_row_and_a_section():
    named = [name for row in ROWS for name in tables().named(row)]
    assert len(named) == len(set(named))
    assert set(named) == set(files.presets()) - {"sparse_allreduce"}
    headings = re.findall(r"^##+ (.*)$", (ROOT / "docs/algorithms.md").read_text(), flags=re.M)
    sections = {name for heading in headings for name in re.split(r"[, ]+", heading)}
    assert set(named) <= sections
