"""PyTorch's .pt and .pth files, read as data only.

`torch.load` is used with `weights_only=True`. An object of a configuration class
(`__main__.GPTConfig`, `argparse.Namespace`) becomes an object of a class in this module with the
same attributes. The configuration class is not imported, and its code is not run. If the file
stores numbers of an object without their names, they become an `Unread`. A whole pickled
module is refused; the error lists the module's classes (`pickled_names.py`) and the command that
saves only its weights. Files from before torch 1.6, which are not zip archives, are supported.
`read_plain_pickle` reads vocabularies.
"""

import codecs
import io
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from logitd.model.convert.containers import container_of
from logitd.model.convert.foreign import ConvertError, Unread
from logitd.model.convert.pickled_names import PickledNames, pickled_names
from logitd.model.convert.pt_archive import Archive, check_tensors, read_archive, tensors_in
from logitd.model.convert.source_file import source_bytes

PACKED_TIMES = 4
"""An archive may unpack to at most this many times its size, plus PICKLE_BYTES."""
PICKLE_BYTES = 64 * 2**20
"""Maximum size of a plain pickle, in bytes. Character vocabularies are much smaller."""
DEPTH = 32
"""Collections nested more deeply are not read."""
ARRAY_NUMBERS = 2**16
"""Maximum number of elements of a NumPy array that is read."""
SHOWN = 80
"""Maximum number of characters of an object's values in a message."""
_WITHOUT_SETTINGS = ("builtins.", "datetime.", "numpy.random.", "random.", "re.")
"""Beginnings of the names of classes whose objects are collections, times, random states or
expressions."""

_OF_NUMPY: Mapping[str, Any] = {
    **{
        f"numpy.{core}.multiarray.scalar": np.float64().__reduce__()[0]
        for core in ("core", "_core")
    },
    **{f"numpy.dtypes.{name}": getattr(np.dtypes, name) for name in np.dtypes.__all__},
    "numpy.dtype": np.dtype,
    "_codecs.encode": codecs.encode,
}
"""Functions that create NumPy's numbers. They run no code of the file."""


class Attributes:
    """Stands in for an object whose class is not imported. It has that object's attributes.

    kind    the name of the object's class
    values  the values without names in the file: the arguments with which the object was created
            (of a member of an `enum.Enum`, its value), and a state that is no dictionary (of a
            frozen dataclass with slots, the values of its fields)
    """

    __slots__ = ("__dict__", "values")
    kind: ClassVar[str] = ""
    values: list[Any]

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        made = super().__new__(cls)
        made.values = list(arguments)
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Store the attributes. pickle passes them as a dictionary, or as a pair of dictionaries if
        the class has slots. The values of other states have no names."""
        pair = isinstance(state, tuple) and len(state) == 2
        parts = state if pair else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                vars(self).update(part or {})
        else:
            self.values += state if isinstance(state, list | tuple) else [state]

    def contents(self) -> Any:
        """The attributes as a dictionary. If there are none, the only value, or a list of the
        values. Numbers without names become an `Unread`."""
        named, values = vars(self), self.values
        if not values:
            return named
        if not named and len(values) == 1:
            return values[0]
        if self.kind.startswith(_WITHOUT_SETTINGS) or not _has_number(values):
            return named or values
        name = self.kind.rpartition(".")[2]
        shown = ", ".join(map(_shown, values))
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
        reason = "its values have no names in the file: save them as a dictionary"
        unread = Unread(f"{name}({shown}) ({reason})")
        return {**named, name: unread} if named else unread


class ArrayAttributes(Attributes):
    """`Attributes` for a NumPy array, whose only value is the list of its elements."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_column, elements = state
        self.values = []
        if not dtype.hasobject and len(elements) <= ARRAY_NUMBERS * dtype.itemsize:
            order: Literal["F", "C"] = "F" if by_column else "C"
            self.values = [np.frombuffer(elements, dtype).reshape(shape, order=order).tolist()]


class UncalledAttributes(Attributes):
    """`Attributes` for plain pickles. A plain pickle creates objects without calling their class. A
    pickle that calls a class would run code and is refused."""

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        if arguments or named:
            cls._refuse()
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {cls.__name__}; creating that would run code")


