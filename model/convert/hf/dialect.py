"""Split patterns: translates them between two dialects of regular expressions.

tiktoken uses the Rust engine fancy-regex; Hugging Face's tokenizers use Oniguruma with Ruby's
syntax. These constructs in split patterns differ between the two:

  X{1,2}+   in fancy-regex: one or two, without backtracking; in Ruby: one or two, repeated
  X{2}?     in fancy-regex: two; in Ruby: two or none
  $ and ^   in fancy-regex: the ends of the text; in Ruby: the ends of each line
  a(?i)b|c  in fancy-regex: ab or c; in Ruby: ab or ac
  (?s: (?m: the dot matches line breaks, too: (?s: in fancy-regex, (?m: in Ruby
  \\w \\b     in fancy-regex, joiners are in words; in Ruby, ² and ½ are, but not in a class
  (?i:      in fancy-regex, classes of characters ignore case, too; in Ruby, (?i:ss) matches ß

A translated pattern has the same meaning as the original. Patterns that cannot be translated are
refused, and so is every escape that is not known to have one meaning. The engines use different
versions of Unicode, so a recently added character may be a letter in only one of the engines.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from logitd.model.convert.foreign import ConvertError

_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_OPENING = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|(?P<options>[a-zA-Z-]+)[:)]))?")
_REPEAT = re.compile(
    r"(?P<interval>\{\d+(?P<range>,\d*)?\})(?P<suffix>[+?]?)|(?:[*+?]|\{\d*(?:,\d*)?\})[+?]?"
)
_SAME = "sSdDnrtfvaAz"
"""Letters whose escapes have the same meaning in both dialects."""
_OTHER_PROPERTIES = ("print", "graph", "word", "xdigit")
"""Names of properties with different meanings."""
_UNLIKE_FOLDING = re.compile(r"\\(?:[pP]\{[^}]*\}|u....|[wWbB])")
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}"


@dataclass(frozen=True)
class _Dialect:
    """The way to write, in the dialect translated to, what the other dialect writes differently.

    word       the characters that the other dialect calls \\w, as members of a character class
    in_class   those that it calls \\w in a character class
    keep       an operand and its interval -> the other dialect's interval followed by +
    exact      an operand and its interval -> the other dialect's exact interval followed by ?
    anchors    the other dialect's ^ and $
    """

    word: str
    in_class: str
    keep: Callable[[str, str], str]
    exact: Callable[[str, str], str]
    anchors: Mapping[str, str]


_ONIGURUMA = _Dialect(
    word=_WORD + r"\u200C\u200D",
    in_class=_WORD + r"\u200C\u200D",
    keep=lambda operand, interval: f"(?>{operand}{interval})",
    exact=lambda operand, interval: f"{operand}{interval}",
    anchors={"$": r"\z", "^": r"\A"},
)
_FANCY_REGEX = _Dialect(
    word=_WORD + "²³¹¼½¾",
    in_class=_WORD,
    keep=lambda operand, interval: f"(?:{operand}{interval})+",
    exact=lambda operand, interval: f"(?:{operand}{interval})?",
    anchors={"$": r"(?=\n|\z)", "^": r"(?:(?<=\n)|\A)"},
)


def to_oniguruma(pattern: str) -> str:
    """Translate a split pattern from tiktoken's dialect to the dialect of Hugging Face's
    tokenizers. Raises ConvertError."""
    return _rewritten(pattern, _ONIGURUMA)


def from_oniguruma(pattern: str) -> str:
    """Translate a split pattern from the dialect of Hugging Face's tokenizers to tiktoken's. Raises
    ConvertError."""
    return _rewritten(pattern, _FANCY_REGEX)


def _rewritten(pattern: str, dialect: _Dialect) -> str:
    out: list[str] = []
    openings: list[int] = []  # places in `out` at which open groups begin
    atom = 0  # place in `out` at which the operand of a repetition begins
    ignoring = [pattern.startswith("(?i)")]  # for each open group, whether it ignores case
    folded = ""  # the characters whose case is ignored
    at = 0
    while at < len(pattern):
        source = piece = seen = pattern[at]
        if match := _ESCAPE.match(pattern, at):
            source, seen = match[0], f" {match[0]} "
            atom, piece = len(out), _escape(source, pattern, dialect)
        elif source == "[":
            source = _character_class(pattern, at)
            seen = " ".join(re.findall(rf"{_ESCAPE.pattern}|.", source, re.DOTALL))
            atom, piece = len(out), _translated_class(source, pattern, dialect)
        elif source == "(":
            source = piece = _opening(pattern, at)
            seen = ""
            openings.append(len(out))
            ignoring.append(ignoring[-1] or source == "(?i:")
        elif source == ")":
            if not openings:
                raise ConvertError(f"the split pattern {pattern[:60]!r} has an unmatched )")
            atom, seen = openings.pop(), ""
            ignoring.pop()
        elif source in "*+?{" and (match := _REPEAT.match(pattern, at)):
            source = piece = match[0]
            keeps = match["suffix"] == "+"
            if keeps or (match["suffix"] and match["range"] is None):
                write = dialect.keep if keeps else dialect.exact
                piece = write("".join(out[atom:]), match["interval"])
                del out[atom:]
        else:
            atom, piece = len(out), dialect.anchors.get(source, source)
        folded += seen if ignoring[-1] else " "
        out.append(piece)
        at += len(source)
    _check_folding(folded, pattern)
    return "".join(out)


def _escape(escape: str, pattern: str, dialect: _Dialect, *, in_class: bool = False) -> str:
    """The translation of an escape. Raises ConvertError if its meaning is not known to be the same
    in both dialects."""
    kind, members = escape[1], dialect.in_class if in_class else dialect.word
    word = f"[{members}]"
    if kind == "w":
        return members if in_class else word
    if kind == "W":
        return f"[^{members}]"
    if kind in "bB" and not in_class:
        edges = (f"(?<={word})(?!{word})", f"(?<!{word})(?={word})")
        inside = (f"(?<={word})(?={word})", f"(?<!{word})(?!{word})")
        return f"(?:{'|'.join(edges if kind == 'b' else inside)})"
    if kind in "pP" and len(escape) > 2:
        name = re.sub(r"[\s_^-]", "", escape[3:-1]).lower()
        known = name.isalpha() and name not in _OTHER_PROPERTIES
    elif kind in "xu":
        known = len(escape) > 2 and int(escape[2:], 16) < (0x80 if kind == "x" else 0xD800)
    else:
        known = kind in _SAME or (kind.isascii() and not kind.isalnum() and kind not in "<>")
    if not known:
        raise ConvertError(
            f"the split pattern {pattern[:60]!r} has {escape}, which may mean different things in "
            "the two dialects of regular expressions; write the characters or a property such as "
            r"\p{L}"
        )
    return escape


def _opening(pattern: str, at: int) -> str:
    match = _OPENING.match(pattern, at)
    assert match is not None, "an opening bracket is there"
    if (match["options"] or "").strip("i") or pattern[match.end() - 1] == "?":
        raise ConvertError(
            f"the split pattern has {pattern[at : at + 6]!r} at index {at}; the only "
            "group option that can be translated is (?i:"
        )
    if match["options"] and match[0].endswith(")") and at:
        raise ConvertError(
            f"the split pattern has {match[0]!r} at index {at}: behind it, | means different "
            "things in the two dialects; write (?i:...) instead"
        )
    if match[0] == "(" and pattern[at + 1 : at + 2] == "?":
        raise ConvertError(
            f"the split pattern has {pattern[at : at + 6]!r} at index {at}, which is not supported"
        )
    return match[0]


def _character_class(pattern: str, at: int) -> str:
    """The text of the character class that begins at index `at` of the pattern, including nested
    classes."""
    depth, end = 0, at
    while end < len(pattern):
        character = pattern[end]
        if character == "\\":
            end += 2
            continue
        depth += {"[": 1, "]": -1}.get(character, 0)
        end += 1
        if depth == 0:
            return pattern[at:end]
        if depth == 1 and character == "[" and end - at == 1:
            end += pattern[end : end + 1] == "^"
            end += pattern[end : end + 1] == "]"  # a "]" in the first place is a character
    raise ConvertError(f"the split pattern {pattern[:60]!r} has an unclosed character class")


def _translated_class(source: str, pattern: str, dialect: _Dialect) -> str:
    for operator in ("[:", "--", "~~"):
        if operator in source:
            raise ConvertError(
                f"the split pattern {pattern[:60]!r} has {operator} in a character class, which "
                "means different things in the two dialects of regular expressions; write the "
                r"characters, \- for a hyphen, or a property such as \p{L}"
            )
    return _ESCAPE.sub(lambda escape: _escape(escape[0], pattern, dialect, in_class=True), source)


def _check_folding(folded: str, pattern: str) -> None:
    """Raise ConvertError if the characters whose case is ignored contain a property, or letters
    that are one letter in the other case."""
    escape = _UNLIKE_FOLDING.search(folded)
    several = (letters for letters in _long_foldings() if letters in folded.casefold())
    wrong = escape[0] if escape else next(several, None)
    if wrong is not None:
        raise ConvertError(
            f"the split pattern {pattern[:60]!r} ignores the case of {wrong}, which means "
            "different things in the two dialects of regular expressions; write the characters of "
            "both cases instead of (?i:"
        )


@cache
def _long_foldings() -> frozenset[str]:
    """The texts of several letters that equal one letter if case is ignored, such as ss and ß."""
    folded = (chr(code).casefold() for code in range(0x20000))
    return frozenset(text for text in folded if len(text) > 1)
