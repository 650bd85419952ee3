"""A sample as bytes, behind a checksum.

An entry is a CRC-32, the length of a header, the header, and the bytes of the sample's arrays and
bytes objects one after another. The header is JSON, so that reading a file runs no code of it.
"""

import ast
import functools
import io
import json
import zlib
from typing import Any

import numpy as np

_WORD = 4


@functools.lru_cache(maxsize=256)
def _dtype(text: str) -> np.dtype[Any]:
    """The dtype of a text that :func:`_text` wrote."""
    return np.lib.format.descr_to_dtype(ast.literal_eval(text)) if text[0] in "'[(" else np.dtype(text)


def _text(dtype: np.dtype[Any]) -> str:
    """A dtype as text; those of ml_dtypes, such as bfloat16, by their names."""
    text = dtype.name if dtype.isbuiltin == 2 else repr(np.lib.format.dtype_to_descr(dtype))
    if dtype.hasobject or _dtype(text) != dtype:
        raise TypeError(f"a sample has an array of dtype {dtype}, {_ALLOWED}")
    return text


_ALLOWED = (
    "which can't be cached. A sample is made of dicts, lists, tuples, NumPy arrays and scalars without objects, "
    "bool, int, float, str, bytes and None: let prepare return such a sample"
)


def _pack(x: Any, parts: list[bytes]) -> Any:
    """A part of a sample as JSON; its bytes are appended to ``parts``."""
    kind = type(x)
    if x is None or kind in (bool, int, float, str):
        return x
    if kind is list:
        return [_pack(child, parts) for child in x]
    if kind is tuple:
        return {"tuple": [_pack(child, parts) for child in x]}
    if kind is dict:
        return {"dict": [[_pack(key, parts), _pack(child, parts)] for key, child in x.items()]}
    if kind is bytes:
        parts.append(x)
        return {"bytes": len(x)}
    if kind in (np.ndarray, np.memmap) or isinstance(x, np.generic):
        parts.append(x.tobytes())
        return {"scalar" if isinstance(x, np.generic) else "array": [_text(x.dtype), x.shape]}
    raise TypeError(f"a sample has a {kind.__module__}.{kind.__qualname__}, {_ALLOWED}")


def _unpack(node: Any, file: io.BytesIO) -> Any:
    """What :func:`_pack` packed; its bytes come next in the file."""
    if type(node) is list:
        return [_unpack(child, file) for child in node]
    if type(node) is not dict:
        return node
    ((kind, value),) = node.items()
    if kind == "tuple":
        return tuple(_unpack(child, file) for child in value)
    if kind == "dict":
        return {_unpack(key, file): _unpack(child, file) for key, child in value}
    if kind == "bytes":
        return file.read(value)
    array = np.empty(value[1], _dtype(value[0]))
    file.readinto(array.reshape(-1).view(np.uint8).data)
    return array[()] if kind == "scalar" else array


def encode(sample: Any, salt: bytes) -> bytes:
    """Makes an entry.

    Args:
      sample: dicts, lists and tuples of NumPy arrays, NumPy scalars, bool, int, float, str, bytes
        and None.
      salt: what the entry belongs to; it is part of the checksum, not of the entry.

    Raises:
      TypeError: the sample has something else.
    """
    parts: list[bytes] = []
    header = json.dumps(_pack(sample, parts), separators=(",", ":")).encode()
    body = b"".join([len(header).to_bytes(_WORD, "little"), header, *parts])
    return zlib.crc32(body, zlib.crc32(salt)).to_bytes(_WORD, "little") + body


def sound(entry: bytes, salt: bytes) -> bool:
    """Whether an entry has the bytes that :func:`encode` gave it, for this salt."""
    body = memoryview(entry)[_WORD:]
    return zlib.crc32(body, zlib.crc32(salt)) == int.from_bytes(entry[:_WORD], "little")


def decode(entry: bytes) -> Any:
    """The sample of a sound entry. Its arrays are new, and the caller may change them."""
    file = io.BytesIO(entry)
    file.seek(_WORD)
    return _unpack(json.loads(file.read(int.from_bytes(file.read(_WORD), "little"))), file)
