"""Message text: the text of a message as a chat template sees it. It can never become a special
token.

Every character that occurs in a special token is hidden in messages: it is replaced by a lone
surrogate, which no input text can contain, until the special tokens in the whole prompt have been
found. So the special tokens of the prompt consist only of characters that the template itself
wrote, whatever it does with messages: it may cut, join, reverse and repeat them, change their case,
and write parts of special tokens next to them.

The methods of a `MessageText` return the same results as for the plain text, so ordinary templates
work as usual. Only a plain string that a template makes from it contains the surrogates: a search
in such a string (`'a' in ('x' ~ content)`) does not find hidden characters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

SURROGATES = range(0xDC00, 0xE000)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Tables for `str.translate` that replace characters with surrogates, and surrogates with
    characters."""

    hide: Mapping[int, int]
    show: Mapping[int, int]

    @classmethod
    def of(cls, special_tokens: Iterable[str], texts: Iterable[str]) -> Self:
        """Make tables that hide the characters of special tokens, and characters of `texts` that a
        change of case can turn into one of them. Raises ValueError if there are not enough
        surrogates."""
        dangerous = _in_all_cases(set[str]().union(*special_tokens))
        for character in set[str]().union(*texts):
            if dangerous & (cases := _in_all_cases({character})):
                dangerous |= cases
        characters = sorted(map(ord, dangerous))
        if len(characters) > len(SURROGATES):
            raise ValueError(
                f"the special tokens have {len(characters)} different characters, in upper and "
                f"lower case, but the limit is {len(SURROGATES)}"
            )
        hide = dict(zip(characters, SURROGATES, strict=False))
        return cls(hide, {surrogate: character for character, surrogate in hide.items()})


def _answering(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: "MessageText", *args: Any, **kwargs: Any) -> Any:
        shown = {name: _shown(argument) for name, argument in kwargs.items()}
        return _hidden(plain(self._plain, *map(_shown, args), **shown), self._table)

    return method


class MessageText(str):
    """A text with hidden characters. Its methods also return texts with hidden characters, and hide
    even characters that come from an argument, as in `replace`."""

    _plain: str
    _table: Hidden

    def __new__(cls, plain: str, table: Hidden) -> Self:
        text = super().__new__(cls, plain.translate(table.hide))
        text._plain, text._table = plain, table
        return text

    def __str__(self) -> Self:
        return self

    def __hash__(self) -> int:
        return hash(self._plain)

    def __iter__(self) -> Iterator[str]:
        return (MessageText(character, self._table) for character in self._plain)


for _name in (
    *("__repr__", "__eq__", "__ne__", "__contains__", "__getitem__", "startswith", "endswith"),
    *("find", "rfind", "index", "rindex", "count", "split", "rsplit", "splitlines", "partition"),
    *("rpartition", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace"),
    *("upper", "lower", "title", "capitalize", "casefold", "swapcase"),
    *("isalpha", "isdigit", "isspace"),
):
    setattr(MessageText, _name, _answering(getattr(str, _name)))


def _shown(argument: Any) -> Any:
    if isinstance(argument, MessageText):
        return argument._plain
    return tuple(map(_shown, argument)) if isinstance(argument, tuple) else argument


def _hidden(answer: Any, table: Hidden) -> Any:
    if isinstance(answer, str):
        return MessageText(answer, table)
    if isinstance(answer, (list, tuple)):
        return type(answer)(_hidden(item, table) for item in answer)
    return answer


def _in_all_cases(characters: Iterable[str]) -> set[str]:
    """The given characters, and all characters into which a change of case can turn them."""
    known: set[str] = set()
    new = set(characters)
    while new:
        known |= new
        cases = (c.upper() + c.lower() + c.title() + c.casefold() for c in new)
        new = set[str]().union(*cases) - known
    return known
