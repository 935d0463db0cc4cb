"""Message text: the text of a message as a chat template sees it. It can never become a special
token.

Every character that occurs in a special token is hidden in messages: it is replaced by a lone
surrogate, which no input text can contain, until the special tokens in the whole prompt have been
found. So the special tokens of the prompt consist only of characters that the template itself
wrote, whatever it does with messages: it may cut, join, reverse and repeat them, change their case,
and write parts of special tokens next to them.

The methods of a `MessageText` return the same results as for the plain text, so ordinary templates
work as usual, and so do functions that `hiding` wraps. Only a plain string that a template makes
from it contains the surrogates: a search in such a string (`'a' in ('x' ~ content)`) does not find
hidden characters. Nor does a search for a `MessageText` in a plain string.
"""

import functools
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


def hiding(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of plain texts accept message texts too. If it gets one, even within a list
    or an object, all texts that it returns are message texts."""

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        table: Hidden | None
        if args and isinstance(args[0], MessageText):  # the usual case, without a search
            table = args[0]._table
        elif (table := next(_tables((args, kwargs)), None)) is None:
            return plain(*args, **kwargs)
        shown = {name: _shown(argument) for name, argument in kwargs.items()}
        return _hidden(plain(*map(_shown, args), **shown), table)

    return function


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
    *("__repr__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"),
    *("__getitem__", "__mod__", "startswith", "endswith", "find", "rfind", "index", "rindex"),
    *("count", "split", "rsplit", "splitlines", "partition", "rpartition", "strip", "lstrip"),
    *("rstrip", "removeprefix", "removesuffix", "replace", "translate", "expandtabs", "center"),
    *("ljust", "rjust", "zfill", "upper", "lower", "title", "capitalize", "casefold", "swapcase"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
    *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
):
    setattr(MessageText, _name, hiding(getattr(str, _name)))


def _tables(value: Any) -> Iterator[Hidden]:
    if isinstance(value, MessageText):
        yield value._table
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tables(item)
    elif isinstance(value, dict):
        for item in value.items():
            yield from _tables(item)


def _shown(value: Any) -> Any:
    if isinstance(value, MessageText):
        return value._plain
    if isinstance(value, (list, tuple)):
        return type(value)(map(_shown, value))
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return value


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
