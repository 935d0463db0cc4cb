"""Lines: reads a vocabulary with one token per line, with or without its id.

The id may be before or after the token, separated by a tab, a space, a comma or a colon. Without
ids, the lines are sorted by id.
"""

import re
from pathlib import Path

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.vocabulary.table import Table

SEPARATORS = ("\t", ": ", ", ", ":", ",", " ")
"""Texts between a token and its id. Those that contain another one come first."""
AS_JSON = "write the tokens as a JSON list"


def table_of_lines(raw: bytes, path: Path) -> Table:
    """Read a file that has one token per line. Raises ConvertError."""
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path} is not UTF-8 text: {error}") from error
    if (numbered := _numbered(text, path)) is not None:
        return Table(texts=numbered, where=str(path))
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > 3 and all("\t" in line for line in lines):
        raise ConvertError(
            f"{path} has several columns, and neither the first nor the last has the ids of the "
            f"tokens: {AS_JSON}"
        )
    if len(lines) > 3 and all(re.fullmatch(r"(['\"]).+\1", line) for line in lines):
        raise ConvertError(
            f"{path} has its tokens in quotes: write them without quotes, or as a JSON list"
        )
    empty = [place for place, line in enumerate(lines) if not line]
    if len(empty) == 2 and empty[1] == empty[0] + 1:  # one of the characters is a line break
        lines[empty[0] : empty[1] + 1] = ["\n"]
    elif empty:
        raise ConvertError(
            f"{path}: line {empty[0] + 1} is empty, but each line must be a token: remove empty "
            f"lines, or {AS_JSON}"
        )
    return Table(texts=dict(enumerate(lines)), where=str(path), listed=True)


def _numbered(text: str, path: Path) -> dict[int, str] | None:
    """The tokens by id; None if not every line has a different token and a number. Raises
    ConvertError if the numbers are no ids, if both columns are numbers, or if only the first line
    has no number."""
    for separator in SEPARATORS:
        found = []
        for pairs in (_id_last(text, separator), _id_first(text, separator)):
            if pairs is None or len({token for token, _ in pairs}) < len(pairs):
                continue
            texts = {int(number): token for token, number in pairs}
            if len(texts) < len(pairs):
                raise ConvertError(
                    f"{path} has a number in each line, but several lines have the same one, so "
                    f"the numbers are not ids: remove them, or {AS_JSON}"
                )
            found.append(texts)
        if len(found) == 2 and found[0] != found[1]:
            raise ConvertError(
                f"{path} has two numbers in each line, and either may be the id: {AS_JSON}"
            )
        if found:
            return found[0]
        first, _, rest = text.partition("\n")
        if (
            separator in first
            and not _is_numbered(first, separator)
            and _is_numbered(rest, separator)
        ):
            raise ConvertError(
                f"{path}: each line has a token and a number, except the first, {first!r}: "
                "remove it"
            )
    return None


def _is_numbered(text: str, separator: str) -> bool:
    return _id_last(text, separator) is not None or _id_first(text, separator) is not None


def _id_last(text: str, separator: str) -> list[tuple[str, str]] | None:
    return _pairs(rf"(?P<token>\n|[^\n]*?){re.escape(separator)}(?P<id>[0-9]+)", text)


def _id_first(text: str, separator: str) -> list[tuple[str, str]] | None:
    return _pairs(rf"(?P<id>[0-9]+){re.escape(separator)}(?P<token>\n|[^\n]*)", text)


def _pairs(line: str, text: str) -> list[tuple[str, str]] | None:
    """The token and the number of each line; None if they do not cover the text. A line break may
    be a token."""
    pattern, pairs, end = re.compile(rf"{line}(?:\n|\Z)"), [], 0
    while end < len(text):
        if (match := pattern.match(text, end)) is None:
            return None
        pairs.append((match["token"], match["id"]))
        end = match.end()
    return pairs or None
