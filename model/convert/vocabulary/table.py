"""Tables: reads ids, texts and merges of a vocabulary from the data structures of other programs.

These forms in checkpoints, JSON files and pickles are supported: {stoi, itos}, {token2id,
id2token}, {char_to_int, int_to_char} and similar names, a tuple of dictionaries in both directions,
lists and strings of characters, {token: id}, {id: token}, {"105,110": id} for merges, and
tiktoken's encodings. In JSON, numbers in keys are strings. The direction of a dictionary is
recognized by its values, not by its name. `files.py` opens files, and `build.py` builds tokenizers.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logitd.model.convert.foreign import ConvertError

Text = str | bytes
Texts = Mapping[int, Text]
IdMerges = Mapping[tuple[int, int], int]
StringMerges = tuple[tuple[str, str], ...]

_UNIT = r"(?:s|c|w|t|b|ch|chr|char|character|str|string|tok|token|word|byte)s?"
_NUMBER = r"(?:i|id|idx|int|index|num|number)s?"
_DIRECTED = re.compile(rf"{_UNIT}(?:to|2){_NUMBER}|{_NUMBER}(?:to|2){_UNIT}")
_DATA = frozenset(("tokens", "words"))
"""Names of lists that may be training data. Such a list is used only if there is no other
vocabulary."""
_OWNER = re.compile(r"^(tokenizer|tok|model|text|data)(?=.)")
"""First word of a key, if it only says what the vocabulary belongs to, such as `tokenizer` in
`tokenizer_chars`."""
_RANKS = frozenset(("mergeableranks", "ranks"))
_ALPHABETS = frozenset(("chars", "characters", "alphabet", "charset"))
_NAMED = frozenset(("vocab", "vocabulary", "vocabdict", "invvocab", "tokenizer"))
_NAMED |= _DATA | _RANKS | _ALPHABETS
_MERGES = frozenset(("merges", "bpemerges", "mergeslist"))
_PATTERNS = ("pat_str", "pattern", "split_pattern")
_SPECIAL = frozenset(("specialtokens", "specialtoken", "specials"))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Ids and texts of a vocabulary.

    where    source of the table, for messages
    merges   the new id for each pair of ids that is merged
    strings  pairs of texts to merge, in order of priority
    pattern  split pattern, if it is stored
    special  names that the source lists as special tokens
    ranked   True if the texts are byte sequences and their ids are tiktoken's ranks
    listed   True if the ids are places in a list, which does not say that the first id is 0
    """

    texts: Texts
    where: str
    merges: IdMerges | None = None
    strings: StringMerges | None = None
    pattern: str | None = None
    special: frozenset[str] = frozenset()
    ranked: bool = False
    listed: bool = False


@dataclass(frozen=True)
class _Entry:
    """A vocabulary under a key of a dictionary. `ordered` is True if the vocabulary is a
    dictionary that states the ids, and False if it is a list."""

    label: str
    texts: Texts
    ordered: bool
    name: str = ""

    @property
    def listed(self) -> bool:
        """True for a list that is not named after its index, as `itos` is."""
        return not self.ordered and _DIRECTED.fullmatch(self.name) is None


def table_in(container: Mapping[Any, Any], where: str) -> Table | None:
    """Find the vocabulary under the usual keys of a dictionary; None if there is none. Raises
    ConvertError if vocabularies contradict each other."""
    entries = [entry for item in container.items() if (entry := _entry(*item, where)) is not None]
    chosen = _agreed(entries, where)
    lists = (value for key, value in container.items() if _plain(key) in _MERGES)
    merges = [value for value in lists if isinstance(value, Mapping | list | tuple)]
    pairs, strings = read_merges(merges[-1], f"'merges' of {where}") if merges else (None, None)
    if chosen is None and pairs is None:
        return None
    special = _special_tokens(container)
    texts: dict[int, Text] = {i: name for name, i in special.items() if i is not None}
    label = "'merges'"
    if chosen is not None:
        for token_id, name in texts.items():
            if (other := chosen.texts.get(token_id, name)) != name:
                raise ConvertError(
                    f"{where}: the special token {name!r} and {other!r} of {chosen.label} have the "
                    f"same id, {token_id}: name a file that states all ids with --tokenizer"
                )
        texts, label = texts | dict(chosen.texts), chosen.label
    patterns = (p for key in _PATTERNS if isinstance(p := container.get(key), str) and p)
    return Table(
        texts=texts,
        where=f"{label} of {where}",
        merges=pairs,
        strings=strings,
        pattern=next(patterns, None),
        special=frozenset(special),
        ranked=any(entry.ordered and entry.name in _RANKS for entry in entries),
        listed=chosen is not None and chosen.listed and not merges,
    )


