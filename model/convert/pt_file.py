"""PyTorch's .pt and .pth files, read as data alone.

`torch.load` with `weights_only=True` and nothing else: a file that needs more is refused with what
it holds and how to save it anew. Vocabularies are often pickles as well, of plain containers, or of
an object that has them as attributes; `read_plain_pickle` builds containers and, for an object, a
dictionary of its attributes. No class that a pickle names is looked for, and nothing is called.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

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


def without_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds beside its tensors and the dictionaries and lists that have some."""
    return {
        key: value
        for key, value in checkpoint.items()
        if isinstance(key, str) and not _holds_tensors(value)
    }


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        depth > 0
        and isinstance(value, list | tuple)
        and any(_holds_tensors(inner, depth - 1) for inner in value)
    )


def read_plain_pickle(path: Path) -> Any:
    """What a pickle of dictionaries, lists, numbers and texts holds; an object that has these as
    attributes is a dictionary of them. Raises ConvertError."""
    try:
        size = path.stat().st_size
        if size > PICKLE_BYTES:
            raise ConvertError(f"{path} has {size:,} bytes, too many for a vocabulary")
        with path.open("rb") as file:
            return _attributes(_PlainUnpickler(file, encoding="utf-8").load())
    except FileNotFoundError as error:
        raise ConvertError(f"there is no file {path}") from error
    except ConvertError:
        raise
    except Exception as error:  # as many kinds as there are ways to break a pickle
        raise ConvertError(
            f"{path} is not a pickle of plain values: {type(error).__name__}: {error}"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Knows no class and no function, so nothing runs: whatever is named stands for an object
    without code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("collections", "OrderedDict"), ("collections", "Counter")):
            return dict
        return _NeverCalled(f"{module}.{name}", (_Attributes,), {})


class _NeverCalled(type):
    """The type of objects that a pickle names. Pickles make plain objects without a call; one that
    calls what it names would run code."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {cls.__name__}, and to build that would run code")


class _Attributes(metaclass=_NeverCalled):
    """Stands for an object of a pickle: has its attributes and nothing else."""

    state: Any = None

    def __new__(cls, *args: Any) -> Self:
        if args:
            raise pickle.UnpicklingError(
                f"it names {cls.__name__}, and to build that would run code"
            )
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _attributes(value: Any) -> Any:
    """An object as a dictionary of its attributes, and so what is directly in a container."""
    if isinstance(value, _Attributes):
        value = value.state if isinstance(value.state, dict) else {}
    if isinstance(value, dict):
        return {
            key: inner.state if isinstance(inner, _Attributes) else inner
            for key, inner in value.items()
        }
    return value


def _foreign_object(message: str) -> str:
    """What torch refused, in its long message."""
    named = re.search(r"GLOBAL (\S+)", message) or re.search(r"Unsupported \w+:? (\S+)", message)
    return named[1].strip(":,") if named else "more than tensors and numbers"
