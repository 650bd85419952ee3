"""A transformation as a file says it: a preset by name, with its options."""

import dataclasses
import difflib
import importlib
import inspect
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .. import allreduce, quantize, select, wire
from .._comm.comm import CommLike
from .._engine.memory import ErrorFeedback
from .._engine.transform import SparseAllReduce
from .general import Options

VERSION = 1
ROOMS = {"select": select, "wire": wire, "quantize": quantize, "allreduce": allreduce}
# Where a part stands, and of which room it is.
PARTS = {"select": "select", "wire": "wire", "values": "quantize", "quantize": "quantize", "allreduce": "allreduce"}


def presets() -> dict[str, Callable[..., SparseAllReduce]]:
    """The presets by name, and the general form: those public functions that stand in this folder."""
    public, folder = importlib.import_module(__name__.partition(".")[0]), __name__.rpartition(".")[0]
    functions = {name: getattr(public, name) for name in public.__all__ if inspect.isfunction(getattr(public, name))}
    return {
        name: function
        for name, function in functions.items()
        if function.__module__.startswith(f"{folder}.") and function.__module__ != __name__
    }


def options_of(preset: Callable[..., SparseAllReduce]) -> list[str]:
    """The options of a preset by name: its own, and those that it shares with others."""
    names = []
    for name, parameter in inspect.signature(preset).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            names.append(name)
        elif parameter.kind is parameter.VAR_KEYWORD:
            names.extend(Options.__annotations__)
    return names


def from_file(path: str | os.PathLike[str], comm: CommLike | tuple[CommLike, CommLike]) -> SparseAllReduce:
    """The transformation that a file describes, such as ``jsparse tune`` writes it.

    The file is JSON: the version of the format, a preset's name, its options by name. Selectors, wires, quantizers and
    all-reduces among these are objects of one key, what they are called; what they leave out is as by default. Further
    keys of the file, such as what ``tune`` measured, are not read::

      {"jsparse": 1, "preset": "oktopk",
       "options": {"density": 0.01, "wire": {"wire.Compact": {"values": {"quantize.BFloat16": {}}}}}}

    Args:
      path: the file.
      comm: what the preset is given: a mesh axis name, a tuple of them, or a :class:`Comm`; for ``hitopk`` and
        ``torus`` a tuple of two, ``(inter, intra)``.

    Returns:
      The preset's gradient transformation.

    Raises:
      ValueError: the file is not such JSON, is of another version, or names what there is not; an option is out of
        range; ``comm`` is not of the preset's form.

    Example::

      tx = optax.chain(jsparse.from_file("tune.json", "data"), optax.adam(1e-3))
    """
    try:
        content = json.loads(pathlib.Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}); write it anew with jsparse tune --out {path}") from error
    try:
        return build(content, comm)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def build(content: Any, comm: Any) -> SparseAllReduce:
    """The transformation of a file's content."""
    if not isinstance(content, dict) or "jsparse" not in content:
        raise ValueError('there is no "jsparse", the version; jsparse tune --out FILE writes such a file')
    if content["jsparse"] != VERSION:
        raise ValueError(
            f"the format's version is {content['jsparse']!r}, and this jsparse reads {VERSION}: write the file anew "
            "with jsparse tune, or install the version that wrote it"
        )
    known, name, options = presets(), str(content.get("preset")), content.get("options", {})
    _check_known("preset", name, known)
    if not isinstance(options, dict):
        raise ValueError(f'"options" is {options!r}; it is an object of options by name')
    preset = known[name]
    parameters = inspect.signature(preset).parameters
    keywords = options_of(preset)
    arguments = [comm]
    if "inter" in parameters:
        if not isinstance(comm, tuple) or len(comm) != 2:
            raise ValueError(f"{name} is over two levels: comm is a tuple of two, (inter, intra), and not {comm!r}")
        arguments = list(comm)
    return _called(name, preset, arguments, options, keywords)


def describe(preset: str, **options: Any) -> dict[str, Any]:
    """The content of a file for a preset and its options."""
    return {
        "jsparse": VERSION,
        "preset": preset,
        "options": {name: _plain(option) for name, option in options.items() if option is not None},
    }


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Writes JSON so that at any time the whole old file is there, or the whole new one."""
    path = pathlib.Path(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """What JSON can hold of an option."""
    if not dataclasses.is_dataclass(value):
        return value
    room = next((room for room, module in ROOMS.items() if getattr(module, type(value).__name__, 0) is type(value)), "")
    if not room and not isinstance(value, ErrorFeedback):
        raise ValueError(f"{value!r} is none of jsparse's own parts: a file can't name it")
    fields = {
        field.name: _plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.compare and getattr(value, field.name) != field.default
    }
    return {f"{room}.{type(value).__name__}".lstrip("."): fields}


def _part(where: str, value: Any) -> Any:
    """An option of what JSON holds of it."""
    if not isinstance(value, dict):
        if where in PARTS and value is not None:
            raise ValueError(f'{where} is {value!r}; it is an object of one key, such as {{"{_some(where)}": {{}}}}')
        return value
    if len(value) != 1 or not isinstance(next(iter(value.values())), dict):
        raise ValueError(f"{where} is {value!r}; it is an object of one key, a name such as {_some(where)!r}")
    name, fields = next(iter(value.items()))
    if where == "error_feedback":
        known: dict[str, Any] = {"ErrorFeedback": ErrorFeedback}
    else:
        room = PARTS.get(where)
        if room is None:
            raise ValueError(f"{where} is {value!r}; it is a number, a text, true or false")
        known = {f"{room}.{key}": part for key, part in _classes(room).items()}
    _check_known(where, name, known)
    names = [field.name for field in dataclasses.fields(known[name]) if field.compare]
    return _called(name, known[name], [], fields, names)


def _called(
    name: str, function: Callable[..., Any], arguments: list[Any], options: Mapping[str, Any], known: Any
) -> Any:
    for option in options:
        _check_known(f"option of {name}", option, known)
    given = {option: _part(option, value) for option, value in options.items()}
    try:
        return function(*arguments, **given)
    except TypeError as error:  # One is missing, or of a wrong type.
        raise ValueError(f"{name} can't be made of {given}: {error}; its options are {', '.join(known)}") from error


def _classes(room: str) -> dict[str, Any]:
    module = ROOMS[room]
    return {name: getattr(module, name) for name in module.__all__ if dataclasses.is_dataclass(getattr(module, name))}


def _some(where: str) -> str:
    """A name that could stand there."""
    room = PARTS.get(where)
    return f"{room}.{next(iter(_classes(room)))}" if room else "ErrorFeedback"


def _check_known(what: str, name: Any, known: Iterable[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), list(known), 1)
        meant = f"; {near[0]!r} is meant, perhaps" if near else ""
        raise ValueError(f"there is no {what} {name!r}{meant}: choose one of {', '.join(known)}")
