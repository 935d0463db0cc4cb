"""What every reader of a foreign format gives, and how it takes its tensors.

A reader (`nanogpt.py`, `hf/config.py`, `litgpt.py`) turns names and shapes into ours and says
where the model comes from. Nothing is trusted: `StateDictReader` names a tensor that is
missing, has another shape, is not of a float dtype, or is left over at the end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import GPTConfig

FLOATS = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


class ConvertError(ValueError):
    """A model that cannot be imported or exported; the message says what is in the way."""


@dataclass(frozen=True, kw_only=True)
class ForeignTokenizer:
    """A vocabulary in this project's form.

    end_known   the source says which special token ends a document; else it is a guess by names
    order   for each of our ids the id that it had in the source; None where they are the same
    notes   what a person should know, as sentences
    chat_template   its source, where the model has one that means the same here
    """

    tokenizer: Tokenizer
    order: Sequence[int] | None = None
    notes: Sequence[str] = ()
    chat_template: str | None = None
    end_known: bool = False


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A model read from another format: shape, weights by our names, and where it comes from.

    `config.vocab_size` and the rows of `weights` are still the source's rows (V, padding
    included); `importing.py` fits them to the vocabulary.
    """

    kind: str  # "nanoGPT", "Hugging Face llama", ...
    config: GPTConfig
    weights: Mapping[str, Tensor]
    dtype: torch.dtype  # of the source
    step: int = 0
    tokens: int = 0
    val_loss: float | None = None
    contents: Mapping[str, Any] = field(default_factory=dict)  # beside the tensors, as it was read
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the source, for the card
    notes: Sequence[str] = ()  # changes of weights, as sentences
    unknown: Mapping[str, Any] = field(default_factory=dict)  # settings that nothing understands

    @property
    def rows(self) -> int:
        """Rows of the token embedding."""
        return self.config.vocab_size


class StateDictReader:
    """The tensors of one file or folder, by name; each is taken once."""

    def __init__(self, where: str, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self._where = where
        self._names = set(names)
        self._read = read
        self._taken: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name and shape. Raises ConvertError."""
        if name not in self._names:
            raise ConvertError(f"{self._where} lacks the tensor {name} of shape {shape}")
        tensor = self._read(name)
        self._taken.add(name)
        if tuple(tensor.shape) != shape:
            raise ConvertError(
                f"{self._where}: {name} has shape {tuple(tensor.shape)}, its configuration says "
                f"{shape}"
            )
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "without values" if tensor.is_meta else "sparse"
            raise ConvertError(f"{self._where}: {name} is {kind}; dense tensors can be imported")
        if tensor.dtype not in FLOATS:
            raise ConvertError(
                f"{self._where}: {name} is {str(tensor.dtype).removeprefix('torch.')}; weights "
                f"in {', '.join(FLOATS.values())} can be imported, quantized ones cannot"
            )
        if not torch.isfinite(tensor).all():
            raise ConvertError(f"{self._where}: {name} has NaN or infinite values")
        self.dtypes.add(tensor.dtype)
        return tensor

    def require_layers(self, count: int) -> None:
        """Raise ConvertError for more layers than there are tensors: a configuration may say any
        number, and listing the names alone would fill memory."""
        if count > len(self._names):
            raise ConvertError(
                f"{self._where} has {len(self._names):,} tensors, and its configuration says "
                f"{count:,} layers, each of which has several"
            )

    def ignore(self, *suffixes: str) -> None:
        """Leave out tensors that are not weights: masks and tables."""
        self._taken |= {name for name in self._names if name.endswith(suffixes)}

    def finish(self) -> None:
        """Raise ConvertError if a tensor was not taken: the source computes with it."""
        if left := sorted(self._names - self._taken):
            raise ConvertError(
                f"{self._where} has {len(left)} tensors that a model of its configuration does "
                f"not have, the first is {left[0]}"
            )

    def dtype(self) -> torch.dtype:
        """The dtype of the tensors taken; float32 where they differ or are wider."""
        if len(self.dtypes) == 1 and torch.float64 not in self.dtypes:
            return next(iter(self.dtypes))
        return torch.float32


class Settings:
    """A foreign configuration, read key by key: a wrong or missing one is named."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where = where
        self._values = values
        self._read: set[str] = set()

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of these keys that is there. Raises ConvertError."""
        value = self._first(names, default)
        if type(value) is not int or value < 1:
            raise ConvertError(f"{self._where}: {names[0]} is {value!r}; expected a number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._first((name,), default)
        try:
            if not isinstance(value, bool) and isinstance(value, int | float):
                return float(value)
        except OverflowError:
            value = "more than a number can be"
        raise ConvertError(f"{self._where}: {name} is {value!r}; expected a number")

    def flag(self, name: str, default: bool) -> bool:
        value = self._first((name,), default)
        if not isinstance(value, bool):
            raise ConvertError(f"{self._where}: {name} is {value!r}; expected true or false")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self._first((name,), default, needed=False)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the key is there, be it null."""
        self._read.add(name)
        return name in self._values

    def names(self) -> list[str]:
        """The keys whose value is not null."""
        return [name for name, value in self._values.items() if value is not None]

    def part(self, name: str) -> "Settings":
        """The object under a key, read in the same way; empty where there is none."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConvertError(f"{self._where}: {name} is {value!r}; expected an object")
        return Settings(f"{name} of {self._where}", value)

    def reject_unless(self, name: str, neutral: Sequence[Any], reason: str) -> None:
        """Raise ConvertError where a key asks for something that no GPTConfig says."""
        value = self._first((name,), None, needed=False)
        if value is not None and value not in neutral:
            raise ConvertError(f"{self._where}: {name} is {value!r}; {reason}")

    def unread(self) -> dict[str, Any]:
        """The values of the keys that were not asked for."""
        return {name: value for name, value in self._values.items() if name not in self._read}

    def _first(self, names: Sequence[str], default: Any, *, needed: bool = True) -> Any:
        self._read.update(names)
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is None and needed:
            raise ConvertError(f"{self._where} lacks {names[0]}")
        return default