def read_pt(path: Path) -> dict[str, Any]:
    """Read the dictionary in a .pt file. Its tensors stay on disk until they are used. Raises
    ConvertError."""
    container_of(path)  # refuses formats of other programs by name
    archive = _archive(path) if zipfile.is_zipfile(path) else None
    try:
        loaded = _load(path, archive)
    except pickle.UnpicklingError as error:
        loaded = _load_with_attributes(path, archive, error)
    except Exception as error:  # damaged bytes make torch fail in many ways
        raise _unreadable(path, error) from error
    plain = _Plain()(loaded)
    if not isinstance(plain, dict):
        raise ConvertError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors")
    check_tensors(path, plain, archive)
    return dict(_WithNumbers()(plain))


def _archive(path: Path) -> Archive:
    """Read an archive's list of files. Raises ConvertError if the list cannot be read or if the
    unpacked size is much larger than the file. torch.save does not compress, and torch would
    allocate memory for the listed sizes."""
    try:
        archive = read_archive(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise _unreadable(path, error) from error
    size = path.stat().st_size
    if archive.unpacked > PACKED_TIMES * size + PICKLE_BYTES:
        raise ConvertError(
            f"{path} has {size:,} bytes, but would unpack to {archive.unpacked:,} bytes: it is "
            "damaged, or was compressed after it was saved. Load it with the program that created "
            "it, and save it again with torch.save"
        )
    return archive


def _load(path: Path, archive: Archive | None) -> Any:
    mapped = archive is not None and not archive.compressed
    with warnings.catch_warnings():  # torch warns of unusual pickle protocols
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _load_with_attributes(
    path: Path, archive: Archive | None, refused: pickle.UnpicklingError
) -> Any:
    """Load a file with `Attributes` in place of its classes. Raises ConvertError if the file
    contains anything besides configuration objects, such as a module or a function call."""
    names = pickled_names(path)
    if not (archive is not None or names.holds_module or names.foreign):
        raise _unreadable(path, refused) from refused
    if not names.foreign:
        raise ConvertError(
            f"{path} is an archive of torch.save that cannot be read as data: it is damaged, or "
            f"was saved with pickle_protocol 4 or later. Save it in a new file: {_save(path)}"
        ) from refused
    if names.holds_module or archive is None:
        raise _holds_code(path, names) from refused
    bags = {
        name: type(
            "Attributes",
            (ArrayAttributes if name.endswith("multiarray._reconstruct") else Attributes,),
            {"kind": name},
        )
        for name in names.foreign
    }
    known: list[Any] = [(read, name) for name, read in {**bags, **_OF_NUMPY}.items()]
    try:
        with torch.serialization.safe_globals(known):
            return _load(path, archive)
    except Exception as error:
        raise _holds_code(path, names) from error


def _has_number(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, bool | int | float | np.generic)
        or (isinstance(value, list | tuple) and _has_number(value))
        or (isinstance(value, Attributes) and _has_number(value.values))
        for value in values
    )


def _shown(value: Any) -> str:
    if isinstance(value, Attributes):
        return value.kind.rpartition(".")[2]
    return str(value) if isinstance(value, np.generic) else repr(value)