def table_of(value: Any, where: str) -> Table | None:
    """Find the vocabulary in the contents of a file, which may be a dictionary of tables, a table,
    or a tuple of dictionaries in both directions. None if there is no vocabulary. Raises
    ConvertError."""
    if isinstance(value, Mapping):
        inner = ((f"{str(name)!r} of {where}", v) for name, v in value.items())
        for place, container in ((where, value), *inner):
            if isinstance(container, Mapping) and (table := table_in(container, place)):
                return table
    texts = _texts(value, where, alphabet=False)
    if isinstance(value, list | tuple) and [isinstance(v, Mapping) for v in value] == [True, True]:
        labels = ("the first part", "the second part")
        parts = [
            (label, _by_direction(each, where)) for label, each in zip(labels, value, strict=True)
        ]
        entry = _agreed([_Entry(label, part, True) for label, part in parts if part], where)
        return None if entry is None else Table(texts=entry.texts, where=where)
    listed = not isinstance(value, Mapping)
    return None if texts is None else Table(texts=texts, where=where, listed=listed)


def _entry(key: Any, value: Any, where: str) -> _Entry | None:
    name = _OWNER.sub("", _plain(key))
    if name not in _NAMED and _DIRECTED.fullmatch(name) is None:
        return None
    texts = _texts(value, f"{str(key)!r} of {where}", alphabet=name in _ALPHABETS)
    return _Entry(repr(str(key)), texts, isinstance(value, Mapping), name) if texts else None


def _agreed(entries: Sequence[_Entry], where: str) -> _Entry | None:
    """Choose the first vocabulary; dictionaries are preferred to lists. Raises ConvertError if
    another vocabulary contradicts it. A list may lack some texts of a dictionary, but may not have
    additional texts."""
    ordered = [entry for entry in entries if entry.ordered]
    lists = [entry for entry in entries if not entry.ordered]
    listed = [entry for entry in lists if entry.name not in _DATA]
    if not ordered and not listed:
        listed = lists
    if not (ordered or listed):
        return None
    first, *others = *ordered, *listed
    for other in others:
        if other.texts == first.texts:
            continue
        if other.ordered:
            raise ConvertError(f"{where}: {other.label} is not the inverse of {first.label}")
        if not first.ordered:
            raise ConvertError(
                f"{where}: {first.label} and {other.label} are different vocabularies"
            )
        if strange := sorted({*map(str, other.texts.values())} - {*map(str, first.texts.values())}):
            raise ConvertError(
                f"{where}: {other.label} has {strange[0]!r}, which {first.label} lacks"
            )
    return first


def _special_tokens(container: Mapping[Any, Any]) -> dict[str, int | None]:
    special: dict[str, int | None] = {}
    for key, value in container.items():
        if _plain(key) not in _SPECIAL:
            continue
        if isinstance(value, Mapping):
            special |= {k: v for k, v in value.items() if isinstance(k, str) and type(v) is int}
        elif isinstance(value, list | tuple):
            for text in value:
                if isinstance(text, str):
                    special.setdefault(text, None)
    return special


def read_merges(value: Any, where: str) -> tuple[IdMerges | None, StringMerges | None]:
    """Read merges of ids or of texts. Both are None if there are no merges. Raises ConvertError if
    the merges have another form: without them, a text would get different ids."""
    pairs = _id_merges(value)
    strings = None if pairs else _string_merges(value)
    if not pairs and not strings and value:
        raise ConvertError(
            f"{where} holds a merge in an unknown form; expected pairs of tokens, or pairs of ids "
            "with the new id"
        )
    return pairs, strings


