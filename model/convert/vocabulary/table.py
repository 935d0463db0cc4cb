"""A vocabulary as somebody wrote it down: ids and their texts, perhaps with merges.

Reads what programs leave in checkpoints, JSON and pickles: {stoi, itos}, {token2id, id2token},
{char_to_int, int_to_char} and their like, a tuple of both directions, lists and strings of
characters, {token: id}, {id: token}, {"105,110": id} for merges, and tiktoken's encodings. Keys of
JSON that are numbers stand as text. Which direction a dictionary has is seen from its values, not
from its name. Does not open files (`files.py`), and does not make tokenizers (`build.py`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from logitd.model.convert.foreign import ConvertError

Text = str | bytes
Texts = Mapping[int, Text]

_UNIT = r"(?:s|c|w|t|b|ch|chr|char|character|str|string|tok|token|word|byte)s?"
_NUMBER = r"(?:i|id|idx|int|index|num|number)s?"
_DIRECTED = re.compile(rf"{_UNIT}(?:to|2){_NUMBER}|{_NUMBER}(?:to|2){_UNIT}")
_NAMED = frozenset(
    (
        *("vocab", "vocabulary", "vocabdict", "invvocab", "tokenizer", "tokens", "words"),
        *("mergeableranks", "ranks"),
    )
)
_DATA = frozenset(("tokens", "words"))
"""Names of what may be the training data as well: they count where there is nothing else."""
_ALPHABETS = frozenset(("chars", "characters", "alphabet", "charset"))
_MERGES = frozenset(("merges", "bpemerges", "mergeslist"))
_PATTERNS = ("pat_str", "pattern", "split_pattern")
_SPECIAL = frozenset(("specialtokens", "specialtoken", "specials"))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Ids and texts.

    where    the place, for people
    merges   pairs of ids and what they make, in the order of what they make
    strings  pairs of texts that are joined, in order
    pattern  how texts are cut, where that is written down
    special  names that are special tokens by the source's own word
    ranked   the texts are bytes that tiktoken merges by their ids
    """

    texts: Texts
    where: str
    merges: Mapping[tuple[int, int], int] | None = None
    strings: tuple[tuple[str, str], ...] | None = None
    pattern: str | None = None
    special: frozenset[str] = frozenset()
    ranked: bool = False


def table_in(container: Mapping[Any, Any], where: str) -> Table | None:
    """The vocabulary that a dictionary holds under the names that are usual; None where it holds
    none. Raises ConvertError where it says two things at once."""
    ordered, listed, data = dict[str, Texts](), dict[str, Texts](), dict[str, Texts]()
    merges: Any = None
    special: dict[str, int] = {}
    named: frozenset[str] = frozenset()
    for key, value in container.items():
        name = _plain(key)
        if name in _MERGES:
            merges = value
        elif name in _SPECIAL and isinstance(value, Mapping):
            special = {k: v for k, v in value.items() if isinstance(k, str) and type(v) is int}
        elif name in _SPECIAL and isinstance(value, list | tuple):
            named = frozenset(text for text in value if isinstance(text, str))
        elif _is_vocabulary(name) and (texts := _texts(value, alphabet=name in _ALPHABETS)):
            kind = ordered if isinstance(value, Mapping) else data if name in _DATA else listed
            kind[str(key)] = texts
    if not ordered and not listed:
        listed = data
    texts = _agreeing(ordered, listed, where)
    pairs = None if merges is None else id_merges(merges)
    if texts is None and pairs is None:
        return None
    taken = {} if texts is None else dict(texts)
    key = next(iter([*ordered, *listed])) if texts is not None else "merges"
    return Table(
        texts=taken | {value: name for name, value in special.items() if value not in taken},
        where=f"{key!r} of {where}",
        merges=pairs,
        strings=None if merges is None or pairs is not None else string_merges(merges),
        pattern=_pattern(container),
        special=named.union(special),
        ranked=any(_plain(name) in ("mergeableranks", "ranks") for name in ordered),
    )


def table_of(value: Any, where: str) -> Table | None:
    """The vocabulary that a whole file holds: a dictionary of tables, a table itself, or a tuple of
    both directions. None where it is something else. Raises ConvertError."""
    if isinstance(value, Mapping):
        table = table_in(value, where)
        if table is not None:
            return table
        for name, inner in value.items():
            if isinstance(inner, Mapping) and (
                table := table_in(inner, f"{str(name)!r} of {where}")
            ):
                return table
    if isinstance(value, list | tuple) and len(value) == 2 and _are_mappings(value):
        both = {name: _texts(part, alphabet=False) for name, part in zip("ab", value, strict=True)}
        known = {name: texts for name, texts in both.items() if texts}
        texts = _agreeing(known, {}, where, names=("the first part", "the second"))
    else:
        texts = _texts(value, alphabet=False)
    return None if texts is None else Table(texts=texts, where=where)


def id_merges(value: Any) -> dict[tuple[int, int], int] | None:
    """Merges of ids, {(a, b): id} or {"a,b": id}, and lists of ((a, b), id); None where they are
    something else."""
    if isinstance(value, Mapping):
        items: list[Any] = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(value)
    else:
        return None
    merges: dict[tuple[int, int], int] = {}
    for item in items:
        if not isinstance(item, list | tuple) or len(item) != 2 or type(item[1]) is not int:
            return None
        pair = _pair(item[0])
        if pair is None:
            return None
        merges[pair] = item[1]
    return merges or None


