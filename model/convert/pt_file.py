"""PyTorch's .pt and .pth files, read as data alone.

`torch.load` with `weights_only=True` and nothing else: a file that needs more is refused with what
it holds and how to save it anew. Meta files of character vocabularies are pickles as well, of
plain containers; `read_plain_pickle` builds nothing but these.
"""

import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

import torch

from model.convert.foreign import ConvertError

PICKLE_BYTES = 64 * 2**20
"""More than any character vocabulary has."""


def read_pt(path: Path, *, keep: str) -> dict[str, Any]:
    """The dictionary that a .pt file holds; its tensors stay on the disk until they are read.

    `keep` is, as Python, what to save where the file was made if it cannot be read. Raises
    ConvertError.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise ConvertError(f"there is no file {path}") from error
    except pickle.UnpicklingError as error:
        raise ConvertError(
            f"{path} holds {_foreign_object(str(error))}, and to read that would run code. "
            f"Load it where it was made and save what is needed: torch.save({keep}, {path.name!r})"
        ) from error
    except Exception as error:  # torch stumbles over damaged bytes in many ways
        raise ConvertError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read: it is truncated, damaged or "
            f"not in torch.save's zip format ({type(error).__name__}); files from before "
            f"torch 1.6 have to be saved anew: torch.save({keep}, {path.name!r})"
        ) from error
    if not isinstance(found, dict):
        raise ConvertError(f"{path} holds a {type(found).__name__}, not a dictionary of tensors")
    return found


def read_plain_pickle(path: Path) -> Any:
    """What a pickle of dictionaries, lists, numbers and texts holds. Raises ConvertError."""
    try:
        size = path.stat().st_size
        if size > PICKLE_BYTES:
            raise ConvertError(f"{path} has {size:,} bytes, too many for a vocabulary")
        with path.open("rb") as file:
            return _PlainUnpickler(file, encoding="utf-8").load()
    except FileNotFoundError as error:
        raise ConvertError(f"there is no file {path}") from error
    except ConvertError:
        raise
    except Exception as error:  # as many kinds as there are ways to break a pickle
        raise ConvertError(
            f"{path} is not a pickle of plain values: {type(error).__name__}: {error}"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Knows no class and no function, so nothing runs."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and to build that would run code")


def _foreign_object(message: str) -> str:
    """What torch refused, in its long message."""
    named = re.search(r"GLOBAL (\S+)", message) or re.search(r"Unsupported \w+:? (\S+)", message)
    return named[1].strip(":,") if named else "more than tensors and numbers"