class _Converter:
    """Converts nested collections. A collection that occurs several times is converted once, and
    inside itself it becomes None."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}
        """The collections so far, by id, and their conversions."""

    def __call__(self, value: Any, depth: int = 0) -> Any:
        if not isinstance(value, Attributes | Mapping | list | tuple):
            return self.converted(value)
        if id(value) in self._made:
            return self._made[id(value)][1]
        if depth > DEPTH:
            return Unread(f"values that are nested more than {DEPTH} levels deep")
        self._made[id(value)] = value, None
        made = self.collection(value, depth + 1)
        self._made[id(value)] = value, made
        return made

    def converted(self, value: Any) -> Any:
        return value

    def collection(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return {key: self(inner, depth) for key, inner in value.items()}
        return [self(inner, depth) for inner in value]


class _Plain(_Converter):
    """Puts dictionaries and lists in place of `Attributes` and other collections."""

    def collection(self, value: Any, depth: int) -> Any:
        if isinstance(value, Attributes):
            return self(value.contents(), depth)
        return super().collection(value, depth)


class _WithNumbers(_Converter):
    """Puts Python's numbers in place of NumPy's, and of tensors without axes that are not next to
    weights."""

    def converted(self, value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    def collection(self, value: Any, depth: int) -> Any:
        made = super().collection(value, depth)
        tensors = [t for t in made.values() if isinstance(t, Tensor)] if type(made) is dict else []
        if tensors and all(tensor.dim() == 0 for tensor in tensors):
            return {k: t.item() if isinstance(t, Tensor) else t for k, t in made.items()}
        return made


def _holds_code(path: Path, names: PickledNames) -> ConvertError:
    shown = ", ".join(names.foreign[:6]) + (", ..." if len(names.foreign) > 6 else "")
    if not names.holds_module and not names.by_torch and not zipfile.is_zipfile(path):
        modules = {name.partition(".")[0] for name in names.foreign}
        of = "JAX arrays" if modules & {"jax", "jaxlib"} else "objects"
        of = "NumPy arrays" if modules <= {"numpy", "_codecs"} else of
        return ConvertError(
            f"{path} is a pickle of {of} ({shown}), not a file of torch.save; reading it would "
            "run code. Load it where it was created, and save the numbers as arrays by name in a "
            f"new file: numpy.savez({path.stem + '.npz'!r}, **arrays)"
        )
    if not names.holds_module:
        return ConvertError(
            f"{path} holds {shown or 'more than tensors and numbers'}; reading that would run "
            "code. Load it where it was created, and save only what is needed in a new file: "
            f"{_save(path)}"
        )
    load = f"torch.load({path.name!r}, weights_only=False)"
    if not names.by_torch:
        load = f"pickle.load(open({path.name!r}, 'rb'))"
    return ConvertError(
        f"{path} is a whole pickled module ({shown}); reading it would run its code. Load it "
        f"where that code is, and save only the weights: {_save(path, load)}"
    )


def _save(path: Path, module: str = "model") -> str:
    """The line of Python that saves the weights of a module in a new file."""
    return f"torch.save({module}.state_dict(), {path.stem + '-weights.pt'!r})"


def _unreadable(path: Path, error: Exception) -> ConvertError:
    size = f"{path} ({path.stat().st_size:,} bytes)"
    names = pickled_names(path)
    if names.holds_module or names.foreign:
        return _holds_code(path, names)
    with path.open("rb") as file:
        head = file.read(1024)
    begins = head[:4]
    if begins[:2] == b"PK":
        return ConvertError(f"{size} is a truncated or damaged zip archive: copy it again")
    if names.complete:
        return ConvertError(
            f"{size} is a pickle that torch.save did not write or complete. If it holds lists of "
            f"numbers, save them as arrays by name: numpy.savez({path.stem + '.npz'!r}, "
            f"**arrays); otherwise save its tensors in a new file: {_save(path)}"
        )
    what = f"is truncated or damaged ({type(error).__name__})"
    if head and head.isascii() and b"\0" not in head:
        what = "and is a text. Expected a weight file (.pt, .pth, .bin, .safetensors) or its folder"
    return ConvertError(f"{size} is not a file of torch.save: it begins with {begins!r}, {what}")


def without_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a checkpoint, except tensors and containers with tensors."""
    return {
        key: value
        for key, value in checkpoint.items()
        if isinstance(key, str) and not any(tensors_in(value))
    }


def read_plain_pickle(path: Path) -> Any:
    """Read a pickle of dictionaries, lists, numbers and strings. An object whose attributes are
    such values becomes a dictionary. Raises ConvertError."""
    raw = source_bytes(path, PICKLE_BYTES)
    try:
        _check_memo(raw)
        return _Plain()(_PlainUnpickler(io.BytesIO(raw), encoding="utf-8").load())
    except Exception as error:  # a pickle can be broken in many ways
        raise ConvertError(
            f"{path} is not a pickle of plain values: {type(error).__name__}: {error}"
        ) from error


def _check_memo(raw: bytes) -> None:
    """Raise UnpicklingError if a memo index exceeds the pickle's length. Python would allocate all
    memo entries up to that index."""
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name.endswith("PUT") and argument is not None and argument > len(raw):
            raise pickle.UnpicklingError(f"its memo index {argument:,} exceeds its length")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("collections", "OrderedDict"), ("collections", "Counter")):
            return dict
        return type(f"{module}.{name}", (UncalledAttributes,), {})
