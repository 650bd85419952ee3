"""Files that describe a transformation: a preset by name, with its options."""

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
# For each field that holds a part, the module that the part comes from.
PARTS = {"select": select, "wire": wire, "values": quantize, "quantize": quantize, "allreduce": allreduce}


def presets() -> dict[str, Callable[..., SparseAllReduce]]:
    """The presets and the general form, by name: the public functions of this folder's modules.

    Whole optimizers are none of them.
    """
    public, folder = importlib.import_module(__name__.partition(".")[0]), __name__.rpartition(".")[0]
    return {
        name: function
        for name, function in inspect.getmembers(public, inspect.isfunction)
        if function.__module__.startswith(f"{folder}.")
        and function.__module__ != __name__
        and inspect.signature(function).return_annotation is SparseAllReduce
    }


def options_of(preset: Callable[..., SparseAllReduce]) -> list[str]:
    """The names of a preset's options: its own, and those that it shares with other presets."""
    parameters = inspect.signature(preset).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    shares = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [*own, *Options.__annotations__] if shares else own


def from_file(path: str | os.PathLike[str], comm: CommLike | tuple[CommLike, CommLike]) -> SparseAllReduce:
    """Makes the transformation that a file describes, such as one that ``jsparse tune`` wrote.

    The file is JSON. It has the version of the format, the name of a preset (whole optimizers and
    :func:`phases` are none), and the preset's options by name. Selectors, wires, quantizers,
    all-reduces and an ErrorFeedback are objects with one key, the name of the part; its value has
    the part's options by name. An option that is left out has its default. Other keys of the file,
    such as the measurements of ``tune``, are ignored::

      {"jsparse": 1, "preset": "oktopk",
       "options": {"density": 0.01,
                   "wire": {"wire.Compact": {"values": {"quantize.BFloat16": {}}}}}}

    Args:
      path: the file.
      comm: what the preset is given: a mesh axis name, a tuple of them, or a :class:`Comm`. For
        ``hitopk`` and ``torus`` it is a tuple of two, ``(inter, intra)``.

    Returns:
      The preset's gradient transformation.

    Raises:
      OSError: the file can't be read.
      ValueError: the file is not such JSON, or has another version, or names something that does
        not exist; an option is out of range; ``comm`` does not have the form that the preset
        needs.

    Example::

      tx = optax.chain(jsparse.from_file("tune.json", "data"), optax.adam(1e-3))
    """
    try:
        return build(json.loads(pathlib.Path(path).read_text()), comm)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}); write it anew with jsparse tune --out {path}") from error
    except RecursionError as error:
        raise ValueError(f"{path} has too many brackets within each other; write it anew with jsparse tune") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def build(content: Any, comm: Any) -> SparseAllReduce:
    """Makes the transformation that a file's content describes."""
    if not isinstance(content, dict) or "jsparse" not in content:
        raise ValueError(
            'there is no "jsparse", the version of the format; jsparse tune --out FILE writes a file that has it'
        )
    if content["jsparse"] != VERSION:
        raise ValueError(
            f"the format's version is {content['jsparse']!r}, and this jsparse reads {VERSION}: write the file anew "
            "with jsparse tune, or install the version that wrote it"
        )
    known, name, options = presets(), str(content.get("preset")), content.get("options", {})
    _check_known("preset", name, known)
    if not isinstance(options, dict):
        raise ValueError(f'"options" is {options!r}; it must be an object, with a value for each option by name')
    preset, arguments = known[name], [comm]
    if "inter" in inspect.signature(preset).parameters:
        if not isinstance(comm, tuple) or len(comm) != 2:
            raise ValueError(f"comm is {comm!r}; {name} has two levels, so pass a tuple of two, (inter, intra)")
        arguments = list(comm)
    return _called(name, preset, arguments, options, options_of(preset))


def describe(preset: str, **options: Any) -> dict[str, Any]:
    """The content of a file for a preset and its options."""
    parameters = inspect.signature(presets()[preset]).parameters
    # None is left out where it is the default.
    given = {
        name: _plain(option)
        for name, option in options.items()
        if option is not None or (name in parameters and parameters[name].default is not None)
    }
    return {"jsparse": VERSION, "preset": preset, "options": given}


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Writes JSON atomically: at any time the file is the whole old one or the whole new one.

    Links are followed. What is no plain file, such as a pipe, and a file whose place no other can
    take, as its folder may not be written to, are written in place.
    """
    text = json.dumps(content, indent=2) + "\n"
    path = pathlib.Path(path).resolve()
    if path.exists() and (not path.is_file() or not os.access(path.parent, os.W_OK)):
        path.write_text(text)
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        new = pathlib.Path(directory, path.name)
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            new.replace(path)
        except OSError:
            path.write_text(text)


def _plain(value: Any) -> Any:
    """An option's value in the form that JSON can hold."""
    if not dataclasses.is_dataclass(value):
        return value
    names = {part: name for where in (*PARTS, "error_feedback") for name, part in _parts(where).items()}
    if type(value) not in names:
        raise ValueError(f"{value!r} is none of jsparse's own parts, so a file can't name it: use a part of jsparse")
    fields = {
        field.name: _plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.compare and getattr(value, field.name) != field.default
    }
    return {names[type(value)]: fields}


def _part(where: str, value: Any) -> Any:
    """An option's value, made from the form that JSON holds."""
    known = _parts(where)
    if not isinstance(value, dict):
        if where in PARTS and value is not None:
            raise ValueError(f'{where} is {value!r}; it must be an object, such as {{"{next(iter(known))}": {{}}}}')
        return value
    if not known:
        raise ValueError(f"{where} is {value!r}; it must be a number, a text, true or false")
    if len(value) != 1 or not isinstance(next(iter(value.values())), dict):
        raise ValueError(f"{where} is {value!r}; it must be an object with one key, such as {next(iter(known))!r}")
    name, fields = next(iter(value.items()))
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
    except TypeError as error:  # An option is missing or has a wrong type.
        raise ValueError(f"{name} can't be made from {given}: {error}; its options are {', '.join(known)}") from error


def _parts(where: str) -> dict[str, Any]:
    """The parts that a field may hold, by the names that files give them."""
    if where == "error_feedback":
        return {"ErrorFeedback": ErrorFeedback}
    if where not in PARTS:
        return {}
    module = PARTS[where]
    room = module.__name__.rpartition(".")[2]
    public = {f"{room}.{name}": getattr(module, name) for name in module.__all__}
    return {name: part for name, part in public.items() if dataclasses.is_dataclass(part)}


def _check_known(what: str, name: Any, known: Iterable[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), list(known), 1)
        meant = f"; {near[0]!r} is meant, perhaps" if near else ""
        raise ValueError(f"there is no {what} {name!r}{meant}: choose one of {', '.join(known)}")