def _id_merges(value: Any) -> IdMerges | None:
    """Read merges of ids: {(a, b): id}, {"a,b": id}, or lists of ((a, b), id). None if the value
    has another form."""
    merges: dict[tuple[int, int], int] = {}
    for item in _items(value):
        if not isinstance(item, list | tuple) or len(item) != 2 or type(item[1]) is not int:
            return None
        if (pair := _pair(item[0])) is None:
            return None
        merges[pair] = item[1]
    return merges or None


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.items()
    return value if isinstance(value, list | tuple) else ()


def _string_merges(value: Any) -> StringMerges | None:
    """Read merges of texts: a list of [a, b] or "a b", or {(a, b): rank}. None if the value has
    another form."""
    if isinstance(value, Mapping):
        if not all(type(rank) is int for rank in value.values()):
            return None
        value = sorted(value, key=value.__getitem__)
    merges = []
    for merge in _items(value):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list | tuple) or len(parts) != 2:
            return None
        if not all(isinstance(part, str) for part in parts):
            return None
        merges.append((parts[0], parts[1]))
    return tuple(merges) or None


def checked(texts: Texts, where: str) -> Texts:
    """The texts, sorted by id. Raises ConvertError if an id is negative, or if a text is empty,
    appears twice or is not valid Unicode."""
    if any(token_id < 0 for token_id in texts):
        raise ConvertError(f"{where} has the id {min(texts)}; ids start at 0")
    seen: dict[Text, int] = {}
    for token_id, text in sorted(texts.items()):
        if text in seen:
            raise ConvertError(f"{where}: {text!r} has two ids, {seen[text]} and {token_id}")
        if not text:
            raise ConvertError(f"{where}: the text of id {token_id} is empty")
        if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
            raise ConvertError(f"{where}: the text of id {token_id}, {text!r}, is not Unicode")
        seen[text] = token_id
    return dict(sorted(texts.items()))


def _plain(key: Any) -> str:
    """A key in lower case, without underscores and hyphens; "" if it is not a string."""
    return key.lower().replace("_", "").replace("-", "") if isinstance(key, str) else ""


def _texts(value: Any, where: str, *, alphabet: bool) -> Texts | None:
    """Read a dictionary in either direction, or a list of texts. With `alphabet`, a string is read
    as a list of characters. None if the value has another form."""
    if isinstance(value, Mapping):
        return _by_direction(value, where)
    if isinstance(value, str) and alphabet:
        return dict(enumerate(value)) or None
    if isinstance(value, list | tuple) and value and all(isinstance(t, str | bytes) for t in value):
        return dict(enumerate(value))
    return None


def _by_direction(value: Mapping[Any, Any], where: str) -> Texts | None:
    keys, values = list(value), list(value.values())
    if value and all(type(number) is int for number in values):
        if not all(isinstance(text, str | bytes) for text in keys):
            return None
        by_id = dict(zip(values, keys, strict=True))
        for text, number in value.items():
            if by_id[number] != text:
                raise ConvertError(f"{where}: {text!r} and {by_id[number]!r} share the id {number}")
        return by_id
    numbers = [_number(key) for key in keys]
    texts = all(isinstance(text, str | bytes) for text in values)
    if not value or not texts or None in numbers or len(set(numbers)) < len(numbers):
        return None
    return {int(key): text for key, text in value.items()}


def _number(key: Any) -> int | None:
    """A key as a number; the key may be a string. None if it is not a number."""
    if type(key) is int:
        return key
    whole = isinstance(key, str) and re.fullmatch(r"0|[1-9][0-9]{0,17}", key)
    return int(key) if whole else None


def _pair(value: Any) -> tuple[int, int] | None:
    """Read two ids: (105, 110), or a string "105,110", "105 110" or "(105, 110)"."""
    if isinstance(value, str):
        match = re.fullmatch(r"\(?\s*([0-9]{1,18})\s*[, ]\s*([0-9]{1,18})\s*\)?", value)
        return None if match is None else (int(match[1]), int(match[2]))
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int for n in value):
        return value[0], value[1]
    return None
