"""Names in a pickle: lists the classes and functions that a pickle refers to, without loading it.

`pickletools` reads the instructions and runs none of them. Supports torch.save's zip archives, its
older form (several pickles in a row), and plain pickles.
"""

import pickletools
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BYTES = 256 * 2**20
"""Maximum number of bytes to read from a pickle that is not in a zip archive. Such a pickle
contains the values of the tensors, so it may be very large."""

OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of torch.save's older form: a pickle of torch's magic number."""

DAMAGE = (
    *(ValueError, OSError, IndexError, EOFError, KeyError, OverflowError, MemoryError),
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, struct.error, zlib.error),
)
"""Errors that reading a damaged pickle or archive may raise."""

HARMLESS = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_parameter",
        "torch._tensor._rebuild_from_type_v2",
        "torch.nn.parameter.Parameter",
        "torch.Size",
        "torch.device",
        "torch.Tensor",
        "torch.serialization._get_layout",
    }
)
"""Names that torch.load allows with `weights_only=True`, besides storages and dtypes."""


@dataclass(frozen=True)
class PickledNames:
    """The names of classes and functions in a pickle file.

    foreign       names that `weights_only=True` does not allow, in the file's order
    holds_module  True if the file contains a torch module
    by_torch      True if the file was written by torch.save, not pickle.dump
    complete      True if at least one pickle could be read to its end
    """

    foreign: tuple[str, ...] = ()
    holds_module: bool = False
    by_torch: bool = False
    complete: bool = False


def pickled_names(path: Path) -> PickledNames:
    """Read the names in a file. A file that is not a pickle has none."""
    by_torch, names, complete, texts = False, list[str](), False, set[str]()
    # Damaged bytes may cause warnings about invalid escapes. After an error, the names read so far
    # count; the caller reports the damage.
    with suppress(*DAMAGE), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                inner = next((n for n in archive.namelist() if n.endswith("data.pkl")), None)
                if inner is None:
                    return PickledNames()
                by_torch = True
                with archive.open(inner) as file:
                    names = list(_globals(file, texts))  # type: ignore[arg-type]
            complete = True
        else:
            with path.open("rb") as file:
                by_torch = file.read(len(OLD_TORCH)) == OLD_TORCH
                file.seek(0)
                size = path.stat().st_size
                while file.tell() < min(size, BYTES):
                    names += _globals(file, texts)
                    complete = True
    foreign = tuple(dict.fromkeys(name for name in names if not _harmless(name)))
    module = "_modules" in texts and "_parameters" in texts
    return PickledNames(foreign, module, by_torch, complete)


def _harmless(name: str) -> bool:
    last = name.rpartition(".")[2]
    return name in HARMLESS or (
        name.startswith("torch.") and (last.endswith("Storage") or name.count(".") == 1)
    )


def _globals(file: BinaryIO, texts: set[str]) -> Iterator[str]:
    """Yield the names in a pickle. If the pickle contains strings that identify a torch module, add
    them to `texts`."""
    strings: list[str] = []
    memo: dict[int, str] = {}
    memoized, last = 0, ""
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "MEMOIZE" or opcode.name.endswith("BINPUT"):
            memo[memoized if argument is None else argument] = last
            memoized += 1
            continue
        last = argument if isinstance(argument, str) and "UNICODE" in opcode.name else ""
        if opcode.name in ("GLOBAL", "INST") and isinstance(argument, str):
            module, *name = argument.split(" ")
            if len(name) != 1 or not all(map(str.isidentifier, f"{module}.{name[0]}".split("."))):
                raise ValueError(f"{argument!r} does not consist of a module and a name")
            yield argument.replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL" and len(strings) >= 2:
            yield ".".join(strings[-2:])
        elif opcode.name.endswith("BINGET"):
            last = memo.get(argument, "") if isinstance(argument, int) else ""
        if last:
            strings.append(last)
            if last in ("_modules", "_parameters"):
                texts.add(last)
