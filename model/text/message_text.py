"""Message text: what a message says, as a chat template may handle it, so that no special token can
come of it.

Every character that stands in a special token is hidden in the text of a message: a lone surrogate
stands for it, which no text that we read can hold, until the special tokens of the whole prompt
have been found. So these consist of characters that the template wrote and of none that a message
did, whatever the template does with messages: it may cut, join, reverse, repeat them or change
their case, and write parts of special tokens beside them.

A template that does what is usual sees nothing of this: the methods of a `MessageText` answer as
what it says. Only a plain string that was made from it holds the surrogates, and what looks into
that (`'a' in ('x' ~ content)`) does not find those characters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

SURROGATES = range(0xDC00, 0xE000)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Characters and what stands for each, there and back (for `str.translate`)."""

    hide: Mapping[int, int]
    show: Mapping[int, int]

    @classmethod
    def of(cls, special_tokens: Iterable[str], texts: Iterable[str]) -> Self:
        """Those of special tokens, and those of these texts that become one in another case, in
        every case. Raises ValueError when there are too many."""
        dangerous = _in_all_cases(set[str]().union(*special_tokens))
        for character in set[str]().union(*texts):
            if dangerous & (cases := _in_all_cases({character})):
                dangerous |= cases
        characters = sorted(map(ord, dangerous))
        if len(characters) > len(SURROGATES):
            raise ValueError(
                f"the special tokens have {len(characters)} characters; {len(SURROGATES)} can be "
                "told from what messages say"
            )
        hide = dict(zip(characters, SURROGATES, strict=False))
        return cls(hide, {surrogate: character for character, surrogate in hide.items()})


def _answering(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of str that answers as what the text says."""

    def method(self: "MessageText", *args: Any, **kwargs: Any) -> Any:
        said = tuple(_said(argument) for argument in args)
        answer = plain(
            self._said, *said, **{name: _said(argument) for name, argument in kwargs.items()}
        )
        return _hidden_again(answer, self._hidden)

    return method


class MessageText(str):
    """A text in which characters are hidden, and the strings that come out of its methods. What a
    method puts in counts as said by the message, and makes no special token either."""

    _said: str
    _hidden: Hidden

    def __new__(cls, said: str, hidden: Hidden) -> Self:
        text = super().__new__(cls, said.translate(hidden.hide))
        text._said, text._hidden = said, hidden
        return text

    def __str__(self) -> Self:
        return self

    def __hash__(self) -> int:
        return hash(self._said)

    def __iter__(self) -> Iterator[str]:
        return (MessageText(character, self._hidden) for character in self._said)

    __repr__ = _answering(str.__repr__)
    __eq__ = _answering(str.__eq__)
    __ne__ = _answering(str.__ne__)
    __contains__ = _answering(str.__contains__)
    __getitem__ = _answering(str.__getitem__)
    startswith = _answering(str.startswith)
    endswith = _answering(str.endswith)
    find = _answering(str.find)
    rfind = _answering(str.rfind)
    index = _answering(str.index)
    rindex = _answering(str.rindex)
    count = _answering(str.count)
    split = _answering(str.split)
    rsplit = _answering(str.rsplit)
    splitlines = _answering(str.splitlines)
    partition = _answering(str.partition)
    rpartition = _answering(str.rpartition)
    strip = _answering(str.strip)
    lstrip = _answering(str.lstrip)
    rstrip = _answering(str.rstrip)
    removeprefix = _answering(str.removeprefix)
    removesuffix = _answering(str.removesuffix)
    replace = _answering(str.replace)
    upper = _answering(str.upper)
    lower = _answering(str.lower)
    title = _answering(str.title)
    capitalize = _answering(str.capitalize)
    casefold = _answering(str.casefold)
    swapcase = _answering(str.swapcase)
    isalpha = _answering(str.isalpha)
    isdigit = _answering(str.isdigit)
    isspace = _answering(str.isspace)


def _said(argument: Any) -> Any:
    """An argument, its texts of messages as they are said."""
    if isinstance(argument, MessageText):
        return argument._said
    return tuple(map(_said, argument)) if isinstance(argument, tuple) else argument


def _hidden_again(answer: Any, hidden: Hidden) -> Any:
    """An answer, its strings hidden."""
    if isinstance(answer, str):
        return MessageText(answer, hidden)
    if isinstance(answer, (list, tuple)):
        return type(answer)(_hidden_again(item, hidden) for item in answer)
    return answer


def _in_all_cases(characters: Iterable[str]) -> set[str]:
    """These characters, and all that become of them by any changes of case."""
    known: set[str] = set()
    new = set(characters)
    while new:
        known |= new
        cases = (c.upper() + c.lower() + c.title() + c.casefold() for c in new)
        new = set[str]().union(*cases) - known
    return known
