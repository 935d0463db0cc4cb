"""Foreign models: the results of all readers, and checked access to tensors and settings.

A reader (`nanogpt.py`, `hf/config.py`, `litgpt.py`, `by_role/`) translates names and shapes.
Nothing in a file is trusted. `StateDictReader` raises an error if a tensor is missing, is unused,
or has a wrong shape or dtype. `Settings` raises an error if a key is missing or has a wrong value.
"""

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from logitd.model.plural import pluralize
from logitd.model.text.tokenizer import Tokenizer, TokenizerError
from logitd.model.transformer.config import ConfigError, GPTConfig

FLOATS = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


class ConvertError(ValueError):
    """Raised if a model cannot be imported or exported. The message gives the reason."""


@dataclass(frozen=True, slots=True, repr=False)
class Unread:
    """Stands for values of a file that cannot be read as settings, for example because they have no
    names. Its repr describes them to the user."""

    description: str

    def __repr__(self) -> str:
        return self.description

    @classmethod
    def is_in(cls, value: Any) -> bool:
        """True for an `Unread`, and for a list that contains one."""
        return isinstance(value, cls) or (isinstance(value, list) and any(map(cls.is_in, value)))


class UnusableTensor(ConvertError):
    """Raised for a tensor that is not dense, has no float dtype or is not finite."""


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Turn an error about a shape or a vocabulary into a ConvertError that names the source."""
    try:
        yield
    except (ConfigError, TokenizerError) as error:
        raise ConvertError(f"{where}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ForeignTokenizer:
    """A vocabulary in this project's form.

    order          the source's id for each id of `tokenizer`; None if they are the same
    notes          sentences for the user
    chat_template  text of the chat template, if the template has the same meaning here
    end_known      True if the source names the token that ends a document; False if the token is a
                   guess
    where          place of the vocabulary, for messages
    listed         True if the ids are places in a list, which does not say that the first id is 0
    """

    tokenizer: Tokenizer
    order: Sequence[int] | None = None
    notes: Sequence[str] = ()
    chat_template: str | None = None
    end_known: bool = False
    where: str = ""
    listed: bool = False

    @property
    def source_ids(self) -> Sequence[int]:
        """The source's id for each id of `tokenizer`."""
        return range(self.tokenizer.vocab_size) if self.order is None else self.order


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A model read from another format.

    The embedding and the head still have the source's number of rows, including padding;
    `config.vocab_size` is this number. `importing.py` fits both to the vocabulary.

    kind      "nanoGPT", "Hugging Face llama", ...
    dtype     dtype of the source's weights
    contents  contents of the weight file except tensors, or contents of the configuration file
    facts     facts about the source, for the card
    notes     descriptions of changes to the weights
    unknown   settings that the reader does not understand
    """

    kind: str
    config: GPTConfig
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    step: int = 0
    tokens: int = 0
    val_loss: float | None = None
    contents: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.config.vocab_size


def check_tensor(where: str, name: str, tensor: Tensor) -> None:
    """Raise UnusableTensor unless a tensor is dense, of a float dtype, and finite."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "without values" if tensor.is_meta else "sparse"
        raise UnusableTensor(f"{where}: {name} is {kind}; only dense tensors can be imported")
    if tensor.dtype not in FLOATS:
        raise UnusableTensor(
            f"{where}: {name} is {str(tensor.dtype).removeprefix('torch.')}; only weights in "
            f"{', '.join(FLOATS.values())} can be imported, not quantized weights"
        )
    if not torch.isfinite(tensor).all():
        raise UnusableTensor(f"{where}: {name} has NaN or infinite values")