def string_merges(value: Any) -> tuple[tuple[str, str], ...] | None:
    """Merges of texts in order: [a, b], "a b", or {(a, b): rank}."""
    if isinstance(value, Mapping):
        if not all(type(rank) is int for rank in value.values()):
            return None
        value = sorted(value, key=value.__getitem__)
    if not isinstance(value, list | tuple):
        return None
    merges = []
    for merge in value:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list | tuple) or len(parts) != 2:
            return None
        if not all(isinstance(part, str) for part in parts):
            return None
        merges.append((parts[0], parts[1]))
    return tuple(merges) or None


def checked(texts: Texts, where: str) -> Texts:
    """The same texts, by id. Raises ConvertError for ids and texts that cannot be a vocabulary."""
    if any(token_id < 0 for token_id in texts):
        raise ConvertError(f"{where} has the id {min(texts)}; ids begin with 0")
    seen: dict[Text, int] = {}
    for token_id, text in sorted(texts.items()):
        if text in seen:
            raise ConvertError(f"{where}: {text!r} stands for both ids {seen[text]} and {token_id}")
        if not text:
            raise ConvertError(f"{where}: the text of id {token_id} is empty")
        if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
            raise ConvertError(f"{where}: the text of id {token_id}, {text!r}, is not Unicode")
        seen[text] = token_id
    return dict(sorted(texts.items()))


def _plain(key: Any) -> str:
    """A name without its capitals and underscores."""
    return key.lower().replace("_", "").replace("-", "") if isinstance(key, str) else ""


def _is_vocabulary(name: str) -> bool:
    return name in _NAMED or name in _ALPHABETS or _DIRECTED.fullmatch(name) is not None


def _texts(value: Any, *, alphabet: bool) -> Texts | None:
    """Ids and texts in whatever direction; `alphabet`: a string is its characters."""
    if isinstance(value, Mapping):
        return _by_direction(value)
    if isinstance(value, str) and alphabet:
        return dict(enumerate(value)) or None
    if isinstance(value, list | tuple) and value and all(isinstance(t, str | bytes) for t in value):
        return dict(enumerate(value))
    return None


def _by_direction(value: Mapping[Any, Any]) -> Texts | None:
    if not value:
        return None
    if all(type(number) is int for number in value.values()):
        if not all(isinstance(text, str | bytes) for text in value):
            return None
        if len(set(value.values())) < len(value):
            numbers = list(value.values())
            twice = next(number for number in numbers if numbers.count(number) > 1)
            texts = [text for text, number in value.items() if number == twice]
            raise ConvertError(
                f"{texts[0]!r} and {texts[1]!r} of a vocabulary share the id {twice}"
            )
        return {number: text for text, number in value.items()}
    if all(isinstance(text, str | bytes) for text in value.values()):
        numbers = [_number(key) for key in value]
        if None in numbers or len(set(numbers)) < len(numbers):
            return None
        return {int(key): text for key, text in value.items()}
    return None


def _number(key: Any) -> int | None:
    if type(key) is int:
        return key
    if isinstance(key, str) and re.fullmatch(r"0|[1-9][0-9]*", key):
        return int(key)
    return None


def _pair(value: Any) -> tuple[int, int] | None:
    """Two ids: (105, 110), or as text "105,110", "105 110" and "(105, 110)"."""
    if isinstance(value, str):
        match = re.fullmatch(r"\(?\s*(\d+)\s*[, ]\s*(\d+)\s*\)?", value)
        return None if match is None else (int(match[1]), int(match[2]))
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int for n in value):
        return value[0], value[1]
    return None


def _agreeing(
    ordered: Mapping[str, Texts],
    listed: Mapping[str, Texts],
    where: str,
    names: tuple[str, str] | None = None,
) -> Texts | None:
    """What the tables of one place say together. Dictionaries name their ids; a list beside them
    may leave out some of their texts."""
    for first, second in _pairs(ordered):
        if ordered[first] != ordered[second]:
            this, other = names or (repr(second), repr(first))
            raise ConvertError(f"{where}: {this} is not {other} the other way round")
    if ordered:
        texts = next(iter(ordered.values()))
        for name, others in listed.items():
            if strange := sorted(set(map(str, others.values())) - set(map(str, texts.values()))):
                raise ConvertError(
                    f"{where}: {name!r} has {strange[0]!r}, which {next(iter(ordered))!r} lacks"
                )
        return texts
    for first, second in _pairs(listed):
        if listed[first] != listed[second]:
            raise ConvertError(f"{where}: {first!r} and {second!r} are different vocabularies")
    return next(iter(listed.values()), None)


def _pairs(tables: Mapping[str, Texts]) -> Iterator[tuple[str, str]]:
    first, *others = [*tables] or [""]
    return ((first, other) for other in others)


def _pattern(container: Mapping[Any, Any]) -> str | None:
    for name in _PATTERNS:
        if isinstance(container.get(name), str) and container[name]:
            return str(container[name])
    return None


def _are_mappings(parts: Any) -> bool:
    return all(isinstance(part, Mapping) for part in parts)
