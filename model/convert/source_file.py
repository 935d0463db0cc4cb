"""Source files: reading a foreign file, with ConvertError for everything that is wrong with it.

`model/files.py` reads the bytes; here its system errors become ConvertError: a pipe, a device, a
folder, a file that is missing, too large, not UTF-8 or not JSON. Knows no formats.
"""

import json
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ConvertError
from logitd.model.files import TEXT_BYTES, VOCABULARY_BYTES, read_regular, require_regular


def require_source(path: Path) -> None:
    """Raise ConvertError unless a path names a regular file: for libraries that open it."""
    try:
        require_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def source_bytes(path: Path, most: int = VOCABULARY_BYTES) -> bytes:
    """The bytes of a file of at most `most`. Raises ConvertError."""
    try:
        return read_regular(path, most)
    except OSError as error:
        raise _unreadable(path, error) from error


def source_text(path: Path, most: int = TEXT_BYTES, *, lines: bool = True) -> str:
    """A file as UTF-8; with `lines` every line ends in "\\n", as Python's open() does. Raises
    ConvertError."""
    try:
        text = source_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path} is not a text in UTF-8: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if lines else text


def source_json(path: Path) -> Any:
    """The JSON of a file. Raises ConvertError."""
    try:
        return json.loads(source_bytes(path).decode("utf-8-sig"))
    except RecursionError as error:
        raise ConvertError(f"{path} is not JSON: it nests too deeply") from error
    except ValueError as error:
        raise ConvertError(f"{path} is not JSON: {error}") from error


def source_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ConvertError."""
    document = source_json(path)
    if not isinstance(document, dict):
        raise ConvertError(f"{path} is not a JSON object")
    return document


def object_beside(folder: Path | None, name: str) -> dict[str, Any]:
    """The JSON object of a file in a folder; empty if there is none. Raises ConvertError."""
    return source_object(folder / name) if folder and (folder / name).is_file() else {}


def _unreadable(path: Path, error: OSError) -> ConvertError:
    if isinstance(error, FileNotFoundError):
        return ConvertError(f"{path} does not exist")
    sentence = str(error.strerror or error)
    return ConvertError(sentence if str(path) in sentence else f"{path} cannot be read: {sentence}")