def finite_number(value: Any) -> float | None:
    """A value from a file as a finite number; None if it is not one. A tensor with one element
    counts as a number."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        value = float(value)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and math.isfinite(value) else None


def count_or_zero(value: Any) -> int:
    """A value from a file as a count, such as the number of training steps; 0 if it is not a
    positive integer."""
    return value if type(value) is int and value > 0 else 0


def plausible_loss(value: Any) -> float | None:
    """A value from a file as a loss in nats; None if it is not plausible. nanoGPT and similar
    programs store 1e9 before the first evaluation."""
    loss = finite_number(value)
    return loss if loss is not None and 0 <= loss < 1e6 else None


def common_dtype(dtypes: Collection[torch.dtype]) -> torch.dtype:
    """The common dtype of a model's tensors; float32 if the dtypes differ or are wider than
    float32."""
    if len(dtypes) == 1 and torch.float64 not in dtypes:
        return next(iter(dtypes))
    return torch.float32


class StateDictReader:
    """Reads the tensors of a file or folder, and records which of them have been used."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        self._where = where
        self._tensors = tensors
        self._taken: set[str] = set()
        self._dtypes: set[torch.dtype] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor with this name. Raises ConvertError if it is missing or has another shape."""
        if name not in self._tensors:
            raise ConvertError(f"{self._where} lacks the tensor {name} of shape {shape}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ConvertError(
                f"{self._where}: {name} has shape {tuple(tensor.shape)}; its configuration "
                f"requires {shape}"
            )
        check_tensor(self._where, name, tensor)
        self._taken.add(name)
        self._dtypes.add(tensor.dtype)
        return tensor

    def require_layers(self, count: int) -> None:
        """Raise ConvertError if the configuration states more layers than there are tensors. If
        that number is wrong and very large, the list of tensor names alone could fill the
        memory."""
        if count > len(self._tensors):
            raise ConvertError(
                f"{self._where} has {len(self._tensors):,} tensors, but its configuration states "
                f"{count:,} layers, each of which has several tensors"
            )

    def ignore(self, *suffixes: str) -> None:
        """Ignore tensors that are not weights, such as masks and tables."""
        self._taken |= {name for name in self._tensors if name.endswith(suffixes)}

    def finish(self) -> torch.dtype:
        """The common dtype of the tensors that were used. Raises ConvertError if a tensor is left
        unused: the source computes with it, so ignoring it would change the results."""
        if left := sorted(self._tensors.keys() - self._taken):
            raise ConvertError(
                f"{self._where} has {pluralize(len(left), 'tensor')} that a model with its "
                f"configuration does not have; the first is {left[0]}"
            )
        return common_dtype(self._dtypes)


class Settings:
    """The configuration of a foreign model, read key by key. Errors name the key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where = where
        self._values = values
        self._read: set[str] = set()

    def integer(self, *names: str, default: int | None = None) -> int:
        """The value of the first of these keys that is present and not null. Raises ConvertError
        unless it is a positive integer."""
        value = self._first(names, default)
        known = type(value) is int and value > 0
        return int(self._checked(names[0], value, known, "a positive integer"))

    def count(self, name: str, default: int) -> int:
        """The value of a key, or the default. Raises ConvertError unless it is a nonnegative
        integer."""
        value = self._first((name,), default)
        known = type(value) is int and value >= 0
        return int(self._checked(name, value, known, "an integer, at least 0"))

    def number(self, name: str, default: float | None = None) -> float:
        """The value of a key, or the default. Raises ConvertError unless it is a finite number."""
        value = self._first((name,), default)
        known = type(value) in (int, float) and abs(value) <= sys.float_info.max
        return float(self._checked(name, value, known, "a finite number"))

    def flag(self, name: str, default: bool) -> bool:
        value = self._first((name,), default)
        return bool(self._checked(name, value, isinstance(value, bool), "true or false"))

    def get(self, name: str, default: Any = None) -> Any:
        value = self._first((name,), default, needed=False)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """True if the key is present, even if its value is null."""
        self._read.add(name)
        return name in self._values

    def names(self) -> list[str]:
        """The keys whose values are not null."""
        return [name for name, value in self._values.items() if value is not None]

    def part(self, name: str) -> "Settings":
        """The object under a key; empty if the key is missing. Raises ConvertError if it is not an
        object."""
        value = self.get(name, {})
        value = self._checked(name, value, isinstance(value, dict), "an object")
        return Settings(f"{name} of {self._where}", value)

    def reject_unless(self, name: str, neutral: Sequence[Any], reason: str) -> None:
        """Raise ConvertError if the key has a value that is neither null nor in `neutral`."""
        value = self._first((name,), None, needed=False)
        if value is not None and value not in neutral:
            raise ConvertError(f"{self._where}: {name} is {value!r}; {reason}")

    def unread(self) -> dict[str, Any]:
        """The values of the keys that were not read."""
        return {name: value for name, value in self._values.items() if name not in self._read}

    def _checked(self, name: str, value: Any, known: bool, expected: str) -> Any:
        if not known:
            raise ConvertError(f"{self._where}: {name} is {value!r:.100}; expected {expected}")
        return value

    def _first(self, names: Sequence[str], default: Any, *, needed: bool = True) -> Any:
        self._read.update(names)
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is None and needed:
            raise ConvertError(f"{self._where} lacks {names[0]}")
        return default
