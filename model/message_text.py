"""Message text: what a message says, as a chat template may handle it, so that no special token can
come of it.

Every character that stands in a special token is hidden in the text of a message: a lone surrogate
stands for it, which no text that we read can hold, until the special tokens of the whole prompt
have been found. So these consist of characters that the template wrote and of none that a message
did, whatever the template does with messages: it may cut, join, reverse, repeat them or change
their case, and write parts of special tokens beside them.

A template that does what is usual sees nothing of this: a `MessageText` is compared, searched,
split, stripped and put into another case as what it says. Only a plain string that was made from
it holds the surrogates, and what looks into that (`'a' in ('x' ~ content)`) does not find those
characters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex

SURROGATES = range(0xDC00, 0xE000)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Characters and what stands for each, there and back (for `str.translate`)."""

    hide: Mapping[int, int]
    show: Mapping[int, int]

    @classmethod
    def of(cls, special_tokens: Iterable[str], texts: Iterable[str]) -> Self:
        """Those of special tokens, and those of these texts that become one in another case.
        Raises ValueError when there are too many."""
        dangerous = set[str]().union(*special_tokens)
        found = {c for c in set[str]().union(*texts) if dangerous & set(_other_cases(c))}
        characters = sorted(map(ord, dangerous | found))
        if len(characters) > len(SURROGATES):
            raise ValueError(
                f"the special tokens have {len(characters)} characters; {len(SURROGATES)} can be "
                "told from what messages say"
            )
        hide = dict(zip(characters, SURROGATES, strict=False))
        return cls(hide, {surrogate: character for character, surrogate in hide.items()})


def _looking(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of str that looks for its arguments, or cuts: of what the text says."""

    def method(self: "MessageText", *args: Any, **kwargs: Any) -> Any:
        hide = self._hidden.hide
        args = tuple(_hidden_in(one, hide) for one in args)
        kwargs = {name: _hidden_in(one, hide) for name, one in kwargs.items()}
        return _kept(plain(self, *args, **kwargs), self._hidden)

    return method


def _in_case(plain: Callable[[str], str]) -> Callable[["MessageText"], "MessageText"]:
    """A method of str that gives what the text says in another case."""

    def method(self: "MessageText") -> "MessageText":
        return MessageText(plain(self.translate(self._hidden.show)), self._hidden)

    return method


class MessageText(str):
    """A text in which characters are hidden. What comes out of its methods is of this kind again,
    and what goes into them is compared with what it says."""

    _hidden: Hidden

    def __new__(cls, text: str, hidden: Hidden) -> Self:
        return cls.made_of(text.translate(hidden.hide), hidden)

    @classmethod
    def made_of(cls, text: str, hidden: Hidden) -> Self:
        """One of a text in which they are hidden already."""
        made = super().__new__(cls, text)
        made._hidden = hidden
        return made

    def __str__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return repr(self.translate(self._hidden.show)).translate(self._hidden.hide)

    def __hash__(self) -> int:
        return hash(self.translate(self._hidden.show))

    def __iter__(self) -> Iterator[str]:
        return (self.made_of(character, self._hidden) for character in super().__iter__())

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Self:
        """`new` is the template's, and so not hidden."""
        replaced = super().replace(old.translate(self._hidden.hide), new, count)
        return self.made_of(replaced, self._hidden)

    __eq__ = _looking(str.__eq__)
    __ne__ = _looking(str.__ne__)
    __contains__ = _looking(str.__contains__)
    __getitem__ = _looking(str.__getitem__)
    startswith = _looking(str.startswith)
    endswith = _looking(str.endswith)
    find = _looking(str.find)
    rfind = _looking(str.rfind)
    index = _looking(str.index)
    rindex = _looking(str.rindex)
    count = _looking(str.count)
    split = _looking(str.split)
    rsplit = _looking(str.rsplit)
    splitlines = _looking(str.splitlines)
    partition = _looking(str.partition)
    rpartition = _looking(str.rpartition)
    strip = _looking(str.strip)
    lstrip = _looking(str.lstrip)
    rstrip = _looking(str.rstrip)
    removeprefix = _looking(str.removeprefix)
    removesuffix = _looking(str.removesuffix)
    upper = _in_case(str.upper)
    lower = _in_case(str.lower)
    title = _in_case(str.title)
    capitalize = _in_case(str.capitalize)
    casefold = _in_case(str.casefold)
    swapcase = _in_case(str.swapcase)


def _hidden_in(argument: Any, hide: Mapping[int, int]) -> Any:
    if isinstance(argument, str):
        return argument.translate(hide)
    if isinstance(argument, tuple):
        return tuple(_hidden_in(one, hide) for one in argument)
    return argument


def _kept(result: Any, hidden: Hidden) -> Any:
    """A result, its strings of the same kind."""
    if isinstance(result, str):
        return MessageText.made_of(result, hidden)
    if isinstance(result, (list, tuple)):
        return type(result)(_kept(one, hidden) for one in result)
    return result


def _other_cases(character: str) -> str:
    return character.upper() + character.lower() + character.title() + character.casefold()
