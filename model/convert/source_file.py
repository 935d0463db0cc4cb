"""Source files: reads files of other programs. All errors are of the class ConvertError.

`model/files.py` reads the bytes and raises OSError for a pipe, a device, a folder, or a file that
is missing or too large. This module turns these errors into ConvertError, and raises it for files
that are not UTF-8 or not JSON.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from logitd.model.convert.foreign import ConvertError
from logitd.model.files import TEXT_BYTES, VOCABULARY_BYTES, read_regular, require_regular

Kind = TypeVar("Kind", dict[str, Any], list[Any])


def require_source(path: Path) -> None:
    """Raise ConvertError unless a path is a regular file. Call this before a library opens the
    file."""
    try:
        require_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def source_bytes(path: Path, most: int = VOCABULARY_BYTES) -> bytes:
    """Read a file. Raises ConvertError if the file cannot be read or is larger than `most`
    bytes."""
    try:
        return read_regular(path, most)
    except OSError as error:
        raise _unreadable(path, error) from error


def source_text(path: Path, most: int = TEXT_BYTES, *, lines: bool = True) -> str:
    """Read a UTF-8 text file. With `lines`, line endings are converted to "\\n", as Python's open()
    does. Raises ConvertError."""
    try:
        text = source_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path} is not UTF-8 text: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if lines else text


def source_json(path: Path) -> Any:
    """Read a JSON file. Raises ConvertError."""
    try:
        return json.loads(source_bytes(path).decode("utf-8-sig"))
    except RecursionError as error:
        raise ConvertError(f"{path} is not JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ConvertError(f"{path} is not JSON: {error}") from error


def source_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object. Raises ConvertError."""
    document = source_json(path)
    if not isinstance(document, dict):
        raise ConvertError(f"{path} is not a JSON object")
    return document


def object_beside(folder: Path | None, name: str) -> dict[str, Any]:
    """Read the JSON object in the file `name` of a folder; empty if there is no such file. Raises
    ConvertError."""
    return source_object(folder / name) if folder and (folder / name).is_file() else {}


def member(part: Mapping[str, Any], name: str, kind: type[Kind], where: object) -> Kind:
    """The value of a member of a JSON object; empty if the member is missing or null. Raises
    ConvertError if it is not of this `kind`."""
    value = part.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "an object"
        raise ConvertError(f"{where}: {name} is {value!r:.60}; expected {expected}")
    return value


def _unreadable(path: Path, error: OSError) -> ConvertError:
    if isinstance(error, FileNotFoundError):
        return ConvertError(f"{path} does not exist")
    sentence = str(error.strerror or error)
    return ConvertError(sentence if str(path) in sentence else f"{path} cannot be read: {sentence}")
